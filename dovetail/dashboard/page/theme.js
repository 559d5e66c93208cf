// Runs before the page is drawn, so that a dark page never flashes white.
(() => {
  let wanted = null;
  try { wanted = localStorage.getItem("dovetail-theme"); } catch { /* a browser without storage */ }
  const dark = wanted ? wanted === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  document.documentElement.dataset.theme = dark ? "dark" : "light";
})();
