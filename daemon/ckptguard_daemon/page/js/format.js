// Numbers, times and sizes as people read them. Pure.

const WORDS = { nan: "NaN", inf: "∞", "-inf": "−∞" };
const COUNT = new Intl.NumberFormat("en");
const EXACT = new Intl.DateTimeFormat("sv-SE", {
  year: "numeric", month: "2-digit", day: "2-digit", hour: "2-digit", minute: "2-digit", second: "2-digit",
  hourCycle: "h23", timeZoneName: "short",
});
const UNITS = ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
const SPANS = [[86400 * 365, "y"], [86400 * 30, "mo"], [86400, "d"], [3600, "h"], [60, "min"], [1, "s"]];

export const NOTHING = "—";

/** True for a number that can be drawn: a document writes NaN and infinity as words. */
export const isFinite = (value) => typeof value === "number" && Number.isFinite(value);

/** 1234567 -> "1,234,567". */
export const count = (value) => (isFinite(value) ? COUNT.format(value) : (WORDS[value] ?? NOTHING));

/** "1 run", "2 runs". */
export const many = (value, one, more = `${one}s`) => `${count(value)} ${value === 1 ? one : more}`;

/** 0.000123 -> "1.23e-4"; 12.3456 -> "12.35"; "nan" -> "NaN". */
export function number(value, digits = 4) {
  if (!isFinite(value)) return WORDS[value] ?? NOTHING;
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e6 || size < 1e-3) return value.toExponential(digits - 2).replace("e+", "e");
  return String(Number(value.toPrecision(Math.max(digits, Math.ceil(Math.log10(size + 1))))));
}

/** 1536 -> "1.5 KiB". */
export function bytes(value) {
  if (!isFinite(value)) return NOTHING;
  let unit = 0;
  let size = value;
  while (Math.abs(size) >= 1024 && unit < UNITS.length - 1) {
    size /= 1024;
    unit += 1;
  }
  return `${unit === 0 || size >= 100 ? Math.round(size) : size.toFixed(1)} ${UNITS[unit]}`;
}

/** 5400 -> "1.5 h"; 42 -> "42 s". */
export function duration(seconds) {
  if (!isFinite(seconds)) return NOTHING;
  const size = Math.abs(seconds);
  if (size < 1 && size > 0) return "under 1 s";
  const [span, unit] = SPANS.find(([least]) => size >= least) ?? [1, "s"];
  const found = size / span;
  return `${found >= 10 || span === 1 ? Math.round(found) : Number(found.toFixed(1))} ${unit}`;
}

/** How long ago `at` is: "3 min ago", "in 2 h", "just now". */
export function ago(at, now) {
  if (!isFinite(at)) return NOTHING;
  const passed = now - at;
  if (Math.abs(passed) < 1.5) return "just now";
  return passed > 0 ? `${duration(passed)} ago` : `in ${duration(-passed)}`;
}

const LATEST = 8.64e12; // seconds that a date can hold

/** "2026-11-23 14:03:04 UTC", in the reader's own time zone. */
export function exact(at) {
  return isFinite(at) && Math.abs(at) <= LATEST ? EXACT.format(at * 1000) : NOTHING;
}

/** "2026-11-23T14:03:04.000Z", or undefined if it cannot be told. */
export const iso = (at) => (isFinite(at) && Math.abs(at) < 2.5e11 ? new Date(at * 1000).toISOString() : undefined);

/** The middle of a long text left out: "checkpoint-very...tensors". */
export function shorten(text, most = 60) {
  const letters = Array.from(text);
  if (letters.length <= most) return text;
  const half = Math.floor((most - 1) / 2);
  return `${letters.slice(0, half).join("")}…${letters.slice(-half).join("")}`;
}

/** Seconds since 1970 of a moment that a document gives as a number or as "2026-01-31T12:00:00Z". */
export function seconds(moment) {
  const found = typeof moment === "string" ? Date.parse(moment) / 1000 : moment;
  return isFinite(found) ? found : null;
}
