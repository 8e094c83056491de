// What keeps the checkpoints: retention, protected copies, replicas, scrubs and pins.
import { useState } from "preact/hooks";
import { html } from "../html.js";
import { url } from "../api.js";
import { Actions } from "../actions.js";
import { useDocument } from "../documents.js";
import { Take } from "../export/take.js";
import { bytes, count, duration, many, seconds } from "../format.js";
import { to } from "../router.js";
import { RunHead } from "../run_head.js";
import { Table } from "../table.js";
import { idText, stepText } from "../text.js";
import { Bytes, Fact, Name, Outcome, Section, Sentence, Stale, Time, Waiting } from "../widgets.js";

const step = { key: "step", title: "Step", class: "right", largest: true, value: (one) => (Array.isArray(one.step) ? one.step.at(-1) : one.step), export: (one) => stepText(one.step), cell: (one) => stepText(one.step) };
const size = { key: "bytes", title: "Size", class: "right", largest: true, value: (one) => one.bytes, cell: (one) => html`<${Bytes} value=${one.bytes} />` };
const outcome = { key: "outcome", title: "Outcome", value: (one) => one.outcome, cell: (one) => html`<${Outcome} outcome=${one.outcome} />` };
const path = { key: "path", title: "Checkpoint", width: 2.4, value: (one) => one.path, cell: (one) => html`<${Name}>${one.path}<//>` };
const linked = (run) => ({ ...path, value: (one) => one.path ?? one.name, cell: (one) => html`<${Name} href=${to.checkpoint(run, one.name)}>${one.path ?? one.name}<//>` });

const DECIDED = [path, step, outcome, size, { key: "reasons", title: "Why", width: 2.4, value: (one) => one.reasons.join("; "), cell: (one) => html`<bdi class="wrap">${one.reasons.join("; ")}</bdi>` }];
const THINNED = [path, step, { ...size, title: "Would go" }, { key: "reason", title: "What goes, or why nothing", width: 3, value: (one) => one.reason || one.files.join(", "), cell: (one) => html`<bdi class="wrap">${one.reason ? `stays whole: ${one.reason}` : one.files.join(", ")}</bdi>` }];
const TRASH = [path, step, size, { key: "removed_at", title: "Removed", value: (one) => one.removed_at, cell: (one) => html`<${Time} at=${seconds(one.removed_at)} focus=${false} />` }];
const REPLICAS = [
  { key: "url", title: "Replica", width: 2.4, value: (one) => one.url, cell: (one) => html`<${Name}>${one.url}<//>` },
  { key: "held", title: "Holds", class: "right", largest: true, value: (one) => one.held, cell: (one) => count(one.held) },
  { key: "behind", title: "Lacks", class: "right", largest: true, value: (one) => one.behind, cell: (one) => (one.behind === null ? "not known" : one.behind ? html`<strong class="bad-text">${count(one.behind)}</strong>` : "none") },
  { key: "last_good", title: "Newest good", value: (one) => one.last_good ?? null, cell: (one) => idText(one.last_good) },
  { key: "trouble", title: "Trouble", width: 2.4, value: (one) => one.trouble, cell: (one) => (one.trouble ? html`<bdi class="bad-text">${one.trouble}</bdi>` : "none") },
];
const HOW = { copy: "a full copy", reflink: "a copy that shares its blocks", link: "a link: it shares its bytes" };
const kept = (run) => [linked(run), step, outcome, size, { key: "kept", title: "Copy", value: (one) => one.kept, cell: (one) => HOW[one.kept] ?? one.kept }];
const aside = (run) => [linked(run), step, outcome, size, { key: "aside", title: "Where", value: (one) => one.aside, cell: (one) => one.aside }];

/** A table with its heading and what saves it; nothing where there are no rows. */
function Part({ title, id, name, columns, rows, rowKey = (row) => row.name, tools = null, narrowHeight = 92 }) {
  if (!rows?.length) return null;
  return html`<${Section} title=${title} id=${id} tools=${html`${tools}<${Take} name=${`${name}-${id}`} what=${title.toLowerCase()} columns=${columns} rows=${rows} />`}>
    <${Table} caption=${title} columns=${columns} rows=${rows} rowKey=${rowKey} height=${40} narrowHeight=${narrowHeight} />
  <//>`;
}

const RULES = [
  ["keep_last", "Keep the newest", { type: "number", min: 1, max: 1e9, placeholder: "5" }],
  ["keep_every", "Keep one of every … steps", { type: "number", min: 1, max: 1e12, placeholder: "1000" }],
  ["keep_within", "Keep those saved within", { placeholder: "2d, 12h" }],
  ["keep_best", "Keep the best by a metric", { placeholder: "eval_loss:min:3" }],
  ["thin_after", "Thin all but the newest", { type: "number", min: 1, max: 1e9, placeholder: "3" }],
  ["keep_bytes", "Use at most", { placeholder: "500GB" }],
];

const best = (text) => text.split(/[\s,]+/).filter(Boolean);

const sum = (rows) => rows.reduce((all, one) => all + one.bytes, 0);

/** Rules as the query of the preview, and as the arguments of the action. */
const search = (rules) => new URLSearchParams(Object.entries(rules).flatMap(([key, value]) => (key === "keep_best" ? best(value).map((one) => [key, one]) : [[key, value]]))).toString();
const typed = ({ keep_last: last, keep_every: every, keep_best: metrics, thin_after: thin, failed, ...rest }) => ({
  ...rest,
  ...(last && { keep_last: Number(last) }), ...(every && { keep_every: Number(every) }),
  ...(metrics && { keep_best: best(metrics) }), ...(thin && { thin_after: Number(thin) }), ...(failed && { failed: true }),
});

function Retention({ me, run, runName, onDone }) {
  const [rules, setRules] = useState(null); // those that were asked for
  const query = rules && search(rules);
  const doc = useDocument(rules ? url`v1/runs/${run}/retention` + (query ? `?${query}` : "") : null);
  const found = doc.data;
  const thinned = found?.thinned.filter((one) => !one.reason) ?? [];
  const preview = (event) => {
    event.preventDefault();
    const form = new FormData(event.target);
    const next = Object.fromEntries([...form].filter(([, value]) => value !== ""));
    if (search(next) === query) doc.reload();
    else setRules(next);
  };
  const done = () => {
    doc.reload();
    onDone();
  };
  return html`<${Section} title="What would retention remove?" id="retention">
    <form class="card padded rules" onSubmit=${preview}>
      ${RULES.map(([name, words, attributes]) => html`<label key=${name} for=${name}>${words}<input id=${name} name=${name} ...${attributes} /></label>`)}
      <label class="check"><input type="checkbox" name="failed" value="true" /> Also remove what failed</label>
      <div class="rules-go"><button class="primary">Show what it would remove</button><span class="dim">Empty fields: the rules of your settings. Nothing is removed.</span></div>
    </form>
    ${rules && html`<${Waiting} doc=${doc} what="the preview" /><${Stale} doc=${doc} />`}
    ${found && html`
      <${Sentence} kind=${found.removed.length || thinned.length ? "suspect" : "note"} action=${html`<${Actions} me=${me} run=${run} runName=${runName} verbs=${["prune"]} values=${typed(rules)} onDone=${done} />`}>
        ${many(found.removed.length, "checkpoint")} would go to the trash, ${bytes(sum(found.removed))}. ${many(found.kept.length, "checkpoint")} would stay${thinned.length > 0 && `, ${count(thinned.length)} of them without optimizer state: ${bytes(sum(thinned))} less`}.<//>
      ${found.could_not_tell?.map((sentence, at) => html`<${Sentence} key=${at} kind="bad">${sentence}<//>`)}
      <${Part} title="Would be removed" id="removed" name=${runName} columns=${DECIDED} rows=${found.removed} rowKey=${(row) => `${row.series} ${row.id}`} />
      <${Part} title="Would be thinned" id="thinned" name=${runName} columns=${THINNED} rows=${found.thinned} rowKey=${(row) => `${row.series} ${row.id}`} />
      <${Part} title="Would be kept" id="stays" name=${runName} columns=${DECIDED} rows=${found.kept} rowKey=${(row) => `${row.series} ${row.id}`} />
      <${Part} title="In the trash" id="trash" name=${runName} columns=${TRASH} rows=${found.in_trash} rowKey=${(row) => `${row.series} ${row.id}`} />`}
  <//>`;
}

function Scrub({ scrub }) {
  if (!scrub) return html`<p class="card empty">Nothing is read again here. The setting <code>scrub_every</code> changes that.</p>`;
  const every = scrub.every_seconds ?? scrub.every;
  const rate = scrub.bytes_per_second ?? scrub.rate;
  const place = (title, found, word) => html`<${Fact} label=${title}>${found ? html`<${Name} most=${60}>${found.path}<//> <span class="dim">${found.place === "kept" ? "its copy, " : ""}${word}</span> <${Time} at=${seconds(found.at)} />` : "—"}<//>`;
  return html`<dl class="facts card padded">
    <${Fact} label="Everything is read again within">${duration(every)}<//>
    <${Fact} label="At most">${rate ? `${bytes(rate)} a second` : "as fast as it can"}<//>
    ${place("Being read", scrub.reading, "since")}${place("Read last", scrub.last, "")}${place("Read next", scrub.next, "due")}
  </dl>`;
}

const ACTIONS = [
  { key: "verb", title: "Action", value: (one) => one.verb, cell: (one) => html`<strong>${one.verb}</strong>` },
  { key: "by", title: "By", value: (one) => one.name, cell: (one) => html`<${Name}>${one.name}<//>` },
  { key: "at", title: "When", value: (one) => one.began_at, cell: (one) => html`<${Time} at=${seconds(one.began_at)} focus=${false} />` },
  { key: "reason", title: "Reason", width: 2, value: (one) => one.reason, cell: (one) => html`<bdi class="wrap">${one.reason}</bdi>` },
  { key: "state", title: "Result", value: (one) => one.state, cell: (one) => one.state },
  { key: "result", title: "What was done", width: 3, value: (one) => one.result.join("; "), cell: (one) => html`<bdi class="wrap">${one.result.join("; ")}</bdi>` },
];

/** What operators had done. It is asked for by a click, because it is read from the run's records. */
function Audit({ run, runName }) {
  const [asked, setAsked] = useState(false);
  const doc = useDocument(asked ? url`v1/runs/${run}/actions` : null);
  const rows = doc.data?.actions;
  return html`<${Section} title="What operators did" id="audit" tools=${rows?.length > 0 && html`<${Take} name=${`${runName}-actions`} what="what operators did" columns=${ACTIONS} rows=${rows} />`}>
    ${asked ? html`<${Waiting} doc=${doc} what="the audit" /><${Stale} doc=${doc} />` : html`<button type="button" onClick=${() => setAsked(true)}>Read the audit</button>`}
    ${rows && html`<${Table} caption="Actions" columns=${ACTIONS} rows=${rows} rowKey=${(one) => one.id} empty="Nobody has changed this run from the page." />`}
  <//>`;
}

export default function Keep({ run, me }) {
  const page = useDocument(url`v1/runs/${run}/page`, (event) => event.run === run);
  const found = page.data;
  const runName = found?.run?.name ?? run;
  const generations = found?.generations ?? [];
  const pinned = generations.filter((one) => one.pinned);
  const unpin = { key: "unpin", title: "Action", cell: (one) => html`<${Actions} me=${me} run=${run} runName=${runName} verbs=${["unpin"]} checkpoint=${one} onDone=${page.reload} />` };
  const pins = [linked(run), step, outcome, size, { key: "pinned", title: "Why", width: 1.6, value: (one) => one.pinned, cell: (one) => html`<bdi class="wrap">${one.pinned}</bdi>` }];
  const mayUnpin = me?.actions?.includes("unpin");
  return html`<${RunHead} run=${run} doc=${page} tab="keep" />
    <${Waiting} doc=${page} what="the run" /><${Stale} doc=${page} />
    ${found && html`
      <${Retention} me=${me} run=${run} runName=${runName} onDone=${page.reload} />
      <${Section} title="Replicas" id="replicas" tools=${found.replicas.length > 0 && html`<${Actions} me=${me} run=${run} runName=${runName} verbs=${["replicate"]} onDone=${page.reload} /><${Take} name=${`${runName}-replicas`} what="the replicas" columns=${REPLICAS} rows=${found.replicas} />`}>
        <${Table} caption="Replicas" columns=${REPLICAS} rows=${found.replicas} rowKey=${(one) => one.url} height=${40} narrowHeight=${120} empty="This run has no replica. The setting replicas names them." />
      <//>
      <${Section} title="Reading again" id="scrub"><${Scrub} scrub=${found.scrub} /><//>
      <${Part} title="Pinned" id="pinned" name=${runName} columns=${mayUnpin ? [...pins, unpin] : pins} rows=${pinned} narrowHeight=${130} />
      <${Part} title="Protected copies" id="kept" name=${runName} columns=${kept(run)} rows=${generations.filter((one) => one.kept).reverse()} />
      <${Part} title="Quarantine and trash" id="aside" name=${runName} columns=${aside(run)} rows=${generations.filter((one) => one.aside).reverse()} />
      <${Audit} run=${run} runName=${runName} />`}`;
}
