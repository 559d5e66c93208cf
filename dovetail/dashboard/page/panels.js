// A card with a plot, and the timeline of one or several steps in it.

import { ask, duration, el, short } from "./dom.js";
import { baseLayout, draw, drawWhenSeen, phaseColour, plain } from "./plot.js";

export function plotCard(title, ...controls) {
  const plot = el("div", { class: "plot", data: { chart: title } });
  const names = el("div", { class: "legend" });
  const words = el("p", { class: "soft note", hidden: true });
  const card = el("section", { class: "card chart", "aria-label": title }, el("header", {}, el("h2", { text: title }), ...controls), names, plot, words);
  return {
    card, plot,
    note: (text) => { words.textContent = text; words.hidden = !text; },
    legend: (entries) => names.replaceChildren(...entries.map(([name, colour]) => el("span", {}, el("i", { class: "dot", style: `background:${colour}` }), name))),
  };
}

// Waiting is drawn hatched: reds for engines, greys for the trainer.
const WAIT_COLOURS = { groups: "#64748b", rewards: "#d6336c", testing: "#f59f00", driver: "#ced4da", draws: "#e8590c", commit_weights: "#e03131" };
export const waitColour = (reason) => WAIT_COLOURS[reason] ?? "#ced4da";

// With engines on devices of their own the driver does not generate: it waits for groups.
export const coloursOf = (words) => (phase) => (phase === "gen" && words.gen !== words.generate_groups ? waitColour("groups") : phaseColour(phase));

// What a run does at this moment; where that takes long, who waits for whom.
export const rightNow = (status) => (status.phase ? `Right now: ${status.phase}, step ${status.now_step}${status.waits ? `: ${status.waits}` : ""}. ` : "");

const ROWS = ["driver", "worker", "engine"];
const order = (row) => ROWS.indexOf(row.split(" ")[0]) * 1e6 + (Number(row.replace(/\D/g, "")) || 0);

// `place`: run, step, and how many steps up to it. `words`, `wait_words`: what phases and waits are called.
export async function showTimeline(panel, place, { words, wait_words }, { waits = false } = {}) {
  const mine = panel.asked = (panel.asked ?? 0) + 1;
  let timeline = null;
  let problem = "";
  try {
    timeline = await ask("timeline", place);
  } catch (error) { problem = error.message; }
  if (mine !== panel.asked) return; // another step was chosen meanwhile
  if (problem) { panel.note(problem); panel.plot.hidden = true; return; }
  panel.plot.hidden = false;
  panel.note("");
  const hasEngines = timeline.spans.some((span) => span.worker.startsWith("engine "));
  const waiting = waits || hasEngines ? timeline.waits : [];
  const rows = [...new Set(timeline.spans.map((span) => span.worker))].sort((a, b) => order(a) - order(b));
  const bars = [[timeline.spans, (phase) => words[phase] ?? phase.replaceAll("_", " "), coloursOf(words), ""], [waiting, (reason) => wait_words[reason], waitColour, "/"]];
  const named = new Map();
  const traces = bars.flatMap(([spans, name, colour, pattern]) => [...new Set(spans.map((span) => span.phase))].map((phase) => {
    const mine = spans.filter((span) => span.phase === phase);
    if (!named.has(colour(phase))) named.set(colour(phase), name(phase));
    return {
      type: "bar", orientation: "h", name: plain(name(phase)), y: mine.map((span) => plain(span.worker)), base: mine.map((span) => span.start),
      x: mine.map((span) => Math.max(span.end - span.start, 0)),
      marker: { color: colour(phase), opacity: pattern ? 0.55 : 1, line: { width: pattern ? 0 : 0.5, color: "rgba(255,255,255,.4)" }, pattern: { shape: pattern, size: 5, solidity: 0.25 } },
      customdata: mine.map((span) => [duration(span.end - span.start), duration(span.start), span.memory === null ? "" : `, ${short(span.memory)} GiB`]),
      hovertemplate: `${plain(name(phase))}: %{customdata[0]}, begins at %{customdata[1]}%{customdata[2]}<extra></extra>`,
    };
  }));
  panel.legend([...named].map(([colour, name]) => [name, colour]));
  const last = Math.max(...timeline.spans.map((span) => span.end));
  const several = timeline.starts.length > 1 ? timeline.starts : [];
  panel.plot.style.height = `${Math.max(170, 60 + 26 * rows.length)}px`;
  drawWhenSeen(panel.plot, () => draw(panel.plot, traces, baseLayout({
    barmode: "overlay", bargap: 0.25, hovermode: "closest", margin: { l: 44, r: 10, t: several.length ? 20 : 6, b: 30 },
    yaxis: { autorange: "reversed", categoryorder: "array", categoryarray: rows, fixedrange: true },
    xaxis: { ticksuffix: " s", range: [0, last * 1.01] },
    shapes: several.map((one) => ({ type: "line", xref: "x", yref: "paper", x0: one.start, x1: one.start, y0: 0, y1: 1, line: { width: 1, dash: "dot", color: "#868e96" } })),
    annotations: several.map((one) => ({ x: one.start, y: 1, yref: "paper", text: `step ${one.step}`, showarrow: false, xanchor: "left", yanchor: "bottom", font: { size: 11 } })),
  })));
}
