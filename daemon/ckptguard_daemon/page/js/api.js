// Questions to the daemon. Every failure is a sentence.

const FIRST = 10_000; // ms in which the first page comes up
const SENTENCES = {
  401: ["You are not signed in.", "Run `ckptguard dashboard` for a new link, or enter your token."],
  403: ["Your role does not allow this.", "Ask an operator."],
  404: ["There is nothing at this address.", "The fleet's page lists all runs."],
  413: ["The request is too long.", null],
  429: ["Too many attempts.", "Wait a minute, then try again."],
};

/** What went wrong, in a sentence. `status` is 0 if there was no answer. */
export class Failure extends Error {
  constructor(sentence, { hint = null, status = 0, kind = "unreachable" } = {}) {
    super(sentence);
    Object.assign(this, { hint, status, kind });
  }
}

// The daemon's clock counts, not the browser's: ages are those that the daemon would tell. Its header has whole seconds.
let offset = 0;

function noteClock(response) {
  const ahead = (Date.parse(response.headers.get("date")) - Date.now()) / 1000;
  if (Number.isFinite(ahead)) offset = Math.abs(ahead) < 2 ? 0 : ahead;
}

/** The daemon's time now, in seconds since 1970. */
export const clock = () => Date.now() / 1000 + offset;

/** A message of the daemon as a sentence: "no such run" -> "No such run." */
export const whole = (text) => text && `${text[0].toUpperCase()}${text.slice(1)}${/[.!?…]$/.test(text) ? "" : "."}`;

async function failureOf(response) {
  const [sentence, hint] = SENTENCES[response.status] ?? [`The daemon answered ${response.status}.`, null];
  try {
    const { error } = await response.json();
    const theirs = response.status === 401 || response.status === 404 ? null : error.hint; // these hints are for programs
    return new Failure(whole(error.message), { hint: whole(theirs ?? hint), status: response.status, kind: error.kind });
  } catch {
    return new Failure(sentence, { hint, status: response.status, kind: "request" });
  }
}

/** The answer to a question that `first.js` has sent, once, while the first page comes up. */
function askedEarly(path) {
  const answer = performance.now() < FIRST ? globalThis.early?.get(path) : undefined;
  globalThis.early?.delete(path);
  return answer;
}

/** Send a request. Raises a Failure, or an AbortError if `signal` ends it. */
async function send(path, { method = "GET", body, headers = {}, signal } = {}) {
  let response;
  try {
    response = await ((method === "GET" && askedEarly(path)) || fetch(path, {
      method,
      signal,
      credentials: "same-origin",
      cache: "no-store",
      headers: body === undefined ? headers : { "content-type": "application/json", ...headers },
      body: body === undefined ? undefined : JSON.stringify(body),
    }));
  } catch (error) {
    if (error.name === "AbortError") throw error;
    dispatchEvent(new Event("ckptguard:unreachable"));
    throw new Failure("The daemon does not answer.", { hint: method === "GET" ? "Check that it runs. This page tries again by itself." : "Check that it runs, and look whether it was done before you try again." });
  }
  noteClock(response);
  if (!response.ok) {
    const failure = await failureOf(response);
    if (failure.status === 401) globalThis.early?.clear(); // they were asked for without a session, too
    if (failure.status === 401) dispatchEvent(new Event("ckptguard:signed-out"));
    throw failure;
  }
  return response;
}

/** Ask for a JSON document. `path` is relative: "v1/fleet". */
export async function ask(path, options) {
  const response = await send(path, options);
  if (response.status === 204) return null;
  try {
    return await response.json();
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Failure("The daemon's answer broke off.", { hint: "This page tries again by itself." });
  }
}

/** Encode a name for an address. A lone surrogate has no encoding, so it becomes a replacement character. */
export const encoded = (name) => encodeURIComponent(String(name).toWellFormed?.() ?? String(name));

/** Return a path with its names encoded: url`v1/runs/${run}/page`. */
export const url = (texts, ...names) => String.raw({ raw: texts }, ...names.map(encoded));
