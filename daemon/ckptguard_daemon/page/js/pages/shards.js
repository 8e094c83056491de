// Which rank has which files, how large they are, and which of them is wrong.
import { useMemo } from "preact/hooks";
import { html } from "../html.js";
import { url } from "../api.js";
import { useDocument } from "../documents.js";
import { Take } from "../export/take.js";
import { bytes, count, many } from "../format.js";
import { to } from "../router.js";
import { RunHead } from "../run_head.js";
import { Table } from "../table.js";
import { stepText } from "../text.js";
import { Bytes, Fact, Name, Outcome, Section, Sentence, Stale, Waiting } from "../widgets.js";

const FILES = [
  { key: "path", title: "File", width: 2.4, value: (f) => f.path, cell: (f) => html`<${Name}>${f.path}<//>` },
  { key: "rank", title: "Rank", value: (f) => f.rank, cell: (f) => rowName(f) },
  { key: "kind", title: "Kind", value: (f) => f.kind, cell: (f) => html`<${Name}>${f.kind}<//>` },
  { key: "size", title: "Size", class: "right", largest: true, value: (f) => f.size, cell: (f) => html`<${Bytes} value=${f.size} />` },
  { key: "tensors", title: "Tensors", class: "right", largest: true, value: (f) => f.tensors, cell: (f) => count(f.tensors) },
  { key: "outcome", title: "Outcome", value: (f) => f.outcome, cell: (f) => html`<${Outcome} outcome=${f.outcome} />` },
  { key: "note", title: "What is wrong", width: 2.4, value: (f) => f.note, cell: (f) => html`<bdi class="wrap">${f.note ?? ""}</bdi>` },
];

const rowName = ({ rank }) => (typeof rank === "number" ? `rank ${rank}` : "all ranks");

/** A row for each rank, and last one for the files of all ranks. */
function matrix(files) {
  const rows = new Map();
  for (const file of files) {
    const name = rowName(file);
    if (!rows.has(name)) rows.set(name, { name, order: file.rank ?? Infinity, cells: new Map() });
    const { cells } = rows.get(name);
    cells.set(file.kind, [...(cells.get(file.kind) ?? []), file]);
  }
  return [...rows.values()].sort((a, b) => a.order - b.order);
}

const WORST = ["bad", "incomplete", "pending", "suspect", "good"];
const worst = (files) => WORST.find((outcome) => files.some((file) => file.outcome === outcome)) ?? "pending";

function Cell({ files, usual }) {
  if (!files) return html`<span class="dim">none</span>`;
  const size = files.reduce((sum, file) => sum + (file.size ?? 0), 0);
  const odd = usual > 0 && (size < usual / 2 || size > usual * 2);
  return html`<span class="shard" title=${files.map(({ path }) => path).slice(0, 10).join("\n")}><${Outcome} outcome=${worst(files)} bare /> <span class=${odd ? "odd" : ""}>${bytes(size)}</span>${files.length > 1 && html` <span class="dim">${count(files.length)} files</span>`}</span>`;
}

const middle = (values) => values.sort((a, b) => a - b)[Math.floor(values.length / 2)] ?? 0;

function Matrix({ doc, runName }) {
  const rows = useMemo(() => matrix(doc.files), [doc]);
  const kinds = [...new Set(doc.files.map(({ kind }) => kind))];
  const total = (row, kind) => row.cells.get(kind)?.reduce((sum, file) => sum + (file.size ?? 0), 0) ?? null;
  const columns = [
    { key: "rank", title: "Rank", value: (row) => row.order, export: (row) => row.name, cell: (row) => row.name },
    ...kinds.map((kind) => {
      const usual = middle(rows.map((row) => total(row, kind)).filter((size) => size !== null));
      return { key: kind, title: html`<bdi>${kind}</bdi>`, largest: true, value: (row) => total(row, kind), cell: (row) => html`<${Cell} files=${row.cells.get(kind)} usual=${usual} />` };
    }),
  ];
  const saved = columns.map((column, at) => ({ ...column, title: at ? kinds[at - 1] : "rank" }));
  return html`<${Section} title="Ranks and their files" id="matrix" tools=${html`<${Take} name=${`${runName}-shards`} what="the matrix" columns=${saved} rows=${rows} />`}>
    <${Table} caption="Ranks and their files" columns=${columns} rows=${rows} rowKey=${(row) => row.name} height=${40} cards=${false} />
  <//>`;
}

export default function Shards({ run, name }) {
  const page = useDocument(url`v1/runs/${run}/page`, (event) => event.run === run);
  const doc = useDocument(url`v1/runs/${run}/shards?name=${name}`);
  const found = doc.data;
  const runName = page.data?.run?.name ?? run;
  const wrong = found?.files.filter((file) => file.note) ?? [];
  return html`<${RunHead} run=${run} doc=${page} title=${found ? `Shards of ${found.path === "." ? page.data?.run.name ?? "the run" : found.path}` : "Shards"} tools=${html`<a class="button" href=${to.checkpoint(run, name)}>The checkpoint</a>`} />
    <${Waiting} doc=${doc} what="the files of every rank" /><${Stale} doc=${doc} />
    ${found && html`
      ${wrong.length > 0 && html`<${Sentence} kind="bad">${many(wrong.length, "file is", "files are")} not right. <bdi>${wrong[0].path}</bdi>: <bdi>${wrong[0].note}</bdi><//>`}
      ${found.others.slice(0, 10).map((words, at) => html`<${Sentence} key=${at} kind="bad"><bdi>${words}</bdi><//>`)}
      <dl class="facts card padded"><${Fact} label="Step">${stepText(found.step)}<//><${Fact} label="Outcome"><${Outcome} outcome=${found.outcome} /><//>
        <${Fact} label="World size">${count(found.world_size)}<//><${Fact} label="Files">${count(found.files.length)}<//>
        <${Fact} label="Size">${bytes(found.files.reduce((sum, file) => sum + (file.size ?? 0), 0))}<//></dl>
      <${Matrix} doc=${found} runName=${runName} />
      <${Section} title="Files" id="files" tools=${html`<${Take} name=${`${runName}-files`} what="the files" columns=${FILES} rows=${found.files} />`}>
        <${Table} caption="Files" columns=${FILES} rows=${found.files} rowKey=${(file) => file.path} height=${40} narrowHeight=${112} />
      <//>`}`;
}
