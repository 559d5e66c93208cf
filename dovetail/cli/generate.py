"""Generate responses to look at: `dovetail generate MODEL "prompt" ...`, from a file (--file), or from standard input.

MODEL is a checkpoint (`global_step_N`), a run folder (its newest checkpoint, or with --best its best), a Hugging Face
folder or a hub name.
A prompt is one user message, in the chat template of the model where it has one. A checkpoint is used as its run
validated: same engine, same lengths, greedy unless --temperature says otherwise.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dovetail.cli.eval import add_model_arguments, add_sampling_arguments, set_logging
from dovetail.cli.option_types import output_file
from dovetail.config.overrides import sets_known_key

if TYPE_CHECKING:
    from dovetail.trainer.generate import Response

_ROWS = (".parquet", ".jsonl", ".json", ".ndjson")
_FORCED = (
    # The model responds once: tools and environments belong to the run's data, not to a prompt from outside.
    "actor_rollout_ref.rollout.multi_turn.enable=False",
    "actor_rollout_ref.rollout.agent.environment=null",
    "actor_rollout_ref.rollout.agent.command=null",
    "actor_rollout_ref.rollout.agent.agent_loop_config_path=null",
    "actor_rollout_ref.rollout.agent.default_agent_loop=single_turn_agent",
    "data.val_files=not-read",  # a run that validates must name one
    "trainer.nnodes=1",
    "trainer.n_gpus_per_node=1",
    "actor_rollout_ref.hybrid_engine=True",
    "actor_rollout_ref.rollout.nnodes=0",
    "trainer.logger=[file]",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    parser.add_argument("prompts", nargs="*", metavar="PROMPT", help="without one, lines of --file or standard input")
    parser.add_argument(
        "--file", type=Path, metavar="F", help="one prompt per line; or .parquet / .jsonl with a column prompt"
    )
    parser.add_argument("--system", metavar="TEXT", help="system message before each prompt")
    parser.add_argument(
        "--jsonl", type=output_file, metavar="OUT", help="also write one JSON object per response to this file"
    )
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change the configuration")
    add_sampling_arguments(parser)


def run(args: argparse.Namespace) -> int:
    set_logging(args.verbose)
    from dovetail.trainer.saved_model import find_model

    config = find_model(args.model, best=args.best).config(overrides=[*args.set, *_FORCED]).config
    prompts = _prompts(args, config.data.prompt_key)
    sampling = {"n": args.n, "temperature": args.temperature, "max_tokens": args.max_tokens, "best": args.best}
    responses = generate(args.model, prompts, overrides=args.set, **sampling)
    for prompt, samples in zip(prompts, responses, strict=True):
        _show(prompt, samples)
    if args.jsonl is not None:
        from dovetail.observability.run_folder import write_json_lines

        rows = [
            {
                "prompt": prompt,
                "response": sample.text,
                "tokens": sample.num_tokens,
                "finish_reason": sample.finish_reason,
            }
            for prompt, samples in zip(prompts, responses, strict=True)
            for sample in samples
        ]
        write_json_lines(args.jsonl, rows)
    return 0


def generate(
    given: str,
    prompts: Sequence[Any],
    *,
    n: int | None = None,
    temperature: float | None = None,
    max_tokens: int | None = None,
    overrides: Sequence[str] = (),
    best: bool = False,
) -> list[list[Response]]:
    """Responses of a checkpoint, a run's newest (`best`: best) checkpoint or a model to each prompt."""
    from dovetail.trainer.generate import generate_responses
    from dovetail.trainer.saved_model import find_model, sampling_overrides

    model = find_model(given, best=best)
    config = model.config(overrides=[*overrides, *_FORCED]).config
    asked = sampling_overrides(config, n=n, temperature=temperature, max_tokens=max_tokens)
    config = model.config(overrides=[*overrides, *_FORCED, *asked]).config
    return generate_responses(config, prompts, Path(model.folder) if model.is_checkpoint else None)


def _prompts(args: argparse.Namespace, column: str) -> list[Any]:
    """Text or messages, from the command line, the file or standard input; with the system message before each."""
    from dovetail.data.errors import DataError

    if setting := next((text for text in args.prompts if sets_known_key(text)), None):
        raise DataError(
            f"{setting!r} stands where a prompt is read and is a setting: give it as --set {shlex.quote(setting)}. A "
            "prompt of these words can come from --file or standard input."
        )
    if args.prompts:
        prompts: list[Any] = args.prompts
    elif args.file is not None:
        prompts = _read(args.file, column)
    else:
        if sys.stdin.isatty():
            sys.stderr.write("Type prompts, one per line; Ctrl-D generates.\n")
        prompts = [line.rstrip("\n") for line in sys.stdin if line.strip()]
    if not prompts:
        raise DataError("there is no prompt; give one on the command line, with --file, or on standard input.")
    return [_with_system(prompt, args.system) for prompt in prompts] if args.system else prompts


def _read(file: Path, column: str) -> list[Any]:
    from dovetail.data.errors import DataError
    from dovetail.data.files import read_rows

    if file.suffix not in _ROWS:
        if not file.is_file():
            raise DataError(f"--file {file}: there is no such file.")
        return [line for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    rows = read_rows(str(file))
    if column not in rows.columns:
        raise DataError(f"--file {file} has no column {column!r}, only {', '.join(rows.columns)}; set data.prompt_key.")
    return [rows[number][column] for number in range(len(rows))]


def _with_system(prompt: Any, system: str) -> Any:
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    return [{"role": "system", "content": system}, *messages]


def _show(prompt: Any, samples: Sequence[Response]) -> None:
    text = prompt if isinstance(prompt, str) else "\n".join(f"[{m['role']}] {m.get('content')}" for m in prompt)
    sys.stdout.write(f"> {text}\n")
    for sample in samples:
        cut = "" if sample.finish_reason != "length" else f"  [cut at {sample.num_tokens} tokens]"
        sys.stdout.write(f"{sample.text}{cut}\n")
    sys.stdout.write("\n")
