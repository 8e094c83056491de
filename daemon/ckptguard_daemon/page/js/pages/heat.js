// Tensors over checkpoints.
import { html } from "../html.js";
import { RunHead } from "../run_head.js";

export default function Heat({ run, name }) {
  return html`<${RunHead} run=${run} title=${name ?? "Tensors over checkpoints"} />`;
}
