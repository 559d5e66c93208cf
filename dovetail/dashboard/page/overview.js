// Curves of one or several runs, with events.

import { ask, debounce, el, field, short } from "./dom.js";
import { draw, drawWhenSeen, eventTraces, EVENTS, legend, lineLayout, lineTraces, sketch } from "./plot.js";
import { go } from "./address.js";

export async function overview(box, state) {
  const options = { smoothing: state.parameters.smooth ? Number(state.parameters.smooth) : null, log: state.parameters.log === "1",
    range: null, extra: (state.parameters.extra ?? "").split("\n").filter(Boolean) };
  options.smoothing ??= (state.runs.find((run) => run.name === state.run)?.step ?? 0) > 50 ? 0.6 : 0;
  const names = [...state.shown].sort((a, b) => (a === state.run ? -1 : b === state.run ? 1 : 0));
  const cards = el("div", { class: "cards" });
  const warnings = el("div", { class: "warning-strip" });
  const grid = el("div", { class: "grid" });
  const absent = el("p", { class: "soft note" });
  const boxes = new Map();
  let overviews = [];

  const remember = () => go({ parameters: { smooth: options.smoothing, log: options.log ? "1" : "", extra: options.extra.join("\n") } }, { replace: true });
  const slider = el("input", { type: "range", min: "0", max: "0.99", step: "0.01", "aria-label": "Smoothing" });
  const sliderValue = el("output", { class: "soft" });
  const reload = debounce(() => load().catch(() => {}), 120);
  slider.addEventListener("input", () => { options.smoothing = Number(slider.value); sliderValue.textContent = slider.value; remember(); reload(); });
  const logBox = el("input", { type: "checkbox", checked: options.log, onchange: () => { options.log = logBox.checked; remember(); paint(); } });
  const picker = el("input", { type: "search", list: "metric-names", placeholder: "add a metric …", "aria-label": "Add a metric" });
  const pickerNames = el("datalist", { id: "metric-names" });
  picker.addEventListener("change", () => {
    const name = picker.value.trim();
    if (overviews[0]?.names.includes(name) && !options.extra.includes(name)) { options.extra.push(name); remember(); reload(); }
    picker.value = "";
  });
  const reset = el("button", { class: "button", hidden: true, text: "Reset zoom", onclick: () => { options.range = null; load(); } });
  const marks = el("div", { class: "marks soft" });
  box.append(cards, warnings, el("div", { class: "bar" }, field("Smoothing", el("span", { class: "inline" }, slider, sliderValue)),
    el("label", { class: "check" }, logBox, " log scale"), picker, pickerNames, reset, marks), grid, absent);

  let asked = 0;
  async function load() {
    const mine = ++asked;
    const want = { smoothing: options.smoothing, extra: options.extra, first: options.range?.[0], last: options.range?.[1] };
    const results = await Promise.allSettled(names.map((run) => ask("overview", { run, ...want })));
    if (mine !== asked) return;
    if (results[0].status === "rejected") throw results[0].reason;
    overviews = results.map((result, index) => ({ run: names[index], ...(result.value ?? { charts: [], events: [], names: [] }) }));
    const kinds = new Set(overviews[0].events.map((event) => event.kind));
    marks.replaceChildren(...Object.entries(EVENTS).filter(([kind]) => kinds.has(kind)).map(([, look]) =>
      el("span", {}, el("i", { class: "dot", style: `background:${look.colour}` }), look.name)));
    slider.value = options.smoothing;
    sliderValue.textContent = Number(options.smoothing).toFixed(2);
    reset.hidden = !options.range;
    pickerNames.replaceChildren(...overviews[0].names.map((name) => el("option", { value: name })));
    paint();
  }

  function paint() {
    drawCards(cards, overviews[0].cards);
    warnings.hidden = !overviews[0].names.length; // nothing is checked before the first step
    drawWarnings(warnings, overviews[0].warnings);
    const known = new Set();
    for (const chart of overviews[0].charts) { known.add(chart.key); drawChart(chart); }
    const missing = overviews[0].charts.filter((chart) => boxes.get(chart.key).card.hidden);
    absent.replaceChildren(...missing.length ? ["Not recorded in this run: ", missing.map((chart) => chart.title + (chart.absent ? ` (${chart.absent})` : "")).join(", "), "."] : []);
    for (const [key, made] of boxes) if (!known.has(key)) { made.card.remove(); boxes.delete(key); }
  }

  function drawChart(chart) {
    if (!boxes.has(chart.key)) boxes.set(chart.key, makeChart(chart));
    const made = boxes.get(chart.key);
    const manyRuns = names.length > 1;
    const lines = overviews.flatMap((one) => {
      const same = one.charts.find((other) => other.key === chart.key);
      const runIndex = state.runs.findIndex((run) => run.name === one.run);
      return Object.entries(same?.lines ?? {}).map(([name, line]) => ({ run: one.run, runIndex, name, ...line }));
    }).filter((line) => line.x.length);
    made.legend.replaceChildren(...legend(lines, manyRuns).map((line) =>
      el("span", {}, el("i", { class: "stroke", style: `border-top:2px ${line.dash === "solid" ? "solid" : "dotted"} ${line.colour}` }), line.name)));
    made.card.hidden = !lines.length;
    if (!lines.length) return;
    const events = overviews[0].events;
    sketch(made.plot, lines, { manyRuns, log: options.log });
    drawWhenSeen(made.plot, async () => {
      await draw(made.plot, [...lineTraces(lines, { smoothing: options.smoothing, manyRuns }), ...eventTraces(events)],
        lineLayout({ log: options.log, events, range: options.range, share: chart.share, lines }));
      if (!made.plot.dataset.wired && made.plot.on) wire(made.plot);
    });
  }

  function makeChart(chart) {
    const plot = el("div", { class: "plot", data: { chart: chart.key } });
    const names_ = el("div", { class: "legend" });
    const close = options.extra.includes(chart.key) && el("button", { class: "icon-button", title: "Remove", "aria-label": `Remove ${chart.title}`, text: "×",
      onclick: () => { options.extra.splice(options.extra.indexOf(chart.key), 1); remember(); load(); } });
    const card = el("section", { class: "card chart", "aria-label": chart.title }, el("header", {}, el("h2", { text: chart.title }), names_, close), plot);
    grid.append(card);
    return { card, plot, legend: names_ };
  }

  function wire(plot) {
    plot.dataset.wired = "1";
    plot.on("plotly_relayout", (change) => {
      if (change["xaxis.range[0]"] !== undefined) {
        options.range = [Math.max(0, Math.floor(change["xaxis.range[0]"])), Math.ceil(change["xaxis.range[1]"])];
        load();
      } else if (change["xaxis.autorange"] && options.range) { options.range = null; load(); }
    });
    plot.on("plotly_click", (event) => {
      const step = event.points?.[0]?.x;
      if (step !== undefined) go({ view: "rollouts", parameters: { step } });
    });
  }

  await load();
  // After the first frame with numbers and curves: what a reader calls the first view.
  requestAnimationFrame(() => setTimeout(() => performance.mark("first-view")));
  return { refresh: () => load(), repaint: paint, key: (key) => { if (key === "l") logBox.click(); } };
}

function drawCards(box, cards) {
  box.replaceChildren(...cards.map((card) => {
    const [last, first] = [short(card.last, 4), short(card.first, 4)];
    return el("div", { class: "card number" }, el("small", { class: "soft", text: card.title }), el("strong", { text: last }),
      el("small", { class: "soft", text: last === first ? `as at step ${card.first_step}` : `${card.last > card.first ? "▲" : "▼"} from ${first} at step ${card.first_step}` }));
  }));
}

function drawWarnings(box, warnings) {
  if (!warnings.length) {
    box.replaceChildren(el("a", { class: "ok", href: "#", text: "✓ all checks pass", onclick: openHealth }));
    return;
  }
  box.replaceChildren(...warnings.slice(0, 4).map((warning) =>
    el("a", { class: `warn ${warning.severity}`, href: "#", data: { tip: warning.evidence }, text: warning.title, onclick: openHealth })));
}

function openHealth(event) {
  event.preventDefault();
  go({ view: "health", parameters: {} });
}
