// The responses: groups of a step, filters, search, tokens in colour, and two steps side by side.

import { ask, counted, debounce, el, field, select, short } from "./dom.js";
import { compare } from "./compare.js";
import { colouredAnswer, colourings, colourLegend } from "./tokens.js";
import { conversation, trajectoryFacts } from "./trajectory.js";
import { go } from "./address.js";
import { shortPrompt } from "./prompt.js";

const FILTERS = [["all", "all"], ["wrong", "wrong"], ["truncated", "truncated"], ["no_signal", "no signal"], ["failed", "reward failed"]];
const ORDERS = [["recorded", "as recorded"], ["longest", "longest first"], ["best", "best first"], ["worst", "worst first"], ["gap", "largest log-prob diff first"]];
const PAGE = 8;

export async function rollouts(box, state) {
  const wish = { kind: "rollouts", step: null, wanted: "all", order: "recorded", words: "", scope: "step", colour: "", outcome: "", tool: "", ...state.parameters };
  if (wish.step !== null) wish.step = Number(wish.step);
  let steps = [];
  let first = 0;
  let asked = 0;
  let searching = null;
  const follow = wish.step === null;

  const stepInput = el("input", { type: "number", class: "step-input", "aria-label": "Step", onchange: () => toStep(Number(stepInput.value)) });
  const slider = el("input", { type: "range", min: "0", "aria-label": "Step", oninput: () => { stepInput.value = steps[slider.value]; }, onchange: () => toStep(steps[slider.value]) });
  const search = el("input", { type: "search", placeholder: "search …", value: wish.words, "aria-label": "Search responses and prompts" });
  search.addEventListener("input", debounce(() => change({ words: search.value.trim() }), 300));
  const summary = el("div", { class: "soft summary", role: "status" });
  const list = el("div", { class: "groups" });
  const more = el("button", { class: "button", hidden: true, text: "More", onclick: () => { more.disabled = true; first += PAGE; load({ append: true }); } });
  const legend = el("span", {});
  const colours = select("Colour tokens by", [], "", (colour) => change({ colour }), { id: "colour" });
  const agents = el("span", { class: "inline", hidden: true });
  const chips = el("div", { class: "chips", role: "group", "aria-label": "Filter" });
  box.append(el("div", { class: "bar" },
    select("Responses of", [["rollouts", "training"], ["validation", "validation"]], wish.kind, (kind) => { wish.step = null; change({ kind, step: null }, true); }, { id: "kind" }),
    field("Step", el("span", { class: "inline" }, el("button", { class: "icon-button", title: "One step back (,)", "aria-label": "One step back", text: "‹", onclick: () => move(-1) }), stepInput,
      el("button", { class: "icon-button", title: "One step on (.)", "aria-label": "One step on", text: "›", onclick: () => move(1) }), slider)),
    select("Order", ORDERS, wish.order, (order) => change({ order }), { id: "order" }),
    colours, legend),
  el("div", { class: "bar" }, chips, agents, search, select("in", [["step", "this step"], ["run", "all steps"]], wish.scope, (scope) => change({ scope }), { id: "scope" })),
  summary, list, more);

  let left = false; // the reader is in another view
  function remember() {
    if (left) return;
    const kept = Object.fromEntries(Object.entries(wish).filter(([name, value]) => value && !["all", "recorded"].includes(value) && !(name === "kind" && value === "rollouts") && !(name === "scope" && value === "step")));
    go({ parameters: kept }, { replace: true });
  }

  function change(changes, otherSteps = false) {
    Object.assign(wish, changes);
    first = 0;
    remember();
    return otherSteps ? start() : load();
  }

  const toStep = (step) => { if (steps.length) change({ step: steps.reduce((a, b) => (Math.abs(b - step) < Math.abs(a - step) ? b : a)) }); };
  const move = (by) => { const at = steps.indexOf(wish.step); if (at >= 0 && steps[at + by] !== undefined) change({ step: steps[at + by] }); };

  async function start() {
    const mine = ++asked;
    const reply = await ask("steps", { run: state.run, kind: wish.kind });
    if (mine !== asked) return;
    steps = reply.steps;
    const known = colourings(reply.numbers);
    if (!known.some(([key]) => key === wish.colour)) wish.colour = ""; // an address of another run, or mistyped
    colours.querySelector("select").replaceChildren(...known.map(([key, text, absent]) =>
      el("option", { value: key, selected: key === wish.colour, disabled: absent, text: absent ? `${text} (not recorded)` : text })));
    if (!steps.length && follow && wish.kind === "rollouts" && (await ask("steps", { run: state.run, kind: "validation" })).steps.length) {
      // Fine-tuning records no training responses.
      box.querySelector("#kind").value = "validation";
      return change({ kind: "validation" }, true);
    }
    if (mine !== asked) return;
    if (!steps.length) {
      list.replaceChildren();
      chips.replaceChildren();
      more.hidden = true;
      summary.textContent = wish.kind === "rollouts" ? "No training responses are recorded yet." : "No validation is recorded: data.val_files is empty, or none was due yet.";
      return;
    }
    if (!steps.includes(wish.step)) wish.step = steps.at(-1);
    slider.max = String(steps.length - 1);
    await load();
  }

  async function load({ append = false } = {}) {
    if (!steps.length) return;
    const mine = ++asked;
    searching?.abort();
    stepInput.value = wish.step;
    slider.value = String(steps.indexOf(wish.step));
    legend.replaceChildren(colourLegend(wish.colour) ?? "");
    if (wish.scope === "run" && (wish.words || wish.wanted !== "all")) return searchRun(mine);
    const place = { run: state.run, kind: wish.kind, step: wish.step };
    const reply = await ask("groups", { ...place, wanted: wish.wanted, words: wish.words, order: wish.order, outcome: wish.outcome, tool: wish.tool, first, count: PAGE });
    if (mine !== asked) return;
    drawChips(reply.counts);
    drawAgents(reply.counts);
    summary.textContent = [`${reply.num_groups} of ${counted(reply.counts.groups, "prompt")}`, `${counted(reply.counts.all, "response")} in step ${reply.step}`,
      reply.bad_lines ? `${reply.bad_lines} lines of the file are incomplete and are left out` : ""].filter(Boolean).join(" · ");
    if (!append) list.replaceChildren();
    list.append(...reply.groups.map((group) => drawGroup(group, place)));
    if (!reply.groups.length && !append) list.append(el("p", { class: "empty", text: "No response of this step matches." }));
    more.hidden = first + PAGE >= reply.num_groups;
    more.disabled = false;
  }

  async function searchRun(mine) {
    searching = new AbortController();
    list.replaceChildren();
    more.hidden = true;
    const kind = wish.kind;
    let cursor = -1;
    let count = 0;
    while (mine === asked && cursor !== null && count < 40) {
      let reply;
      try {
        reply = await ask("search", { run: state.run, kind, wanted: wish.wanted, words: wish.words, cursor }, searching.signal);
      } catch (error) { if (error.name === "AbortError") return; throw error; }
      if (mine !== asked) return;
      count += reply.matches.length;
      cursor = reply.next;
      list.append(...reply.matches.map((answer) => drawMatch(answer, kind)));
      summary.textContent = `${counted(count, "response")} found${cursor === null ? " in all steps" : `, ${counted(reply.left, "step")} left to read …`}`;
    }
    if (cursor !== null && count) summary.textContent = `the newest ${count} responses that match`;
    if (!count) list.append(el("p", { class: "empty", text: "No response of any step matches." }));
  }

  function drawChips(counts) {
    chips.replaceChildren(...FILTERS.map(([key, title]) =>
      el("button", { class: "chip", "aria-pressed": String(wish.wanted === key), data: { filter: key }, onclick: () => change({ wanted: key }) },
        title, el("small", { class: "soft", text: String(counts[key] ?? "") }))));
  }

  function openCompare(place, group) {
    wish.compare = group.key;
    remember();
    return compare(place, group, drawAnswer, () => { wish.compare = ""; remember(); });
  }

  function drawAgents({ outcomes, tools }) {
    agents.hidden = !Object.keys(outcomes).length;
    if (agents.hidden) return;
    const options = (counts) => [["", "any"], ...Object.entries(counts).map(([name, count]) => [name, `${name} (${count})`])];
    agents.replaceChildren(select("Outcome", options(outcomes), wish.outcome, (outcome) => change({ outcome }), { id: "outcome" }),
      Object.keys(tools).length ? select("Tool", options(tools), wish.tool, (tool) => change({ tool }), { id: "tool" }) : "");
  }

  function drawGroup(group, place) {
    const head = el("header", {}, el("div", { class: "prompt", text: shortPrompt(group.prompt) }), dots(group.scores),
      el("div", { class: "facts soft" }, group.ground_truth != null && group.ground_truth !== "" && el("span", {}, "expected ", el("b", { text: String(group.ground_truth) })),
        el("span", { text: `mean reward ${short(group.mean_score)}` }), el("span", { text: `${group.answers.length === group.size ? "" : `${group.answers.length} of `}${counted(group.size, "response")}${group.num_trajectories && group.num_trajectories !== group.size ? ` of ${group.num_trajectories} trajectories` : ""}` }),
        group.no_signal && el("span", { class: "badge quiet", text: "no signal", data: { tip: "All responses got the same reward: nothing is learned from this group." } }),
        el("button", { class: "link", text: "other steps", onclick: () => openCompare(place, group) })));
    const whole = el("details", { class: "whole" }, el("summary", { text: "full prompt" }), el("div", { class: "text", text: group.prompt }));
    return el("article", { class: "card group", data: { uid: group.uid } }, head, whole, el("div", { class: "answers" }, group.answers.map((answer) => drawAnswer(answer, place))));
  }

  const drawMatch = (answer, kind) => el("article", { class: "card group" }, el("header", {}, el("div", { class: "prompt", text: shortPrompt(answer.prompt) }),
    el("div", { class: "facts soft" }, el("button", { class: "link", text: `step ${answer.step}`, onclick: () => { change({ scope: "step", step: answer.step }); document.getElementById("scope").value = "step"; } }))),
  el("div", { class: "answers" }, drawAnswer(answer, { run: state.run, kind, step: answer.step })));

  function drawAnswer(answer, place) {
    const text = el("div", { class: "text", text: answer.response || "(empty)" });
    const row = el("div", { class: `answer${answer.wrong ? " wrong" : ""}${answer.truncated ? " truncated" : ""}` }, el("div", { class: "facts" },
      (answer.failed || answer.score !== null) && el("span", { class: `badge ${answer.failed ? "failed" : answer.wrong ? "no" : "yes"}`, text: answer.failed ? "reward failed" : short(answer.score), data: { tip: extraFacts(answer) } }),
      answer.advantage !== null && el("span", { class: "soft", text: `advantage ${answer.advantage > 0 ? "+" : ""}${short(answer.advantage)}` }),
      el("span", { class: "soft", text: `${answer.length} tokens` }), answer.gap !== null && el("span", { class: "soft", text: `log-prob diff ${short(answer.gap)}` }),
      answer.truncated && el("span", { class: "badge cut", text: "truncated" })), answer.agent && el("div", { class: "facts" }, trajectoryFacts(answer.agent)), text);
    if (answer.agent) row.classList.add("trajectory");
    if (answer.agent && !wish.colour) conversation(answer, place).then((drawn) => { if (drawn) text.replaceWith(drawn); }, () => {});
    if (wish.colour) colouredAnswer(answer, place, wish.colour).then((coloured) => text.replaceWith(coloured), () => {});
    return row;
  }

  await start();
  if (wish.compare && steps.length) {
    const place = { run: state.run, kind: wish.kind, step: wish.step };
    // Not awaited: the dialog looks through other steps while the page is ready.
    ask("group", { ...place, key: wish.compare }).then((group) => openCompare(place, group)).catch(() => { wish.compare = ""; });
  }
  return {
    refresh: async () => {
      const [known, kind] = [steps.length, wish.kind];
      const fresh = (await ask("steps", { run: state.run, kind })).steps;
      if (fresh.length === known || kind !== wish.kind) return;
      // Readers who look at the newest step stay there; others are not disturbed.
      const atEnd = follow && (known === 0 || wish.step === steps.at(-1)) && wish.scope === "step" && !list.contains(document.activeElement);
      steps = fresh;
      slider.max = String(steps.length - 1);
      if (atEnd) { wish.step = steps.at(-1); first = 0; await load(); }
    },
    key: (key) => { if (key === ",") move(-1); if (key === ".") move(1); },
    close: () => { left = true; asked += 1; searching?.abort(); document.querySelector("dialog.compare")?.close(); },
  };
}

function dots(scores) {
  const numbers = scores.filter((score) => score !== null);
  const [low, high] = [Math.min(...numbers, 0), Math.max(...numbers, 1)];
  return el("div", { class: "dots", data: { tip: `rewards: ${scores.slice(0, 64).map((score) => short(score)).join(", ")}` } }, scores.slice(0, 64).map((score) =>
    el("i", { style: score === null ? "" : `--part:${((score - low) / (high - low || 1)).toFixed(3)}`, class: score === null ? "none" : "" })));
}

function extraFacts(answer) {
  const facts = Object.entries(answer.extra).filter(([name]) => !["uid", "sampling_seed", "reward_failed", "response_length", "length", "failed", "logprob_gap", "prompt"].includes(name));
  return [`reward ${short(answer.score)}`, ...facts.map(([name, value]) => `${name}: ${String(value).slice(0, 120)}`)].join("\n");
}
