// The template tag of every component. Text in a template is a text node, never markup.
import { h } from "preact";
import htm from "htm";

export const html = htm.bind(h);
