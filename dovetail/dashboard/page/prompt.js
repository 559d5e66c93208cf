// What a user asked, out of a prompt as a chat template wrote it.

const USER_TURNS = [/<\|im_start\|>user\n([\s\S]*?)<\|im_end\|>/g, /<\|start_header_id\|>user<\|end_header_id\|>\s*([\s\S]*?)<\|eot_id\|>/g, /<start_of_turn>user\n([\s\S]*?)<end_of_turn>/g, /\[INST\]([\s\S]*?)\[\/INST\]/g];

export function shortPrompt(prompt) {
  for (const pattern of USER_TURNS) {
    const turns = [...prompt.matchAll(pattern)];
    if (turns.length) return turns.at(-1)[1].trim();
  }
  return prompt.trim();
}
