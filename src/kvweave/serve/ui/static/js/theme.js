// Runs before anything is painted, so that a chosen theme never flashes in the other one.
(() => {
  let theme = null;
  try {
    theme = JSON.parse(localStorage.getItem("kvweave.settings") || "{}").theme;
  } catch {
    // no storage, or not ours: the system's theme
  }
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
})();
