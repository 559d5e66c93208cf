// Asynchronous training: how stale the trained tokens are, what waits in the buffer, and who waits for whom.

import { ask, el, field, select } from "./dom.js";
import { baseLayout, draw, drawWhenSeen, legend, lineLayout, lineTraces, plain } from "./plot.js";
import { plotCard, rightNow, showTimeline, waitColour } from "./panels.js";
import { lagColour } from "./tokens.js";
import { go } from "./address.js";

export async function asynchronous(box, state) {
  const wish = { step: state.parameters.step ? Number(state.parameters.step) : null, count: state.parameters.count ?? "3" };
  const steps = el("input", { type: "number", min: "0", class: "step-input", "aria-label": "Last step of the timeline" });
  const line = plotCard("Who works, who waits", select("Steps", [["1", "1"], ["3", "3"], ["5", "5"], ["10", "10"]], wish.count, (count) => change({ count }), { id: "count" }), field("up to", steps));
  const idle = plotCard("Idle share of a step, by what is waited for");
  const lags = plotCard("Trained tokens by staleness, per step");
  const histogram = plotCard("Trained tokens by staleness, whole run");
  const now = el("p", { class: "card sentence", hidden: true });
  const grid = el("div", { class: "grid" }, line.card, idle.card, lags.card, histogram.card);
  line.card.classList.add("wide");
  box.append(now, grid);
  const charts = new Map();
  let reply = null;

  steps.addEventListener("change", () => change({ step: Number(steps.value) }));

  function change(changes) {
    Object.assign(wish, changes);
    go({ parameters: { step: wish.step ?? "", count: wish.count } }, { replace: true });
    drawTimeline();
  }

  async function load() {
    reply = await ask("async", { run: state.run });
    paint();
  }

  function paint() {
    now.textContent = rightNow(reply.status);
    now.hidden = !now.textContent;
    drawTimeline();
    drawIdle();
    drawStaleness();
    for (const chart of reply.charts) drawLines(chart);
  }

  function drawTimeline() {
    line.card.hidden = !reply.timeline_steps;
    if (!reply.timeline_steps) return;
    const [first, last] = reply.timeline_steps;
    const step = Math.min(last, Math.max(first, wish.step ?? last));
    steps.value = step;
    showTimeline(line, { run: state.run, step, count: Math.min(Number(wish.count), Math.max(1, step - Math.max(first, 1) + 1)) }, reply, { waits: true });
  }

  function drawIdle() {
    const { steps: at, waits } = reply.idle;
    idle.card.hidden = !waits.length;
    if (!waits.length) return;
    idle.legend(waits.map((wait) => [wait.name, waitColour(wait.key)]));
    idle.note(at[0] > Math.max(1, reply.timeline_steps[0]) ? `the last ${at.length} steps` : "");
    drawWhenSeen(idle.plot, () => draw(idle.plot, waits.map((wait) => ({
      x: at, y: wait.shares, mode: at.length < 60 ? "lines+markers" : "lines", name: plain(wait.name), line: { color: waitColour(wait.key), width: 2 }, marker: { size: 5 },
      hovertemplate: `%{y:.1%}  ${plain(wait.name)}<extra></extra>`,
    })), shares()));
  }

  function drawStaleness() {
    const { steps: at, lags: all, per_bar } = reply.staleness;
    lags.card.hidden = histogram.card.hidden = !all.length;
    if (!all.length) return;
    const words = (lag) => (lag.name === "0" ? "0 (fresh)" : `${lag.name} behind`);
    lags.legend(all.map((lag, index) => [words(lag), lagColour(index)]));
    lags.note(per_bar > 1 ? `each bar is the mean of about ${per_bar} steps` : "");
    drawWhenSeen(lags.plot, () => draw(lags.plot, all.map((lag, index) => ({
      type: "bar", x: at, y: lag.shares, marker: { color: lagColour(index) }, name: words(lag), hovertemplate: `%{y:.1%}  ${words(lag)}<extra></extra>`,
    })), shares({ barmode: "stack", bargap: at.length > 40 ? 0 : 0.2 })));
    histogram.note("Updates between the weights that sampled a token and those it is trained on.");
    drawWhenSeen(histogram.plot, () => draw(histogram.plot, [{
      type: "bar", x: all.map((lag) => lag.name), y: all.map((lag) => lag.mean), marker: { color: all.map((_, index) => lagColour(index)) },
      text: all.map((lag) => `${(100 * lag.mean).toPrecision(3)} %`), textposition: "outside", cliponaxis: false, hovertemplate: "%{y:.1%} of the tokens<extra></extra>",
    }], baseLayout({ hovermode: "closest", xaxis: { type: "category", title: { text: "updates behind", font: { size: 11 }, standoff: 4 } }, yaxis: { tickformat: ".0%", rangemode: "tozero" } })));
  }

  const shares = (changes = {}) => baseLayout({ xaxis: { title: { text: "step", font: { size: 11 }, standoff: 4 }, tickformat: "~d", unifiedhovertitle: { text: "step %{x}" } },
    yaxis: { tickformat: ".0%", rangemode: "tozero" }, ...changes });

  function drawLines(chart) {
    if (!charts.has(chart.key)) {
      charts.set(chart.key, plotCard(chart.title));
      grid.append(charts.get(chart.key).card);
    }
    const panel = charts.get(chart.key);
    const lines = Object.entries(chart.lines).map(([name, points]) => ({ name, ...points }));
    panel.legend(legend(lines, false).map((one) => [one.name, one.colour]));
    drawWhenSeen(panel.plot, () => draw(panel.plot, lineTraces(lines, { smoothing: 0, manyRuns: false }), lineLayout({ log: false, events: [], range: null, share: chart.share, lines })));
  }

  await load();
  return { refresh: load, repaint: paint, key: (key) => {
    if (reply.timeline_steps && (key === "," || key === ".")) change({ step: Number(steps.value) + (key === "." ? 1 : -1) });
  } };
}
