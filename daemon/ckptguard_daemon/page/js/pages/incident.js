// One incident: what happened, why probably, what was done, and the updates before it.
import { useMemo, useRef } from "preact/hooks";
import { html } from "../html.js";
import { url } from "../api.js";
import { useDocument } from "../documents.js";
import { count, number } from "../format.js";
import { to } from "../router.js";
import { RunHead } from "../run_head.js";
import { View } from "../charts/view.js";
import { Curves } from "../charts/curves.js";
import { curveTools } from "../export/curve_take.js";
import { Table } from "../table.js";
import { Take } from "../export/take.js";
import { Headroom, sickText } from "../tensors/tree_view.js";
import { Fact, Name, Outcome, Section, Sentence, Stale, Time, Waiting } from "../widgets.js";

const TENSORS = [
  { key: "name", title: "Tensor", width: 2.4, value: (t) => t.name, cell: (t) => html`<${Name}>${t.name}<//>` },
  { key: "kind", title: "Kind", value: (t) => t.kind, cell: (t) => html`<span class="chip">${t.kind}</span>` },
  { key: "nan", title: "NaN", class: "right", largest: true, value: (t) => t.nan, cell: (t) => count(t.nan) },
  { key: "inf", title: "Inf", class: "right", largest: true, value: (t) => t.inf, cell: (t) => count(t.inf) },
  { key: "elements", title: "Of", class: "right", largest: true, value: (t) => t.elements, cell: (t) => count(t.elements) },
  { key: "what", title: "What", value: (t) => t.what, cell: (t) => html`<bdi>${t.what ?? sickText(t) ?? "—"}</bdi>` },
];
const LARGEST = [
  { key: "tensor", title: "Tensor", width: 2.4, value: (t) => t.tensor, cell: (t) => html`<${Name}>${t.tensor}<//>` },
  { key: "largest", title: "Largest", class: "right", largest: true, value: (t) => t.largest, cell: (t) => number(t.largest) },
  { key: "share", title: "Share of fp16", value: (t) => t.largest, cell: (t) => html`<${Headroom} largest=${t.largest} />`, largest: true },
];
const CHANGES = [
  { key: "name", title: "Tensor", width: 2.4, value: (c) => c.name, cell: (c) => html`<${Name}>${c.name}<//>` },
  { key: "change", title: "Change", value: (c) => c.change, cell: (c) => c.change },
  { key: "became", title: "Became not finite", class: "right", largest: true, value: (c) => c.became_nonfinite, cell: (c) => count(c.became_nonfinite) },
  { key: "l2", title: "Relative change", class: "right", largest: true, value: (c) => c.relative_l2, cell: (c) => number(c.relative_l2) },
  { key: "largest", title: "Largest before", class: "right", largest: true, value: (c) => c.largest, cell: (c) => number(c.largest) },
];
const SAMPLES = ["step", "loss", "grad_norm", "scale", "lr"].map((key) => ({ key, title: key.replace("_", " "), value: (sample) => sample[key], cell: (sample) => number(sample[key]) }));

/** True if fp16 was computed in, or a gradient scaler was at work. */
const usesFp16 = ({ training, samples }) => Object.values(training ?? {}).includes("float16") || (samples ?? []).some(({ scale }) => typeof scale === "number");

function Cause({ cause, first }) {
  const head = html`<h3>${cause.title}</h3> <span class="chip ${cause.confidence}">${cause.confidence}</span>`;
  const body = html`<ul class="because">${cause.because.map((line, at) => html`<li key=${at}><bdi>${line}</bdi></li>`)}</ul>
    <p class="todo">What to do</p><ol class="advice">${cause.advice.map((line, at) => html`<li key=${at}><bdi>${line}</bdi></li>`)}</ol>`;
  if (first) return html`<article class="card cause">${head}${body}</article>`;
  return html`<details class="card cause"><summary>${head}</summary>${body}</details>`;
}

function onsetWords({ onset, onset_through: through }) {
  if (typeof onset !== "number") return "not known";
  return typeof through === "number" && through !== onset ? `between update ${count(onset)} and ${count(through)}` : `update ${count(onset)}`;
}

const flat = (value) => (value === null || value === undefined ? "—" : typeof value === "number" ? number(value) : typeof value === "object" ? JSON.stringify(value) : String(value));

const Pairs = ({ values }) => html`<dl class="facts card padded">${Object.entries(values).filter(([, value]) => value !== null).map(([key, value]) => html`<${Fact} key=${key} label=${html`<bdi>${key.replaceAll("_", " ")}</bdi>`}><bdi>${flat(value)}</bdi><//>`)}</dl>`;

function Place({ run, title, facts, generations }) {
  if (!facts) return null;
  const generation = generations?.find((one) => one.path === facts.path && (!facts.id || one.name.endsWith(`.${facts.id.split(".").at(-1)}`)));
  return html`<${Fact} label=${title}><${Name} href=${generation ? to.checkpoint(run, generation.name) : null}>${facts.path}<//> <${Outcome} outcome=${facts.outcome} /><//>`;
}

/** The curves of the updates before it, with where it began. */
function Before({ found, name }) {
  const doc = useMemo(() => {
    const column = (key) => found.samples.map((sample) => sample[key] ?? null);
    return { step: column("step"), loss: column("loss"), grad_norm: column("grad_norm"), scale: column("scale"), lr: column("lr") };
  }, [found]);
  const view = useRef(new View()).current;
  view.setDomain(doc.step[0], doc.step.at(-1));
  const marks = [{ step: found.onset, name: "it began", bad: true }, { step: found.last_good?.step, name: "last good" }];
  const tools = curveTools(name, doc, marks.filter(({ step }) => typeof step === "number"));
  return html`<div class="card padded"><${Curves} doc=${doc} view=${view} incidents=${[{ onset: found.onset, step: found.step }]} tools=${tools} /></div>`;
}

export default function Incident({ run, name }) {
  const changes = (event) => event.run === run && event.kind !== "verdict";
  const page = useDocument(url`v1/runs/${run}/page`, changes);
  const doc = useDocument(url`v1/runs/${run}/incidents/${name}`, changes);
  const found = doc.data;
  const report = url`v1/runs/${run}/incidents/${name}/report`;
  const tools = html`<a class="button" href=${report} target="_blank" rel="noopener">Report on one page</a>`;
  const title = found ? `${found.cause.replaceAll("_", " ")} at step ${found.step === null ? "unknown" : count(found.step)}` : name;
  const section = (id, words, columns, rows) => rows?.length > 0 && html`<${Section} title=${words} id=${id} tools=${html`<${Take} name=${`${name}-${id}`} what=${words.toLowerCase()} columns=${columns} rows=${rows} />`}>
    <${Table} caption=${words} columns=${columns} rows=${rows} rowKey=${(row) => rows.indexOf(row)} /><//>`;
  return html`<${RunHead} run=${run} doc=${page} title=${title} tools=${tools} />
    <${Waiting} doc=${doc} what="the incident" /><${Stale} doc=${doc} />
    ${found && html`
      <${Sentence} kind=${found.state === "closed" ? "good" : "bad"}><strong>${found.state}</strong>: <bdi>${found.reason}</bdi><//>
      <dl class="facts card padded">
        <${Fact} label="Began at">${onsetWords(found)}<//><${Fact} label="Noticed at">${found.step === null ? "—" : `update ${count(found.step)}`} <span class="dim">by <bdi>${found.source}</bdi></span><//>
        <${Fact} label="When"><${Time} at=${Date.parse(found.opened_at) / 1000} /><//>
        <${Place} run=${run} title="Last good" facts=${found.last_good} generations=${page.data?.generations} />
        <${Place} run=${run} title="First bad" facts=${found.first_bad} generations=${page.data?.generations} />
      </dl>
      ${found.causes?.length > 0 && html`<${Section} title="Likely cause, and what to do" id="causes">${found.causes.map((cause, at) => html`<${Cause} key=${at} cause=${cause} first=${at === 0} />`)}<//>`}
      ${found.actions?.length > 0 && html`<${Section} title="What was done" id="done"><ol class="card padded steps">${found.actions.map((line, at) => html`<li key=${at}><bdi>${line}</bdi></li>`)}</ol><//>`}
      ${found.samples?.length > 0 && html`<${Section} title="The updates before" id="before" tools=${html`<${Take} name=${`${name}-samples`} what="the updates before" columns=${SAMPLES} rows=${found.samples} />`}><${Before} found=${found} name=${name} /><//>`}
      ${section("not-finite", "What was not finite, or wrong", TENSORS, found.tensors)}
      ${section("changed", "What changed", CHANGES, found.changes)}
      ${section("headroom", "Headroom in fp16 before it", LARGEST, usesFp16(found) ? found.last_good?.largest : [])}
      ${found.training && html`<${Section} title="Training configuration" id="training"><${Pairs} values=${found.training} /><//>`}
      ${Object.keys(found.evidence ?? {}).length > 0 && html`<${Section} title="Evidence" id="evidence"><${Pairs} values=${found.evidence} /><//>`}`}`;
}
