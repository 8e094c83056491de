// One checkpoint: what was said of it, its files, and its tensors.
import { useMemo, useState } from "preact/hooks";
import { html } from "../html.js";
import { url } from "../api.js";
import { Actions } from "../actions.js";
import { useDocument } from "../documents.js";
import { count, many, number, seconds } from "../format.js";
import { to } from "../router.js";
import { RunHead } from "../run_head.js";
import { Table } from "../table.js";
import { Take } from "../export/take.js";
import { stepText } from "../text.js";
import { matching } from "../tensors/tree.js";
import { Headroom, shapeText, sickText, TensorTree } from "../tensors/tree_view.js";
import { Bytes, Fact, Name, Outcome, Section, Sentence, Stale, Time, Waiting } from "../widgets.js";

const FILES = [
  { key: "path", title: "File", width: 2.4, value: (f) => f.path, cell: (f) => html`<${Name}>${f.path}<//>` },
  { key: "size", title: "Size", value: (f) => f.size, cell: (f) => html`<${Bytes} value=${f.size} />`, class: "right", largest: true },
  { key: "format", title: "Format", value: (f) => f.format, cell: (f) => f.format },
  { key: "rank", title: "Rank", value: (f) => f.rank, cell: (f) => f.rank ?? "—" },
  { key: "digest", title: "Digest", value: (f) => f.digest, cell: (f) => html`<${Digest} value=${f.digest} />` },
];

const TENSORS = ["name", "role", "dtype", "shape", "file", "digest", "largest", "rms", "zeros", "nan", "inf", "headroom", "problem"].map((key) => ({
  key,
  title: key,
  value: (tensor) => (key === "shape" ? (tensor.shape ?? []).join(" ") : tensor[key]),
}));

/** True if something of it is computed in fp16, whose limit matters then: a tensor, or a gradient scaler. */
const usesFp16 = ({ tensors, files }) => tensors.some(({ dtype, name }) => dtype === "float16" || /scaler/i.test(name)) || files.some(({ path }) => /scaler/i.test(path));

const Digest = ({ value }) => (value ? html`<code class="digest" title=${value}>${value.slice(0, 16)}</code>` : html`<span class="dim">—</span>`);

function Tensors({ doc, name }) {
  const [wanted, setWanted] = useState("");
  const [onlySick, setOnlySick] = useState(false);
  const [chosen, setChosen] = useState(null);
  const shown = useMemo(() => matching(doc.tensors, wanted, onlySick), [doc, wanted, onlySick]);
  const sick = useMemo(() => doc.tensors.filter(sickText).length, [doc]);
  const fp16 = useMemo(() => usesFp16(doc), [doc]);
  const tools = html`<${Take} name=${`${name}-tensors`} what="the tensors" columns=${TENSORS} rows=${shown} />`;
  return html`<${Section} title="Tensors" id="tensors" tools=${tools}>
    <div class="filters">
      <input type="search" aria-label="Find tensors by name" placeholder="Find by name" value=${wanted} onInput=${(e) => setWanted(e.target.value)} />
      <label><input type="checkbox" checked=${onlySick} disabled=${!sick} onChange=${(e) => setOnlySick(e.target.checked)} /> Only what is bad</label>
      <span class="dim" role="status">${many(shown.length, "tensor")}${sick ? `, ${count(sick)} bad` : ""}${doc.tensors_omitted ? `; ${count(doc.tensors_omitted)} more are not shown` : ""}</span>
    </div>
    ${shown.length ? html`<${TensorTree} tensors=${shown} openAll=${Boolean(wanted || onlySick)} fp16=${fp16} onChoose=${setChosen} />` : html`<p class="empty card">${doc.tensors.length ? "No tensor is like this." : "No tensor of it is on record."}</p>`}
    <${Chosen} tensor=${chosen} fp16=${fp16} />
  <//>`;
}

/** The whole of what is known of one tensor. */
function Chosen({ tensor, fp16 }) {
  if (!tensor) return html`<p class="dim chosen">Choose a tensor to see its digest, its file and its numbers.</p>`;
  return html`<div class="card chosen" role="status">
    <h3><${Name} class="whole" most=${4000}>${tensor.name || "(no name)"}<//></h3>
    <dl class="facts">
      <${Fact} label="Type">${tensor.dtype}<//><${Fact} label="Shape">${shapeText(tensor.shape)}<//><${Fact} label="Role">${tensor.role}<//>
      <${Fact} label="Largest magnitude">${number(tensor.largest)}<//><${Fact} label="Root mean square">${number(tensor.rms)}<//>
      <${Fact} label="Zeros">${typeof tensor.zeros === "number" ? `${number(100 * tensor.zeros, 3)} %` : "—"}<//>
      ${fp16 && html`<${Fact} label="Share of fp16"><${Headroom} largest=${tensor.largest} /><//>`}
      <${Fact} label="What is wrong"><bdi>${sickText(tensor) ?? "nothing"}</bdi><//>
      <${Fact} label="File"><${Name} class="whole">${tensor.file ?? "—"}<//><//><${Fact} label="Digest"><code class="digest whole">${tensor.digest ?? "—"}</code><//>
    </dl>
  </div>`;
}

function Verdicts({ verdicts, omitted }) {
  if (!verdicts.length) return html`<p class="card empty">It has no verdict yet.</p>`;
  return html`<ol class="verdicts card">${verdicts.toReversed().map(
    (verdict) => html`<li key=${verdict.name}>
      <p><${Outcome} outcome=${verdict.outcome} /> <${Time} at=${seconds(verdict.at)} /> <span class="dim">by <bdi>${verdict.by}</bdi></span> ${verdict.counts && html`<span class="chip">counts</span>`} ${verdict.place_damaged && html`<span class="chip">the bytes in place are damaged</span>`}</p>
      ${verdict.findings?.length > 0 && html`<ul class="findings">${verdict.findings.map((finding, at) => html`<li key=${at} class=${finding.severity}><${Finding} finding=${finding} /></li>`)}</ul>`}
    </li>`,
  )}${omitted > 0 && html`<li class="dim">${many(omitted, "older verdict")}</li>`}</ol>`;
}

function Finding({ finding }) {
  return html`<span class="chip">${finding.check}</span> ${finding.tensor && html`<${Name} class="whole" most=${160}>${finding.tensor}<//>: `}<bdi>${finding.message}</bdi>
    ${finding.file && html` <span class="dim">in <bdi>${finding.file}</bdi></span>`}`;
}

/** The generation before this one in its series, to compare with. */
function before(generations, name) {
  const own = generations.find((generation) => generation.name === name);
  const series = generations.filter((generation) => generation.series === own?.series);
  return series[series.indexOf(own) - 1] ?? null;
}

/** What can be done: a path names what is there now, so most verbs need this very content to be in place. Other tensors than
 * before are a question, which accepting them answers. */
function offered(found, generation) {
  const { outcome, verdicts = [] } = found ?? {};
  const isAsked = outcome === "suspect" && verdicts.some(({ counts, findings }) => counts && findings.some(({ check }) => check === "schema"));
  const inPlace = generation?.in_place ? ["verify", generation.pinned ? "unpin" : "pin", ...(isAsked ? ["accept"] : []), ...(outcome === "bad" ? ["repair"] : [])] : [];
  return [...inPlace, ...(outcome === "suspect" ? ["clear"] : []), ...(outcome === "good" ? ["rollback"] : [])];
}

const KIND = { good: "good", bad: "bad", suspect: "suspect", incomplete: "suspect" };

export default function Checkpoint({ run, name, me }) {
  const page = useDocument(url`v1/runs/${run}/page`, (event) => event.run === run);
  const doc = useDocument(url`v1/runs/${run}/checkpoint?name=${name}`);
  const found = doc.data;
  const generation = page.data?.generations.find((one) => one.name === name);
  const earlier = page.data ? before(page.data.generations, name) : null;
  const again = () => {
    doc.reload();
    page.reload();
  };
  const about = found ?? generation; // without either, an action would be about the whole run
  const isOld = found && generation?.judged_at > Math.max(0, ...found.verdicts.map(({ at }) => seconds(at) ?? 0)) + 1;
  const verbs = offered(found, generation);
  const tools = html`${earlier && html`<a class="button" href=${to.diff(run, earlier.name, name)}>Compare with ${stepText(earlier.step)}</a>`}
    <a class="button" href=${to.shards(run, name)}>Shards</a>
    ${about && html`<${Actions} me=${me} run=${run} runName=${page.data?.run?.name} verbs=${verbs} checkpoint=${about} onDone=${again} />`}`;
  const path = found?.path ?? generation?.path;
  const title = path === "." ? (page.data?.run?.name ?? path) : (path ?? name);
  return html`<${RunHead} run=${run} doc=${page} title=${title} tools=${tools} />
    <${Waiting} doc=${doc} what="the checkpoint" /><${Stale} doc=${doc} />
    ${isOld && html`<${Sentence} action=${html`<button type="button" onClick=${doc.reload}>Look again</button>`}>There is a newer verdict on it.<//>`}
    ${found && html`
      <${Sentence} kind=${KIND[found.outcome] ?? "note"}><${Outcome} outcome=${found.outcome} bare /> <bdi>${found.sentence}</bdi><//>
      <dl class="facts card padded">
        <${Fact} label="Step">${stepText(found.step)}<//>
        <${Fact} label="Saved"><${Time} at=${generation?.saved_at} /><//>
        <${Fact} label="Size"><${Bytes} value=${found.bytes} /><//>
        <${Fact} label="Tensors">${count(found.tensors.length)}<//>
        ${generation?.pinned && html`<${Fact} label="Pinned"><bdi>${generation.pinned}</bdi><//>`}
        ${Object.entries(found.metrics ?? {}).map(([key, value]) => html`<${Fact} key=${`metric ${key}`} label=${html`<bdi>${key}</bdi>`}>${number(value)}<//>`)}
        ${(found.counters ?? []).map((counter) => html`<${Fact} key=${counter.kind} label=${html`<bdi>${counter.kind}</bdi>`}><span title=${counter.source}>${count(counter.value)}</span><//>`)}
      </dl>
      <${Section} title="Verdicts" id="verdicts"><${Verdicts} verdicts=${found.verdicts} omitted=${found.verdicts_omitted} /><//>
      <${Section} title="Files" id="files" tools=${html`<${Take} name=${`${name}-files`} what="the files" columns=${FILES} rows=${found.files} />`}>
        <${Table} caption="Files" columns=${FILES} rows=${found.files} rowKey=${(file) => file.path} height=${40} narrowHeight=${92} />
      <//>
      <${Tensors} doc=${found} name=${name} />`}`;
}
