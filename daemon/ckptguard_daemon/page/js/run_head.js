// The head of every page of a run: where you are, and the way to its other pages.
import { useEffect } from "preact/hooks";
import { html } from "./html.js";
import { shorten } from "./format.js";
import { to } from "./router.js";
import { Name, Silenced } from "./widgets.js";

const LONG = 160; // characters of a name
const TABS = [
  ["run", "Overview", to.run],
  ["heat", "Heat map", to.heat],
  ["diff", "Compare", to.diff],
  ["keep", "Copies and retention", to.keep],
];

/**
 * `doc`: the run's page document (for its name), or null. `tab`: which of the pages this is, if it is one of the tabs.
 * `title`: of a page below (a checkpoint, an incident); the run's own name otherwise.
 */
export function RunHead({ run, doc = null, tab = null, title = null, tools = null }) {
  const name = doc?.data?.run?.name ?? run;
  useEffect(() => {
    document.title = shorten(title === null ? `${name} · ckptguard` : `${title} · ${name} · ckptguard`, 120);
  }, [name, title]);
  return html`<nav class="crumbs" aria-label="Where you are">
      <span><a href=${to.fleet()}>Fleet</a></span>
      ${title !== null && html`<span><${Name} href=${to.run(run)} most=${60}>${name}<//></span>`}
    </nav>
    <div class="head">
      <div class="head-name"><h1 tabindex="-1"><${Name} class="whole" most=${LONG}>${title ?? name}<//></h1>
        ${String(title ?? name).length > LONG && html`<details><summary>The whole name</summary><bdi class="name whole">${title ?? name}</bdi></details>`}
        ${title === null && doc?.data && html`<p class="dim small"><${Name} class="whole" most=${LONG}>${doc.data.run.url}<//></p>`}
      </div>
      ${tools && html`<div class="tools">${tools}</div>`}
    </div>
    <nav class="tabs" aria-label="Pages of this run">${TABS.map(
      ([key, words, address]) => html`<a key=${key} href=${address(run)} aria-current=${key === tab ? "page" : undefined}>${words}</a>`,
    )}</nav>
    ${doc?.data?.run?.silence && html`<${Silenced} silence=${doc.data.run.silence} />`}`;
}
