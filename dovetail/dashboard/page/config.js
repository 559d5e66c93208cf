// The resolved configuration: what was changed, and how two runs differ.

import { ask, debounce, el, select } from "./dom.js";
import { go } from "./address.js";

export async function config(box, state) {
  const others = state.runs.filter((run) => run.name !== state.run);
  let other = others.some((run) => run.name === state.parameters.other) ? state.parameters.other : "";
  let only = state.parameters.only ?? "changed";
  let rows = [];
  let asked = 0;
  const words = el("input", { type: "search", placeholder: "search keys, values, meanings …", "aria-label": "Search the configuration" });
  words.addEventListener("input", debounce(paint, 150));
  const table = el("div", { class: "card table-box" });
  const summary = el("span", { class: "soft", role: "status" });
  const bar = el("div", { class: "bar" });
  box.append(bar, table);

  function drawBar() {
    bar.replaceChildren(select("Show", [["changed", "what differs from the defaults"], ["all", "every key"], ...(other ? [["between", "what differs between the runs"]] : [])], only,
      (value) => { only = value; remember(); paint(); }, { id: "only" }),
    others.length ? select("Compare with", [["", "no other run"], ...others.map((run) => [run.name, run.name])], other, (value) => {
      other = value;
      only = other ? "between" : "changed";
      remember();
      load();
    }, { id: "other" }) : "", words, summary);
  }

  const remember = () => go({ parameters: { other, only } }, { replace: true });

  async function load() {
    const mine = ++asked;
    const reply = await ask("config", { run: state.run, other });
    if (mine !== asked) return; // another run was chosen meanwhile
    rows = reply.rows;
    drawBar();
    paint();
  }

  function paint() {
    const wanted = words.value.trim().toLowerCase();
    const kept = rows.filter((row) => (only === "changed" ? !row.is_default : only === "between" ? row.differs : true)
      && (!wanted || `${row.key} ${text(row.value)} ${row.meaning}`.toLowerCase().includes(wanted)));
    summary.textContent = `${kept.length} of ${rows.length} keys`;
    const head = ["key", state.run, ...(other ? [other] : []), "default"];
    table.replaceChildren(el("table", {}, el("thead", {}, el("tr", {}, head.map((title) => el("th", { text: title, scope: "col" })))),
      el("tbody", {}, kept.slice(0, 1000).map((row) => el("tr", { class: row.is_default ? "" : "changed" },
        el("th", { scope: "row" }, el("code", { text: row.key }), el("small", { class: "soft", text: row.meaning })),
        el("td", { data: { of: state.run } }, el("code", { text: text(row.value) })),
        other && el("td", { class: row.differs ? "differs" : "", data: { of: other } }, el("code", { text: text(row.other) })),
        el("td", { class: "soft", data: { of: "default" } }, el("code", { text: text(row.default) })))))));
    if (!kept.length) table.replaceChildren(el("p", { class: "empty", text: only === "between" ? "The two runs have the same configuration." : "Nothing matches." }));
  }

  await load();
  return {};
}

function text(value) {
  if (value === null || value === undefined) return "null";
  return typeof value === "string" ? value : JSON.stringify(value);
}
