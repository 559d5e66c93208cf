// Two steps side by side: the responses to one prompt then and now.

import { ask, el } from "./dom.js";
import { shortPrompt } from "./prompt.js";

// `closed` is called when the reader closes it.
export async function compare(place, group, drawAnswer, closed) {
  const step = place.step;
  const status = el("p", { class: "soft", role: "status", text: "Looking for other steps with this prompt …" });
  const left = el("div", { class: "side" });
  const right = el("div", { class: "side" });
  const picks = el("div", { class: "chips" });
  const close = el("button", { class: "icon-button", "aria-label": "Close", text: "×", onclick: () => box.close() });
  const box = el("dialog", { class: "compare" }, el("header", {}, el("h2", { text: shortPrompt(group.prompt).slice(0, 300) }), close), status, picks, el("div", { class: "sides" }, left, right));
  document.body.append(box);
  let open = true;
  box.addEventListener("close", () => { open = false; box.remove(); closed(); });
  box.showModal();

  let newest = 0; // of what was asked for; replies to older ones are dropped
  let picked = false;

  const draw = async (side, step, mine = newest) => {
    const at = { ...place, step };
    const reply = await ask("group", { ...at, key: group.key });
    if (mine !== newest) return;
    side.replaceChildren(el("h3", { text: `step ${step}` }), el("div", { class: "answers" }, reply.answers.map((answer) => drawAnswer(answer, at))));
  };
  const show = async (other) => {
    const [early, late] = other < step ? [other, step] : [step, other];
    newest += 1;
    for (const pick of picks.children) pick.setAttribute("aria-pressed", String(Number(pick.dataset.step) === other));
    await Promise.all([draw(left, early), draw(right, late)]);
    right.hidden = false;
  };

  right.hidden = true;
  await draw(left, step);
  const known = [];
  let cursor = -1;
  while (open && cursor !== null && known.length < 60) {
    const reply = await ask("same-prompt", { ...place, row: group.answers[0].row, cursor });
    cursor = reply.next;
    for (const other of reply.steps) {
      known.push(other);
      picks.append(el("button", { class: "chip", data: { step: String(other) }, text: `step ${other}`, onclick: () => { picked = true; show(other); } }));
    }
    status.textContent = known.length ? `This prompt is in ${known.length + 1} steps${cursor === null ? "." : ` so far, ${reply.left} steps left to read …`}`
      : cursor === null ? "No other step has this prompt. Validation prompts come back at every validation, training prompts in the next epoch." : status.textContent;
    if (!picked && known.length && right.childElementCount === 0) await show(known.at(-1));
  }
  // The first one shown came from the first bite; the earliest step tells more.
  if (open && !picked && known.length) await show(Math.min(...known));
}
