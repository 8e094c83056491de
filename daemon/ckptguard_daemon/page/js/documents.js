// Documents that stay current: asked for once, and again when something happens that changes them.
import { useEffect, useRef, useState } from "preact/hooks";
import { ask, clock } from "./api.js";
import { listen } from "./live.js";

const GAP = 300; // between two questions for one document, in ms; more for one that takes long
const AGAIN = 3000; // after a failure
const QUIET = 15_000; // after this without an event: a save that waits, a replica that fell behind make none
const remembered = new Map(); // the last documents, so that going back shows something at once
const MOST_REMEMBERED = 12;

function remember(path, data) {
  remembered.delete(path);
  remembered.set(path, data);
  if (remembered.size > MOST_REMEMBERED) remembered.delete(remembered.keys().next().value);
}

/** Forget every document: another user may sign in. */
export const forgetAll = () => remembered.clear();

/**
 * Return {data, failure, loading, reload} of the document at `path` (null: none).
 *
 * `changes(event)` says whether an event changes it; it is also asked for now and then. Without it only `reload` asks
 * again. The last data stays while a newer one is on its way, and when it fails: `failure` then says why.
 */
export function useDocument(path, changes = null) {
  const [, draw] = useState(0);
  const kept = useRef({ path: undefined });
  const wanted = useRef(changes);
  wanted.current = changes;
  if (kept.current.path !== path) kept.current = { path, data: remembered.get(path) ?? null, failure: null, loading: path !== null };
  useEffect(() => {
    if (path === null) return undefined;
    const mine = kept.current;
    const ended = new AbortController();
    let timer = null;
    let due = Infinity;
    let busy = false;
    let dirty = false;
    let gap = GAP;
    let asked = -Infinity;
    const plan = (pause) => {
      if (performance.now() + pause >= due) return;
      clearTimeout(timer);
      due = performance.now() + pause;
      timer = setTimeout(load, pause);
    };
    const soon = () => {
      if (busy) dirty = true;
      else plan(Math.max(0, asked + gap - performance.now()));
    };
    const load = async () => {
      clearTimeout(timer);
      due = Infinity;
      dirty = busy;
      if (busy) return;
      busy = true;
      asked = performance.now();
      let pause = wanted.current === null ? Infinity : QUIET;
      try {
        mine.data = await ask(path, { signal: ended.signal });
        mine.failure = null;
        remember(path, mine.data);
      } catch (error) {
        if (ended.signal.aborted) return;
        mine.failure = error;
        pause = error.status === 0 || error.status >= 500 ? AGAIN : Infinity;
      }
      const took = performance.now() - asked;
      gap = Math.max(GAP, 4 * took); // a large fleet's document is asked for less often
      mine.loading = busy = false;
      draw((n) => n + 1);
      if (dirty) soon();
      else if (pause !== Infinity) plan(pause === QUIET ? Math.max(QUIET, 100 * took) : pause);
    };
    mine.reload = load;
    const deaf = listen((event) => {
      if (wanted.current !== null && (event.reset || wanted.current(event))) soon();
    });
    load();
    return () => {
      deaf();
      clearTimeout(timer);
      ended.abort();
    };
  }, [path]);
  const { data = null, failure = null, loading = false, reload = () => {} } = kept.current;
  return { data, failure, loading, reload };
}

const tickers = new Set();
setInterval(() => tickers.forEach((tick) => tick()), 5000);

/** The same, drawn again every five seconds. */
export function useClock() {
  const [, draw] = useState(0);
  useEffect(() => {
    const tick = () => draw((n) => n + 1);
    tickers.add(tick);
    return () => tickers.delete(tick);
  }, []);
  return clock();
}
