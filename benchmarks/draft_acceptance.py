"""How many tokens a decode step would give if earlier text drafted them: what speculation could save on real responses.

A draft is what followed the last occurrence of the final tokens in the response itself, else in its prompt, else in a
response of its group that is already complete (all begin together). Speculative sampling accepts a drafted token with
the probability the model gives it, so over many positions that is how often the recorded response has that token:
no model is needed. `beyond` counts only positions where few responses still run, where a decode step is not limited by
matrix products and speculation can help.

    python -m benchmarks.draft_acceptance RUN/rollouts/step_24.jsonl --tokenizer MODEL_FOLDER --beyond 230
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from transformers import AutoTokenizer

Tokens = Sequence[int]


@dataclass
class Text:
    """What may be looked up: the last place after each short run of tokens."""

    longest: int
    tokens: list[int] = field(default_factory=list)
    places: dict[tuple[int, ...], int] = field(default_factory=dict)

    def append(self, tokens: Tokens) -> None:
        for token in tokens:  # a run is entered when something follows it
            end = len(self.tokens)
            for size in range(1, min(self.longest, end) + 1):
                self.places[tuple(self.tokens[end - size :])] = end
            self.tokens.append(token)

    def after(self, run: tuple[int, ...], count: int) -> list[int]:
        place = self.places.get(run)
        return [] if place is None else self.tokens[place : place + count]


def steps_and_tokens(
    prompt: Tokens, response: Tokens, others: Sequence[Tokens], *, longest: int, count: int, beyond: int
) -> tuple[int, int]:
    """Decode steps and tokens of one response from position `beyond` on."""
    own, given, siblings = Text(longest), Text(longest), Text(longest)
    given.append(prompt)
    waiting = sorted(others, key=len)
    position = steps = tokens = 0
    while position < len(response):
        while waiting and len(waiting[0]) <= position:
            siblings.append(waiting.pop(0))
        draft: list[int] = []
        for size in range(min(longest, position), 0, -1):
            run = tuple(response[position - size : position])
            draft = own.after(run, count) or given.after(run, count) or siblings.after(run, count)
            if draft:
                break
        accepted = 0
        while accepted < len(draft) and response[position + accepted : position + accepted + 1] == [draft[accepted]]:
            accepted += 1
        gained = min(accepted + 1, len(response) - position)
        if position >= beyond:
            steps, tokens = steps + 1, tokens + gained
        own.append(response[position : position + gained])
        position += gained
    return steps, tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rollouts", type=Path, help="a step's file under a run's rollouts/")
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder of the model")
    parser.add_argument("--beyond", type=int, default=230)
    parser.add_argument("--longest", type=int, default=3, help="tokens that are looked up, at most")
    args = parser.parse_args()
    groups: dict[str, list[dict]] = defaultdict(list)
    for line in args.rollouts.open():
        row = json.loads(line)
        groups[row["uid"]].append(row)
    tokenizer = AutoTokenizer.from_pretrained(args.tokenizer)
    for count in (3, 5, 8):
        shown = []
        for beyond in (0, args.beyond):
            steps = tokens = 0
            for rows in groups.values():
                prompt = tokenizer(rows[0]["prompt"], add_special_tokens=False)["input_ids"]
                for row in rows:
                    others = [other["response_ids"] for other in rows if other is not row]
                    found = steps_and_tokens(
                        prompt, row["response_ids"], others, longest=args.longest, count=count, beyond=beyond
                    )
                    steps, tokens = steps + found[0], tokens + found[1]
            shown.append(f"{tokens / max(steps, 1):.2f} beyond token {beyond}")
        print(f"{count} drafted tokens: {', '.join(shown)} (tokens a decode step)", flush=True)


if __name__ == "__main__":
    main()
