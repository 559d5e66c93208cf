// Everything that knows Plotly: colours of the theme, lines with events, stacked bars, drawing only what is seen.

export const RUN_COLOURS = ["#0d9488", "#e07b00", "#6366f1", "#d6336c", "#2f9e44", "#1c7ed6", "#ae3ec9", "#846358"];
const LINE_COLOURS = ["#0d9488", "#e07b00", "#6366f1", "#d6336c", "#2f9e44"];
const DASHES = ["solid", "dot", "dash", "dashdot"];
export const EVENTS = {
  validation: { colour: "#6366f1", symbol: "triangle-up", name: "validation" },
  checkpoint: { colour: "#2f9e44", symbol: "square", name: "checkpoint" },
  skipped_step: { colour: "#e03131", symbol: "x", name: "skipped step" },
  resume: { colour: "#e8a200", symbol: "star", name: "resume" },
};
export const PHASE_COLOURS = {
  gen: "#0d9488", generate_sequences: "#0d9488", generate_groups: "#0d9488",
  old_log_prob: "#74b816", compute_log_prob: "#74b816",
  ref: "#a9a100", compute_ref_log_prob: "#a9a100",
  values: "#d9480f", compute_values: "#d9480f",
  reward: "#d6336c", compute_rm_score: "#d6336c",
  adv: "#868e96",
  update_critic: "#ae3ec9",
  update_actor: "#4c6ef5",
  testing: "#f59f00",
  save_checkpoint: "#846358",
  weight_sync: "#e03131", commit_weights: "#e03131", send_weights: "#e03131",
  other: "#ced4da",
};
const OTHERS = ["#1098ad", "#c2255c", "#5c940d", "#862e9c", "#e8590c", "#364fc7"];

export function phaseColour(phase) {
  if (PHASE_COLOURS[phase]) return PHASE_COLOURS[phase];
  let sum = 0;
  for (const letter of phase) sum = (sum * 31 + letter.charCodeAt(0)) % 997;
  return OTHERS[sum % OTHERS.length];
}

// Five megabytes take a moment to start: first the browser shows what is there already.
let loading = null;
export function plotly() {
  loading ??= new Promise((resolve) => { requestAnimationFrame(() => setTimeout(resolve)); }).then(() => new Promise((resolve, reject) => {
    if (window.Plotly) { resolve(window.Plotly); return; }
    const script = document.createElement("script");
    script.src = "/plotly.min.js";
    script.onload = () => resolve(window.Plotly);
    script.onerror = () => reject(new Error("The chart library could not be loaded."));
    document.head.append(script);
  }));
  return loading;
}

// The curves as plain lines, until the chart library is there.
export function sketch(box, lines, { manyRuns, log }) {
  if (box.dataset.drawn || !lines.length) return;
  const value = (y) => (log ? Math.log10(Math.max(y, 1e-12)) : y);
  const all = lines.flatMap((line) => line.y.map(value));
  const ends = lines.flatMap((line) => [line.x[0], line.x.at(-1)]);
  const [left, right, low, high] = [Math.min(...ends), Math.max(...ends), Math.min(...all), Math.max(...all)];
  const picture = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  for (const [name, setting] of Object.entries({ class: "sketch", viewBox: "0 0 100 100", preserveAspectRatio: "none", "aria-hidden": "true" })) picture.setAttribute(name, setting);
  const names = [...new Set(lines.map((line) => line.name))];
  for (const line of lines) {
    const curve = document.createElementNS("http://www.w3.org/2000/svg", "polyline");
    const [x, y] = line.sx ? [line.sx, line.sy] : [line.x, line.y];
    const points = x.map((step, index) => `${(100 * (step - left)) / (right - left || 1)},${100 - (100 * (value(y[index]) - low)) / (high - low || 1)}`);
    curve.setAttribute("points", points.join(" "));
    curve.setAttribute("stroke", manyRuns ? RUN_COLOURS[line.runIndex % RUN_COLOURS.length] : LINE_COLOURS[names.indexOf(line.name) % LINE_COLOURS.length]);
    picture.append(curve);
  }
  box.replaceChildren(picture);
}

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
// Plotly reads some tags in texts; names of runs and metrics are plain text.
export const plain = (text) => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;");

export function baseLayout(changes = {}) {
  const axis = {
    gridcolor: colour("--grid"), linecolor: colour("--grid"), zerolinecolor: colour("--grid"),
    tickfont: { size: 11, color: colour("--soft") }, automargin: true, tickformat: "~g",
  };
  const { xaxis = {}, yaxis = {}, ...rest } = changes;
  return {
    paper_bgcolor: colour("--card"), plot_bgcolor: colour("--card"),
    font: { family: "system-ui, sans-serif", size: 12, color: colour("--text") },
    margin: { l: 44, r: 10, t: 6, b: 30 }, showlegend: false, hovermode: "x unified", dragmode: "zoom",
    hoverlabel: { bgcolor: colour("--card"), bordercolor: colour("--line"), font: { color: colour("--text"), size: 12 } },
    xaxis: { ...axis, spikecolor: colour("--soft"), spikethickness: 1, spikedash: "dot", ...xaxis }, yaxis: { ...axis, ...yaxis }, ...rest,
  };
}

const CONFIG = { displaylogo: false, responsive: true, displayModeBar: false, doubleClick: "reset", scrollZoom: false };

// Charts out of sight are drawn when they come into sight.
const waiting = new WeakMap();
const watcher = new IntersectionObserver((entries) => {
  for (const entry of entries) {
    entry.target.dataset.seen = entry.isIntersecting ? "1" : "";
    if (entry.isIntersecting && waiting.has(entry.target)) {
      const draw = waiting.get(entry.target);
      waiting.delete(entry.target);
      draw();
    }
  }
}, { rootMargin: "200px" });

export function drawWhenSeen(box, draw) {
  if (box.dataset.seen === "1") { draw(); return; }
  waiting.set(box, draw);
  watcher.observe(box);
}

// One chart at a time, with a breath between: the first is seen soon, and the page answers meanwhile.
let line = Promise.resolve();
export function draw(box, traces, layout) {
  const drawn = line.then(async () => {
    const Plotly = await plotly();
    if (!box.isConnected) return;
    box.querySelector(".sketch")?.remove();
    await Plotly.react(box, traces, layout, CONFIG);
    box.dataset.drawn = "1";
    await new Promise((resolve) => { setTimeout(resolve); });
  });
  line = drawn.catch(() => {});
  return drawn;
}

// lines: [{run, runIndex, name, x, y, sx, sy}]
export function lineTraces(lines, { smoothing, manyRuns }) {
  const names = [...new Set(lines.map((line) => line.name))];
  const traces = [];
  for (const line of lines) {
    const number = names.indexOf(line.name);
    const shade = manyRuns ? RUN_COLOURS[line.runIndex % RUN_COLOURS.length] : LINE_COLOURS[number % LINE_COLOURS.length];
    const dash = manyRuns ? DASHES[number % DASHES.length] : "solid";
    const label = plain(manyRuns ? `${line.run} · ${line.name}` : line.name);
    const mode = line.x.length < 60 ? "lines+markers" : "lines";
    const soft = smoothing > 0 && line.x.length > 2;
    traces.push({
      x: line.x, y: line.y, mode: soft ? "lines" : mode, name: label, opacity: soft ? 0.28 : 1,
      line: { color: shade, width: soft ? 1 : 2, dash }, marker: { color: shade, size: 5 },
      hovertemplate: soft ? "%{y:.4g} (as recorded)<extra></extra>" : `%{y:.4g}  ${label}<extra></extra>`,
    });
    if (soft) {
      traces.push({
        x: line.sx, y: line.sy, mode: "lines", name: label, line: { color: shade, width: 2.2, dash },
        hovertemplate: `<b>%{y:.4g}</b>  ${label}<extra></extra>`,
      });
    }
  }
  return traces;
}

export function eventTraces(events) {
  // Each kind at its own height: a step may be validated and saved.
  return Object.entries(EVENTS).flatMap(([kind, look], row) => {
    const shown = events.filter((event) => event.kind === kind);
    if (!shown.length) return [];
    return [{
      x: shown.map((event) => event.step), y: shown.map(() => 0.03 + 0.05 * row), yaxis: "y2", mode: "markers", name: look.name,
      marker: { symbol: look.symbol, size: 7, color: look.colour, opacity: 0.85 },
      text: shown.map((event) => plain(event.text)), hovertemplate: `${look.name} %{text}<extra></extra>`, cliponaxis: false,
    }];
  });
}

export function lineLayout({ log, events, range, share, lines }) {
  // Of a few steps Plotly would label halves, which read as the same step twice.
  const [first, last] = range ?? [Math.min(...lines.map((line) => line.x[0])), Math.max(...lines.map((line) => line.x.at(-1)))];
  const strong = events.filter((event) => event.kind === "skipped_step" || event.kind === "resume");
  return baseLayout({
    xaxis: { title: { text: "step", font: { size: 11 }, standoff: 4 }, range: range ?? undefined, autorange: !range,
      dtick: last - first < 8 ? 1 : undefined, hoverformat: "d", tickformat: "~d", unifiedhovertitle: { text: "step %{x}" } },
    yaxis: { type: log ? "log" : "linear", rangemode: share && !log ? "tozero" : "normal", tickformat: log ? ".1e" : "~g" },
    yaxis2: { overlaying: "y", range: [0, 1], visible: false, fixedrange: true },
    shapes: strong.slice(-200).map((event) => ({
      type: "line", xref: "x", yref: "paper", x0: event.step, x1: event.step, y0: 0, y1: 1,
      line: { color: EVENTS[event.kind].colour, width: 1, dash: "dot" },
    })),
  });
}

export function legend(lines, manyRuns) {
  const names = [...new Set(lines.map((line) => line.name))];
  return names.map((name, number) => ({
    name, colour: manyRuns ? colour("--soft") : LINE_COLOURS[number % LINE_COLOURS.length],
    dash: manyRuns ? DASHES[number % DASHES.length] : "solid",
  }));
}
