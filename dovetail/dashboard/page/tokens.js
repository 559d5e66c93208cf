// A response with its tokens coloured by a number each of them has.

import { ask, el, short } from "./dom.js";

const COLOURINGS = [["", "plain text"], ["token_advantages", "advantage"], ["token_logprob_gaps", "log-prob diff"], ["token_entropies", "entropy"], ["token_mask", "trained or observed"], ["token_versions", "weight version"]];
const ABSENT = {
  token_advantages: "No advantages per token are recorded for this response.",
  token_logprob_gaps: "No log-prob differences are recorded: they come with the pass for the old log-probs, which leaves out the first optimizer step of a batch.",
  token_entropies: "No entropies are recorded: they come with the pass for the old log-probs, which leaves out the first optimizer step of a batch.",
  token_mask: "Which tokens are trained on is not recorded for this response.",
  token_versions: "No weight versions are recorded for this response.",
};
// By updates behind, the last for all that are further: from fresh over near to far.
const LAGS = ["#12b886", "#339af0", "#845ef7", "#f59f00", "#e8590c", "#e03131"];
export const lagColour = (lag) => LAGS[Math.min(Math.max(lag, 0), LAGS.length - 1)];

// What the tokens of this run can be coloured by: key, name, and whether it is missing. Versions only where they differ.
export function colourings(recorded) {
  return COLOURINGS.map(([key, name]) => [key, name, Boolean(key) && !recorded.includes(key)]).filter(([key, , absent]) => !["token_versions", "token_mask"].includes(key) || !absent);
}
const ENDS = { token_advantages: ["lower", "higher"], token_logprob_gaps: ["engine surer", "trainer surer"], token_entropies: ["sure", "unsure"], token_mask: ["observed", "trained"] };

// Signed numbers go from orange over nothing to blue, entropies from nothing to purple.
function shade(value, largest, kind) {
  const part = Math.min(1, Math.abs(value) / (largest || 1));
  const strength = (part ** 0.7 * 0.72).toFixed(3);
  if (kind === "token_mask") return value ? "rgba(18, 184, 134, 0.4)" : "rgba(134, 142, 150, 0.25)";
  if (kind === "token_entropies") return `rgba(147, 51, 234, ${strength})`;
  return value < 0 ? `rgba(224, 108, 0, ${strength})` : `rgba(37, 99, 235, ${strength})`;
}

export async function colouredAnswer(answer, where, kind) {
  const whole = await ask("answer", { ...where, row: answer.row });
  const values = whole[kind];
  if (!values || !whole.token_ends) return el("div", {}, el("p", { class: "soft note", text: ABSENT[kind] }), el("div", { class: "text", text: answer.response }));
  const letters = [...whole.response].length === whole.response.length ? whole.response : [...whole.response];
  const largest = kind === "token_versions" ? 0 : kind === "token_mask" ? 1 : largestOf(values, kind);
  const behind = (index) => (values[index] < 0 ? null : whole.step - 1 - values[index]);
  const box = el("div", { class: "text tokens" });
  let start = 0;
  whole.token_ends.forEach((end, index) => {
    const text = typeof letters === "string" ? letters.slice(start, end) : letters.slice(start, end).join("");
    start = end;
    const facts = [`token ${index + 1}, id ${whole.response_ids?.[index] ?? "?"}`];
    for (const [name, title] of COLOURINGS.slice(1, -2)) if (whole[name]) facts.push(`${title} ${short(whole[name][index])}`);
    if (whole.token_mask) facts.push(whole.token_mask[index] ? "trained" : "not trained");
    if (whole.token_versions) facts.push(versionWords(whole.token_versions[index], whole.step));
    const colour = kind === "token_versions" ? (behind(index) === null ? "none" : `${lagColour(behind(index))}66`) : shade(values[index], largest, kind);
    box.append(el("span", { class: text ? "token" : "token special", style: `background:${colour}`,
      data: { tip: facts.join("\n") }, text: text || "∎" }));
  });
  return box;
}

function versionWords(version, step) {
  if (version < 0) return "not sampled";
  const lag = step - 1 - version;
  return `weights of step ${version}${lag ? `, ${lag} update${lag > 1 ? "s" : ""} behind` : " (fresh)"}`;
}

export function colourLegend(kind) {
  if (!kind) return null;
  if (kind === "token_versions") {
    return el("span", { class: "scale soft" }, "updates behind:", LAGS.map((colour, lag) => [el("i", { style: `background:${colour}66` }), lag === LAGS.length - 1 ? `${lag}+` : String(lag)]).flat());
  }
  const [low, high] = ENDS[kind];
  const steps = kind === "token_mask" ? [0, 1] : kind === "token_entropies" ? [0, 0.25, 0.5, 0.75, 1] : [-1, -0.5, 0, 0.5, 1];
  return el("span", { class: "scale soft" }, low, ...steps.map((step) => el("i", { style: `background:${shade(step, 1, kind)}` })), high);
}

function largestOf(values, kind) {
  const sorted = values.map(Math.abs).sort((a, b) => a - b);
  const high = sorted[Math.floor(sorted.length * 0.98)] ?? 0;
  // So that noise is not painted like a finding.
  return Math.max(high, { token_advantages: 1, token_logprob_gaps: 0.02, token_entropies: 0.5 }[kind]);
}
