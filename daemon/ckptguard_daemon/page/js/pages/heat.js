// Tensors over checkpoints: where the numbers grew, and which tensor went bad first.
import { useMemo, useState } from "preact/hooks";
import { html } from "../html.js";
import { url } from "../api.js";
import { HeatMap, Legend } from "../charts/heat_map.js";
import { chosenTensors, heatModel, inOrder } from "../charts/heat_model.js";
import { heatPicture } from "../export/pictures.js";
import { useDocument } from "../documents.js";
import { count, many, number } from "../format.js";
import { setQuery, to } from "../router.js";
import { RunHead } from "../run_head.js";
import { Table } from "../table.js";
import { Take } from "../export/take.js";
import { stepText } from "../text.js";
import { Choices, Name, Outcome, Section, Sentence, Stale, Waiting } from "../widgets.js";

const MODES = [["magnitude", "Largest magnitude"], ["change", "Change"]];
const SIZES = [["16", "Names"], ["4", "Overview"]];
const MOST = 60; // checkpoints in one window

/** The words for one cell. */
function cellWords(heat, model, tensor, column) {
  const [value, before] = [heat.largest[tensor][column], heat.largest[tensor][column - 1]];
  const sick = model.noted(tensor, column);
  const parts = [];
  if (sick) parts.push(sick);
  if (typeof value === "number") {
    parts.push(`largest ${number(value)}`);
    if (typeof before === "number" && before > 0 && value > 0) parts.push(`× ${number(value / before, 3)} since the one before`);
  } else if (!sick) parts.push("not on record");
  return parts.join(", ");
}

function Readout({ heat, model, rows, cell, run, id }) {
  const tensor = cell ? rows[cell.row] : undefined;
  if (tensor === undefined) return html`<p id=${id} class="readout card dim">Point at a cell, or move with the arrow keys. Enter opens its checkpoint.</p>`;
  const checkpoint = heat.checkpoints[cell.column];
  return html`<div id=${id} class="readout card" role="status" aria-live=${cell.follow ? "polite" : "off"}>
    <p class="readout-name"><${Name} class="whole" most=${300}>${heat.tensors[tensor].name || "(no name)"}<//></p>
    <p>at step <a href=${to.checkpoint(run, checkpoint.name)}>${stepText(checkpoint.step)}</a> <${Outcome} outcome=${checkpoint.outcome} />: <strong>${cellWords(heat, model, tensor, cell.column)}</strong></p>
  </div>`;
}

const badColumns = (heat, run) => [
  { key: "tensor", title: "Tensor", value: ([tensor]) => heat.tensors[tensor].name, cell: ([tensor]) => html`<${Name}>${heat.tensors[tensor].name}<//>` },
  { key: "role", title: "Role", value: ([tensor]) => heat.tensors[tensor].role, cell: ([tensor]) => heat.tensors[tensor].role },
  {
    key: "step", title: "Step", class: "right", value: ([, column]) => column, export: ([, column]) => stepText(heat.checkpoints[column].step),
    cell: ([, column]) => html`<a href=${to.checkpoint(run, heat.checkpoints[column].name)}>${stepText(heat.checkpoints[column].step)}</a>`,
  },
  { key: "what", title: "What is wrong", value: ([, , what]) => what, cell: ([, , what]) => what },
];

/** The whole map as a table: a row a tensor, a column a checkpoint. */
function mapColumns(heat) {
  const steps = heat.checkpoints.map((checkpoint, column) => ({ title: `step ${stepText(checkpoint.step)}`, export: (tensor) => heat.largest[tensor][column] }));
  return [{ title: "tensor", export: (tensor) => heat.tensors[tensor].name }, { title: "role", export: (tensor) => heat.tensors[tensor].role }, ...steps];
}

function Map({ heat, run, runName, choice, choose }) {
  const { mode, size, words, role, onlySick } = choice;
  const model = useMemo(() => heatModel(heat, mode), [heat, mode]);
  const order = useMemo(() => inOrder(heat), [heat]);
  const rows = useMemo(() => chosenTensors(heat, order, { words, role, onlySick }), [heat, order, words, role, onlySick]);
  const firstAt = heat.first_bad ? rows.indexOf(heat.first_bad[0]) : -1;
  const first = firstAt >= 0 ? { row: firstAt, column: heat.first_bad[1] } : null;
  const [wanted, setCell] = useState(first && { ...first, follow: true, centred: true });
  const roles = useMemo(() => [...new Set(heat.tensors.map((tensor) => tensor.role))], [heat]);
  const columns = useMemo(() => badColumns(heat, run), [heat, run]);
  const cell = wanted && wanted.row < rows.length && wanted.column < heat.checkpoints.length ? wanted : null;
  const picture = () => heatPicture({ title: `${runName}: ${mode === "change" ? "change of the largest magnitude" : "largest magnitude"}`, heat, model, rows: rows.slice(cell && cell.row > 150 ? cell.row - 50 : 0), first: heat.first_bad });
  return html`<div class="filters">
      <${Choices} label="What the colours show" options=${MODES} value=${mode} onChoose=${(value) => choose({ mode: value })} />
      <${Choices} label="Height of a row" options=${SIZES} value=${size} onChoose=${(value) => choose({ size: value })} />
      <input type="search" aria-label="Find tensors by name" placeholder="Find by name" value=${words} onInput=${(e) => choose({ words: e.target.value })} />
      ${roles.length > 1 && html`<select aria-label="Role" value=${role} onChange=${(e) => choose({ role: e.target.value })}><option value="">All roles</option>${roles.map((one) => html`<option key=${one} value=${one}>${one}</option>`)}</select>`}
      <label><input type="checkbox" checked=${onlySick} disabled=${!heat.bad.length} onChange=${(e) => choose({ onlySick: e.target.checked })} /> Only what is bad</label>
      ${first && html`<button type="button" onClick=${() => setCell({ ...first, follow: true, centred: true })}>Go to the first bad one</button>`}
    </div>
    <${Legend} model=${model} />
    ${rows.length ? html`<${HeatMap} heat=${heat} model=${model} rows=${rows} rowHeight=${Number(size)} cell=${cell} first=${first} described="heat-cell"
        onCell=${(found, by) => setCell({ ...found, follow: by === "key" })} onOpen=${({ column }) => (location.hash = to.checkpoint(run, heat.checkpoints[column].name))} />` : html`<p class="empty card">No tensor is like this.</p>`}
    <${Readout} heat=${heat} model=${model} rows=${rows} cell=${cell} run=${run} id="heat-cell" />
    <p class="filters"><span class="dim">${many(rows.length, "tensor")}, ${many(heat.checkpoints.length, "checkpoint")}${heat.tensors_omitted > 0 && `; ${many(heat.tensors_omitted, "tensor is", "tensors are")} left out`}${heat.more?.between > 0 && `; ${many(heat.more.between, "checkpoint lies", "checkpoints lie")} between them`}</span>
      <span class="grow"></span><${Take} name=${`${runName}-heat`} what="the map" columns=${mapColumns(heat)} rows=${rows} picture=${picture} /></p>
    ${heat.bad.length > 0 && html`<${Section} title="What is bad" id="bad" tools=${html`<${Take} name=${`${runName}-bad-tensors`} what="what is bad" columns=${columns} rows=${heat.bad} />`}>
      <${Table} caption="Tensors that are bad" columns=${columns} rows=${heat.bad} rowKey=${([tensor, column]) => `${tensor} ${column}`} height=${38} narrowHeight=${72} /><//>`}`;
}

export default function Heat({ run, query }) {
  const page = useDocument(url`v1/runs/${run}/page`, (event) => event.run === run);
  const [choice, setChoice] = useState(() => ({
    mode: query.get("show") === "change" ? "change" : "magnitude", size: "16", words: query.get("find") ?? "", role: "", onlySick: false,
  }));
  const [range, setRange] = useState(() => ({ series: query.get("series") ?? "", first: query.get("first") ?? "", last: query.get("last") ?? "" }));
  const parts = [["series", range.series], ["first", range.first], ["last", range.last], ["most", MOST]].filter(([, value]) => value !== "");
  const doc = useDocument(url`v1/runs/${run}/heat` + `?${parts.map(([key, value]) => url`${key}=${value}`).join("&")}`);
  const heat = doc.data;
  const choose = (values) => {
    setChoice((old) => ({ ...old, ...values }));
    if ("mode" in values) setQuery({ show: values.mode === "change" ? "change" : null });
    if ("words" in values) setQuery({ find: values.words || null });
  };
  const see = (values) => {
    setRange({ ...range, ...values });
    setQuery(values);
  };
  const series = heat?.every_series ?? page.data?.series ?? [];
  const steps = heat?.checkpoints.map(({ step }) => (Array.isArray(step) ? step[0] : step)).filter((step) => typeof step === "number") ?? [];
  const unread = heat?.checkpoints.find(({ problem }) => problem);
  const runName = page.data?.run?.name ?? run;
  const newest = heat && page.data?.generations.findLast((one) => one.series === heat.series);
  const isOld = newest && range.last === "" && !heat.checkpoints.some(({ name }) => name === newest.name);
  return html`<${RunHead} run=${run} doc=${page} tab="heat" tools=${html`<button type="button" onClick=${doc.reload}>Look again</button>`} />
    ${isOld && html`<${Sentence}>There is a newer checkpoint, of step ${stepText(newest.step)}. Look again to see it.<//>`}
    <form class="filters" onSubmit=${(event) => {
      event.preventDefault();
      const form = new FormData(event.target);
      see({ series: form.get("series") ?? range.series, first: form.get("first"), last: form.get("last") });
    }}>
      ${series.length > 1 && html`<label>Series <select name="series">${series.map((one) => html`<option key=${one} value=${one} selected=${one === (range.series || heat?.series)}>${one}</option>`)}</select></label>`}
      <label>From step <input name="first" type="number" min="0" class="short" value=${range.first} placeholder=${steps[0] ?? ""} /></label>
      <label>to step <input name="last" type="number" min="0" class="short" value=${range.last} placeholder=${steps.at(-1) ?? ""} /></label>
      <button>Show</button>
      ${heat?.more?.before > 0 && steps.length > 0 && html`<button type="button" onClick=${() => see({ first: "", last: String(Math.max(steps[0] - 1, 0)) })}>Earlier</button>`}
      ${heat?.more?.after > 0 && steps.length > 0 && html`<button type="button" onClick=${() => see({ first: String(steps.at(-1) + 1), last: "" })}>Later</button>`}
      ${heat && html`<span class="dim">${heat.reads ? `${many(heat.reads, "record")} read` : "nothing read"}</span>`}
    </form>
    <${Waiting} doc=${doc} what="the magnitudes of the tensors" /><${Stale} doc=${doc} />
    ${unread && html`<${Sentence} kind="suspect">The records of step ${stepText(unread.step)} cannot be read: <bdi>${unread.problem}</bdi><//>`}
    ${heat && (heat.tensors.length && heat.checkpoints.length ? html`<${Map} key=${`${range.first} ${range.last} ${range.series}`} heat=${heat} run=${run} runName=${runName} choice=${choice} choose=${choose} />` : html`<p class="empty card">No checkpoint of these steps has magnitudes on record. Verify one first.</p>`)}`;
}
