// One run: whether it is protected, its checkpoints, its curves, and what happened.
import { html } from "../html.js";
import { url } from "../api.js";
import { useDocument } from "../documents.js";
import { RunHead } from "../run_head.js";
import { Stale, Waiting } from "../widgets.js";

export default function Run({ run }) {
  const doc = useDocument(url`v1/runs/${run}/page`, (event) => event.run === run);
  return html`<${RunHead} run=${run} doc=${doc} tab="run" />
    <${Waiting} doc=${doc} what="the run" /><${Stale} doc=${doc} />`;
}
