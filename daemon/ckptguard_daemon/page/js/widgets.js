// The small parts that every page is made of.
import { html } from "./html.js";
import { bytes, exact, iso, ago, shorten } from "./format.js";
import { useClock } from "./documents.js";
import { visible } from "./text.js";

// Each outcome has a shape of its own: colour never says anything alone. Drawn in a square of 16.
export const SHAPES = {
  good: "M8 1.5a6.5 6.5 0 1 0 0 13 6.5 6.5 0 0 0 0-13",
  bad: "M4 1.6 8 5.6 12 1.6 14.4 4 10.4 8 14.4 12 12 14.4 8 10.4 4 14.4 1.6 12 5.6 8 1.6 4z",
  suspect: "M8 1.3 15.2 14.3H.8z",
  incomplete: "M8 .9 15.1 8 8 15.1 .9 8z",
  pending: "M8 1.5a6.5 6.5 0 1 0 0 13 6.5 6.5 0 0 0 0-13m0 3a3.5 3.5 0 1 1 0 7 3.5 3.5 0 0 1 0-7",
};

export const OUTCOMES = Object.keys(SHAPES);

const known = (outcome) => (outcome in SHAPES ? outcome : "pending");

/** The mark of an outcome, with its word; `bare` leaves the word to screen readers. */
export function Outcome({ outcome, bare = false, text = outcome }) {
  const word = html`<span class=${bare ? "unseen" : ""}>${text ?? "pending"}</span>`;
  return html`<span class="outcome ${known(outcome)}"><svg class="mark" viewBox="0 0 16 16" aria-hidden="true"><path d=${SHAPES[known(outcome)]} /></svg>${word}</span>`;
}

const SIGNS = { good: "m10.5 16 4 4 7.5-8", none: "M11.5 16h9" };

/** Whether a run is safe: filled for "good" and "warn", open for "bad" and "none"; each has a sign of its own. */
export function Shield({ look, size = 16 }) {
  return html`<svg class="shield ${look}" viewBox="0 0 32 32" width=${size} height=${size} aria-hidden="true">
    <path class="body" d="M16 2 4 6.5v8.2C4 22.4 9 28 16 30c7-2 12-7.6 12-15.3V6.5z" />
    <path class="sign" d=${SIGNS[look] ?? "M16 9.5v8.5m0 4v.6"} />
  </svg>`;
}

/** A name from a file: its own direction, never markup, shortened by style. The whole name is its title. */
export function Name({ children, href = null, most = 200, class: kind = "" }) {
  const text = visible(String(children ?? ""));
  const shown = shorten(text, most);
  const title = shown === text && text.length < 24 ? undefined : text;
  if (href === null) return html`<bdi class="name ${kind}" title=${title}>${shown}</bdi>`;
  return html`<a class="name ${kind}" href=${href} title=${title}><bdi>${shown}</bdi></a>`;
}

/**
 * A moment: how long ago, with the exact time on hover and focus. In a list or a table (`focus` false) it takes no focus
 * of its own: there the exact time shows when its line has the focus.
 */
export function Time({ at, focus = true, now }) {
  const clock = useClock();
  if (typeof at !== "number") return html`<span class="dim">—</span>`;
  const words = ago(at, now ?? clock);
  if (focus) return html`<time class="tip" datetime=${iso(at)} data-tip=${exact(at)} tabindex="0">${words}<span class="unseen">, ${exact(at)}</span></time>`;
  return html`<time class="in-line" datetime=${iso(at)} title=${exact(at)}><span>${words}</span><span>${exact(at)}</span></time>`;
}

export const Bytes = ({ value }) => html`<span class="number" title=${typeof value === "number" ? `${value.toLocaleString("en")} bytes` : undefined}>${bytes(value)}</span>`;

/** A sentence in a box. `kind`: "note", "bad", "suspect" or "good". */
export function Sentence({ kind = "note", hint = null, children, action = null }) {
  return html`<div class="sentence ${kind}" role=${kind === "bad" ? "alert" : "status"}>
    <p>${children}${hint && html` <span class="hint">${hint}</span>`}</p>${action}
  </div>`;
}

/** That nobody is disturbed about a run: until when, who said so, and why. */
export function Silenced({ silence }) {
  const now = useClock();
  if (silence.until === null) return html`<${Sentence} kind="bad" hint="Messages are sent.">A record of a silence cannot be read.<//>`;
  if (silence.until <= now) return null;
  return html`<${Sentence} kind="suspect">Silenced by <bdi>${silence.by}</bdi>: no messages and no alerts. It ends <${Time} at=${silence.until} />.${silence.reason && html` <bdi>${silence.reason}</bdi>`}<//>`;
}

/** What stands in the place of a document: that it comes, or why it does not. Null once there is data. */
export function Waiting({ doc, what }) {
  if (doc.failure && !doc.data) {
    const again = html`<button type="button" onClick=${doc.reload}>Try again</button>`;
    return html`<${Sentence} kind="bad" hint=${doc.failure.hint} action=${again}>${doc.failure.message}<//>`;
  }
  if (!doc.data) return html`<p class="waiting" role="status">Loading ${what}…</p>`;
  return null;
}

/** That what is shown is old, and since when. */
export function Stale({ doc }) {
  if (!doc.failure || !doc.data) return null;
  return html`<${Sentence} kind="suspect" hint=${doc.failure.hint}>${typeof doc.data.as_of === "number" ? `As of ${exact(doc.data.as_of)}. ` : ""}${doc.failure.message}<//>`;
}

/** One fact with its label, for a list of facts: <dl class="facts">. */
export const Fact = ({ label, children }) => html`<div class="fact"><dt>${label}</dt><dd>${children}</dd></div>`;

/** A part of a page with its heading. */
export function Section({ title, id, tools = null, children }) {
  return html`<section class="section" aria-labelledby=${id}><div class="section-head"><h2 id=${id}>${title}</h2>${tools}</div>${children}</section>`;
}

/** A few choices of which one holds: buttons that say so. */
export function Choices({ label, options, value, onChoose }) {
  return html`<div class="choices" role="group" aria-label=${label}>${options.map(
    ([key, text]) => html`<button type="button" key=${key} aria-pressed=${String(key === value)} onClick=${() => onChoose(key)}>${text}</button>`,
  )}</div>`;
}
