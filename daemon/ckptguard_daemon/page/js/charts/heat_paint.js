// Draws the part of a heat map that is in sight. The same drawing for the page and for a picture of it.
import { endOf, stepText } from "../text.js";
import { RAMPS } from "./colours.js";
import { ABSENT, SICK } from "./heat_model.js";

const HEAD = 46; // outcomes and steps above the cells
const STEPS = RAMPS.magnitude.length - 1;
const SHAPES = { good: "●", suspect: "▲", incomplete: "◐", bad: "✕", pending: "○" };

/** Where everything is. `width` and `height` are those of the part in sight. */
export function layOut(width, height, columns, rows, rowHeight) {
  const names = Math.round(Math.min(Math.max(width * 0.34, 150), 340, width / 2));
  const cell = Math.max(Math.min(Math.floor((width - names) / Math.max(columns, 1)), 40), 12);
  return { width, height, columns, rows, rowHeight, names, head: HEAD, cell, fullWidth: names + cell * columns, fullHeight: HEAD + rowHeight * rows };
}

/** The row and column of a place on the canvas; null outside the cells. */
export function cellAt(at, scroll, x, y) {
  const column = Math.floor((x - at.names + scroll.left) / at.cell);
  const row = Math.floor((y - at.head + scroll.top) / at.rowHeight);
  const inside = x >= at.names && y >= at.head && column < at.columns && row < at.rows;
  return inside ? { row, column } : null;
}

/** Where to scroll for a cell to be in sight: as little as possible, or to the middle. */
export function scrollTo(at, scroll, { row, column, centred }) {
  const within = (from, size, seen, now) => (centred ? from - (seen - size) / 2 : Math.min(Math.max(now, from + size - seen), from));
  return {
    left: within(column * at.cell, at.cell, at.width - at.names, scroll.left),
    top: within(row * at.rowHeight, at.rowHeight, at.height - at.head, scroll.top),
  };
}

function stripes(context, colours) {
  const tile = document.createElement("canvas");
  tile.width = tile.height = 6;
  const pen = tile.getContext("2d");
  pen.fillStyle = colours.card;
  pen.fillRect(0, 0, 6, 6);
  pen.strokeStyle = colours.bad;
  pen.lineWidth = 2;
  pen.beginPath();
  for (const shift of [-6, 0, 6]) {
    pen.moveTo(shift - 1, 7);
    pen.lineTo(shift + 7, -1);
  }
  pen.stroke();
  return context.createPattern(tile, "repeat");
}

/** Draw. `scene`: {heat, model, rows (indices of tensors), at, scroll, cursor, first: {row, column}, colours}. */
export function paintHeat(context, scene) {
  const { at, scroll, colours, rows, model } = scene;
  const sick = stripes(context, colours);
  const ramp = RAMPS[model.mode];
  const from = Math.floor(scroll.top / at.rowHeight);
  const to = Math.min(Math.ceil((scroll.top + at.height - at.head) / at.rowHeight), at.rows);
  const begin = Math.floor(scroll.left / at.cell);
  const end = Math.min(Math.ceil((scroll.left + at.width - at.names) / at.cell), at.columns);
  const gap = at.rowHeight > 6 ? 1 : 0;
  context.fillStyle = colours.card;
  context.fillRect(0, 0, at.width, at.height);
  const placed = (row, column) => [at.names + column * at.cell - scroll.left, at.head + row * at.rowHeight - scroll.top];
  clipped(context, [at.names, at.head, at.width - at.names, at.height - at.head], () => {
    for (let row = from; row < to; row += 1) {
      const shares = model.shares[rows[row]];
      for (let column = begin; column < end; column += 1) {
        const [x, y] = placed(row, column);
        const share = shares[column];
        if (share === ABSENT) {
          context.fillStyle = colours.line;
          context.fillRect(x + at.cell / 2 - 1, y + at.rowHeight / 2 - 1, 2, Math.min(2, at.rowHeight));
          continue;
        }
        context.fillStyle = share === SICK ? sick : ramp[Math.round(Math.min(Math.max(share, 0), 1) * STEPS)];
        context.fillRect(x, y, at.cell - gap, at.rowHeight - gap);
      }
    }
    if (scene.first) outline(context, placed(scene.first.row, scene.first.column), at, 3, [[colours.card, 5, []], [colours.bad, 3, []]]);
    if (scene.cursor) outline(context, placed(scene.cursor.row, scene.cursor.column), at, 0, [[colours.card, 4, []], [colours.ink, 2, [4, 2]]]);
  });
  paintNames(context, scene, from, to);
  paintHead(context, scene, begin, end);
}

function clipped(context, area, paint) {
  context.save();
  context.beginPath();
  context.rect(...area);
  context.clip();
  paint();
  context.restore();
}

function outline(context, [x, y], at, around, pens) {
  for (const [colour, width, dash] of pens) {
    context.strokeStyle = colour;
    context.lineWidth = width;
    context.setLineDash(dash);
    context.strokeRect(x - 0.5 - around, y - 0.5 - around, at.cell + 2 * around, at.rowHeight + 2 * around);
  }
  context.setLineDash([]);
}

function paintNames(context, { at, scroll, colours, rows, heat, cursor }, from, to) {
  if (at.rowHeight < 10) return;
  context.font = `${Math.min(at.rowHeight - 3, 13)}px ui-monospace, "DejaVu Sans Mono", monospace`;
  context.textBaseline = "middle";
  context.textAlign = "left";
  const most = Math.floor((at.names - 18) / context.measureText("m").width);
  clipped(context, [0, at.head, at.names - 4, at.height - at.head], () => {
    for (let row = from; row < to; row += 1) {
      context.fillStyle = cursor?.row === row ? colours.ink : colours.soft;
      const text = endOf(heat.tensors[rows[row]].name, most);
      context.fillText(`\u2066${text}\u2069`, 8, at.head + (row + 0.5) * at.rowHeight - scroll.top);
    }
  });
}

function paintHead(context, { at, scroll, colours, heat, cursor }, begin, end) {
  context.font = '12px system-ui, "DejaVu Sans", sans-serif';
  context.textBaseline = "middle";
  context.textAlign = "center";
  let free = at.names; // the next label begins right of the one before
  clipped(context, [at.names, 0, at.width - at.names, at.head], () => {
    for (let column = begin; column < end; column += 1) {
      const { outcome, step } = heat.checkpoints[column];
      const middle = at.names + (column + 0.5) * at.cell - scroll.left;
      context.fillStyle = outcome === "good" ? colours.good : outcome === "bad" ? colours.bad : colours.warn;
      context.fillText(SHAPES[outcome] ?? "○", middle, at.head - 11);
      const text = stepText(step);
      const half = context.measureText(text).width / 2;
      if (middle - half < free || middle + half > at.width) continue;
      context.fillStyle = cursor?.column === column ? colours.ink : colours.soft;
      context.fillText(text, middle, 12);
      free = middle + half + 10;
    }
  });
}
