// One run: whether it is protected, its checkpoints, its curves, and what happened.
import { useMemo, useState } from "preact/hooks";
import { html } from "../html.js";
import { Actions } from "../actions.js";
import { url } from "../api.js";
import { Curves } from "../charts/curves.js";
import { Legend, Timeline } from "../charts/timeline.js";
import { timelineModel } from "../charts/timeline_model.js";
import { View } from "../charts/view.js";
import { useDocument } from "../documents.js";
import { curveTools } from "../export/curve_take.js";
import { many } from "../format.js";
import { RunHead } from "../run_head.js";
import { Checkpoints, Events, Incidents, Status } from "../run_parts.js";
import { Section, Sentence, Stale, Waiting } from "../widgets.js";

const NONE = [];

/** The steps that the charts show: those of checkpoints, incidents and samples. */
function domainOf(model, curves) {
  const steps = [...(model.steps ?? [])];
  if (curves?.step.length) steps.push(curves.step[0], curves.step.at(-1), curves.step.reduce((a, b) => Math.max(a, b), 0));
  return steps.length ? [Math.min(...steps), Math.max(...steps)] : [0, 1];
}

/** What the picture of a curve marks: where incidents began. */
const marksOf = ({ incidents }) => incidents.filter(({ onset }) => typeof onset === "number").map(({ onset, cause }) => ({ step: onset, name: String(cause ?? "incident").replaceAll("_", " "), bad: true }));

function Zoom({ view }) {
  return html`<div class="zoom" role="group" aria-label="Zoom">
    <button type="button" class="icon" aria-label="Zoom out" title="Zoom out" onClick=${() => view.zoom(2)}><svg viewBox="0 0 24 24" class="line" aria-hidden="true"><path d="M6 12h12" /></svg></button>
    <button type="button" class="icon" aria-label="Zoom in" title="Zoom in" onClick=${() => view.zoom(0.5)}><svg viewBox="0 0 24 24" class="line" aria-hidden="true"><path d="M6 12h12M12 6v12" /></svg></button>
    <button type="button" class="quiet" onClick=${() => view.fit()}>Show all</button>
  </div>`;
}

function Charts({ run, page, curves }) {
  const [view] = useState(() => new View());
  const model = useMemo(() => timelineModel(page), [page]);
  const [first, last] = useMemo(() => domainOf(model, curves.data), [model, curves.data]);
  useMemo(() => view.setDomain(first, last), [first, last]);
  const skipped = curves.data?.skipped ?? NONE;
  return html`<${Section} title="Timeline" id="timeline" tools=${html`<${Zoom} view=${view} />`}>
    <div class="card charts">
      ${model.marks.length || model.incidents.length
        ? html`<${Timeline} run=${run} model=${model} view=${view} skipped=${skipped} /><${Legend} model=${model} skipped=${skipped} />`
        : html`<p class="empty">There is no checkpoint with a step yet.</p>`}
      ${model.without > 0 && html`<p class="dim small source">${many(model.without, "checkpoint has no step", "checkpoints have no step")}. The table below lists all.</p>`}
      ${curves.data && html`<${Curves} doc=${curves.data} view=${view} incidents=${page.incidents} tools=${curveTools(page.run.name, curves.data, marksOf(page))} />`}
      ${!curves.data && curves.failure && html`<${Sentence} kind="suspect" hint=${curves.failure.hint}>The curves could not be read. ${curves.failure.message}<//>`}
    </div>
  <//>`;
}

export default function Run({ run, me }) {
  const mine = (event) => event.run === run;
  const doc = useDocument(url`v1/runs/${run}/page`, mine);
  const curves = useDocument(url`v1/runs/${run}/curves`, mine);
  const tools = doc.data && html`<${Actions} me=${me} run=${run} runName=${doc.data?.run.name} verbs=${["verify", doc.data.run.silence ? "unsilence" : "silence", "rollback"]} onDone=${doc.reload} />`;
  return html`<${RunHead} run=${run} doc=${doc} tab="run" tools=${tools} />
    <${Waiting} doc=${doc} what="the run" /><${Stale} doc=${doc} />
    ${doc.data?.noted === false && html`<${Sentence} kind="suspect" hint="It does so soon.">The daemon has not looked through this run yet.<//>`}
    ${doc.data && html`<${Status} page=${doc.data} />
      <${Charts} run=${run} page=${doc.data} curves=${curves} />
      <div class="two">
        <${Section} title="What happened" id="events"><${Events} run=${run} events=${doc.data.events} newest=${doc.data.newest_event} /><//>
        <${Section} title="Incidents" id="incidents"><${Incidents} run=${doc.data.run} incidents=${doc.data.incidents} me=${me} onDone=${doc.reload} /><//>
      </div>
      <${Section} title="Checkpoints" id="checkpoints"><${Checkpoints} run=${run} page=${doc.data} /><//>`}`;
}
