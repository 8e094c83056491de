// The parts of a run's page that are words: its status, what happened, its incidents, its checkpoints.
import { useEffect, useMemo, useState } from "preact/hooks";
import { html } from "./html.js";
import { Actions } from "./actions.js";
import { bytes, count, isFinite, many } from "./format.js";
import { clock } from "./api.js";
import { useClock } from "./documents.js";
import { again, everyCheckpoint, placeOf, stepOf } from "./charts/timeline_model.js";
import { replicasInWords, stalenessInWords } from "./fleet_facts.js";
import { fields } from "./export/files.js";
import { Take } from "./export/take.js";
import { listen } from "./live.js";
import { to } from "./router.js";
import { Table } from "./table.js";
import { Choices, Fact, Name, OUTCOMES, Outcome, Sentence, Shield, Time } from "./widgets.js";

function KnownGood({ run }) {
  if (run.known_good_step === null && run.known_good_at === null) return "none yet";
  const step = run.known_good_step === null ? "" : `step ${count(run.known_good_step)}, `;
  return html`${step}<${Time} at=${run.known_good_at} />`;
}

/** "Am I protected?", in the words of `ckptguard status`, and the facts behind it. */
export function Status({ page }) {
  const { run } = page;
  const now = useClock();
  const age = stalenessInWords(run, now);
  return html`<div class="card status state ${run.protected ? "good" : "bad"}">
    <${Shield} look=${run.protected ? "good" : "bad"} size=${44} />
    <div class="status-text">
      <p class="dim small">Am I protected?</p>
      <p class="status-words">${page.sentence}</p>
      <dl class="facts">
        <${Fact} label="Known-good"><${KnownGood} run=${run} /><//>
        ${age && html`<${Fact} label="Its age">${age}<//>`}
        <${Fact} label="At risk">${run.at_risk ?? "nothing"}<//>
        <${Fact} label="Waiting for a verdict">${run.backlog ? `${many(run.backlog, "save")}, ${bytes(run.backlog_bytes)}` : "none"}<//>
        <${Fact} label="Replicas">${run.replicas ? html`<a href=${to.keep(run.id)}>${replicasInWords(run)}</a>` : "none"}<//>
        ${isFinite(run.scrubbed_at) && html`<${Fact} label="Oldest scrub"><${Time} at=${run.scrubbed_at} /><//>`}
      </dl>
      ${run.trouble && html`<${Sentence} kind="bad" hint="The daemon tries again by itself.">The last pass failed: <bdi>${run.trouble}</bdi><//>`}
      ${run.state === "waiting" && !run.trouble && html`<${Sentence} kind="suspect" hint="The page follows it.">The daemon is still scanning this run. What you see may be older.<//>`}
      ${["bad", "suspect", "incomplete"].includes(run.newest_outcome) && html`<${Sentence} kind=${run.newest_outcome === "bad" ? "bad" : "suspect"} hint="Its line below says why. Roll back to train on from the known-good checkpoint.">The newest save is ${run.newest_outcome}.<//>`}
      ${page.filling && html`<${Sentence} kind="suspect" hint="Set keep_bytes or thin_after, or prune by hand."><bdi>${page.filling[0].toUpperCase() + page.filling.slice(1)}.</bdi><//>`}
      ${page.not_understood?.map((sentence) => html`<${Sentence} key=${sentence} kind="suspect"><bdi>${sentence}</bdi><//>`)}
      ${page.could_not_tell.map((sentence) => html`<${Sentence} key=${sentence} kind="suspect">Could not tell: <bdi>${sentence}</bdi><//>`)}
    </div>
  </div>`;
}

const SAID = {
  verdict: (event) => html`<${Outcome} outcome=${event.cause} />`,
  incident: (event) => html`<span class="tag bad">incident</span> ${event.cause}`,
  rollback: (event) => html`<span class="tag back">rollback</span> ${event.cause}`,
  quarantine: () => html`<span class="tag">quarantine</span>`,
  prune: () => html`<span class="tag">pruned</span>`,
  gone: () => html`<span class="tag">gone</span>`,
  replica: (event) => html`<span class="tag">replica</span> ${event.cause}`,
};
const AT_FIRST = 12;

/** What an event without a step is about: its checkpoint's name and save, or its record's. */
const nameless = ({ about }) => about.replace(/\/-\.(\d+)$/, ", save $1");

function EventLine({ run, event, now, fresh }) {
  const about = event.kind === "incident" || event.kind === "rollback" ? to.incident(run, event.about) : event.kind === "replica" ? to.keep(run) : to.checkpoint(run, event.about);
  const words = isFinite(event.step) ? `${event.kind === "rollback" ? "back to step" : "step"} ${count(event.step)}` : nameless(event);
  return html`<li class=${fresh ? "fresh" : ""}>
    <span class="event-what">${SAID[event.kind]?.(event) ?? html`<span class="tag">${event.kind}</span>`}</span>
    <span class="event-about"><${Name} href=${about} most=${80}>${words}<//>${event.text && html`<bdi class="event-text" title=${event.text}>${event.text}</bdi>`}</span>
    <${Time} at=${event.at} now=${now} focus=${false} />
  </li>`;
}

/** The newest events, with those that the stream brings before the document does. Up to its newest, the document is right. */
export function Events({ run, events, newest }) {
  const [newer, setNewer] = useState([]);
  const [all, setAll] = useState(false);
  const now = useClock();
  const opened = useMemo(() => clock(), [run]);
  useEffect(() => listen((event) => !event.reset && event.run === run && event.kind !== "change" && setNewer((old) => [...old.slice(-200), event])), [run]);
  const found = useMemo(() => {
    const ahead = newer.filter((event) => event.number > newest);
    const byNumber = new Map([...ahead, ...events].map((event) => [event.number, event]));
    return [...byNumber.values()].sort((a, b) => (b.at ?? Infinity) - (a.at ?? Infinity) || b.number - a.number);
  }, [events, newer, newest]);
  if (!found.length) return html`<p class="empty card">Nothing has happened yet.</p>`;
  return html`<div class="card"><ol class="events" aria-live="polite" aria-relevant="additions">${found.slice(0, all ? 400 : AT_FIRST).map(
    (event) => html`<${EventLine} key=${event.number} run=${run} event=${event} now=${now} fresh=${event.at > opened} />`,
  )}</ol>
  ${found.length > AT_FIRST && html`<button type="button" class="quiet more" onClick=${() => setAll(!all)}>${all ? "Show fewer" : `Show ${count(Math.min(found.length, 400))}`}</button>`}</div>`;
}

const courseOf = ({ onset, went_back_to: goal }) =>
  [isFinite(onset) && `began at step ${count(onset)}`, isFinite(goal) && `went back to step ${count(goal)}`].filter(Boolean).map((part) => `, ${part}`).join("");

/** The incidents, open ones first, with what can be done about those beside them. */
export function Incidents({ run, incidents, me, onDone }) {
  const now = useClock();
  const [only, setOnly] = useState("all");
  if (!incidents.length) return html`<p class="empty card">There was no incident.</p>`;
  const open = incidents.filter((incident) => incident.open);
  const shown = only === "open" && open.length ? open : incidents;
  const ordered = [...shown].sort((a, b) => Boolean(b.open) - Boolean(a.open) || (b.at ?? 0) - (a.at ?? 0));
  const choices = [["all", `all ${count(incidents.length)}`], ["open", `open ${count(open.length)}`]];
  return html`${open.length > 0 && open.length < incidents.length && html`<${Choices} label="Which incidents" value=${only} onChoose=${setOnly} options=${choices} />`}
  <ul class="card incidents">${ordered.slice(0, 50).map(
    (incident) => html`<li key=${incident.name}>
      <p>
        <span class="tag ${incident.open ? "bad" : ""}">${incident.open ? "open" : "closed"}</span>${" "}
        <a href=${to.incident(run.id, incident.name)}><bdi>${incident.cause ?? "unknown cause"}</bdi>${isFinite(incident.step) ? ` at step ${count(incident.step)}` : ""}</a>
      </p>
      ${incident.reason && html`<p class="incident-reason"><bdi>${incident.reason}</bdi></p>`}
      <p class="dim small"><${Time} at=${incident.at} now=${now} focus=${false} />${courseOf(incident)}</p>
      ${incident.open && html`<${Actions} me=${me} run=${run.id} runName=${run.name} verbs=${["rollback"]} onDone=${onDone} />`}
    </li>`,
  )}</ul>`;
}

const FEW = 25;
const PLACES = { "in place": "in place", "kept copy": "kept copy only", quarantine: "in quarantine", trash: "in the trash", gone: "gone" };

const stepInWords = (step) => (isFinite(step) ? `step ${count(step)}` : Array.isArray(step) ? `steps ${step.map(count).join(", ")}` : "no step");

/** Why a checkpoint is not good, or not yet. */
const why = (g) => g.waiting || (g.outcome !== "good" && g.reason);

const columns = (run, now) => [
  {
    key: "step", title: "Checkpoint", width: 2, value: (g) => stepOf(g) ?? null, largest: true,
    cell: (g) => html`<span class="lines"><${Name} href=${g.name && to.checkpoint(run, g.name)} most=${120}>${g.path ?? g.name}<//>
      <span class="dim small">${stepInWords(Array.isArray(g.step) ? g.step : stepOf(g))}${again(g) > 1 ? `, save ${again(g)} of it` : ""}</span>
      ${why(g) && html`<bdi class="dim small why" title=${why(g)}>${why(g)}</bdi>`}</span>`,
  },
  { key: "outcome", title: "Verdict", value: (g) => OUTCOMES.indexOf(g.outcome), cell: (g) => html`<${Outcome} outcome=${g.outcome} />` },
  { key: "place", title: "Where", value: (g) => placeOf(g), cell: (g) => PLACES[placeOf(g)] },
  { key: "kept", title: "Kept", value: (g) => g.kept, cell: (g) => g.kept || html`<span class="dim">no</span>` },
  { key: "replicated", title: "Replicas", value: (g) => g.replicated, largest: true, class: "right", cell: (g) => g.replicated ? count(g.replicated) : html`<span class="dim">0</span>` },
  { key: "pinned", title: "Pinned", value: (g) => Number(g.pinned), largest: true, cell: (g) => g.pinned ? "pinned" : html`<span class="dim">no</span>` },
  { key: "bytes", title: "Size", value: (g) => g.bytes, largest: true, class: "right", cell: (g) => bytes(g.bytes) },
  { key: "saved", title: "Saved", value: (g) => g.saved_at ?? (g.waiting ? now : g.judged_at), largest: true, class: "right", cell: (g) => html`<${Time} at=${g.saved_at} now=${now} focus=${false} />` },
];

const SAVED = fields("name path series step id outcome reason waiting in_place kept aside replicated pinned bytes saved_at judged_at");

/** Every checkpoint: what the timeline shows, as a table. */
export function Checkpoints({ run, page }) {
  const now = useClock();
  const [only, setOnly] = useState("all");
  const [sort, setSort] = useState("-saved");
  const [whole, setWhole] = useState(false);
  const every = useMemo(() => everyCheckpoint(page), [page]);
  const present = OUTCOMES.filter((outcome) => every.some((g) => g.outcome === outcome));
  const rows = useMemo(() => (only === "all" ? every : every.filter((g) => g.outcome === only)), [every, only]);
  const all = useMemo(() => columns(run, now), [run, now]);
  const choices = [["all", `all ${count(every.length)}`], ...present.map((outcome) => [outcome, outcome])];
  return html`<div class="tools checkpoint-tools">
      <${Choices} label="Which checkpoints" value=${only} onChoose=${setOnly} options=${choices} /><span class="grow"></span>
      <${Take} name="checkpoints" what="the checkpoints" columns=${SAVED} rows=${rows} />
    </div>
    <${Table} caption="Checkpoints" columns=${all} rows=${rows} rowKey=${(g) => g.name ?? g.path} sort=${sort} onSort=${setSort}
      most=${whole ? null : FEW} height=${64} narrowHeight=${124} empty="There is no such checkpoint." />
    ${rows.length > FEW && html`<button type="button" class="quiet" aria-expanded=${String(whole)} onClick=${() => setWhole(!whole)}>${whole ? "Show fewer" : `Show all ${count(rows.length)}`}</button>`}`;
}

