// What is shown, as the address bar says it: a view, a run, others beside it, and the view's own parameters.

let known = ["overview"];
export const state = { view: "overview", run: null, shown: new Set(), runs: [], parameters: {} };

// `views`: the names there are; the first is shown when none is asked for.
export function readAddress(views = known) {
  known = views;
  const parts = new URLSearchParams(location.hash.slice(1));
  state.view = views.includes(parts.get("view")) ? parts.get("view") : views[0];
  const runs = state.runs.map((run) => run.name);
  const wanted = parts.get("run");
  state.run = runs.includes(wanted) ? wanted : state.run ?? runs[0] ?? null;
  const shown = (parts.get("with") ?? "").split("\n").filter((name) => runs.includes(name));
  state.shown = new Set([...shown, ...(state.run ? [state.run] : [])]);
  state.parameters = Object.fromEntries([...parts].filter(([name]) => !["view", "run", "with"].includes(name)));
}

// Change what is shown; `parameters` are the view's own and survive a reload.
export function go(changes = {}, { replace = false } = {}) {
  const next = { view: state.view, run: state.run, parameters: state.parameters, shown: state.shown, ...changes };
  if (changes.run && !changes.shown) next.shown = new Set([changes.run, ...[...state.shown].filter((n) => n !== state.run)]);
  const parts = new URLSearchParams({ view: next.view, run: next.run ?? "" });
  const others = [...next.shown].filter((name) => name !== next.run);
  if (others.length) parts.set("with", others.join("\n"));
  for (const [name, value] of Object.entries(next.parameters)) if (value !== "" && value != null) parts.set(name, value);
  const address = `#${parts}`;
  if (replace) { history.replaceState(null, "", address); readAddress(); } else location.hash = address;
}
