// The address of each page: what stands behind the `#`. A name is one encoded part of it.
import { useEffect, useState } from "preact/hooks";
import { encoded } from "./api.js";

const ROUTES = [
  ["fleet", []],
  ["run", ["run", ":run"]],
  ["checkpoint", ["run", ":run", "checkpoint", ":name"]],
  ["heat", ["run", ":run", "heat"]],
  ["diff", ["run", ":run", "diff", ":a", ":b"]],
  ["diff", ["run", ":run", "diff"]],
  ["shards", ["run", ":run", "shards", ":name"]],
  ["incident", ["run", ":run", "incident", ":name"]],
  ["keep", ["run", ":run", "keep"]],
];

/** Return {page, query, ...names} of an address; the page is "nowhere" if there is none. */
export function parse(hash) {
  const [path, query = ""] = hash.replace(/^#?\/?/, "").split("?", 2);
  let parts;
  try {
    parts = path.split("/").filter(Boolean).map(decodeURIComponent);
  } catch {
    return { page: "nowhere", query: new URLSearchParams() };
  }
  for (const [page, pattern] of ROUTES) {
    if (pattern.length !== parts.length) continue;
    if (!pattern.every((part, i) => part.startsWith(":") || part === parts[i])) continue;
    const names = Object.fromEntries(pattern.flatMap((part, i) => (part.startsWith(":") ? [[part.slice(1), parts[i]]] : [])));
    return { page, query: new URLSearchParams(query), ...names };
  }
  return { page: "nowhere", query: new URLSearchParams() };
}

const link = (...parts) => `#/${parts.map(encoded).join("/")}`;

export const to = {
  fleet: () => "#/",
  run: (run) => link("run", run),
  checkpoint: (run, name) => link("run", run, "checkpoint", name),
  heat: (run) => link("run", run, "heat"),
  diff: (run, a, b) => (a === undefined ? link("run", run, "diff") : link("run", run, "diff", a, b)),
  shards: (run, name) => link("run", run, "shards", name),
  incident: (run, name) => link("run", run, "incident", name),
  keep: (run) => link("run", run, "keep"),
};

/** Keep a page's own state (a filter, a window) in its address, without a new entry in the history. */
export function setQuery(values) {
  const [path, query = ""] = location.hash.split("?", 2);
  const now = new URLSearchParams(query);
  for (const [name, value] of Object.entries(values)) {
    if (value === null || value === undefined || value === "") now.delete(name);
    else now.set(name, value);
  }
  const text = now.toString();
  history.replaceState(null, "", `${path || "#/"}${text ? `?${text}` : ""}`);
}

export function useRoute() {
  const [hash, setHash] = useState(location.hash);
  useEffect(() => {
    const changed = () => setHash(location.hash);
    addEventListener("hashchange", changed);
    return () => removeEventListener("hashchange", changed);
  }, []);
  return { ...parse(hash), key: hash.split("?", 1)[0] };
}
