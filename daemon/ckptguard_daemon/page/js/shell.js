// What is around every page: the header, the way to other pages, signing in, and the page of the address.
import { useEffect, useErrorBoundary, useRef, useState } from "preact/hooks";
import { html } from "./html.js";
import { ActionHost } from "./actions.js";
import { ask } from "./api.js";
import { start, useConnection } from "./live.js";
import { forgetAll, useDocument } from "./documents.js";
import { exact } from "./format.js";
import { to, useRoute } from "./router.js";
import { ThemeSwitch } from "./theme.js";
import { Sentence, Shield } from "./widgets.js";

const PAGES = {
  fleet: () => import("./pages/fleet.js"),
  run: () => import("./pages/run.js"),
  checkpoint: () => import("./pages/checkpoint.js"),
  heat: () => import("./pages/heat.js"),
  diff: () => import("./pages/diff.js"),
  shards: () => import("./pages/shards.js"),
  incident: () => import("./pages/incident.js"),
  keep: () => import("./pages/keep.js"),
};
const loaded = new Map();

const WORDS = {
  connecting: "Connecting",
  live: "Live",
  lost: "Not connected",
  paused: "Paused",
};

function Connection() {
  const { is, since } = useConnection();
  const text = is === "lost" ? `${WORDS.lost}. As of ${exact(since / 1000)}` : WORDS[is];
  return html`<span class="connection ${is}" role="status"><span class="dot" aria-hidden="true"></span>${text}</span>`;
}

function SignIn({ onDone }) {
  const [failure, setFailure] = useState(null);
  const field = useRef(null);
  const submit = async (event) => {
    event.preventDefault();
    try {
      await ask("v1/session", { method: "POST", body: { token: field.current.value } });
      onDone();
    } catch (error) {
      setFailure(error);
    }
    if (field.current) field.current.value = "";
  };
  return html`<main id="main" class="sign-in">
    <${Shield} ok size=${48} />
    <h1 tabindex="-1">Sign in</h1>
    <p>Run <code>ckptguard dashboard</code> for a link, or enter your token.</p>
    <form onSubmit=${submit}>
      <label for="token">Token</label>
      <input id="token" ref=${field} type="password" autocomplete="off" required />
      <button class="primary">Sign in</button>
    </form>
    ${failure && html`<${Sentence} kind="bad" hint=${failure.hint}>${failure.message}<//>`}
  </main>`;
}

function Account({ me, onSignOut }) {
  if (!me?.name) return null;
  const leave = () => ask("v1/session", { method: "DELETE" }).then(onSignOut, onSignOut);
  return html`<span class="account"><bdi class="who" title=${`${me.name}, ${me.role}`}>${me.name}</bdi><span class="role">${me.role}</span></span>
    <button type="button" class="quiet" onClick=${leave}>Sign out</button>`;
}

function Nowhere() {
  return html`<h1 tabindex="-1">There is nothing at this address</h1><p><a href=${to.fleet()}>Go to the fleet</a></p>`;
}

/** The page of an address; its code is loaded with its first use. */
function Page({ route, me }) {
  const [mistake] = useErrorBoundary((error) => reportError(error)); // it stays a failure for whoever looks at the console
  const [, draw] = useState(0);
  const [failure, setFailure] = useState(null);
  const load = PAGES[route.page];
  const found = loaded.get(route.page);
  useEffect(() => {
    if (!load || loaded.has(route.page)) return;
    setFailure(null);
    load().then(
      (module) => {
        loaded.set(route.page, module.default);
        draw((n) => n + 1);
      },
      () => setFailure("This part of the page could not be loaded. Reload the page."),
    );
  }, [route.page]);
  useEffect(() => {
    scrollTo(0, 0);
    document.querySelector("main h1")?.focus({ preventScroll: true });
  }, [route.key, Boolean(found)]);
  if (!load) return html`<${Nowhere} />`;
  if (mistake) return html`<${Sentence} kind="bad" hint="Reload the page. If it stays, report it with what the console says.">This page failed. It shows nothing rather than something wrong.<//>`;
  if (found) return html`<${found} ...${route} me=${me} />`;
  return failure ? html`<${Sentence} kind="bad">${failure}<//>` : html`<p class="waiting" role="status">Loading…</p>`;
}

export function Shell() {
  const route = useRoute();
  const me = useDocument("v1/me");
  const [signedOut, setSignedOut] = useState(false);
  useEffect(() => {
    const out = () => setSignedOut(true);
    addEventListener("ckptguard:signed-out", out);
    return () => removeEventListener("ckptguard:signed-out", out);
  }, []);
  const signIn = () => {
    forgetAll();
    setSignedOut(false);
    me.reload();
    start();
  };
  return html`<a class="skip" href="#main" onClick=${skip}>Skip to the content</a>
    <header class="top">
      <a class="brand" href=${to.fleet()}><${Shield} ok size=${22} /><span>ckptguard</span></a>
      <span class="grow"></span>
      ${!signedOut && html`<${Connection} /><${Account} me=${me.data} onSignOut=${() => dispatchEvent(new Event("ckptguard:signed-out"))} />`}
      <${ThemeSwitch} />
    </header>
    ${signedOut ? html`<${SignIn} onDone=${signIn} />` : html`<main id="main" class=${`page-${route.page}`}><${Page} key=${route.key} route=${route} me=${me.data} /></main><${ActionHost} />`}
    <footer class="bottom">ckptguard ${me.data?.version ?? ""}</footer>`;
}

// The address after `#` is the page's: a plain link to #main would leave it.
function skip(event) {
  event.preventDefault();
  const heading = document.querySelector("main h1") ?? document.querySelector("main");
  heading?.focus();
}
