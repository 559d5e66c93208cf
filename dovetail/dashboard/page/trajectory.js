// A trajectory as a conversation: turns, tool calls with arguments, results, seconds and failures.

import { ask, counted, duration, el, short } from "./dom.js";

export async function conversation(answer, place) {
  const whole = await ask("answer", { ...place, row: answer.row });
  if (!whole.messages?.length) return null;
  const turns = whole.events.filter((event) => event.kind === "generate");
  const written = whole.messages.flatMap((message, index) => (message.role === "assistant" ? [index] : []));
  // Turns the model sampled come last: earlier messages of the assistant belong to the prompt.
  const turnAt = new Map(written.slice(-turns.length || written.length).map((at, index, all) => [at, turns.at(index - all.length)]));
  const box = el("div", { class: "conversation" });
  const shown = new Set();
  whole.messages.forEach((message, index) => {
    const turn = turnAt.get(index);
    if (message.role === "assistant") {
      for (const event of turn ? whole.events.filter((one) => one.kind === "branch" && one.turn === turn.turn) : []) { shown.add(event); box.append(drawEvent(event)); }
      box.append(say("assistant", message.content, turn ? [duration(turn.seconds ?? 0), `${turn.tokens ?? "?"} tokens`] : []));
      const during = turn ? whole.events.filter((event) => event !== turn && event.kind !== "generate" && event.turn === turn.turn && !shown.has(event)) : [];
      for (const event of during) { shown.add(event); box.append(drawEvent(event, whole.messages[index + 1]?.content)); }
      if (!during.some((event) => event.kind === "tool")) for (const call of message.tool_calls ?? []) box.append(drawEvent({ kind: "tool", name: call.function?.name, arguments: call.function?.arguments }));
    } else if (message.role !== "tool" || !shown.size) box.append(say(message.role, message.content, []));
  });
  for (const event of whole.events) if (event.kind !== "generate" && !shown.has(event)) box.append(drawEvent(event));
  return box;
}

function say(role, content, facts) {
  const text = typeof content === "string" ? content : content ? JSON.stringify(content) : "";
  return el("div", { class: `said ${role}` }, el("div", { class: "facts soft" }, el("b", { text: role }), facts.map((fact) => el("span", { text: fact }))), text.trim() && el("div", { class: "text", text: text.trim() }));
}

// `next`: the message after it, which shows what an environment replied.
function drawEvent(event, next) {
  const seconds = event.seconds !== undefined && el("span", { text: duration(event.seconds) });
  const failure = event.failure && el("span", { class: "badge failed", text: event.kind === "retry" ? `tried again: ${event.failure}` : String(event.failure) });
  if (event.kind !== "tool") return el("div", { class: `event ${event.kind}` }, el("div", { class: "facts soft" }, el("b", { text: event.kind }), event.name && el("code", { text: event.name }), failure, event.why && el("span", { text: event.why })), event.result && el("div", { class: "text", text: String(event.result) }));
  const given = event.arguments === undefined || event.arguments === null ? "" : typeof event.arguments === "string" ? event.arguments : JSON.stringify(event.arguments);
  const replies = event.name === "respond" && !given;
  return el("div", { class: `event tool${event.failure ? " failed" : ""}` },
    el("div", { class: "facts soft" }, el("b", { text: replies ? "environment" : "tool" }), !replies && el("code", { text: `${event.name ?? ""}(${given})` }), seconds, failure),
    event.result && !(replies && event.result === next) && el("div", { class: "text", text: String(event.result) }));
}

// One line on how it ended and where its time went.
export function trajectoryFacts(agent) {
  const good = agent.outcome === "finished";
  const { generate, tool } = agent.seconds;
  return [el("span", { class: `badge ${good ? "yes" : "cut"}`, text: agent.outcome }), el("span", { class: "soft", text: `trajectory ${agent.trajectory}${agent.segment ? `, segment ${agent.segment}` : ""}` }),
    el("span", { class: "soft", text: counted(agent.num_turns, "turn") }),
    agent.calls > 0 && el("span", { class: "soft", text: `${counted(agent.calls, "tool call")}${agent.failures ? `, ${agent.failures} failed` : ""}` }),
    generate + tool > 0 && el("span", { class: "split", data: { tip: `engine ${duration(generate)}, tools ${duration(tool)}` } }, el("i", { style: `flex:${short(generate)}` }), el("i", { style: `flex:${short(tool)}` }))];
}
