// Where the time goes, who works when, how fast it is, and what memory it takes.

import { ask, el, field, short } from "./dom.js";
import { baseLayout, draw, drawWhenSeen, legend, lineLayout, lineTraces, plain } from "./plot.js";
import { coloursOf, plotCard, rightNow, showTimeline } from "./panels.js";
import { go } from "./address.js";

export async function time(box, state) {
  const sentence = el("div", { class: "card sentence" });
  const bars = plotCard("Seconds per step, by phase");
  const steps = el("input", { type: "number", min: "0", class: "step-input", "aria-label": "Step of the timeline" });
  const line = plotCard("One step across driver and workers", field("Step", steps));
  const agents = plotCard("Where a trajectory's time goes (mean of a step)");
  const speed = plotCard("Tokens per second and device");
  const mfu = plotCard("Model FLOPs utilisation (share of the peak)");
  const memory = plotCard("Memory in each phase (GiB): planned parts, and measured");
  memory.card.classList.add("wide");
  line.card.classList.add("wide");
  bars.card.classList.add("wide");
  const grid = el("div", { class: "grid" }, bars.card, line.card, agents.card, speed.card, mfu.card, memory.card);
  box.append(sentence, grid);
  let reply = null;
  let step = state.parameters.step ? Number(state.parameters.step) : null;
  let wired = false;

  steps.addEventListener("change", () => { step = Number(steps.value); go({ parameters: { step } }, { replace: true }); drawTimeline(); });

  async function load() {
    reply = await ask("time", { run: state.run });
    paint();
  }

  function paint() {
    sentence.replaceChildren(el("p", {}, el("strong", { text: reply.waits.sentence })),
      el("p", { class: "soft", text: `${rightNow(reply.status)}${reply.waits.advice}` }));
    drawBars();
    drawAgents();
    drawRates();
    drawMemory();
    if (step === null || (reply.timeline_steps && step > reply.timeline_steps[1])) step = reply.timeline_steps?.[1] ?? null;
    drawTimeline();
  }

  function drawBars() {
    const { phases, steps: at, per_bar } = reply.phases;
    bars.note(per_bar > 1 ? `each bar is the mean of about ${per_bar} steps` : "");
    const kept = phases.filter((phase) => phase.seconds.some((seconds) => seconds > 0));
    bars.card.hidden = !kept.length;
    if (!kept.length) return;
    const phaseColour = coloursOf(reply.words);
    bars.legend(kept.map((phase) => [phase.name, phaseColour(phase.key)]));
    drawWhenSeen(bars.plot, async () => {
      await draw(bars.plot, kept.map((phase) => ({
        type: "bar", name: plain(phase.name), x: at, y: phase.seconds, marker: { color: phaseColour(phase.key) },
        hovertemplate: `%{y:.3g} s  ${plain(phase.name)}<extra></extra>`,
      })), baseLayout({ barmode: "stack", bargap: at.length > 40 ? 0 : at.length < 10 ? 0.6 : 0.2,
        xaxis: { title: { text: "step", font: { size: 11 }, standoff: 4 } }, yaxis: { ticksuffix: " s" } }));
      if (wired || !bars.plot.on) return;
      wired = true;
      bars.plot.on("plotly_click", (event) => { step = Number(event.points[0].x); steps.value = step; drawTimeline(); });
    });
  }

  function drawAgents() {
    const { steps: at, parts } = reply.trajectories;
    agents.card.hidden = !parts.length;
    if (!parts.length) return;
    const colours = ["#0d9488", "#d6336c", "#ced4da"];
    agents.legend(parts.map((part, index) => [part.name, colours[index]]));
    drawWhenSeen(agents.plot, () => draw(agents.plot, parts.map((part, index) => ({ type: "bar", name: plain(part.name), x: at, y: part.seconds, marker: { color: colours[index] },
      hovertemplate: `%{y:.3g} s  ${plain(part.name)}<extra></extra>` })), baseLayout({ barmode: "stack", xaxis: { title: { text: "step", font: { size: 11 }, standoff: 4 } }, yaxis: { ticksuffix: " s" } })));
  }

  async function drawTimeline() {
    line.card.hidden = step === null;
    if (step === null) return;
    steps.value = step;
    await showTimeline(line, { run: state.run, step }, reply);
    if (step === 0) line.note("Step 0 is the start of the run: models are built and validated.");
  }

  function drawRates() {
    const rates = Object.entries(reply.rates).map(([name, points]) => ({ name, ...points }));
    const shares = rates.filter((rate) => rate.name.startsWith("perf/mfu/"));
    for (const [card, lines, tickformat] of [[speed, rates.filter((rate) => rate.name === "perf/throughput"), ",~g"], [mfu, shares, ".0%"]]) {
      card.card.hidden = !lines.length;
      if (!lines.length) continue;
      if (lines.length > 1) card.legend(legend(lines, false).map((one) => [one.name.replace("perf/mfu/", "").replaceAll("_", " "), one.colour]));
      const layout = lineLayout({ log: false, events: [], range: null, share: true, lines });
      layout.yaxis.tickformat = tickformat;
      drawWhenSeen(card.plot, () => draw(card.plot, lineTraces(lines, { smoothing: 0, manyRuns: false }), layout));
    }
    mfu.note(shares.some((line) => line.y.some((value) => value > 1)) ? "Above 100 %: the peak of a CPU is measured at the start of the run, and was measured too low here. Set trainer.device_peak_tflops." : "");
  }

  function drawMemory() {
    const { phases, device, device_gib, reported, verdict } = reply.memory;
    const words = [["allocated on the device", reported.allocated], ["reserved on the device", reported.reserved], ["in the largest process on the host", reported.host]];
    const peak = words.filter(([, gib]) => gib !== null).map(([name, gib]) => `${short(gib)} GiB ${name}`).join(", ");
    const planned = (phase) => Object.values(phase.items).reduce((sum, gib) => sum + gib, 0);
    const over = phases.filter((phase) => phase.measured > 1.1 * planned(phase)).map((phase) => `${phase.name} ${short(phase.measured)} instead of ${short(planned(phase))} GiB`);
    memory.note([verdict && `Plan: ${verdict}.`, over.length && `Measured more than planned: ${over.join(", ")}.`, peak && `Peaks over the run: ${peak}.`].filter(Boolean).join(" ") );
    memory.card.hidden = !phases.length && !peak;
    memory.plot.hidden = !phases.length;
    if (!phases.length) return;
    const parts = [...new Set(phases.flatMap((phase) => Object.keys(phase.items)))];
    const shades = ["#4c6ef5", "#ae3ec9", "#e07b00", "#0d9488", "#d6336c", "#74b816", "#1098ad", "#846358", "#adb5bd"];
    memory.legend([...parts.map((part, index) => [part, shades[index % shades.length]]), ["measured", "var(--text)"]]);
    memory.plot.style.height = `${70 + 40 * phases.length}px`;
    const measured = phases.filter((phase) => phase.measured !== null);
    const largest = Math.max(...phases.map((phase) => Math.max(phase.measured ?? 0, planned(phase))));
    const near = device_gib !== null && device_gib < 2.5 * largest;
    const ink = getComputedStyle(document.documentElement).getPropertyValue("--text").trim();
    drawWhenSeen(memory.plot, () => draw(memory.plot, [
      ...parts.map((part, index) => ({ type: "bar", orientation: "h", name: part, y: phases.map((phase) => phase.name), x: phases.map((phase) => phase.items[part] ?? 0),
        marker: { color: shades[index % shades.length] }, hovertemplate: `%{x:.2f} GiB  ${plain(part)}<extra></extra>` })),
      { type: "scatter", mode: "markers", name: "measured", y: measured.map((phase) => phase.name), x: measured.map((phase) => phase.measured),
        marker: { symbol: "diamond", size: 12, color: ink, line: { width: 1.5, color: "#fff" } }, hovertemplate: "<b>%{x:.2f} GiB measured</b><extra></extra>" },
    ], baseLayout({ barmode: "stack", bargap: 0.35, hovermode: "y unified", yaxis: { autorange: "reversed" }, xaxis: { ticksuffix: " GiB", rangemode: "tozero" },
      shapes: near ? [{ type: "line", xref: "x", yref: "paper", x0: device_gib, x1: device_gib, y0: 0, y1: 1, line: { color: "#e03131", dash: "dash" } }] : [],
      annotations: near ? [{ x: device_gib, y: 1, yref: "paper", text: plain(`${device}: ${short(device_gib)} GiB`), showarrow: false, xanchor: "right", yanchor: "top" }] : [] })));
  }

  await load();
  return { refresh: load, repaint: paint, key: (key) => {
    if (step === null || (key !== "," && key !== ".")) return;
    step = Math.min(reply.timeline_steps[1], Math.max(reply.timeline_steps[0], step + (key === "." ? 1 : -1)));
    drawTimeline();
  } };
}
