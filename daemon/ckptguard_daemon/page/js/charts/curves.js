// Loss, gradient norm, loss scale and learning rate over steps, beside the timeline and in its window.
import { useEffect, useLayoutEffect, useMemo, useRef, useState } from "preact/hooks";
import uPlot from "uplot";
import { html } from "../html.js";
import { count, isFinite, number } from "../format.js";
import { colour, useColours } from "../theme.js";
import { Table } from "../table.js";
import { Choices } from "../widgets.js";
import { alone, CURVES, curveData, nearest, standing } from "./curve_data.js";
import { LEFT, RIGHT } from "./timeline_draw.js";
import { useWidth } from "./timeline.js";
import { useView } from "./view.js";

const NONE = [];
const EDGE = { nan: "NaN", inf: "∞", "-inf": "−∞" };

/** The bands and lines that the curves share with the timeline, drawn below the values. */
function drawBehind(u, { incidents, skipped, colours }) {
  const { ctx, bbox } = u;
  const x = (step) => u.valToPos(step, "x", true);
  ctx.save();
  ctx.beginPath();
  ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
  ctx.clip();
  ctx.fillStyle = colours.shade;
  for (const [from, until] of skipped) ctx.fillRect(x(from), bbox.top, Math.max(2, x(until) - x(from)), bbox.height);
  for (const { onset, step } of incidents) {
    if (isFinite(onset) && isFinite(step)) {
      ctx.fillStyle = colours["bad-soft"];
      ctx.fillRect(x(onset), bbox.top, Math.max(1, x(step) - x(onset)), bbox.height);
    }
    ctx.strokeStyle = colours.bad;
    ctx.lineWidth = devicePixelRatio;
    for (const [at, dash] of [[onset, [4, 4]], [step, []]]) {
      if (!isFinite(at)) continue;
      ctx.setLineDash(dash);
      ctx.beginPath();
      ctx.moveTo(x(at), bbox.top);
      ctx.lineTo(x(at), bbox.top + bbox.height);
      ctx.stroke();
    }
  }
  ctx.restore();
}

/** The lines of a logarithmic axis: whole powers of ten, as few as fit. */
function powers(u, _, min, max) {
  const [low, high] = [Math.ceil(Math.log10(min) - 1e-9), Math.floor(Math.log10(max) + 1e-9)];
  const by = Math.max(1, Math.ceil((high - low + 1) / Math.max(2, u.bbox.height / devicePixelRatio / 32)));
  const found = [];
  for (let power = Math.ceil(low / by) * by; power <= high; power += by) found.push(10 ** power);
  return found.length > 1 ? found : [min, max];
}

/** A cross at the edge for each value that is no number: at the top, or below for minus infinity. */
function drawEdges(u, edges, colours) {
  const { ctx, bbox } = u;
  const r = 3.5 * devicePixelRatio;
  let told = -Infinity;
  ctx.save();
  ctx.strokeStyle = ctx.fillStyle = colours.bad;
  ctx.lineWidth = 1.6 * devicePixelRatio;
  ctx.font = `${10 * devicePixelRatio}px ${getComputedStyle(document.body).fontFamily}`;
  ctx.textBaseline = "middle";
  for (const { step, word } of edges) {
    const x = u.valToPos(step, "x", true);
    if (x < bbox.left || x > bbox.left + bbox.width) continue;
    const y = word === "-inf" ? bbox.top + bbox.height - 2 * r : bbox.top + 2 * r;
    ctx.beginPath();
    ctx.moveTo(x - r, y - r);
    ctx.lineTo(x + r, y + r);
    ctx.moveTo(x + r, y - r);
    ctx.lineTo(x - r, y + r);
    ctx.stroke();
    if (x - told > 60 * devicePixelRatio) ctx.fillText(EDGE[word], x + 2 * r, y + 3 * r);
    told = x;
  }
  ctx.restore();
}

function options({ curve, found, width, view, colours, log, behind, last }) {
  const axis = { stroke: colours["ink-3"], grid: { stroke: colours.line, width: 1 }, ticks: { show: false }, font: `11px ${getComputedStyle(document.body).fontFamily}` };
  const points = { show: false, size: 4, fill: colours[curve.colour], filter: (u, i) => alone(u.data[i]) };
  const line = { width: 1.6, stroke: colours[curve.colour], points, paths: curve.steps ? uPlot.paths.stepped({ align: 1 }) : undefined };
  return {
    width,
    height: curve.height + (last ? 26 : 0),
    padding: [10, RIGHT, last ? 0 : 6, 0],
    legend: { show: false },
    scales: { x: { time: false, range: () => [view.min, view.max] }, y: log ? { distr: 3 } : {} },
    axes: [
      { ...axis, show: true, size: last ? 26 : 0, values: (_, steps) => steps.map((step) => (last ? count(step) : "")), space: 90 },
      { ...axis, size: LEFT, ...(log ? { splits: powers, filter: (_, splits) => splits } : {}), values: (_, values) => values.map((value) => (value === null ? "" : number(value, 3))) },
    ],
    series: [{}, line, ...found.data.slice(2).map(() => ({ ...line, width: 1, alpha: 0.45, dash: [3, 3] }))],
    cursor: {
      points: { show: false },
      y: false,
      drag: { x: true, y: false, setScale: false },
    },
    hooks: {
      drawAxes: [(u) => drawBehind(u, { ...behind.current, colours })],
      draw: [(u) => drawEdges(u, behind.current.edges, colours)],
      setCursor: [(u) => u.cursor.event && view.point(u.cursor.left >= 0 ? u.posToVal(u.cursor.left, "x") : null)],
      setSelect: [
        (u) => {
          if (u.select.width < 6) return;
          view.set(u.posToVal(u.select.left, "x"), u.posToVal(u.select.left + u.select.width, "x"));
          u.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
        },
      ],
    },
  };
}

function Readout({ view, found }) {
  useView(view);
  const [steps, values] = found.data;
  if (view.hover === null || !steps.length) return null;
  const i = nearest(steps, view.hover);
  const edge = found.edges.find(({ step }) => step === steps[i]);
  return html`<span class="readout">step ${count(steps[i])} <b>${edge ? EDGE[edge.word] : number(values[i])}</b></span>`;
}

function Curve({ curve, found, view, incidents, skipped, log, last, tools }) {
  const version = useColours();
  const frame = useRef(null);
  const plot = useRef(null);
  const width = useWidth(frame);
  const behind = useRef({});
  behind.current = { incidents, skipped, edges: found.edges };
  useLayoutEffect(() => {
    if (!width) return undefined;
    const tokens = ["ink-3", "line", "shade", "bad", "bad-soft", curve.colour];
    const colours = Object.fromEntries(tokens.map((token) => [token, colour(token)]));
    const u = new uPlot(options({ curve, found, width, view, colours, log, behind, last }), found.data, frame.current);
    plot.current = u;
    let seen = "";
    const deaf = view.listen(() => {
      const window = `${view.min} ${view.max}`;
      const same = window === seen; // places are known only after the new window is drawn
      if (!same) u.setScale("x", { min: view.min, max: view.max });
      seen = window;
      u.setCursor(view.hover === null || !same ? { left: -10, top: -10 } : { left: u.valToPos(view.hover, "x"), top: 0 }, false);
    });
    return () => {
      deaf();
      u.destroy();
    };
    // A change of what is drawn makes a new plot; new values alone do not.
  }, [width, version, view, log, last, found.data.length, found.positive]);
  useEffect(() => plot.current?.setData(found.data), [found, incidents, skipped]);
  return html`<figure class="curve">
    <figcaption>
      <span class="curve-title"><svg width="14" height="8" viewBox="0 0 14 8" aria-hidden="true"><path class=${`stroke-${curve.colour}`} d="M0 4h14" /></svg>${curve.title}</span>
      <${Readout} view=${view} found=${found} /><span class="grow"></span>${tools}
    </figcaption>
    <div ref=${frame} class="plot" role="img" aria-label=${`${curve.title}: ${found.said}`} onDblClick=${() => view.fit()}></div>
  </figure>`;
}

function Values({ doc, curves }) {
  const [open, setOpen] = useState(false);
  const rows = useMemo(() => (open ? doc.step.map((step, i) => ({ i, step })) : []), [open, doc]);
  const columns = [
    { key: "step", title: "Step", value: (row) => row.step, cell: (row) => count(row.step) },
    ...curves.map(({ curve }) => ({ key: curve.key, title: curve.title, value: (row) => (isFinite(doc[curve.key][row.i]) ? doc[curve.key][row.i] : null), cell: (row) => number(doc[curve.key][row.i]) })),
  ];
  return html`<details class="values" onToggle=${(event) => setOpen(event.target.open)}>
    <summary>The values as a table</summary>
    ${open && html`<${Table} caption="Samples" columns=${columns} rows=${rows} rowKey=${(row) => row.i} height=${32} narrowHeight=${76} />`}
  </details>`;
}

/** `doc`: the run's curves; `incidents` of its page. `tools(curve, found)` are further buttons of each. */
export function Curves({ doc, view, incidents, tools = () => null }) {
  const [log, setLog] = useState(false);
  const curves = useMemo(() => {
    const which = standing(doc);
    return CURVES.map((curve) => ({ curve, found: curveData(doc, curve.key, which) })).filter(({ found }) => found !== null);
  }, [doc]);
  if (!curves.length) return html`<p class="empty">There are no samples of this run yet. A guard in its training writes them, or a trainer's own log.</p>`;
  const scale = html`<${Choices} label="Loss axis" options=${[[false, "linear"], [true, "log"]]} value=${log} onChoose=${setLog} />`;
  return html`<div class="curves">
    ${curves.map(({ curve, found }, i) => {
      const drawnLog = found.positive && (curve.log || (curve.key === "loss" && log));
      return html`<${Curve} key=${curve.key} curve=${curve} found=${found} view=${view} incidents=${incidents} skipped=${doc.skipped ?? NONE}
        log=${drawnLog} last=${i === curves.length - 1} tools=${html`${tools(curve, found)}${curve.key === "loss" && found.positive && scale}`} />`;
    })}
    ${doc.source && html`<p class="dim small source">From ${doc.source}.</p>`}
    <${Values} doc=${doc} curves=${curves} />
  </div>`;
}
