// The timeline's drawing: marks by outcome, what is kept and replicated below them, incidents and rollbacks above.
import { count, isFinite } from "../format.js";

export const LEFT = 64; // as wide as the curves' own axis
export const RIGHT = 16;
const ROW = 17;
const TRACK = 14;
const LANE_GAP = 12;
const ARCS = 52;
const AXIS = 24;

/** Return where everything is: {height, lanes: [{top, marks, kept, replicas, bottom}], arcs, axis}. */
export function layout(model) {
  let y = model.incidents.length ? ARCS : 12;
  const arcs = y;
  const lanes = model.lanes.map((lane) => {
    const top = y;
    const named = model.lanes.length > 1 ? 15 : 0;
    const marks = top + named + 12;
    let bottom = marks + (lane.rows - 1) * ROW + 12;
    const kept = lane.kept ? (bottom += TRACK) - TRACK / 2 : null;
    const replicas = lane.replicated ? (bottom += TRACK) - TRACK / 2 : null;
    y = bottom + LANE_GAP;
    return { top, marks, kept, replicas, bottom };
  });
  return { height: y + AXIS, lanes, arcs, axis: y };
}

export const xOf = (step, view, width) => LEFT + ((step - view.min) / (view.max - view.min)) * (width - LEFT - RIGHT);
export const stepAt = (x, view, width) => view.min + ((x - LEFT) / (width - LEFT - RIGHT)) * (view.max - view.min);

/** The steps of an axis: round numbers, at most one every `apart` pixels. */
export function ticks(view, width, apart = 90) {
  const rough = ((view.max - view.min) / Math.max(1, width - LEFT - RIGHT)) * apart;
  const ten = 10 ** Math.floor(Math.log10(rough));
  const by = Math.max(1, ten * ([1, 2, 5, 10].find((n) => n * ten >= rough) ?? 10));
  const first = Math.ceil(Math.max(0, view.min) / by);
  const most = Math.min(Math.floor(view.max / by) - first, 100); // numbers near the largest have no neighbours
  return Array.from({ length: Math.max(0, most + 1) }, (_, i) => (first + i) * by);
}

// Each adds one mark to the current path.
const PATHS = {
  good(ctx, x, y, r) {
    ctx.moveTo(x + r, y);
    ctx.arc(x, y, r, 0, 7);
  },
  pending(ctx, x, y, r) {
    PATHS.good(ctx, x, y, r);
    ctx.moveTo(x + r * 0.5, y);
    ctx.arc(x, y, r * 0.5, 0, -7, true);
  },
  suspect: (ctx, x, y, r) => polygon(ctx, x, y, r * 1.15, [0, -1, 1, 0.8, -1, 0.8]),
  incomplete: (ctx, x, y, r) => polygon(ctx, x, y, r * 1.2, [0, -1, 1, 0, 0, 1, -1, 0]),
  bad: (ctx, x, y, r) =>
    polygon(ctx, x, y, r * 1.15, [-0.55, -1, 0, -0.45, 0.55, -1, 1, -0.55, 0.45, 0, 1, 0.55, 0.55, 1, 0, 0.45, -0.55, 1, -1, 0.55, -0.45, 0, -1, -0.55]),
};

function polygon(ctx, x, y, r, points) {
  for (let i = 0; i < points.length; i += 2) ctx[i ? "lineTo" : "moveTo"](x + points[i] * r, y + points[i + 1] * r);
  ctx.closePath();
}

/** The half width of marks: what fits beside each other, but never too small to tell their shapes when they matter. */
export function radius(lane, view, width) {
  const seen = lane.marks.filter(({ step }) => step >= view.min && step <= view.max).length;
  return Math.min(6.5, Math.max(2, ((width - LEFT - RIGHT) / Math.max(1, seen)) * 0.42));
}

function drawLane(ctx, lane, at, { view, width, colours, several }) {
  const r = radius(lane, view, width);
  if (several) {
    ctx.fillStyle = colours["ink-3"];
    ctx.textAlign = "left";
    ctx.fillText(lane.series.length > 60 ? `${lane.series.slice(0, 59)}…` : lane.series, LEFT, at.top + 6, width - LEFT - RIGHT);
  }
  ctx.textAlign = "right";
  ctx.fillStyle = colours["ink-3"];
  if (at.kept !== null) ctx.fillText("kept", LEFT - 10, at.kept);
  if (at.replicas !== null) ctx.fillText("replica", LEFT - 10, at.replicas);
  ctx.strokeStyle = colours.line;
  ctx.lineWidth = 1;
  ctx.beginPath();
  ctx.moveTo(LEFT, at.marks);
  ctx.lineTo(width - RIGHT, at.marks);
  ctx.stroke();
  const batches = new Map();
  const kept = [];
  const replicas = [];
  for (const mark of lane.heaviest) {
    const x = xOf(mark.step, view, width);
    if (x < LEFT - 8 || x > width - RIGHT + 8) continue;
    const { generation, place } = mark;
    const outcome = generation.outcome in PATHS ? generation.outcome : "pending";
    const hollow = place === "gone" || place === "trash";
    if (generation.kept) kept.push(x);
    if (generation.replicated) replicas.push(x);
    const key = `${outcome} ${hollow}`;
    if (!batches.has(key)) batches.set(key, { outcome, hollow, places: [], seen: new Set() });
    const { places, seen } = batches.get(key);
    // Of marks that would lie on one pixel, one is enough, unless it has something of its own to show.
    const pixel = Math.round(x) * 4 + mark.row;
    if (seen.has(pixel) && !generation.pinned) continue;
    seen.add(pixel);
    places.push([x, at.marks + mark.row * ROW, mark]);
  }
  for (const { outcome, hollow, places } of batches.values()) {
    const size = outcome === "good" ? r : Math.max(r, 4.5);
    ctx.beginPath();
    const dense = outcome === "good" && size < 3; // then a band: thin where they are gone
    for (const [x, y] of places) {
      if (dense) ctx.rect(x - size, y - (hollow ? 0.75 : size), 2 * size, hollow ? 1.5 : 2 * size);
      else PATHS[outcome](ctx, x, y, hollow ? size - 0.5 : size);
    }
    ctx.globalAlpha = hollow ? 0.75 : 1;
    ctx.fillStyle = hollow && !dense ? colours.card : colours[outcome];
    ctx.strokeStyle = colours[outcome];
    ctx.lineWidth = 1.2;
    ctx.fill();
    if (hollow && !dense) ctx.stroke();
    ctx.globalAlpha = 1;
    for (const [x, y, mark] of places) decorate(ctx, x, y, size, mark, colours);
  }
  ctx.fillStyle = colours.good;
  if (at.kept !== null) for (const x of kept) ctx.fillRect(x - Math.max(1, r * 0.7), at.kept - 1.5, Math.max(2, r * 1.4), 3);
  ctx.fillStyle = colours.accent;
  if (at.replicas !== null) for (const x of replicas) ctx.fillRect(x - 1.5, at.replicas - 1.5, 3, 3);
}

/** A frame around what is in quarantine; a pin above what is pinned. */
function decorate(ctx, x, y, r, { generation, place }, colours) {
  if (place === "quarantine" && r > 3) {
    ctx.strokeStyle = colours["ink-2"];
    ctx.lineWidth = 1.2;
    ctx.strokeRect(x - r - 2.5, y - r - 2.5, 2 * r + 5, 2 * r + 5);
  }
  if (generation.pinned) {
    ctx.fillStyle = colours.accent;
    ctx.beginPath();
    polygon(ctx, x, y - r - 6, 4, [-1, -1, 1, -1, 0, 1]);
    ctx.fill();
  }
}

function drawIncident(ctx, incident, { view, width, colours, places }) {
  const bottom = places.axis;
  const at = xOf(isFinite(incident.step) ? incident.step : incident.onset, view, width);
  const inside = (x) => x >= LEFT - 1 && x <= width - RIGHT + 1;
  if (isFinite(incident.onset) && isFinite(incident.step) && incident.step > incident.onset) {
    const from = Math.max(LEFT, xOf(incident.onset, view, width));
    ctx.fillStyle = colours["bad-soft"];
    ctx.fillRect(from, places.arcs, Math.max(0, Math.min(at, width - RIGHT) - from), bottom - places.arcs);
    line(ctx, xOf(incident.onset, view, width), places.arcs, bottom, colours.bad, [3, 3], inside);
  }
  line(ctx, at, places.arcs - 4, bottom, colours.bad, [], inside);
  if (inside(at)) {
    ctx.fillStyle = incident.open ? colours.bad : colours.card;
    ctx.strokeStyle = colours.bad;
    ctx.lineWidth = 1.5;
    ctx.beginPath();
    ctx.arc(at, places.arcs - 11, 7, 0, 7);
    ctx.fill();
    ctx.stroke();
    ctx.fillStyle = incident.open ? colours.card : colours.bad;
    ctx.textAlign = "center";
    ctx.fillText("!", at, places.arcs - 10.5);
  }
}

function line(ctx, x, top, bottom, colour, dash, inside) {
  if (!inside(x)) return;
  ctx.strokeStyle = colour;
  ctx.lineWidth = 1;
  ctx.setLineDash(dash);
  ctx.beginPath();
  ctx.moveTo(Math.round(x) + 0.5, top);
  ctx.lineTo(Math.round(x) + 0.5, bottom);
  ctx.stroke();
  ctx.setLineDash([]);
}

/** The way back: from the step of the incident to the step that training went back to. */
function drawArrow(ctx, incident, { view, width, colours, places }) {
  if (!isFinite(incident.step) || !isFinite(incident.went_back_to)) return;
  const [from, goal] = [xOf(incident.step, view, width), xOf(incident.went_back_to, view, width)];
  if (from < LEFT || goal > width - RIGHT) return;
  const foot = places.arcs - 12;
  const top = Math.max(-8, foot - 22 - Math.abs(from - goal) * 0.25);
  const wide = Math.max(0, 18 - Math.abs(from - goal)); // a loop, where there is no room for an arc
  ctx.strokeStyle = ctx.fillStyle = colours.accent;
  ctx.lineWidth = 2;
  ctx.beginPath();
  ctx.moveTo(from, foot - 7);
  ctx.bezierCurveTo(from + wide, top, goal - wide, top, goal, foot + 8);
  ctx.stroke();
  ctx.beginPath();
  ctx.moveTo(goal, foot + 13);
  ctx.lineTo(goal - 5, foot + 5);
  ctx.lineTo(goal + 5, foot + 5);
  ctx.closePath();
  ctx.fill();
}

/** Draw everything. `scene`: {model, places, view, width, colours, skipped, chosen}. */
export function draw(ctx, scene) {
  const { model, places, view, width, colours, skipped = [], chosen = null } = scene;
  ctx.clearRect(0, 0, width, places.height);
  ctx.font = `11px ${getComputedStyle(document.body).fontFamily}`;
  ctx.textBaseline = "middle";
  ctx.save();
  ctx.beginPath();
  ctx.rect(LEFT, 0, width - LEFT - RIGHT, places.height);
  ctx.clip();
  ctx.fillStyle = colours.shade;
  for (const [from, until] of skipped) {
    const x = xOf(from, view, width);
    ctx.fillRect(x, places.arcs, Math.max(1.5, xOf(until, view, width) - x), places.axis - places.arcs);
  }
  ctx.restore();
  for (const incident of model.incidents) drawIncident(ctx, incident, scene);
  ctx.strokeStyle = colours.line;
  ctx.lineWidth = 1;
  ctx.textAlign = "center";
  for (const step of ticks(view, width)) {
    const x = xOf(step, view, width);
    ctx.fillStyle = colours["ink-3"];
    ctx.fillText(count(step), x, places.axis + 13);
    ctx.fillRect(Math.round(x), places.axis, 1, 4);
  }
  model.lanes.forEach((lane, i) => drawLane(ctx, lane, places.lanes[i], { ...scene, several: model.lanes.length > 1 }));
  for (const incident of model.incidents) drawArrow(ctx, incident, scene);
  if (model.best !== null) {
    const { x, y } = placeOfMark(model.best, scene);
    if (x >= LEFT && x <= width - RIGHT) ring(ctx, x, y, 9, colours.good);
  }
  if (chosen !== null) {
    const { x, y } = placeOfMark(chosen, scene);
    ring(ctx, x, y, 12, colours.accent);
  }
}

function ring(ctx, x, y, r, colour) {
  ctx.strokeStyle = colour;
  ctx.lineWidth = 2;
  ctx.beginPath();
  ctx.arc(x, y, r, 0, 7);
  ctx.stroke();
}

/** The mark nearest to a point, within a finger's reach; null if there is none. */
export function markAt(x, y, { model, places, view, width }) {
  let best = null;
  let least = 14 ** 2;
  model.lanes.forEach((lane, i) => {
    const at = places.lanes[i];
    if (y < at.top - 4 || y > at.bottom + 6) return;
    for (const mark of lane.marks) {
      const dx = xOf(mark.step, view, width) - x;
      if (Math.abs(dx) > 14) continue;
      const dy = Math.min(12, Math.abs(at.marks + mark.row * ROW - y));
      if (dx * dx + dy * dy * 0.6 < least) {
        least = dx * dx + dy * dy * 0.6;
        best = mark;
      }
    }
  });
  return best;
}

/** Where a mark is drawn: {x, y}. */
export function placeOfMark(mark, { model, places, view, width }) {
  return { x: xOf(mark.step, view, width), y: places.lanes[model.lanes.indexOf(mark.lane)].marks + mark.row * ROW };
}
