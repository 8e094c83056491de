// A table of any length: sorted by its headings, with only the rows drawn that are seen. The page itself scrolls.
import { useEffect, useLayoutEffect, useMemo, useRef, useState } from "preact/hooks";
import { html } from "./html.js";
import { many } from "./format.js";

const SPARE = 6; // rows drawn above and below what is seen
const PRINTED = 1000; // most rows on paper

const order = new Intl.Collator("en", { numeric: true });

/** Compare two values of a column: numbers by size, words by the alphabet. What is not known comes last. */
export function compare(a, b) {
  const none = (value) => value === null || value === undefined || Number.isNaN(value);
  if (none(a) || none(b)) return none(a) - none(b);
  return typeof a === "string" || typeof b === "string" ? order.compare(a, b) : a - b;
}

/** Return the rows in the order of a column. `sort` is "key" or "-key"; rows that are equal keep their order. */
export function sorted(rows, columns, sort) {
  const down = sort?.startsWith("-");
  const column = columns.find(({ key }) => key === (down ? sort.slice(1) : sort));
  if (!column?.value) return rows;
  const values = new Map(rows.map((row) => [row, column.value(row)]));
  const unknown = (value) => value === null || value === undefined;
  return [...rows].sort((a, b) => {
    const [x, y] = [values.get(a), values.get(b)];
    return down && !unknown(x) && !unknown(y) ? compare(y, x) : compare(x, y);
  });
}

/** The part of a long list that is seen: [first, behind the last], in rows of `height` pixels. */
export function useWindow(body, total, height) {
  const [range, setRange] = useState([0, 60]);
  useLayoutEffect(() => {
    let frame = null;
    const look = () => {
      frame = null;
      if (!body.current) return;
      const above = -body.current.getBoundingClientRect().top;
      const first = Math.max(0, Math.floor(above / height) - SPARE);
      const last = Math.ceil((above + innerHeight) / height) + SPARE;
      setRange((old) => (old[0] === first && old[1] === last ? old : [first, last]));
    };
    const soon = () => (frame ??= requestAnimationFrame(look));
    const print = () => setRange([0, PRINTED]);
    addEventListener("scroll", soon, { passive: true });
    addEventListener("resize", soon);
    addEventListener("beforeprint", print);
    addEventListener("afterprint", soon);
    look();
    return () => {
      cancelAnimationFrame(frame);
      removeEventListener("scroll", soon);
      removeEventListener("resize", soon);
      removeEventListener("beforeprint", print);
      removeEventListener("afterprint", soon);
    };
  }, [total, height]);
  // A few rows are there even while the table is not in view: who does not see the page finds them.
  const first = Math.min(range[0], Math.max(0, total - 2 * SPARE));
  return [first, Math.min(Math.max(range[1], first + 2 * SPARE), total)];
}

const narrow = matchMedia("(max-width: 720px)");

/** True on a phone's width. */
export function useNarrow() {
  const [is, set] = useState(narrow.matches);
  useEffect(() => {
    const changed = () => set(narrow.matches);
    narrow.addEventListener("change", changed);
    return () => narrow.removeEventListener("change", changed);
  }, []);
  return is;
}

function Heading({ column, sort, onSort }) {
  const down = sort === `-${column.key}`;
  const up = sort === column.key;
  const kind = column.class ?? "";
  if (!column.value) return html`<th role="columnheader" scope="col" class=${kind}>${column.title}</th>`;
  // The first click shows what matters most: the largest number, the first word.
  const next = column.largest ? (down ? column.key : `-${column.key}`) : up ? `-${column.key}` : column.key;
  return html`<th role="columnheader" scope="col" class=${kind} aria-sort=${down ? "descending" : up ? "ascending" : "none"}>
    <button type="button" class="sort" onClick=${() => onSort(next)}>${column.title}<span class="arrow" aria-hidden="true">${down ? "↓" : up ? "↑" : ""}</span></button>
  </th>`;
}

function moveFocus(event) {
  const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
  const row = event.target.closest("tr");
  if (!step || !row || event.target.matches("input, select, textarea")) return;
  const next = step > 0 ? row.nextElementSibling : row.previousElementSibling;
  const target = next?.querySelector("a, button");
  if (!target) return;
  event.preventDefault();
  target.focus();
}

/**
 * A table.
 *
 * - `columns`: [{key, title, cell(row), value(row) to sort by (none: not sortable), largest: true to begin with the
 *   largest, width: its share of the row (1), class}]. The first column is the heading of its row.
 * - `columns` and `rows` that stay the same objects are not drawn again: make them anew when a cell changes.
 * - `rowKey(row)`, `rowClass(row)`.
 * - `sort`, `onSort`: "key" or "-key"; without them the table keeps its own order.
 * - `height`, `narrowHeight`: of a row in pixels, so that only the rows in view are drawn. Without `height` all are.
 * - `most`: show the first ones only.
 * - `cards`: on a phone a row is a card, with the title of each column before its cell. What is not known is left out,
 *   unless the column is there `always`.
 */
export function Table({ caption, columns, rows, rowKey, rowClass, sort, onSort, height, narrowHeight, most = null, cards = true, empty = "There is nothing to show." }) {
  const [own, setOwn] = useState(null);
  const isNarrow = useNarrow();
  const body = useRef(null);
  const by = onSort ? sort : (own ?? sort);
  const shown = useMemo(() => sorted(rows, columns, by).slice(0, most ?? undefined), [rows, columns, by, most]);
  const tall = isNarrow && cards ? (narrowHeight ?? height) : height;
  const window = useWindow(body, shown.length, tall ?? 1e9);
  const [first, last] = tall ? window : [0, shown.length];
  const isCard = isNarrow && cards; // a card leaves out what is not known
  const drawn = useMemo(() => new Map(), [shown, columns, tall, isCard]);
  const space = (n) => n > 0 && html`<tr class="space" aria-hidden="true" style=${{ height: `${n * tall}px` }}><td></td></tr>`;
  const line = (row, at) => html`<tr role="row" key=${rowKey(row)} class=${rowClass?.(row) ?? ""} aria-rowindex=${at + 2} style=${tall ? { height: `${tall}px` } : undefined}>
    ${columns.map((column, i) => !(isCard && i && column.value && !column.always && [null, undefined].includes(column.value(row))) && html`<${i ? "td" : "th"} key=${column.key} role=${i ? "cell" : "rowheader"} scope=${i ? undefined : "row"} class=${column.class ?? ""} data-title=${column.title}>${column.cell(row)}<//>`)}
  </tr>`;
  const lines = [];
  for (let at = first; at < last; at += 1) {
    // The same line again costs nothing while the page scrolls.
    if (!drawn.has(at)) drawn.set(at, line(shown[at], at));
    lines.push(drawn.get(at));
  }
  const widths = columns.map((column) => `minmax(0, ${column.width ?? 1}fr)`).join(" ");
  return html`<div class="table-frame ${cards ? "cards" : ""}" tabindex=${cards ? undefined : 0} role=${cards ? undefined : "group"} aria-label=${cards ? undefined : caption}>
    <table role="table" aria-rowcount=${shown.length + 1} style=${{ "--columns": widths }} onKeyDown=${moveFocus}>
      <caption class="unseen">${caption}, ${many(shown.length, "row")}</caption>
      <thead role="rowgroup"><tr role="row" aria-rowindex="1">${columns.map((column) => html`<${Heading} key=${column.key} column=${column} sort=${by} onSort=${onSort ?? setOwn} />`)}</tr></thead>
      <tbody role="rowgroup" ref=${body}>${space(first)}${lines}${space(shown.length - last)}</tbody>
    </table>
    ${shown.length === 0 && html`<p class="empty">${empty}</p>`}
  </div>`;
}
