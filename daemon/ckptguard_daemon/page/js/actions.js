// What an operator can do: each action shows what it would do, asks why, and says what it did.
import { useEffect, useLayoutEffect, useRef, useState } from "preact/hooks";
import { html } from "./html.js";
import { ask, url } from "./api.js";
import { bytes } from "./format.js";
import { Name, Sentence } from "./widgets.js";

const LONGEST_REASON = 500;

// `word`: of the button; `about`: what it is for; `danger`: it removes or moves files, or calls something good.
const VERBS = {
  verify: { word: "Verify", about: "Reads every byte again, and records a verdict." },
  pin: { word: "Pin", about: "Nothing removes a pinned checkpoint." },
  unpin: { word: "Unpin", about: "The rules of retention hold for it again." },
  silence: {
    word: "Silence", about: "Sends no message and raises no alert about this run until then. All else goes on.",
    spans: [["1h", "1 hour"], ["8h", "8 hours"], ["1d", "1 day"], ["7d", "7 days"], ["30d", "30 days"]],
  },
  unsilence: { word: "Unsilence", about: "Messages are sent and alerts are raised again." },
  clear: { word: "Clear", about: "Lifts the suspicion: it counts as good again.", danger: true },
  accept: { word: "Accept", about: "Uses these tensors as the new reference for the saves that follow.", danger: true },
  repair: { word: "Repair", about: "Replaces damaged files by whole copies of them." },
  replicate: { word: "Replicate", about: "Sends what the replicas lack." },
  prune: { word: "Prune", about: "Moves what no rule keeps to the trash.", danger: true },
  rollback: { word: "Roll back", about: "Goes back to the newest known-good checkpoint. Bad ones after it go to quarantine.", danger: true },
};

/** A button for each of the verbs that this user may use; a reader gets none. Without `checkpoint` they are about the run. */
export function Actions({ me, run, runName, verbs, checkpoint = null, values = {}, onDone }) {
  const allowed = verbs.filter((one) => me?.actions?.includes(one));
  if (!allowed.length) return null;
  const begin = (verb) => showDialog({ verb, run, runName: runName ?? run, checkpoint, values, onDone, must: me.reason_for.includes(verb) });
  return html`<span class="actions" role="group" aria-label="Actions">
    ${allowed.map((one) => html`<${Opener} key=${one} onClick=${() => begin(one)}>${VERBS[one].word}${one === "rollback" && checkpoint ? " to this" : ""}…<//>`)}
  </span>`;
}

const focusHeading = () => document.querySelector("main h1")?.focus({ preventScroll: true });

/** What was done may take its button away, a moment later: who has no mouse goes on at the heading. */
function Opener({ onClick, children }) {
  const button = useRef(null);
  useLayoutEffect(() => () => {
    if (document.activeElement === button.current) focusHeading();
  }, []);
  return html`<button type="button" ref=${button} onClick=${onClick}>${children}</button>`;
}

let showDialog = () => {};

/** Where the dialog is: outside of the page, because what was done may take away the button that asked for it. */
export function ActionHost() {
  const [asked, setAsked] = useState(null);
  showDialog = setAsked;
  useEffect(() => {
    const leave = () => setAsked(null);
    addEventListener("hashchange", leave);
    return () => removeEventListener("hashchange", leave);
  }, []);
  const close = () => {
    setAsked(null);
    if (document.activeElement.matches("body, dialog *")) focusHeading(); // its button is gone
  };
  return asked && html`<${Dialog} ...${asked} onClose=${close} />`;
}

/** Send an action. Work that takes long is asked for until it has ended: the daemon answers when it has, or after 20 s. */
async function act(run, verb, body, signal) {
  let answer = await ask(url`v1/runs/${run}/actions/${verb}`, { method: "POST", body, signal });
  while (answer.state === "running") answer = await ask(url`v1/runs/${run}/jobs/${answer.job}?wait_seconds=20`, { signal });
  return answer;
}

/** What the daemon finds a checkpoint by. A path with escaped characters is not the one in the run: then its id. */
const named = ({ path, id }) => (path && !path.includes("\\u") ? path : id);

function Dialog({ verb, run, runName, checkpoint, values, must, onClose, onDone }) {
  const { word, about, danger, spans } = VERBS[verb];
  const [until, setUntil] = useState(spans?.[1][0]);
  const [state, setState] = useState({ is: "planning" });
  const [reason, setReason] = useState("");
  const dialog = useRef(null);
  const signal = useRef(new AbortController());
  const field = useRef(null);
  const args = { ...(checkpoint ? { [verb === "rollback" ? "to" : "checkpoint"]: named(checkpoint) } : {}), ...(until && { until }), ...values };

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
    return () => signal.current.abort();
  }, []);
  useEffect(() => {
    plan();
  }, [until]);
  useEffect(() => {
    if (state.is === "planned") field.current?.focus();
    if (state.is === "done" || state.is === "failed") dialog.current.querySelector(".dialog-buttons button")?.focus();
  }, [state.is]);
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
      if (error.kind === "plan_changed") await plan(error);
      else setState({ ...state, is: "planned", failure: error });
    }
  };
  const path = checkpoint && html`<${Name} class="whole" most=${300}>${checkpoint.path}<//>`;
  const of = html`<${Name} class="whole" most=${300}>${runName}<//>`;
  const isBack = verb === "rollback" && checkpoint;
  const close = () => dialog.current.close();
  return html`<dialog ref=${dialog} class="action" aria-labelledby="action-title" onClose=${onClose}>
    <form onSubmit=${go}>
      <h2 id="action-title">${word} ${isBack ? html`${of} to ${path}` : path ? html`${path} of ${of}` : of}</h2>
      <p class="dim">${isBack ? "Goes back to this checkpoint. Those after it go to quarantine." : about}</p>
      ${spans && html`<label for="action-until">For how long</label>
        <select id="action-until" value=${until} disabled=${state.is !== "planned"} onChange=${(e) => setUntil(e.target.value)}>${spans.map(([span, words]) => html`<option key=${span} value=${span}>${words}</option>`)}</select>`}
      <${State} state=${state} />
      ${["planned", "doing"].includes(state.is) && verb !== "verify" && html`<label for="action-reason">Reason, for the record</label>
        <textarea id="action-reason" ref=${field} rows="2" aria-describedby="action-plan" placeholder=${must ? "" : "optional"} required=${must} maxlength=${LONGEST_REASON} value=${reason} onInput=${(e) => setReason(e.target.value)}></textarea>`}
      <div class="dialog-buttons">
        <button type="button" onClick=${close}>${state.is === "done" || state.is === "failed" ? "Close" : "Cancel"}</button>
        ${["planned", "doing"].includes(state.is) && html`<button class=${danger ? "danger" : "primary"} disabled=${state.is === "doing" || (must && !reason.trim())}>${word} <span class="of-run"><bdi>${runName}</bdi></span></button>`}
      </div>
    </form>
  </dialog>`;
}

function State({ state }) {
  const failure = state.failure && html`<${Sentence} kind="bad" hint=${state.failure.hint}>${state.failure.message}<//>`;
  if (state.is === "planning") return html`<p class="waiting" role="status">Preparing the preview…</p>`;
  if (state.is === "failed") return failure;
  if (state.is === "done") return html`<${Sentence} kind=${state.answer.state === "done" ? "note" : "bad"}>${state.answer.state === "done" ? "Done. It is on record." : "Not all of it could be done."}<//><${Lines} lines=${state.answer.done} />`;
  const { plan, costs } = state.plan;
  return html`${failure}<h3 id="action-plan">Planned changes</h3><${Lines} lines=${plan} /><${Costs} costs=${costs} />
    ${state.is === "doing" && html`<p class="waiting" role="status">Running. You can leave this page: it goes on.</p>`}`;
}

const Lines = ({ lines }) =>
  lines?.length ? html`<div class="plan mono" tabindex="0" role="group" aria-label="In words">${lines.map((line, at) => html`<p key=${at} dir="auto">${line || " "}</p>`)}</div>` : html`<p>Nothing.</p>`;

function Costs({ costs }) {
  const shown = Object.entries(costs ?? {}).filter(([, value]) => value);
  return shown.length > 0 && html`<dl class="facts">${shown.map(([key, value]) => html`<div class="fact" key=${key}><dt>${key.replace("_", " ").replace("bytes", "Bytes")}</dt><dd>${bytes(value)}</dd></div>`)}</dl>`;
}
