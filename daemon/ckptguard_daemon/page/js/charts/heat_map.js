// A heat map of any size on one canvas: only the part in sight is drawn. A cursor moves by keys, and tells its cell.
import { useEffect, useLayoutEffect, useRef, useState } from "preact/hooks";
import { html } from "../html.js";
import { colour, useColours } from "../theme.js";
import { RAMPS } from "./colours.js";
import { scaleEnds } from "../export/pictures.js";
import { cellAt, layOut, paintHeat, scrollTo } from "./heat_paint.js";

const TOKENS = ["card", "line", "ink", "ink-3", "good", "bad", "suspect"];

const readColours = () => {
  const found = Object.fromEntries(TOKENS.map((token) => [token, colour(token)]));
  return { ...found, soft: found["ink-3"], warn: found.suspect };
};

function useSize(element) {
  const [size, setSize] = useState([0, 0]);
  useLayoutEffect(() => {
    const look = () => setSize([element.current.clientWidth, element.current.clientHeight]);
    const watcher = new ResizeObserver(look);
    watcher.observe(element.current);
    look();
    return () => watcher.disconnect();
  }, []);
  return size;
}

/**
 * `rows`: the indices of the tensors to show. `cell`: {row, column} of the cursor, or null. `onCell(cell, by)` is told
 * where the cursor went, by "key" or "pointer"; `onOpen(cell)` that the checkpoint of a cell is wanted.
 */
export function HeatMap({ heat, model, rows, rowHeight, cell, onCell, onOpen, first, described }) {
  const frame = useRef(null);
  const canvas = useRef(null);
  const version = useColours();
  const [width, height] = useSize(frame);
  const at = layOut(width, height, heat.checkpoints.length, rows.length, rowHeight);
  const scene = useRef(null);
  const waiting = useRef(null);
  scene.current = { heat, model, rows, at, cursor: cell, first };

  const paint = () => {
    waiting.current = null;
    const { at: now } = scene.current; // the frame that was asked for may be older than the size
    if (!canvas.current || !now.width) return;
    const { scrollLeft: left, scrollTop: top } = frame.current;
    const ratio = devicePixelRatio || 1;
    const [wide, high] = [Math.round(now.width * ratio), Math.round(now.height * ratio)];
    if (canvas.current.width !== wide || canvas.current.height !== high) Object.assign(canvas.current, { width: wide, height: high });
    const context = canvas.current.getContext("2d", { alpha: false });
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    paintHeat(context, { ...scene.current, scroll: { left, top }, colours: readColours() });
  };
  const soon = () => (waiting.current ??= requestAnimationFrame(paint));
  useEffect(() => {
    soon();
  }, [heat, model, rows, rowHeight, cell, width, height, version]);
  useEffect(() => () => cancelAnimationFrame(waiting.current), []);

  const pointed = (event) => {
    const box = canvas.current.getBoundingClientRect();
    const { scrollLeft: left, scrollTop: top } = frame.current;
    return cellAt(at, { left, top }, event.clientX - box.left, event.clientY - box.top);
  };
  const hover = (event) => {
    const found = event.pointerType === "mouse" ? pointed(event) : null;
    if (found && (found.row !== cell?.row || found.column !== cell?.column)) onCell(found, "pointer");
  };
  const onKey = (event) => {
    const { row, column } = cell ?? { row: 0, column: 0 };
    const page = Math.max(Math.floor((at.height - at.head) / rowHeight) - 1, 1);
    const far = event.ctrlKey || event.metaKey;
    const moves = {
      ArrowDown: [row + 1, column],
      ArrowUp: [row - 1, column],
      ArrowRight: [row, column + 1],
      ArrowLeft: [row, column - 1],
      PageDown: [row + page, column],
      PageUp: [row - page, column],
      Home: [far ? 0 : row, 0],
      End: [far ? at.rows - 1 : row, at.columns - 1],
    };
    if (event.key === "Enter" && cell) onOpen(cell);
    if (!moves[event.key] || event.altKey || !at.rows) return;
    event.preventDefault();
    const within = (value, most) => Math.max(0, Math.min(value, most - 1));
    const [wantedRow, wantedColumn] = cell ? moves[event.key] : [0, 0];
    onCell({ row: within(wantedRow, at.rows), column: within(wantedColumn, at.columns) }, "key");
  };
  useEffect(() => {
    if (!cell?.follow || !at.width) return;
    const { scrollLeft: left, scrollTop: top } = frame.current;
    frame.current.scrollTo({ ...scrollTo(at, { left, top }, cell), behavior: "instant" });
  }, [cell, width, height]);
  return html`<div class="heat heat-frame card" ref=${frame} onScroll=${soon} style=${{ maxHeight: `${at.fullHeight + 20}px` }}>
    <div class="heat-space" style=${{ width: `${at.fullWidth}px`, height: `${at.fullHeight}px` }}>
      <canvas ref=${canvas} class="heat-canvas" tabindex="0" role="application" aria-roledescription="heat map" aria-label=${`${rows.length} tensors by ${heat.checkpoints.length} checkpoints. Move with the arrow keys.`} aria-describedby=${described}
        style=${{ width: `${at.width}px`, height: `${at.height}px` }} onKeyDown=${onKey} onPointerMove=${hover} onClick=${(event) => {
          const found = pointed(event);
          if (found) onCell(found, "pointer");
        }}></canvas>
    </div>
  </div>`;
}

/** What the colours and patterns mean. */
export function Legend({ model }) {
  const scale = useRef(null);
  useEffect(() => {
    const context = scale.current.getContext("2d");
    RAMPS[model.mode].forEach((value, x) => {
      context.fillStyle = value;
      context.fillRect(x, 0, 1, 12);
    });
  }, [model.mode]);
  const [low, high] = scaleEnds(model);
  return html`<p class="heat-legend">
    <span><span class="number">${low}</span> <canvas ref=${scale} width="256" height="12" aria-hidden="true"></canvas> <span class="number">${high}</span></span>
    <span><i class="key sick" aria-hidden="true"></i> NaN, Inf or damaged</span>
    <span><i class="key first" aria-hidden="true"></i> the first bad one</span>
    <span><i class="key absent" aria-hidden="true"></i> not on record</span>
  </p>`;
}
