// One checkpoint.
import { html } from "../html.js";
import { RunHead } from "../run_head.js";

export default function Checkpoint({ run, name }) {
  return html`<${RunHead} run=${run} title=${name ?? "One checkpoint"} />`;
}
