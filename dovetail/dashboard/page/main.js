// The frame: which view, which runs, and looking for news.

import { ask, duration, el, startTips } from "./dom.js";
import { go, readAddress, state } from "./address.js";
import { overview } from "./overview.js";
import { time } from "./time.js";
import { rollouts } from "./rollouts.js";
import { config } from "./config.js";
import { health } from "./health.js";
import { asynchronous } from "./async.js";
import { RUN_COLOURS } from "./plot.js";

const VIEWS = { overview: ["Overview", overview], time: ["Time", time], rollouts: ["Rollouts", rollouts],
  config: ["Config", config], health: ["Health", health], async: ["Async", asynchronous] };
// Only of runs that have something to show there.
const SPECIAL = ["async"];
const PULSE_MS = 2000;
const views = () => Object.keys(VIEWS).filter((key) => !SPECIAL.includes(key) || state.runs.find((run) => run.name === state.run)?.views?.includes(key));
const $ = (id) => document.getElementById(id);

let current = null;
let numShown = 0;
let stamps = {};
let numRuns = 0;
let looking = false;

export function say(text) {
  $("message").textContent = text ?? "";
  $("message").hidden = !text;
}

// What the run itself has to say: why it ended, or what its folder lacks.
function sayMessage() {
  const message = state.runs.find((run) => run.name === state.run)?.message;
  const box = $("message");
  if (message || box.dataset.run) say(message);
  if (message) box.dataset.run = "1"; else delete box.dataset.run;
}

function drawFrame() {
  $("run").replaceChildren(...state.runs.map((run) => el("option", { value: run.name, selected: run.name === state.run, text: run.name })));
  $("tabs").replaceChildren(...views().map((key, index) => [key, VIEWS[key][0], index]).map(([key, title, index]) =>
    el("a", { href: `#${new URLSearchParams({ view: key, run: state.run ?? "" })}`, "aria-current": key === state.view ? "page" : null,
      title: `${title} (${index + 1})`, text: title, onclick: (event) => { event.preventDefault(); go({ view: key, parameters: {} }); } })));
  const several = state.runs.length > 1 && state.view === "overview";
  $("overlay-runs").hidden = !several;
  if (several) drawOverlays();
  drawStatus();
}

function drawOverlays() {
  $("overlay-runs").replaceChildren(el("span", { class: "soft", text: "Overlay" }), ...state.runs.map((run, index) =>
    el("label", { class: "chip" },
      el("input", { type: "checkbox", checked: state.shown.has(run.name), disabled: run.name === state.run, onchange: (event) => {
        const shown = new Set(state.shown);
        if (event.target.checked) shown.add(run.name); else shown.delete(run.name);
        go({ shown });
      } }),
      el("i", { class: "dot", style: `background:${RUN_COLOURS[index % RUN_COLOURS.length]}` }),
      el("span", { text: run.name }), el("small", { class: "soft", text: run.state }))));
}

function drawNotListed({ num_runs, num_not_listed }) {
  $("not-listed").hidden = !num_not_listed;
  $("not-listed").textContent = `${num_not_listed} more runs are not listed: this page lists ${num_runs}. Start \`dovetail dashboard\` with the folder of a run to see it.`;
}

function drawStatus() {
  const run = state.runs.find((one) => one.name === state.run);
  if (!run) { $("status").replaceChildren(); return; }
  const steps = run.step === null ? "" : `step ${run.step}${run.total_steps ? ` of ${run.total_steps}` : ""}`;
  let doing = "";
  if (run.phase) doing = `${run.phase} for ${duration(Math.max(0, Date.now() / 1000 - run.phase_since))}`;
  $("status").replaceChildren(el("span", { class: `pill ${run.state}`, text: run.state }),
    el("span", { text: steps }), doing && el("span", { class: "soft", text: doing }));
}

async function show() {
  const mine = ++numShown;
  readAddress(Object.keys(VIEWS));
  drawFrame();
  current?.close?.();
  current = null;
  say(null);
  delete $("message").dataset.run;
  const view = $("view");
  if (!state.run) { view.replaceChildren(el("p", { class: "empty", text: "No run is here yet." })); return; }
  sayMessage();
  document.title = `${state.run} · dovetail`;
  const box = el("div", { class: `view ${state.view}` });
  view.replaceChildren(box);
  try {
    const made = await VIEWS[state.view][1](box, state);
    // A reader may have gone on to another view meanwhile: keys and news are for that one.
    if (mine !== numShown) { made.close?.(); return; }
    current = made;
    box.dataset.ready = "1";
  } catch (error) {
    if (mine === numShown) say(error.message);
  }
}

async function lookForNews() {
  if (document.hidden || looking || !state.run) return;
  looking = true;
  try {
    const reply = await ask("pulse", { run: [...state.shown] });
    const changed = Object.keys(reply.stamps).filter((name) => reply.stamps[name] !== stamps[name]);
    const first = !Object.keys(stamps).length;
    stamps = reply.stamps;
    drawNotListed(reply);
    if (reply.num_runs !== numRuns || changed.length) {
      numRuns = reply.num_runs;
      state.runs = await ask("runs");
      drawFrame();
      sayMessage();
      if (!first && changed.length) await current?.refresh?.();
    } else drawStatus();
    if ($("message").dataset.lost) { delete $("message").dataset.lost; say(null); }
  } catch (error) {
    $("message").dataset.lost = "1";
    say(error.message);
  } finally {
    looking = false;
  }
}

function keys(event) {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const typing = ["INPUT", "SELECT", "TEXTAREA"].includes(event.target.tagName) && event.target.type !== "checkbox" && event.target.type !== "range";
  if (typing) { if (event.key === "Escape") event.target.blur(); return; }
  const view = views()[Number(event.key) - 1];
  if (view) go({ view, parameters: {} });
  else if (event.key === "t") changeTheme();
  else if (event.key === "?") $("help").showModal();
  else if (event.key === "r" && state.runs.length) {
    const names = state.runs.map((run) => run.name);
    go({ run: names[(names.indexOf(state.run) + 1) % names.length] });
  } else if (event.key === "/") {
    const box = document.querySelector("input[type=search]");
    if (box) { event.preventDefault(); box.focus(); box.select(); }
  } else current?.key?.(event.key);
}

function changeTheme() {
  const next = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
  document.documentElement.dataset.theme = next;
  try { localStorage.setItem("dovetail-theme", next); } catch { /* a browser without storage */ }
  $("theme").textContent = next === "dark" ? "☀" : "☾";
  current?.repaint?.();
}

async function start() {
  startTips($("tip"));
  $("theme").textContent = document.documentElement.dataset.theme === "dark" ? "☀" : "☾";
  $("theme").addEventListener("click", changeTheme);
  $("help-open").addEventListener("click", () => $("help").showModal());
  $("run").addEventListener("change", () => go({ run: $("run").value }));
  addEventListener("hashchange", show);
  addEventListener("keydown", keys);
  try {
    state.runs = await ask("runs");
    numRuns = state.runs.length;
  } catch (error) { say(error.message); }
  await show();
  setInterval(lookForNews, PULSE_MS);
  lookForNews();
}

start();
