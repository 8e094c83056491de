// Ranks and their files.
import { html } from "../html.js";
import { RunHead } from "../run_head.js";

export default function Shards({ run, name }) {
  return html`<${RunHead} run=${run} title=${name ?? "Ranks and their files"} />`;
}
