// The fleet's document, kept current by the row: an event of one run asks for that run only.
import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import { ask, encoded } from "./api.js";
import { useDocument } from "./documents.js";
import { listen } from "./live.js";

const MOST_ROWS = 40; // of an update; after more events the whole document is asked for
const GAP = 200;

/** Return the fleet's document with `runs`, its rows as of now (null: not yet). */
export function useFleet() {
  const doc = useDocument("v1/fleet", () => false);
  const [newer, setNewer] = useState(new Map()); // id -> {run, asOf}; the run is null if it is gone
  const reload = useRef();
  reload.current = doc.reload;
  useEffect(() => {
    const touched = new Set();
    const ended = new AbortController();
    let timer = null;
    const update = async () => {
      timer = null;
      if (touched.size > MOST_ROWS) {
        touched.clear();
        reload.current();
        return;
      }
      const wanted = [...touched];
      touched.clear();
      try {
        const { runs, as_of: asOf } = await ask(`v1/fleet?${wanted.map((id) => `run=${encoded(id)}`).join("&")}`, { signal: ended.signal });
        const found = new Map(runs.map((run) => [run.id, run]));
        setNewer((old) => new Map([...old, ...wanted.map((id) => [id, { run: found.get(id) ?? null, asOf }])]));
      } catch {
        // The next event, or the whole document, brings it.
      }
    };
    const deaf = listen((event) => {
      if (event.reset) return;
      touched.add(event.run);
      timer ??= setTimeout(update, GAP);
    });
    return () => {
      deaf();
      clearTimeout(timer);
      ended.abort();
    };
  }, []);
  const runs = useMemo(() => doc.data && merged(doc.data, newer), [doc.data, newer]);
  return { ...doc, runs };
}

/** The document's rows, with those in their place that are newer than it. */
function merged(data, newer) {
  const rows = new Map(data.runs.map((run) => [run.id, run]));
  for (const [id, { run, asOf }] of newer) if (asOf > data.as_of) rows.set(id, run);
  return [...rows.values()].filter((run) => run !== null);
}
