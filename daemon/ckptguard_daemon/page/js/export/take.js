// Buttons that save what is shown: a table as CSV and JSON, a picture as PNG and SVG.
import { useState } from "preact/hooks";
import { html } from "../html.js";
import { saveCsv, saveJson, savePng, saveSvg } from "./files.js";

/** `columns` and `rows` of a table, `picture()` the text of an SVG. `what` completes "Save ...". */
export function Take({ name, what, columns = null, rows = null, picture = null }) {
  const [failed, setFailed] = useState(false);
  const told = columns?.filter((column) => column.value || column.export);
  const ways = [
    ...(columns ? [["CSV", () => saveCsv(name, told, rows)], ["JSON", () => saveJson(name, told, rows)]] : []),
    ...(picture ? [["PNG", () => savePng(name, picture())], ["SVG", () => saveSvg(name, picture())]] : []),
  ];
  const save = (way) => Promise.resolve().then(way).then(() => setFailed(false), () => setFailed(true));
  return html`<span class="take" role="group" aria-label=${`Save ${what}`}>
    <span class="dim" aria-hidden="true">Save</span>
    ${ways.map(([kind, way]) => html`<button type="button" class="quiet" key=${kind} aria-label=${`Save ${what} as ${kind}`} onClick=${() => save(way)}>${kind}</button>`)}
    ${failed && html`<span role="alert">The browser could not make this file. Try another kind.</span>`}
  </span>`;
}
