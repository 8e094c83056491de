// What must not wait for the modules. A classic script, because modules run after the first drawing.

// The chosen theme.
try {
  const theme = localStorage.getItem("ckptguard.theme");
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
} catch {
  // A browser that stores nothing keeps to the system's theme.
}

// The documents of the first page are asked for while its code is loaded. `api.js` takes each answer once.
{
  const [, run, below] = /^#\/run\/([0-9a-f]+)(?:\/(heat|keep))?$/.exec(location.hash) ?? [];
  const wanted = ["v1/me"];
  if (run) wanted.push(`v1/runs/${run}/page`);
  if (run && !below) wanted.push(`v1/runs/${run}/curves`);
  if (run && below === "heat") wanted.push(`v1/runs/${run}/heat?most=60`);
  if (!location.hash || location.hash === "#/") wanted.push("v1/fleet");
  globalThis.early = new Map(wanted.map((path) => [path, fetch(path, { credentials: "same-origin", cache: "no-store" })]));
  for (const answer of globalThis.early.values()) answer.catch(() => {}); // whoever takes it says so
}
