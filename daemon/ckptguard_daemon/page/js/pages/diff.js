// Two checkpoints compared: by their manifests at once, by their tensors if asked for.
import { useMemo, useState } from "preact/hooks";
import { html } from "../html.js";
import { url } from "../api.js";
import { useDocument } from "../documents.js";
import { bytes, count, many, number } from "../format.js";
import { to } from "../router.js";
import { RunHead } from "../run_head.js";
import { Table } from "../table.js";
import { Take } from "../export/take.js";
import { stepText } from "../text.js";
import { shapeText, sickText } from "../tensors/tree_view.js";
import { Fact, Name, Outcome, Section, Sentence, Stale, Waiting } from "../widgets.js";

const WORDS = { changed: "changed", retyped: "another type", reshaped: "another shape", unknown: "other bytes", added: "only in the second", removed: "only in the first" };

const largest = (side) => side?.largest ?? null;
const sick = (change) => (change.difference ? (change.difference.became_nonfinite ? `${count(change.difference.became_nonfinite)} values` : null) : sickText(change.a ?? {}) ? null : sickText(change.b ?? {}));

const COLUMNS = [
  { key: "name", title: "Tensor", width: 2.4, value: (c) => c.name, cell: (c) => html`<${Name}>${c.name || "(no name)"}<//>` },
  { key: "role", title: "Role", value: (c) => c.role, cell: (c) => c.role },
  { key: "change", title: "Change", value: (c) => c.change, cell: (c) => html`<span class="chip">${WORDS[c.change] ?? c.change}</span>` },
  { key: "shape", title: "Type and shape", class: "shape", width: 1.4, value: (c) => shapeText((c.b ?? c.a)?.shape), cell: (c) => html`<${Shape} change=${c} />` },
  { key: "a", title: "Largest before", class: "right", largest: true, value: (c) => largest(c.a), cell: (c) => number(largest(c.a)) },
  { key: "b", title: "and after", class: "right", largest: true, value: (c) => largest(c.b), cell: (c) => number(largest(c.b)) },
  { key: "sick", title: "Became not finite", value: sick, cell: (c) => (sick(c) ? html`<strong class="bad-text">${sick(c)}</strong>` : "—") },
  { key: "note", title: "Note", value: (c) => c.note, cell: (c) => html`<bdi>${c.note ?? ""}</bdi>` },
];
const READ = [
  ...COLUMNS.filter(({ key }) => key !== "a" && key !== "b"),
  { key: "l2", title: "Relative change", class: "right", largest: true, value: (c) => c.difference?.relative_l2 ?? null, cell: (c) => number(c.difference?.relative_l2) },
  { key: "most", title: "Largest change", class: "right", largest: true, value: (c) => c.difference?.largest_change ?? null, cell: (c) => number(c.difference?.largest_change) },
  { key: "first", title: "First not finite", value: (c) => c.difference?.first_nonfinite?.join(", ") ?? null, cell: (c) => c.difference?.first_nonfinite?.join(", ") ?? "—" },
];

function Shape({ change: { a, b } }) {
  const words = (side) => `${side.dtype} ${shapeText(side.shape)}`;
  if (!a || !b || words(a) === words(b)) return html`<span class="dim">${a || b ? words(b ?? a) : ""}</span>`;
  return html`<span>${words(a)} → ${words(b)}</span>`;
}

/** A list to pick from. It is filled when it gets the focus: 5,000 checkpoints in two lists take a second to draw. */
function Pick({ label, id, generations, value, onPick }) {
  const [full, setFull] = useState(false);
  const offered = full ? generations : generations.filter(({ name }) => name === value);
  const words = (one) => `${stepText(one.step)} ${one.path ?? one.name} (${one.outcome})`;
  return html`<label class="pick" for=${id}>${label}
    <select id=${id} value=${value ?? ""} onFocus=${() => setFull(true)} onPointerEnter=${() => setFull(true)} onChange=${(event) => onPick(event.target.value)}>
      ${!value && html`<option value="">Choose a checkpoint</option>`}
      ${offered.map((one) => html`<option key=${one.name} value=${one.name}>${words(one).slice(0, 120)}</option>`)}
    </select></label>`;
}

function Side({ title, side, run, name }) {
  return html`<${Fact} label=${title}><${Name} href=${to.checkpoint(run, name)} most=${80}>${side.path}<//> <${Outcome} outcome=${side.outcome} /><//>`;
}

/** The newest checkpoint that is bad, with the newest good one before it; else the newest two. */
function firstChoice(generations) {
  const newest = generations.findLastIndex(({ outcome }) => outcome === "bad");
  if (newest < 0) return generations.slice(-2).map(({ name }) => name);
  const series = generations.slice(0, newest).filter((one) => one.series === generations[newest].series);
  const good = series.findLast(({ outcome }) => outcome === "good");
  const bad = good ? generations.slice(generations.indexOf(good)).find((one) => one.outcome === "bad" && one.series === good.series) : generations[newest];
  return [good?.name, bad.name];
}

function Result({ doc, run, a, b, runName, onRead }) {
  const noted = doc.changes.some((change) => change.note);
  const columns = (doc.read ? READ : COLUMNS).filter(({ key }) => key !== "note" || noted);
  const kinds = Object.entries(doc.counts).filter(([, found]) => found);
  return html`
    <dl class="facts card padded"><${Side} title="First" side=${doc.a} run=${run} name=${a} /><${Side} title="Second" side=${doc.b} run=${run} name=${b} />
      <${Fact} label="Equal">${many(doc.same, "tensor")}<//>${kinds.map(([kind, found]) => html`<${Fact} key=${kind} label=${WORDS[kind] ?? kind}>${many(found, "tensor")}<//>`)}
    </dl>
    ${doc.prefixes?.map((prefix) => html`<p key=${prefix.role} class="dim">Names of the role ${prefix.role} begin with <bdi>${prefix.b || "nothing"}</bdi> instead of <bdi>${prefix.a || "nothing"}</bdi>.</p>`)}
    ${doc.damaged?.map((file, at) => html`<${Sentence} key=${at} kind="bad"><bdi>${file.file}</bdi> is damaged: <bdi>${file.message}</bdi>. Tensors may be missing here.<//>`)}
    ${onRead && doc.would_read > 0 && html`<${Sentence} action=${html`<button type="button" onClick=${onRead}>Read the tensors (${bytes(doc.would_read)})</button>`}>This comes from the manifests. The sizes of the changes are in the tensors themselves.<//>`}
    <${Section} title="What differs" id="changes" tools=${html`<${Take} name=${`${runName}-diff-${stepText(doc.a.step)}-${stepText(doc.b.step)}`} what="what differs" columns=${columns} rows=${doc.changes} />`}>
      <${Table} caption="What differs" columns=${columns} rows=${doc.changes} rowKey=${(change) => `${change.role} ${change.name} ${change.change}`} height=${40} narrowHeight=${112} empty="Nothing differs." />
      ${doc.omitted > 0 && html`<p class="dim">${many(doc.omitted, "further tensor differs", "further tensors differ")}. Run ckptguard diff for all of them.</p>`}
    <//>`;
}

export default function Diff({ run, a, b }) {
  const page = useDocument(url`v1/runs/${run}/page`, (event) => event.run === run);
  const generations = page.data?.generations;
  const [choice, setChoice] = useState({ a, b });
  const [reading, setReading] = useState(null);
  const offered = useMemo(() => (generations && !a ? firstChoice(generations) : [a, b]), [generations, a, b]);
  const [first, second] = [choice.a ?? offered[0], choice.b ?? offered[1]];
  const pair = a && b ? url`v1/runs/${run}/diff?a=${a}&b=${b}` : null;
  const quick = useDocument(pair);
  const whole = useDocument(reading === pair && pair ? `${pair}&read=1` : null);
  const doc = whole.data ? whole : quick;
  const compare = (event) => {
    event.preventDefault();
    if (first && second) location.hash = to.diff(run, first, second);
  };
  return html`<${RunHead} run=${run} doc=${page} tab="diff" />
    <${Waiting} doc=${page} what="the checkpoints" />
    ${generations && html`<form class="filters" onSubmit=${compare}>
      <${Pick} label="First" id="first" generations=${generations} value=${first} onPick=${(value) => setChoice({ ...choice, a: value })} />
      <${Pick} label="Second" id="second" generations=${generations} value=${second} onPick=${(value) => setChoice({ ...choice, b: value })} />
      <button class="primary" disabled=${!first || !second}>Compare</button>
    </form>`}
    ${pair && html`<${Waiting} doc=${quick} what="both manifests" /><${Stale} doc=${quick} />
      ${reading === pair && html`<${Waiting} doc=${whole} what="the tensors of both" />`}
      ${doc.data && html`<${Result} doc=${doc.data} run=${run} a=${a} b=${b} runName=${page.data?.run?.name ?? run} onRead=${reading === pair ? null : () => setReading(pair)} />`}`}`;
}
