// The theme: the system's, or the one that was chosen on this machine.
import { useEffect, useState } from "preact/hooks";
import { html } from "./html.js";

const KEY = "ckptguard.theme";
const NEXT = { system: "light", light: "dark", dark: "system" };
const dark = matchMedia("(prefers-color-scheme: dark)");

/** Read a choice that this browser keeps; it may keep none. */
export function kept(key, otherwise = null) {
  try {
    return localStorage.getItem(key) ?? otherwise;
  } catch {
    return otherwise;
  }
}

/** Keep a choice on this machine (null: forget it). */
export function keep(key, value) {
  try {
    if (value === null) localStorage.removeItem(key);
    else localStorage.setItem(key, value);
  } catch {
    // Then it holds until the page is closed.
  }
}

/** The colour of a token in the current theme, for what is drawn on a canvas. */
export function colour(token) {
  const probe = document.createElement("span");
  probe.style.color = `var(--${token})`;
  document.body.append(probe);
  const found = getComputedStyle(probe).color;
  probe.remove();
  return found;
}

/** Call `listener` when the colours change. Returns what ends it. */
export function onColours(listener) {
  dark.addEventListener("change", listener);
  addEventListener("ckptguard:theme", listener);
  return () => {
    dark.removeEventListener("change", listener);
    removeEventListener("ckptguard:theme", listener);
  };
}

/** A number that changes with the colours: a component that uses it draws again. */
export function useColours() {
  const [version, next] = useState(0);
  useEffect(() => onColours(() => next((n) => n + 1)), []);
  return version;
}

const root = document.documentElement;

function show(theme) {
  if (theme === "light" || theme === "dark") root.dataset.theme = theme;
  else delete root.dataset.theme;
  dispatchEvent(new Event("ckptguard:theme"));
}

// Paper is light, also what is drawn on a canvas.
addEventListener("beforeprint", () => show("light"));
addEventListener("afterprint", () => show(kept(KEY)));

const ICONS = {
  system: "M3 4h18v12H3zM9 20h6M12 16v4",
  light: "M12 8a4 4 0 1 0 0 8 4 4 0 0 0 0-8M12 2v2M12 20v2M2 12h2M20 12h2M4.9 4.9l1.4 1.4M17.7 17.7l1.4 1.4M4.9 19.1l1.4-1.4M17.7 6.3l1.4-1.4",
  dark: "M20 14.5A8.5 8.5 0 0 1 9.5 4 8.5 8.5 0 1 0 20 14.5",
};

export function ThemeSwitch() {
  const [theme, setTheme] = useState(kept(KEY, "system"));
  const choose = () => {
    const next = NEXT[theme] ?? "light";
    keep(KEY, next === "system" ? null : next);
    show(next);
    setTheme(next);
  };
  const words = `Theme: ${theme}. Change to ${NEXT[theme] ?? "light"}.`;
  return html`<button type="button" class="icon" aria-label=${words} title=${words} onClick=${choose}>
    <svg viewBox="0 0 24 24" class="line" aria-hidden="true"><path d=${ICONS[theme] ?? ICONS.system} /></svg>
  </button>`;
}
