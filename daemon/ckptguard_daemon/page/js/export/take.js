// A menu that saves what is shown: a table as CSV and JSON, a picture as PNG and SVG.
import { useRef, useState } from "preact/hooks";
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
  const menu = useRef(null);
  const close = (back) => {
    menu.current.open = false;
    if (back) menu.current.querySelector("summary").focus();
  };
  const save = (way) => {
    close(true);
    Promise.resolve().then(way).then(() => setFailed(false), () => setFailed(true));
  };
  const leave = ({ relatedTarget }) => menu.current?.contains(relatedTarget) === false && close(false);
  return html`<details class="take" ref=${menu} onFocusOut=${leave} onKeyDown=${({ key }) => key === "Escape" && close(true)}>
      <summary aria-label=${`Save ${what}`}>Save</summary>
      <div class="take-ways">${ways.map(([kind, way]) => html`<button type="button" class="quiet" key=${kind} aria-label=${`Save ${what} as ${kind}`} onClick=${() => save(way)}>${kind}</button>`)}</div>
    </details>
    ${failed && html`<span role="alert">The browser could not make this file. Try another kind.</span>`}`;
}
