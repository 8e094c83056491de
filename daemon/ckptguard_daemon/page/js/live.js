// The stream of events: one connection a tab, resumed after its last event. Pages listen to it.
import { useEffect, useState } from "preact/hooks";
import { send } from "./api.js";

const SILENCE = 40_000; // the daemon says something every 15 s: after this, the connection is dead
const LONGEST_PAUSE = 10_000;
const HIDDEN = 30_000; // a browser has six connections for one address: a hidden tab gives its own back

const listeners = new Set();
const watchers = new Set();
let state = { is: "connecting", since: Date.now() };
let lastId = null;
let stop = null;

function become(is) {
  if (state.is === is) return;
  state = { is, since: Date.now() };
  for (const watcher of watchers) watcher(state);
}

function tell(event) {
  for (const listener of [...listeners]) listener(event);
}

/** Take one message of the stream: its lines up to an empty one. */
function take(lines) {
  let kind = "message";
  const data = [];
  for (const line of lines) {
    const [field, ...rest] = line.split(":");
    const value = rest.join(":").replace(/^ /, "");
    if (field === "id") lastId = value;
    else if (field === "event") kind = value;
    else if (field === "data") data.push(value);
  }
  if (kind === "reset") tell({ reset: true });
  else if (kind === "happened") {
    try {
      tell(JSON.parse(data.join("\n")));
    } catch {
      tell({ reset: true }); // whatever it said, the documents know
    }
  }
}

async function read(signal, opened, alive) {
  const headers = lastId === null ? {} : { "last-event-id": lastId };
  const response = await send("v1/events", { signal, headers });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  become("live");
  opened();
  let rest = "";
  let lines = [];
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    alive();
    const found = (rest + value).split(/\r\n|\n|\r/);
    rest = found.pop();
    for (const line of found) {
      if (line !== "") lines.push(line);
      else if (lines.length) {
        take(lines);
        lines = [];
      }
    }
  }
}

/** Read the stream until stopped, with a pause before each further attempt. */
async function follow(signal) {
  let pause = 500;
  let lost = false;
  while (!signal.aborted) {
    const attempt = new AbortController();
    const end = () => attempt.abort();
    signal.addEventListener("abort", end, { once: true });
    let watch = setTimeout(end, SILENCE);
    const alive = () => {
      clearTimeout(watch);
      watch = setTimeout(end, SILENCE);
    };
    const opened = () => {
      pause = 500;
      // What happened meanwhile comes as events; what has no event (a pass, a replica) is asked for once.
      if (lost) tell({ reset: true });
      lost = false;
    };
    try {
      await read(attempt.signal, opened, alive);
    } catch {
      // The state says so. A sentence comes from the documents that fail.
    }
    clearTimeout(watch);
    signal.removeEventListener("abort", end);
    if (signal.aborted) return;
    lost = true;
    become("lost");
    await new Promise((done) => setTimeout(done, pause));
    pause = Math.min(pause * 2, LONGEST_PAUSE);
  }
}

let hidden = null;

/** Begin to follow the stream, unless the tab is hidden. */
export function start() {
  clearTimeout(hidden);
  if (stop || document.visibilityState !== "visible") return;
  stop = new AbortController();
  follow(stop.signal);
}

function end() {
  stop?.abort();
  stop = null;
  become("paused");
}

/** Follow the stream while the tab is seen and its user is signed in. */
export function connect() {
  document.addEventListener("visibilitychange", () => {
    if (document.visibilityState === "visible") start();
    else hidden = setTimeout(end, HIDDEN);
  });
  addEventListener("ckptguard:signed-out", end);
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
