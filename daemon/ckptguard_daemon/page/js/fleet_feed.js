// The fleet's document, kept current by the row: an event of one run asks for that run only.
import { useEffect, useRef, useState } from "preact/hooks";
import { ask, encoded } from "./api.js";
import { useDocument } from "./documents.js";
import { listen } from "./live.js";

const MOST_ROWS = 40; // of an update; after more events the whole document is asked for
const GAP = 200;

/** Return the fleet's document with `runs`, its rows as of now (null: not yet). */
export function useFleet() {
  const doc = useDocument("v1/fleet", () => false);
  const [newer, setNewer] = useState({ of: null, rows: new Map() });
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
        const { runs } = await ask(`v1/fleet?${wanted.map((id) => `run=${encoded(id)}`).join("&")}`, { signal: ended.signal });
        const found = new Map(runs.map((run) => [run.id, run]));
        setNewer((old) => ({ of: old.of, rows: new Map([...old.rows, ...wanted.map((id) => [id, found.get(id) ?? null])]) }));
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
  // Rows are newer only than the document that they were asked for after.
  if (doc.data && newer.of !== doc.data) {
    newer.of = doc.data;
    newer.rows = new Map();
  }
  return { ...doc, runs: doc.data && merged(doc.data, newer.rows) };
}

let last = {};

/** The document's rows with newer ones in their place; the same array while nothing changes. */
function merged(data, rows) {
  if (last.data === data && last.rows === rows) return last.runs;
  const known = new Set(data.runs.map((run) => run.id));
  const own = data.runs.map((run) => (rows.has(run.id) ? rows.get(run.id) : run));
  const added = [...rows].filter(([id]) => !known.has(id)).map(([, run]) => run);
  last = { data, rows, runs: [...own, ...added].filter((run) => run !== null) };
  return last.runs;
}
