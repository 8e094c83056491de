// The stream of events: one connection a tab, resumed after its last event. Pages listen to it.
import { useEffect, useState } from "preact/hooks";
import { ask } from "./api.js";

const SHORTEST_PAUSE = 500;
const LONGEST_PAUSE = 10_000;
const HIDDEN = 30_000; // a browser has six connections for one address: a hidden tab gives its own back

const listeners = new Set();
const watchers = new Set();
let state = { is: "connecting", since: Date.now() };
let lastId = null;
let source = null; // the stream; null while nobody wants one
let pause = SHORTEST_PAUSE; // until the next attempt
let again = null;

function become(is) {
  if (state.is === is) return;
  state = { is, since: Date.now() };
  for (const watcher of watchers) watcher(state);
}

function tell(event) {
  for (const listener of [...listeners]) listener(event);
}

function take({ type, data, lastEventId }) {
  lastId = lastEventId;
  if (type === "reset") tell({ reset: true });
  else if (type === "happened") {
    try {
      tell(JSON.parse(data));
    } catch {
      tell({ reset: true }); // whatever it said, the documents know
    }
  }
}

function open() {
  source?.close(); // of somebody who was faster than a slow answer
  source = new EventSource(lastId === null ? "v1/events" : `v1/events?after=${lastId}`);
  for (const kind of ["hello", "happened", "reset"]) source.addEventListener(kind, take);
  source.onopen = () => {
    pause = SHORTEST_PAUSE;
    // What happened meanwhile comes as events; what has no event (a pass, a replica) is asked for once.
    if (state.is === "lost") tell({ reset: true });
    become("live");
  };
  source.onerror = lose;
}

/** Try again after a pause. Who is signed out learns it from the question before. */
function lose() {
  source.close();
  become("lost");
  clearTimeout(again);
  again = setTimeout(() => ask("v1/me").then(() => source && open(), () => source && lose()), pause);
  pause = Math.min(pause * 2, LONGEST_PAUSE);
}

let hidden = null;

/** Begin to follow the stream, unless the tab is hidden. */
export function start() {
  clearTimeout(hidden);
  if (source === null && document.visibilityState === "visible") open();
}

function end() {
  source?.close();
  source = null;
  clearTimeout(again);
  become("paused");
}

/** Follow the stream while the tab is seen and its user is signed in. */
export function connect() {
  document.addEventListener("visibilitychange", () => {
    if (document.visibilityState === "visible") start();
    else hidden = setTimeout(end, HIDDEN);
  });
  addEventListener("ckptguard:signed-out", end);
  addEventListener("ckptguard:unreachable", () => state.is === "live" && lose()); // the stream may be dead and say nothing
  start();
}

/** Call `listener` with each event, or with {reset: true} if anything may have changed. Returns what ends it. */
export function listen(listener) {
  listeners.add(listener);
  return () => listeners.delete(listener);
}

/** The state of the connection: {is: "connecting" | "live" | "lost" | "paused", since}. */
export function useConnection() {
  const [now, setNow] = useState(state);
  useEffect(() => {
    watchers.add(setNow);
    setNow(state);
    return () => watchers.delete(setNow);
  }, []);
  return now;
}
