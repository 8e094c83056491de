// Files to take away: a table as CSV or JSON, a picture as SVG or PNG. Nothing leaves the browser.

import { iso } from "../format.js";
import { visible } from "../text.js";

const FORMULA = /^[\s\u0000]*[=+\-@\uff1d\uff0b\uff0d\uff20|%]|^[\t\r\n]/u;
const NUMBER = /^[+-]?(\d+(\.\d*)?(e[+-]?\d+)?|inf)$/i;

/** One cell. A text that a spreadsheet would calculate gets an apostrophe in front. Numbers stay numbers. */
export function csvCell(value) {
  if (value === null || value === undefined) return "";
  if (typeof value === "number" || typeof value === "boolean") return String(value);
  const text = visible(typeof value === "object" ? JSON.stringify(value) : String(value));
  const safe = FORMULA.test(text) && !NUMBER.test(text) ? `'${text}` : text;
  return `"${safe.replaceAll('"', '""')}"`;
}

/** A column has a `title`, and `export(row)`, `value(row)` or a `key` of its rows. */
export const cellOf = (column, row) => (column.export ?? column.value ?? ((r) => r[column.key]))(row);

/** Columns of these keys, for a table whose cells say more, or less, than its rows. Times become words. */
export const fields = (keys) =>
  keys.split(" ").map((key) => ({ key, title: key, value: (row) => (key.endsWith("_at") ? iso(row[key]) : row[key]) }));

export function csvText(columns, rows) {
  const lines = rows.map((row) => columns.map((column) => csvCell(cellOf(column, row))).join(","));
  return [columns.map((column) => csvCell(column.title)).join(","), ...lines, ""].join("\r\n");
}

export function jsonText(columns, rows) {
  const named = (row) => Object.fromEntries(columns.map((column) => [column.title, cellOf(column, row) ?? null]));
  return JSON.stringify(rows.map(named), null, 1) + "\n";
}

/** The name of a file, of any text. */
export const fileName = (text, ending) =>
  `${text.replace(/[^A-Za-z0-9._-]+/g, "-").replace(/^[-.]+/, "").slice(0, 80) || "ckptguard"}.${ending}`;

export function saveBlob(name, blob) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60_000); // the browser may ask where to put it first
}

export const saveText = (name, type, text) => saveBlob(name, new Blob([text], { type: `${type};charset=utf-8` }));

export const saveCsv = (name, columns, rows) => saveText(fileName(name, "csv"), "text/csv", csvText(columns, rows));

export const saveJson = (name, columns, rows) =>
  saveText(fileName(name, "json"), "application/json", jsonText(columns, rows));

export const saveSvg = (name, svg) => saveText(fileName(name, "svg"), "image/svg+xml", svg);

/** The same picture as pixels, twice as fine as its own size. */
export async function savePng(name, svg) {
  const picture = new Image();
  const address = URL.createObjectURL(new Blob([svg], { type: "image/svg+xml" }));
  picture.src = address;
  await picture.decode();
  const canvas = document.createElement("canvas");
  [canvas.width, canvas.height] = [picture.naturalWidth * 2, picture.naturalHeight * 2];
  canvas.getContext("2d").drawImage(picture, 0, 0, canvas.width, canvas.height);
  URL.revokeObjectURL(address);
  saveBlob(fileName(name, "png"), await new Promise((resolve) => canvas.toBlob(resolve, "image/png")));
}
