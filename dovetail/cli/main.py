"""The `dovetail` command: finds the subcommand and imports only its module. `--help` imports nothing heavy."""

from __future__ import annotations

import argparse
import importlib
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

import dovetail
from dovetail.config.wording import did_you_mean

# Name -> (module with `add_arguments(parser)` and `run(args) -> exit code`, one line of help). A module of several
# commands has their `DESCRIPTIONS`.
COMMANDS: dict[str, tuple[str, str]] = {
    "check": ("dovetail.cli.check", "resolve a configuration, print its plan and say whether it can run"),
    "train": ("dovetail.cli.train", "train a policy with RL: GRPO, PPO, DAPO and others"),
    "sft": ("dovetail.cli.train", "fine-tune a model on conversations"),
    "dpo": ("dovetail.cli.train", "train a policy on preferences: DPO, IPO, KTO, ORPO, SimPO"),
    "reward": ("dovetail.cli.train", "train a reward model on preferences"),
    "distill": ("dovetail.cli.train", "distil a teacher into a student, on the student's own samples"),
    "eval": ("dovetail.cli.eval", "score a checkpoint or a model: accuracy, pass@k, best@k, by data source"),
    "generate": ("dovetail.cli.generate", "print responses of a checkpoint or a model to prompts"),
    "export": ("dovetail.cli.export", "write the policy of a checkpoint as a Hugging Face folder"),
    "audit": ("dovetail.cli.audit", "check a run folder: checkpoints are as saved, no prompt was lost or used twice"),
    "replay": ("dovetail.cli.replay", "train again on the batches of a recorded asynchronous run, and compare"),
    "dashboard": ("dovetail.cli.dashboard", "show runs in a browser: curves, time, responses, warnings"),
    "report": ("dovetail.cli.report", "write one HTML file and one picture of a run, to send to a colleague"),
    "doctor": ("dovetail.cli.doctor", "show what is installed, and whether engine and trainer agree on this machine"),
    "bench": ("dovetail.cli.bench", "measure how fast a configuration generates and trains on this machine"),
    "demo": ("dovetail.cli.demo", "train a small pretrained model on this machine, in minutes"),
    "data": ("dovetail.cli.data", "prepare prompts: generate a task, or convert a published data set"),
}
# What TRL has commands for is a setting here.
_METHODS = {
    "dovetail train: docs/guide/choosing.md has its algorithms": ("grpo", "rloo", "ppo", "dapo", "gspo"),
    "dovetail dpo with dpo.loss_type=NAME": ("kto", "orpo", "ipo", "simpo"),
    "dovetail export RUN --list": ("checkpoints", "list", "ls"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand; returns the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments and arguments[0] in COMMANDS:
        return _run(arguments[0], arguments[1:])
    parser = _top_parser()
    # Before argparse sees them: `dovetail trian --help` is a mistake, too.
    if arguments and not arguments[0].startswith("-"):
        hint = did_you_mean(arguments[0], COMMANDS) or f" Choose one of {', '.join(COMMANDS)}."
        hint = next((f" Use {command}." for command, names in _METHODS.items() if arguments[0] in names), hint)
        parser.error(f"there is no command {arguments[0]!r}.{hint}")
    parser.parse_args(arguments)
    parser.print_help()
    return 0


def _run(command: str, arguments: list[str]) -> int:
    module_name, summary = COMMANDS[command]
    module = importlib.import_module(module_name)
    parser = _Parser(
        prog=f"dovetail {command}",
        description=getattr(module, "DESCRIPTIONS", {}).get(command, module.__doc__ or summary),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    module.add_arguments(parser)
    parser.set_defaults(command=command)
    # Intermixed: overrides and options come in any order on launch lines.
    args = parser.parse_intermixed_args(arguments)
    try:
        return module.run(args)
    except KeyboardInterrupt as error:  # before training, or the second one: `trainer.stopping`
        number = getattr(error, "signum", signal.SIGINT)
        sys.stderr.write(f"{signal.Signals(number).name}: stopped.\n")
        return 128 + number
    except Exception as error:
        if isinstance(error, OSError) and error.filename is not None:
            # Named on the command line or in the configuration; our own errors of files are sentences.
            sys.stderr.write(f"{error.filename}: {error.strerror}; give a path that is there and that you may use.\n")
            return 2
        if not _is_of_user(error):
            raise
        sys.stderr.write(f"{error}\n")
        return 2


class _Parser(argparse.ArgumentParser):
    """Says what is wrong, without all options before it."""

    def error(self, message: str) -> NoReturn:
        hint = ""
        if message.startswith("unrecognized arguments: --") and "key=value" in self.format_usage():
            name, _, value = message.removeprefix("unrecognized arguments: --").partition(" ")[0].partition("=")
            usual = _usual_name(name) or _usual_name(name := name.replace("-", "_"))
            hint = "; settings have no dashes" + (usual or f": {name}={value or 'VALUE'}")
            if name.startswith("config_"):
                hint = "; name the YAML file by its path: FOLDER/NAME.yaml"
        self.exit(2, f"{self.prog}: {message}{hint}\n`{self.prog} --help` lists the options.\n")


def _usual_name(name: str) -> str | None:
    from dovetail.config.translate.peers import usual_name

    return usual_name(name)


def _is_of_user(error: Exception) -> bool:
    """Whether the message alone says what to change. Imports torch only for what a configuration error is not."""
    from dovetail.config.errors import ConfigError

    if isinstance(error, ConfigError):
        return True
    from dovetail.trainer.refusals import USER_ERRORS

    return isinstance(error, USER_ERRORS)


def _top_parser() -> argparse.ArgumentParser:
    width = max(len(name) for name in COMMANDS)
    commands = "\n".join(f"  {name:<{width}}  {summary}" for name, (_, summary) in COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog="dovetail",
        usage="dovetail <command> [options]",
        description="Reinforcement-learning post-training for language models.",
        epilog=f"commands:\n{commands}\n\ndovetail <command> --help says more.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"dovetail {dovetail.__version__}")
    return parser


if __name__ == "__main__":
    sys.exit(main())
