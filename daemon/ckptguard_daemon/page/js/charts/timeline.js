// The timeline of a run's checkpoints by step, for pointer, finger and keyboard.
import { useEffect, useLayoutEffect, useMemo, useRef, useState } from "preact/hooks";
import { html } from "../html.js";
import { ago, bytes, count, shorten } from "../format.js";
import { clock } from "../api.js";
import { to } from "../router.js";
import { colour, useColours } from "../theme.js";
import { OUTCOMES, Outcome } from "../widgets.js";
import { draw, layout, markAt, placeOfMark, stepAt, xOf } from "./timeline_draw.js";
import { inWords, markInWords, stepOf, whereabouts } from "./timeline_model.js";
import { useView } from "./view.js";

const TOKENS = ["good", "bad", "suspect", "incomplete", "pending", "accent", "ink", "ink-2", "ink-3", "line", "line-strong", "card", "shade", "bad-soft"];
const HELP = "Left and right: another checkpoint. N: the next that is not good. Enter: open it. Plus and minus: zoom. Shift with left and right: move. 0: everything.";

const keyOf = ({ generation }) => generation.name ?? generation.path;

/** The width of an element, as it changes. */
export function useWidth(element) {
  const [width, setWidth] = useState(0);
  useLayoutEffect(() => {
    const observer = new ResizeObserver(([entry]) => setWidth(Math.floor(entry.contentRect.width)));
    observer.observe(element.current);
    setWidth(Math.floor(element.current.clientWidth));
    return () => observer.disconnect();
  }, []);
  return width;
}

/** The pointer and the finger on a chart: the wheel with Ctrl zooms, a drag moves, and two fingers do both. */
export function usePointer(element, view, scene, { onPoint, onClick }) {
  const now = useRef({});
  now.current = { scene, onPoint, onClick };
  useEffect(() => {
    const node = element.current;
    const pointers = new Map();
    let moved = 0;
    const at = (event) => event.clientX - node.getBoundingClientRect().left;
    const stepOf = (x) => stepAt(x, view, now.current.scene.width);
    const down = (event) => {
      if (event.button !== 0) return;
      pointers.set(event.pointerId, at(event));
      moved = 0;
    };
    const move = (event) => {
      const x = at(event);
      const before = pointers.get(event.pointerId);
      if (before === undefined) {
        now.current.onPoint(x, event.clientY - node.getBoundingClientRect().top);
        return;
      }
      moved += Math.abs(x - before);
      if (moved < 4) return;
      if (!node.hasPointerCapture(event.pointerId)) node.setPointerCapture(event.pointerId);
      const other = [...pointers].find(([id]) => id !== event.pointerId)?.[1];
      if (other === undefined) view.pan((stepOf(before) - stepOf(x)) / (view.max - view.min));
      else if (Math.abs(x - other) > 8) view.zoom(Math.abs(before - other) / Math.abs(x - other), stepOf(other));
      pointers.set(event.pointerId, x);
    };
    const up = (event) => {
      const known = pointers.delete(event.pointerId);
      if (known && moved < 4 && event.type === "pointerup") now.current.onClick(at(event), event.clientY - node.getBoundingClientRect().top);
    };
    const leave = () => now.current.onPoint(null, null);
    const wheel = (event) => {
      const sideways = Math.abs(event.deltaX) > Math.abs(event.deltaY);
      if (!event.ctrlKey && !event.metaKey && !sideways) return; // the page scrolls
      event.preventDefault();
      if (sideways && !event.ctrlKey) view.pan(event.deltaX / node.clientWidth);
      else view.zoom(Math.exp(Math.max(-60, Math.min(60, event.deltaY)) * 0.01), stepOf(at(event)));
    };
    const fit = () => view.fit();
    const heard = { pointerdown: down, pointermove: move, pointerup: up, pointercancel: up, pointerleave: leave, wheel, dblclick: fit };
    for (const [name, listener] of Object.entries(heard)) node.addEventListener(name, listener, { passive: false });
    return () => {
      for (const [name, listener] of Object.entries(heard)) node.removeEventListener(name, listener);
    };
  }, [view]);
}

const inside = (view) => view.hover >= view.min && view.hover <= view.max;

function Tip({ mark, scene, box }) {
  const { generation } = mark;
  const { x, y } = placeOfMark(mark, scene);
  const right = x > scene.width / 2;
  const style = { top: `${y + 16}px`, [right ? "right" : "left"]: `${Math.max(4, right ? scene.width - x - 20 : x - 20)}px` };
  return html`<div class="chart-tip card" style=${style} ref=${box}>
    <p><${Outcome} outcome=${generation.outcome} /> <bdi class="name">${generation.path ?? generation.name}</bdi></p>
    <p class="dim">step ${count(stepOf(generation))}${!generation.waiting && ` · ${bytes(generation.bytes)} · saved ${ago(generation.saved_at, clock())}`}</p>
    ${generation.reason && html`<p class="tip-reason"><bdi>${shorten(generation.reason, 160)}</bdi></p>`}
    <p class="dim">${whereabouts(mark).join(" · ")}</p>
  </div>`;
}

/** `skipped`: [[first, last step], ...]. */
export function Timeline({ run, model, view, skipped }) {
  useView(view);
  const version = useColours();
  const frame = useRef(null);
  const canvas = useRef(null);
  const width = useWidth(frame);
  const [pointed, setPointed] = useState(null);
  const [chosenName, setChosen] = useState(null);
  const colours = useMemo(() => Object.fromEntries(TOKENS.map((token) => [token, colour(token)])), [version]);
  const places = useMemo(() => layout(model), [model]);
  const chosen = model.marks.find((mark) => keyOf(mark) === chosenName) ?? null;
  const scene = { model, places, view, width, colours, skipped, chosen };
  useLayoutEffect(() => {
    if (!width) return;
    const node = canvas.current;
    const scale = devicePixelRatio || 1;
    if (node.width !== Math.round(width * scale) || node.height !== Math.round(places.height * scale)) {
      node.width = Math.round(width * scale);
      node.height = Math.round(places.height * scale);
      node.style.height = `${places.height}px`;
    }
    const ctx = node.getContext("2d");
    ctx.setTransform(scale, 0, 0, scale, 0, 0);
    draw(ctx, scene);
  }, [model, colours, width, view.min, view.max, skipped, chosen]);
  const open = (mark) => mark.generation.name && (location.hash = to.checkpoint(run, mark.generation.name));
  usePointer(frame, view, scene, {
    onPoint: (x, y) => {
      view.point(x === null ? null : stepAt(x, view, width));
      setPointed(x === null ? null : markAt(x, y, scene));
    },
    onClick: (x, y) => {
      const mark = markAt(x, y, scene);
      if (mark) open(mark);
    },
  });
  const choose = (mark) => {
    if (!mark) return;
    setChosen(keyOf(mark));
    view.show(mark.step);
  };
  const keys = (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const at = model.marks.indexOf(chosen);
    const inWindow = () => model.marks.findLast((mark) => mark.step <= view.max) ?? model.marks[0];
    const worse = (mark) => mark.generation.outcome !== "good" && mark.generation.outcome !== "pending";
    const by = {
      ArrowLeft: () => (event.shiftKey ? view.pan(-0.2) : choose(chosen ? model.marks[at - 1] : inWindow())),
      ArrowRight: () => (event.shiftKey ? view.pan(0.2) : choose(chosen ? model.marks[at + 1] : inWindow())),
      Home: () => choose(model.marks[0]),
      End: () => choose(model.marks.at(-1)),
      n: () => choose(model.marks.slice(at + 1).find(worse) ?? model.marks.find(worse)),
      Enter: () => chosen && open(chosen),
      Escape: () => setChosen(null),
      "+": () => view.zoom(0.5, chosen?.step),
      "=": () => view.zoom(0.5, chosen?.step),
      "-": () => view.zoom(2, chosen?.step),
      0: () => view.fit(),
    }[event.key];
    if (!by) return;
    event.preventDefault();
    by();
  };
  const shown = pointed ?? chosen;
  return html`<div class="timeline" ref=${frame} tabindex="0" role="application" aria-label="Timeline of checkpoints" aria-describedby="timeline-words timeline-help" onKeyDown=${keys}>
    <canvas ref=${canvas} role="img" aria-label=${inWords(model)}></canvas>
    ${view.hover !== null && inside(view) && html`<div class="crosshair" style=${{ left: `${xOf(view.hover, view, width)}px`, height: `${places.axis}px` }}></div>`}
    ${shown && width > 0 && html`<${Tip} mark=${shown} scene=${scene} />`}
    <p id="timeline-words" class="unseen">${inWords(model)}</p>
    <p id="timeline-help" class="timeline-help">${HELP}</p>
    <p class="unseen" role="status">${chosen ? markInWords(chosen) : ""}</p>
  </div>`;
}

const LEGEND = [
  ["best", "known-good", ({ best }) => best !== null],
  ["kept", "kept copy", ({ lanes }) => lanes.some((lane) => lane.kept)],
  ["replica", "in a replica", ({ lanes }) => lanes.some((lane) => lane.replicated)],
  ["pin", "pinned", ({ marks }) => marks.some(({ generation }) => generation.pinned)],
  ["quarantine", "in quarantine", ({ marks }) => marks.some(({ place }) => place === "quarantine")],
  ["gone", "pruned or gone", ({ marks }) => marks.some(({ place }) => place !== "quarantine" && place !== "in place")],
  ["skipped", "skipped batches", (_, skipped) => skipped.length > 0],
  ["onset", "onset to incident", ({ incidents }) => incidents.some(({ onset, step }) => onset !== null && onset < step)],
  ["back", "rollback", ({ incidents }) => incidents.some(({ went_back_to }) => went_back_to !== null)],
];

/** What the marks mean, as far as there are such. */
export function Legend({ model, skipped }) {
  const outcomes = OUTCOMES.filter((outcome) => model.marks.some(({ generation }) => generation.outcome === outcome));
  return html`<ul class="legend" aria-label="What the marks mean">
    ${outcomes.map((outcome) => html`<li key=${outcome}><${Outcome} outcome=${outcome} /></li>`)}
    ${LEGEND.filter(([, , there]) => there(model, skipped)).map(([key, text]) => html`<li key=${key}><span class="swatch ${key}" aria-hidden="true"></span>${text}</li>`)}
  </ul>`;
}
