// Copies and retention.
import { html } from "../html.js";
import { RunHead } from "../run_head.js";

export default function Keep({ run, name }) {
  return html`<${RunHead} run=${run} title=${name ?? "Copies and retention"} />`;
}
