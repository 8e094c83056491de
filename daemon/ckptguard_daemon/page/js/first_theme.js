// The chosen theme, before anything is drawn. A classic script, because modules run after the first drawing.
try {
  const theme = localStorage.getItem("ckptguard.theme");
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
} catch {
  // A browser that stores nothing keeps to the system's theme.
}
