// Tensors as a tree of any size: only the rows in sight are drawn, and the keyboard alone is enough.
import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import { html } from "../html.js";
import { count, many, number } from "../format.js";
import { useNarrow, useWindow } from "../table.js";
import { buildTree, openAtFirst, openRows } from "./tree.js";
import { Name } from "../widgets.js";

const HEIGHT = 32;
const NARROW = 50;
const FP16 = 65504;

/** How a tensor's largest magnitude stands to the limit of fp16: a share, and how near that is. */
function headroom(largest) {
  if (typeof largest !== "number") return null;
  const share = largest / FP16;
  return { share, near: share > 0.5 ? "over" : share > 0.1 ? "near" : "far" };
}

export const shapeText = (shape) => (shape?.length ? shape.join(" × ") : "scalar");

/** What is wrong with a tensor, in words; null if nothing is. */
export function sickText({ nan, inf, problem = null }) {
  const parts = [nan ? `${count(nan)} NaN` : "", inf ? `${count(inf)} Inf` : ""].filter(Boolean);
  return parts.length ? parts.join(", ") : problem;
}

export function Headroom({ largest }) {
  const room = headroom(largest);
  if (!room) return html`<span class="dim">—</span>`;
  const words = room.share > 1 ? "beyond it" : room.share < 0.001 ? "below 0.1 %" : `${number(100 * room.share, 2)} %`;
  return html`<span class="headroom ${room.near}"><meter min="0" max="1" low="0.1" high="0.5" optimum="0" value=${Math.min(room.share, 1)} aria-label="Share of fp16"></meter><span>${words}</span></span>`;
}

function Row({ row, id, active, at, fp16, onToggle, onChoose }) {
  const { node, level, open } = row;
  const { tensor } = node;
  const sick = tensor ? sickText(tensor) : node.sick ? many(node.sick, "bad tensor") : null;
  const click = () => (tensor ? onChoose(at) : onToggle(at));
  return html`<tr role="row" id=${id} aria-level=${level} aria-rowindex=${at + 2} aria-expanded=${tensor ? undefined : String(open)} aria-selected=${tensor ? String(active) : undefined}
      class=${`${tensor ? "leaf" : "branch"} ${active ? "active" : ""} ${sick ? "sick" : ""}`} onClick=${click}>
    <th role="rowheader" style=${{ paddingLeft: `${8 + Math.min(level - 1, 12) * 16}px` }}>
      <span class="twist" aria-hidden="true">${tensor ? "" : open ? "▾" : "▸"}</span><${Name} most=${120}>${node.label || "(no name)"}<//>
      ${!tensor && html` <span class="chip">${count(node.count)}</span>`}
    </th>
    <td role="gridcell" class="dtype">${tensor ? html`${tensor.dtype} <span class="dim">${shapeText(tensor.shape)}</span>` : ""}</td>
    <td role="gridcell" class="right number">${number(tensor ? tensor.largest : node.largest)}</td>
    ${fp16 && html`<td role="gridcell" class="room"><${Headroom} largest=${tensor ? tensor.largest : node.largest} /></td>`}
    <td role="gridcell" class="verdict">${sick ? html`<strong class="bad-text" title=${sick}>${sick}</strong>` : ""}</td>
  </tr>`;
}

/** `onChoose(tensor)` is called with the chosen tensor. `openAll`: as after a search. `fp16`: show how near its limit is. */
export function TensorTree({ tensors, openAll, fp16, onChoose }) {
  const root = useMemo(() => buildTree(tensors), [tensors]);
  const [open, setOpen] = useState(() => new Set());
  const [active, setActive] = useState(0);
  useEffect(() => {
    setOpen(openAll && tensors.length <= 2000 ? everyKey(root) : openAtFirst(root));
    setActive(0);
  }, [root, openAll]);
  const rows = useMemo(() => openRows(root, open), [root, open]);
  const body = useRef(null);
  const height = useNarrow() ? NARROW : HEIGHT;
  const [first, last] = useWindow(body, rows.length, height);
  const at = Math.min(active, rows.length - 1);

  const toggle = (index, wanted) => {
    const { key } = rows[index].node;
    const next = new Set(open);
    if (wanted ?? !next.has(key)) next.add(key);
    else next.delete(key);
    setOpen(next);
    setActive(index);
  };
  const choose = (index) => {
    setActive(index);
    onChoose(rows[index].node.tensor);
  };
  const go = (index) => {
    const next = Math.max(0, Math.min(index, rows.length - 1));
    setActive(next);
    show(body.current, next * height, height);
  };
  const onKey = (event) => {
    if (event.altKey || event.ctrlKey || event.metaKey || !rows.length) return;
    const { node, level, open: isOpen } = rows[at];
    const parent = () => rows.findLastIndex((row, index) => index < at && row.level < level);
    const actions = {
      ArrowDown: () => go(at + 1),
      ArrowUp: () => go(at - 1),
      PageDown: () => go(at + 15),
      PageUp: () => go(at - 15),
      Home: () => go(0),
      End: () => go(rows.length - 1),
      ArrowRight: () => (node.tensor ? null : isOpen ? go(at + 1) : toggle(at, true)),
      ArrowLeft: () => (isOpen ? toggle(at, false) : go(Math.max(parent(), 0))),
      Enter: () => (node.tensor ? choose(at) : toggle(at)),
      " ": () => (node.tensor ? choose(at) : toggle(at)),
    };
    if (!actions[event.key]) return;
    event.preventDefault();
    actions[event.key]();
  };
  const space = (n) => n > 0 && html`<tr class="space" aria-hidden="true" style=${{ height: `${n * height}px` }}><td></td></tr>`;
  const inSight = at >= first && at < last;
  return html`<div class="table-frame tree-frame">
    <table role="treegrid" class="tree" tabindex="0" aria-label=${`Tensors, ${count(tensors.length)}`} aria-rowcount=${rows.length + 1} aria-activedescendant=${inSight ? `tensor-${at}` : undefined} onKeyDown=${onKey}>
      <thead role="rowgroup"><tr role="row">${["Tensor", "Type and shape", "Largest", ...(fp16 ? ["Share of fp16"] : []), "What is wrong"].map((title, i) => html`<th key=${title} role="columnheader" scope="col" class=${`column-${i} ${i === 2 ? "right" : ""}`}>${title}</th>`)}</tr></thead>
      <tbody role="rowgroup" ref=${body}>
        ${space(first)}
        ${rows.slice(first, last).map((row, i) => html`<${Row} key=${row.node.key} row=${row} fp16=${fp16} id=${`tensor-${first + i}`} at=${first + i} active=${first + i === at} onToggle=${toggle} onChoose=${choose} />`)}
        ${space(rows.length - last)}
      </tbody>
    </table>
  </div>`;
}

function everyKey(root) {
  const keys = new Set();
  const waiting = [root];
  while (waiting.length) {
    const node = waiting.pop();
    if (node.tensor) continue;
    keys.add(node.key);
    waiting.push(...node.children);
  }
  return keys;
}

/** Scroll the page so that a place below an element is in sight. */
function show(element, from, height) {
  const top = element.getBoundingClientRect().top + from;
  if (top < 100) scrollBy(0, top - 100);
  else if (top + height > innerHeight - 80) scrollBy(0, top + height - innerHeight + 80);
}
