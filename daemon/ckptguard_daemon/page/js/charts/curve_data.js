// The samples of a run as lines: what counts now, and what rollbacks left behind. Pure.
import { count, isFinite, many, number } from "../format.js";

const MOST_LEFT = 24; // attempts that were left behind and are drawn

export const CURVES = [
  { key: "loss", title: "Loss", colour: "curve-1", height: 200 },
  { key: "grad_norm", title: "Gradient norm", colour: "curve-2", height: 140, log: true },
  { key: "scale", title: "Loss scale", colour: "curve-3", height: 110, log: true, steps: true },
  { key: "lr", title: "Learning rate", colour: "curve-1", height: 110 },
];

/** Return the indices of each attempt: [[first, behind the last], ...]. Training went back wherever steps fall. */
export function attempts({ step, began = [] }) {
  const starts = new Set(began);
  const found = [];
  let first = 0;
  for (let i = 1; i <= step.length; i += 1) {
    if (i < step.length && step[i] > step[i - 1] && !starts.has(i)) continue;
    if (i > first) found.push([first, i]);
    first = i;
  }
  return found;
}

/**
 * Return the indices that count now, in the order of their steps, and those that each attempt left behind: a later
 * attempt repeats their steps.
 */
export function standing(doc) {
  const all = attempts(doc);
  const now = [];
  const left = [];
  let repeated = Infinity; // the earliest step of the attempts behind this one
  for (const [first, end] of all.toReversed()) {
    const mine = [];
    const gone = [];
    for (let i = first; i < end; i += 1) (doc.step[i] < repeated ? mine : gone).push(i);
    if (gone.length && left.length < MOST_LEFT) left.push(mine.length ? [mine.at(-1), ...gone] : gone);
    now.unshift(...mine);
    repeated = Math.min(repeated, doc.step[first]);
  }
  return { now, left };
}

/**
 * Return one curve for drawing: {data: [steps, values now, values left behind, ...], edges: [{step, word}], said,
 * positive}. `edges` are the values that are no number; null if the curve has no values.
 */
export function curveData(doc, key, { now, left }) {
  const values = doc[key];
  if (!Array.isArray(values) || !values.some((value) => value !== null && value !== undefined)) return null;
  const used = [...new Set([...now, ...left.flat()])].sort((a, b) => doc.step[a] - doc.step[b]);
  const places = new Map();
  const steps = [];
  for (const i of used) {
    if (steps.at(-1) !== doc.step[i]) steps.push(doc.step[i]);
    places.set(i, steps.length - 1);
  }
  const drawn = (indices) => {
    const row = new Array(steps.length).fill(undefined); // another attempt's step: no gap. Null, for NaN, is one
    for (const i of indices) row[places.get(i)] = isFinite(values[i]) ? values[i] : null;
    return row;
  };
  const edges = used.filter((i) => typeof values[i] === "string").map((i) => ({ step: doc.step[i], word: values[i] }));
  const finite = used.map((i) => values[i]).filter(isFinite);
  return { data: [steps, drawn(now), ...left.map(drawn)], edges, positive: finite.every((value) => value > 0), said: inWords(doc, now, values, edges) };
}

function inWords(doc, now, values, edges) {
  const known = now.filter((i) => isFinite(values[i]));
  if (!known.length) return "No value of it is a number.";
  const [first, last] = [known[0], known.at(-1)];
  const bad = edges.length ? ` ${many(edges.length, "value is not finite", "values are not finite")}, first at step ${count(edges[0].step)}.` : "";
  return `${number(values[first])} at step ${count(doc.step[first])}, ${number(values[last])} at step ${count(doc.step[last])}.${bad}`;
}

/** The places of numbers with a gap (null) on both sides: no line shows them. */
export function alone(values) {
  const told = [...values.keys()].filter((i) => values[i] !== undefined);
  const isGap = (at) => (values[told[at]] ?? null) === null;
  return told.filter((i, at) => values[i] !== null && isGap(at - 1) && isGap(at + 1));
}

/** The place in a sorted list that is nearest to a value. */
export function nearest(list, value) {
  let [low, high] = [0, list.length - 1];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (list[middle] < value) low = middle + 1;
    else high = middle;
  }
  return low > 0 && value - list[low - 1] < list[low] - value ? low - 1 : low;
}
