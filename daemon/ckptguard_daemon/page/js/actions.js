// What an operator can do: each action shows what it would do, asks for a reason, and says what it did.
import { useEffect, useRef, useState } from "preact/hooks";
import { html } from "./html.js";
import { ask, url } from "./api.js";
import { bytes, number } from "./format.js";
import { Name, Sentence } from "./widgets.js";

const LONGEST_REASON = 500;

// `word`: of the button; `about`: what it is for; `of`: "checkpoint" or "run"; `danger`: it removes or moves files.
const VERBS = {
  verify: { word: "Verify", about: "Reads every byte again, and records a verdict.", of: "checkpoint" },
  pin: { word: "Pin", about: "Nothing removes a pinned checkpoint.", of: "checkpoint" },
  unpin: { word: "Unpin", about: "The rules of retention hold for it again.", of: "checkpoint" },
  clear: { word: "Clear", about: "Lifts the suspicion: it counts as good again.", of: "checkpoint", danger: true },
  accept: { word: "Accept", about: "Takes the bytes as they are now for the right ones.", of: "checkpoint", danger: true },
  repair: { word: "Repair", about: "Replaces damaged files by whole copies of them.", of: "checkpoint" },
  replicate: { word: "Replicate", about: "Sends what the replicas lack.", of: "run" },
  prune: { word: "Prune", about: "Moves what no rule keeps to the trash.", of: "run", danger: true },
  rollback: { word: "Roll back", about: "Goes back to the newest known-good checkpoint.", of: "run", danger: true },
};

/** A button for each of the verbs that this user may use. A reader gets none. */
export function Actions({ me, run, runName, verbs, checkpoint = null, name = null, values = {}, onDone }) {
  const [verb, setVerb] = useState(null);
  const allowed = verbs.filter((one) => me?.actions?.includes(one));
  if (!allowed.length) return null;
  const close = () => setVerb(null);
  return html`<span class="actions" role="group" aria-label="Actions">
    ${allowed.map((one) => html`<button type="button" key=${one} onClick=${() => setVerb(one)}>${VERBS[one].word}…</button>`)}
    ${verb && html`<${Dialog} key=${verb} verb=${verb} run=${run} runName=${runName ?? run} checkpoint=${VERBS[verb].of === "checkpoint" ? checkpoint : null} name=${name} values=${values} onClose=${close} onDone=${onDone} />`}
  </span>`;
}

/** Send an action. Work that takes long is asked for until it has ended. */
async function act(run, verb, body, signal) {
  let answer = await ask(url`v1/runs/${run}/actions/${verb}`, { method: "POST", body, signal });
  while (answer.job && !answer.done) {
    await new Promise((resolve) => setTimeout(resolve, 700));
    signal.throwIfAborted();
    answer = await ask(url`v1/runs/${run}/jobs/${answer.job}`, { signal });
  }
  return answer;
}

function Dialog({ verb, run, runName, checkpoint, name, values, onClose, onDone }) {
  const { word, about, danger } = VERBS[verb];
  const [state, setState] = useState({ is: "planning" });
  const [reason, setReason] = useState("");
  const dialog = useRef(null);
  const signal = useRef(new AbortController());
  const args = { ...(checkpoint ? { checkpoint: name } : {}), ...values };

  const plan = async (failure = null) => {
    setState({ is: "planning" });
    try {
      setState({ is: "planned", plan: await act(run, verb, { ...args, dry_run: true }, signal.current.signal), failure });
    } catch (error) {
      if (error.name !== "AbortError") setState({ is: "failed", failure: error });
    }
  };
  useEffect(() => {
    dialog.current.showModal();
    plan();
    return () => signal.current.abort();
  }, []);
  const go = async (event) => {
    event.preventDefault();
    const { token } = state.plan;
    setState({ ...state, is: "doing", failure: null });
    try {
      const answer = await act(run, verb, { ...args, dry_run: false, reason: reason.trim(), token }, signal.current.signal);
      setState({ is: "done", answer });
      onDone?.();
    } catch (error) {
      if (error.name === "AbortError") return;
      if (error.status === 409) await plan(error);
      else setState({ ...state, is: "planned", failure: error });
    }
  };
  const target = checkpoint ? html`<${Name} class="whole" most=${300}>${checkpoint.path}<//> of ` : "";
  const close = () => dialog.current.close();
  return html`<dialog ref=${dialog} class="action" aria-labelledby="action-title" onClose=${onClose}>
    <form onSubmit=${go}>
      <h2 id="action-title">${word} ${target}<${Name} class="whole" most=${300}>${runName}<//></h2>
      <p class="dim">${about}</p>
      <${State} state=${state} />
      ${["planned", "doing"].includes(state.is) && html`<label for="action-reason">Reason, for the record</label>
        <textarea id="action-reason" rows="2" required maxlength=${LONGEST_REASON} value=${reason} onInput=${(e) => setReason(e.target.value)}></textarea>`}
      <div class="dialog-buttons">
        <button type="button" onClick=${close}>${state.is === "done" || state.is === "failed" ? "Close" : "Cancel"}</button>
        ${["planned", "doing"].includes(state.is) && html`<button class=${danger ? "danger" : "primary"} disabled=${state.is === "doing" || !reason.trim()}>${word} <span class="of-run"><bdi>${runName}</bdi></span></button>`}
      </div>
    </form>
  </dialog>`;
}

function State({ state }) {
  const failure = state.failure && html`<${Sentence} kind="bad" hint=${state.failure.hint}>${state.failure.message}<//>`;
  if (state.is === "planning") return html`<p class="waiting" role="status">Looking what it would do…</p>`;
  if (state.is === "failed") return failure;
  if (state.is === "done") return html`<div role="status"><${Sentence} kind="good">Done.<//><${Lines} lines=${state.answer.done} /></div>`;
  const { plan, costs } = state.plan;
  return html`${failure}<h3>It would do this</h3><${Lines} lines=${plan} /><${Costs} costs=${costs} />
    ${state.is === "doing" && html`<p class="waiting" role="status">At work. You can leave this page: it goes on.</p>`}`;
}

const Lines = ({ lines }) =>
  lines?.length ? html`<ul class="plan" tabindex="0" role="group" aria-label="Steps">${lines.map((line, at) => html`<li key=${at}><bdi>${line}</bdi></li>`)}</ul>` : html`<p>Nothing.</p>`;

function Costs({ costs }) {
  const shown = Object.entries(costs ?? {}).filter(([, value]) => value !== null);
  if (!shown.length) return null;
  const words = (key, value) => (typeof value !== "number" ? String(value) : key.includes("bytes") ? bytes(value) : number(value));
  return html`<dl class="facts">${shown.map(([key, value]) => html`<div class="fact" key=${key}><dt>${key.replaceAll("_", " ")}</dt><dd>${words(key, value)}</dd></div>`)}</dl>`;
}
