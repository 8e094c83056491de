// One incident.
import { html } from "../html.js";
import { RunHead } from "../run_head.js";

export default function Incident({ run, name }) {
  return html`<${RunHead} run=${run} title=${name ?? "One incident"} />`;
}
