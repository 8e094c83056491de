// Two checkpoints beside each other.
import { html } from "../html.js";
import { RunHead } from "../run_head.js";

export default function Diff({ run, name }) {
  return html`<${RunHead} run=${run} title=${name ?? "Two checkpoints beside each other"} />`;
}
