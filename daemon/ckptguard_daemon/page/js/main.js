// Where the page begins.
import { render } from "preact";
import { html } from "./html.js";
import { connect } from "./live.js";
import { Shell } from "./shell.js";

connect();
render(html`<${Shell} />`, document.getElementById("page"));
