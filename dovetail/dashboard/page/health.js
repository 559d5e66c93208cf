// Which checks have a warning, and what to try.

import { ask, el } from "./dom.js";
import { go } from "./address.js";

export async function health(box, state) {
  async function load() {
    const reply = await ask("health", { run: state.run });
    const list = reply.warnings.map((warning) => el("article", { class: `card finding ${warning.severity}` },
      el("h2", {}, el("span", { class: `badge ${warning.severity === "bad" ? "no" : "cut"}`, text: warning.severity === "bad" ? "act now" : "warning" }), " ", warning.title),
      el("p", { text: warning.evidence }), el("p", {}, el("b", { text: "Try: " }), warning.what_to_try),
      warning.metric && el("button", { class: "link", text: `show ${warning.metric}`, onclick: () => go({ view: "overview", parameters: { extra: warning.metric } }) })));
    const head = el("p", { class: "verdict", text: !reply.num_steps && !reply.warnings.length ? "Nothing can be checked before the first step." : reply.warnings.length ? `${reply.warnings.length} of ${reply.rules.length} checks have a warning.` : `All ${reply.rules.length} checks pass.` });
    box.replaceChildren(head, ...list, el("details", { class: "card", open: !list.length }, el("summary", { text: "What is checked" }), el("ul", { class: "rules" }, reply.rules.map((rule) => el("li", { text: rule }))),
      el("p", { class: "soft", text: "Checks look at the last 10 steps, and compare them with the first 5; the limits are in docs/dashboard.md." })));
  }
  await load();
  return { refresh: load };
}
