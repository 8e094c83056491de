// The fleet: a line a run, those that need you first.
import { useEffect, useMemo, useState } from "preact/hooks";
import { html } from "../html.js";
import { useClock } from "../documents.js";
import { fields } from "../export/files.js";
import { Take } from "../export/take.js";
import { ago, bytes, count, isFinite, many } from "../format.js";
import { LATE, judge, lags, replicasInWords, stale, staleness, stalenessInWords } from "../fleet_facts.js";
import { useFleet } from "../fleet_feed.js";
import { setQuery, to } from "../router.js";
import { Table } from "../table.js";
import { Name, OUTCOMES, Outcome, Sentence, Shield, Stale, Time, Waiting } from "../widgets.js";

const FILTERS = [
  ["all", "All runs", () => true],
  ["needs", "Need you", (run) => run.judged.weight > 0],
  ["unprotected", "Not protected", (run) => !run.protected],
  ["stale", "Known-good is late", stale],
  ["incidents", "Open incident", (run) => Boolean(run.last_incident?.open)],
  ["backlog", "Backlog", (run) => run.backlog > 0],
  ["replicas", "Replicas behind", lags],
];

function Standing({ run }) {
  const { word, look } = run.judged;
  return html`<span class="state ${look}"><${Shield} look=${look} size=${18} />${word}</span>`;
}

/** The age of the known-good checkpoint against the run's own save interval. */
function KnownGood({ run, now }) {
  if (run.known_good_step === null && run.known_good_at === null) return html`<span class="dim">none yet</span>`;
  const ratio = staleness(run, now);
  const late = stale(run, now);
  const words = stalenessInWords(run, now) ?? "its save interval is not known yet";
  return html`<span class="lines">
    <span>${run.known_good_step === null ? "" : `step ${count(run.known_good_step)}, `}<${Time} at=${run.known_good_at} focus=${false} now=${now} /></span>
    <span class="meter ${late ? "late" : ""}">${isFinite(ratio) && html`<svg viewBox="0 0 48 6" width="48" height="6" aria-hidden="true">
        <rect class="rail" width="48" height="6" rx="3" /><rect class="fill" width=${Math.max(3, Math.min(48, (ratio / LATE) * 48))} height="6" rx="3" />
      </svg>`}<span class="dim">${words}</span></span>
  </span>`;
}

function Replicas({ run }) {
  return html`<span class=${lags(run) ? "warn" : run.replicas ? "" : "dim"}>${replicasInWords(run)}</span>`;
}

function LastIncident({ run, now }) {
  const last = run.last_incident;
  if (!last) return html`<span class="dim">none</span>`;
  const step = last.step === null ? "" : `step ${count(last.step)}, `;
  return html`<span class="lines"><${Name} href=${to.incident(run.id, last.name)}>${last.cause ?? "unknown cause"}<//><span class="dim"><span class=${last.open ? "warn" : ""}>${last.open ? "open" : "closed"}</span>, ${step}${ago(last.at, now)}</span></span>`;
}

const columns = (now) => [
  {
    key: "name", title: "Run", width: 2.2, value: (run) => run.name,
    cell: (run) => html`<span class="lines"><span class="run-name"><${Name} href=${to.run(run.id)}>${run.name}<//>${run.training && html`<span class="chip">training</span>`}${run.silence?.until > now && html`<span class="chip">silenced</span>`}</span>
      <${Name} class="dim small">${run.url}<//></span>`,
  },
  { key: "protected", title: "Protected", width: 1.2, value: (run) => run.judged.weight, largest: true, cell: (run) => html`<${Standing} run=${run} />` },
  { key: "age", title: "Known-good", width: 1.9, value: (run) => run.known_good_at === null ? null : now - run.known_good_at, largest: true, cell: (run) => html`<${KnownGood} run=${run} now=${now} />` },
  { key: "risk", title: "At risk", width: 1.4, class: "wrap", always: true, value: (run) => run.risk, largest: true,
    cell: (run) => run.at_risk ? html`<span class="clamp" title=${run.at_risk}>${run.at_risk}</span>` : html`<span class="dim">nothing</span>` },
  { key: "backlog", title: "Backlog", width: 0.9, value: (run) => run.backlog, largest: true,
    cell: (run) => run.backlog ? html`<span class="lines"><span>${many(run.backlog, "save")}</span><span class="dim">${bytes(run.backlog_bytes)}</span></span>` : html`<span class="dim">0</span>` },
  { key: "replicas", title: "Replicas", width: 0.9, value: (run) => run.replicas_behind, largest: true, cell: (run) => html`<${Replicas} run=${run} />` },
  { key: "incident", title: "Last incident", width: 1.6, value: (run) => run.last_incident?.at, largest: true, cell: (run) => html`<${LastIncident} run=${run} now=${now} />` },
];

function Totals({ totals }) {
  const found = OUTCOMES.map((outcome) => totals.find((total) => total.outcome === outcome)).filter((total) => total?.checkpoints);
  if (!found.length) return null;
  return html`<ul class="totals" aria-label="Checkpoints in place">${found.map(
    (total) => html`<li key=${total.outcome}><${Outcome} outcome=${total.outcome} text=${`${count(total.checkpoints)} ${total.outcome}`} /> <span class="dim">${bytes(total.bytes)}</span></li>`,
  )}</ul>`;
}

const SAVED = [
  ...fields("id name url state protected explanation trouble training known_good_step known_good_at newest_outcome newest_at save_interval at_risk"),
  ...fields("backlog backlog_bytes replicas replicas_behind replicas_unknown last_incident silence"),
];

/** The rows that match every word, and the filter. */
export function matching(runs, words, keep, now) {
  const wanted = words.toLowerCase().split(/\s+/).filter(Boolean);
  return runs.filter((run) => keep(run, now) && wanted.every((word) => run.text.includes(word)));
}

export default function Fleet({ query }) {
  const doc = useFleet();
  const now = useClock();
  const [words, setWords] = useState(query.get("q") ?? "");
  const [filter, setFilter] = useState(FILTERS.some(([key]) => key === query.get("only")) ? query.get("only") : "all");
  const [sort, setSort] = useState(query.get("sort"));
  useEffect(() => {
    // Not with every letter: browsers slow down pages that change their address often.
    const timer = setTimeout(() => setQuery({ q: words, only: filter === "all" ? null : filter, sort }), 400);
    return () => clearTimeout(timer);
  }, [words, filter, sort]);
  const runs = useMemo(() => judge(doc.runs ?? [], now), [doc.runs, now]);
  const keep = FILTERS.find(([key]) => key === filter)[2];
  const rows = useMemo(() => matching(runs, words, keep, now), [runs, words, filter]);
  const all = useMemo(() => columns(now), [now]);
  const tallies = useMemo(() => FILTERS.map(([, , test]) => runs.reduce((n, run) => n + test(run, now), 0)), [runs]);
  const needy = tallies[1];
  useEffect(() => {
    document.title = `${needy ? `(${count(needy)}) ` : ""}Fleet · ckptguard`;
  }, [needy]);
  if (!doc.runs) return html`<h1 tabindex="-1">Fleet</h1><${Waiting} doc=${doc} what="the fleet" />`;
  return html`<div class="head"><div>
        <h1 tabindex="-1">Fleet</h1>
        <p class="lead">${runs.length === 0 ? "There is no run yet." : needy === 0 ? `${many(runs.length, "run")}. No run needs attention.` : `${count(needy)} of ${many(runs.length, "run")} ${needy === 1 ? "needs" : "need"} you.`}</p>
      </div><${Totals} totals=${doc.data.totals ?? []} /></div>
    <${Stale} doc=${doc} />
    ${doc.data.catalogue === false && html`<${Sentence} kind="suspect" hint="The log says why.">There is no catalogue, so some columns stay empty.<//>`}
    <div class="tools fleet-tools" role="search">
      <input type="search" aria-label="Filter runs by name" placeholder="Filter runs" value=${words} onInput=${(event) => setWords(event.target.value)} />
      <div class="choices" role="group" aria-label="Which runs">${FILTERS.map(
        ([key, text], i) => html`<button type="button" key=${key} aria-pressed=${String(key === filter)} onClick=${() => setFilter(key)}>${text} <span class="tally">${count(tallies[i])}</span></button>`,
      )}</div>
      <span class="grow"></span><${Take} name="fleet" what="the fleet" columns=${SAVED} rows=${rows} />
    </div>
    <p class="unseen" role="status">${many(rows.length, "run")} shown</p>
    <${Table} caption="Runs" columns=${all} rows=${rows} rowKey=${(run) => run.id} rowClass=${(run) => (run.judged.weight > 2 ? "needs" : "")}
      sort=${sort} onSort=${setSort} height=${62} narrowHeight=${148} empty=${runs.length ? "No run matches. Clear the filter to see all." : "The daemon guards no run yet."} />`;
}
