// Pictures to take away, as the text of an SVG file in the colours of the light theme. Pure.
import { endOf, stepText, visible } from "../text.js";
import { colourOf } from "../charts/colours.js";
import { ABSENT, SICK } from "../charts/heat_model.js";

const INK = "#1b2028";
const SOFT = "#5b6472";
const LINE = "#d5d9e0";
const BAD = "#c4314b";
const LINES = ["#2b5fc7", "#a85f00", "#1a7f4b", "#7a3fb0"];
const MOST_ROWS = 200; // tensors in one picture
const MOST_POINTS = 4096;

const xml = (text) => visible(String(text)).replace(/[&<>"']/g, (c) => `&#${c.charCodeAt(0)};`);
const place = (number) => Number(number.toFixed(2));

const text = (x, y, words, { anchor = "start", colour = SOFT, size = 12, bold = false } = {}) =>
  `<text x="${place(x)}" y="${place(y)}" text-anchor="${anchor}" fill="${colour}" font-size="${size}"${bold ? ' font-weight="600"' : ""} unicode-bidi="plaintext">${xml(words)}</text>`;

const page = (width, height, title, parts) =>
  `<svg xmlns="http://www.w3.org/2000/svg" width="${width}" height="${height}" viewBox="0 0 ${width} ${height}" font-family="system-ui, Helvetica, Arial, sans-serif" role="img" aria-label="${xml(title)}"><rect width="100%" height="100%" fill="#fff"/>${parts.join("")}</svg>\n`;

/** A heat map: the tensors `rows` from the first in sight on. Says so if there are more than fit. */
export function heatPicture({ title, heat, model, rows, first }) {
  const shown = rows.slice(0, MOST_ROWS);
  const [names, head, cell, high] = [340, 76, 16, 15];
  const width = Math.max(names + heat.checkpoints.length * cell + 20, 620);
  const height = head + shown.length * high + 60;
  const parts = [
    text(12, 24, title, { colour: INK, size: 16, bold: true }),
    `<defs><pattern id="sick" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)"><rect width="6" height="6" fill="#fff"/><rect width="3" height="6" fill="${BAD}"/></pattern></defs>`,
  ];
  let free = names;
  heat.checkpoints.forEach(({ step, outcome }, column) => {
    const x = names + (column + 0.5) * cell;
    parts.push(text(x, head - 8, outcome === "good" ? "●" : outcome === "bad" ? "✕" : "○", { anchor: "middle", colour: outcome === "bad" ? BAD : SOFT, size: 10 }));
    const label = stepText(step);
    if (x - label.length * 3.5 < free) return;
    free = x + label.length * 3.5 + 10;
    parts.push(text(x, head - 24, label, { anchor: "middle", size: 11 }));
  });
  shown.forEach((tensor, row) => {
    const y = head + row * high;
    parts.push(text(names - 8, y + 11, endOf(heat.tensors[tensor].name, 46), { anchor: "end", size: 11 }));
    model.shares[tensor].forEach((share, column) => {
      if (share === ABSENT) return;
      const fill = share === SICK ? "url(#sick)" : colourOf(model.mode, share);
      parts.push(`<rect x="${names + column * cell}" y="${y}" width="${cell - 1}" height="${high - 1}" fill="${fill}"/>`);
    });
  });
  const at = first ? shown.indexOf(first[0]) : -1;
  if (at >= 0) parts.push(`<rect x="${names + first[1] * cell - 1}" y="${head + at * high - 1}" width="${cell + 1}" height="${high + 1}" fill="none" stroke="${BAD}" stroke-width="3"/>`);
  parts.push(...legend(model, 12, height - 34));
  if (shown.length < rows.length) parts.push(text(width - 12, height - 12, `${shown.length} of ${rows.length} tensors`, { anchor: "end" }));
  return page(width, height, title, parts);
}

function legend(model, x, y) {
  const stops = [0, 0.25, 0.5, 0.75, 1].map((share) => `<stop offset="${share}" stop-color="${colourOf(model.mode, share)}"/>`);
  const [low, high] = scaleEnds(model);
  return [
    `<defs><linearGradient id="scale">${stops.join("")}</linearGradient></defs><rect x="${x}" y="${y}" width="160" height="12" fill="url(#scale)"/>`,
    text(x, y + 26, low), text(x + 160, y + 26, high, { anchor: "end" }),
    `<rect x="${x + 190}" y="${y}" width="16" height="12" fill="url(#sick)"/>`, text(x + 212, y + 11, "NaN or Inf"),
    `<rect x="${x + 300}" y="${y}" width="16" height="12" fill="none" stroke="${BAD}" stroke-width="3"/>`, text(x + 322, y + 11, "the first bad one"),
  ];
}

/** What stands at the ends of a colour scale. */
export function scaleEnds({ mode, low, high }) {
  const power = (exponent) => String(Number((10 ** exponent).toPrecision(2)));
  return mode === "change" ? [`÷ ${power(high)}`, `× ${power(high)}`] : [power(low), power(high)];
}

/**
 * Curves over steps. `lines`: [{name, values, steps (a staircase)}], `marks`: [{step, name, bad}]. What is not a
 * number is a gap, and a cross at the top.
 */
export function curvePicture({ title, steps, lines, marks = [], log = false }) {
  const [width, height, left, top] = [900, 360, 76, 64];
  const [right, bottom] = [width - 20, height - 44];
  const every = Math.max(Math.ceil(steps.length / MOST_POINTS), 1);
  const scaled = (value) => (typeof value !== "number" || (log && value <= 0) ? null : log ? Math.log10(value) : value);
  const found = lines.flatMap((line) => line.values.map(scaled)).filter((value) => value !== null);
  let [low, high] = found.reduce(([a, b], value) => [Math.min(a, value), Math.max(b, value)], [Infinity, -Infinity]);
  if (low > high) [low, high] = [0, 1];
  if (low === high) [low, high] = [low - 0.5, high + 0.5];
  const [first, last] = [steps[0] ?? 0, steps.at(-1) ?? 1];
  const x = (step) => left + ((step - first) / Math.max(last - first, 1)) * (right - left);
  const y = (value) => bottom - ((value - low) / (high - low)) * (bottom - top);
  const parts = [text(12, 24, title, { colour: INK, size: 16, bold: true })];
  for (let tick = 0; tick <= 4; tick += 1) {
    const value = low + ((high - low) * tick) / 4;
    const shown = log ? 10 ** value : value;
    parts.push(`<path d="M${left} ${place(y(value))}H${right}" stroke="${LINE}"/>`);
    parts.push(text(left - 8, y(value) + 4, Number(shown.toPrecision(3)), { anchor: "end" }));
    const step = Math.round(first + ((last - first) * tick) / 4);
    parts.push(text(x(step), bottom + 20, step, { anchor: "middle" }));
  }
  lines.forEach((line, index) => {
    const colour = LINES[index % LINES.length];
    let drawn = "";
    let before = null;
    line.values.forEach((value, at) => {
      if (at % every && typeof value === "number") return;
      const number = scaled(value);
      if (number === null) {
        if (typeof value === "string") parts.push(text(x(steps[at]), top - 4, "✕", { anchor: "middle", colour: BAD, size: 11 }));
        if (value !== null) before = null; // what is not on record leaves no gap
        return;
      }
      const [px, py] = [place(x(steps[at])), place(y(number))];
      drawn += before === null ? `M${px} ${py}` : line.steps ? `H${px}V${py}` : `L${px} ${py}`;
      before = number;
    });
    parts.push(`<path d="${drawn}" fill="none" stroke="${colour}" stroke-width="1.8" stroke-linejoin="round"/>`);
    parts.push(text(12 + index * 180, 44, `— ${line.name}`, { colour }));
  });
  marks.filter(({ step }) => step >= first && step <= last).forEach(({ step, name, bad }) => {
    const colour = bad ? BAD : LINES[2];
    parts.push(`<path d="M${place(x(step))} ${top}V${bottom}" stroke="${colour}" stroke-width="1.6" stroke-dasharray="5 4"/>`);
    parts.push(text(x(step) + 4, bottom - 6, name, { colour, size: 11 }));
  });
  parts.push(text(right, height - 8, "step", { anchor: "end" }));
  return page(width, height, title, parts);
}
