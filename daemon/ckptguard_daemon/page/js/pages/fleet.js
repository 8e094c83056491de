// The fleet: a line a run.
import { html } from "../html.js";
import { useDocument } from "../documents.js";
import { to } from "../router.js";
import { Table } from "../table.js";
import { Name, Stale, Waiting } from "../widgets.js";

const COLUMNS = [{ key: "name", title: "Run", value: (run) => run.name, cell: (run) => html`<${Name} href=${to.run(run.id)}>${run.name}<//>` }];

export default function Fleet() {
  const doc = useDocument("v1/fleet", () => true);
  return html`<h1 tabindex="-1">Fleet</h1>
    <${Waiting} doc=${doc} what="the fleet" /><${Stale} doc=${doc} />
    ${doc.data && html`<${Table} caption="Runs" columns=${COLUMNS} rows=${doc.data.runs} rowKey=${(run) => run.id} height=${44} narrowHeight=${44} />`}`;
}
