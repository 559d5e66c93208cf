"""Export: `dovetail export CHECKPOINT_FOLDER OUT`. Writes the policy as a folder that transformers and vLLM load.

CHECKPOINT_FOLDER is a `global_step_N` folder, or a run folder (its newest checkpoint is taken). One process on the CPU
does it, whatever number of processes saved the checkpoint; LoRA adapters are merged in.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from dovetail.config import ConfigError, DovetailConfig, load_config

if TYPE_CHECKING:
    from dovetail.backends.base import TrainBackend

CONFIG = "config.yaml"
DTYPES = ("float32", "bfloat16", "float16")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", type=Path, metavar="CHECKPOINT_FOLDER", help="global_step_N, or a run folder")
    parser.add_argument("out", type=Path, metavar="OUT", help="folder to write; an existing one is refused")
    parser.add_argument("--dtype", choices=DTYPES, help="dtype of the written weights; default: as trained")
    parser.add_argument("--model", metavar="PATH", help="folder of the first weights, if it has moved since the run")


def run(args: argparse.Namespace) -> int:
    # torch comes with these; `dovetail export --help` does without.
    from dovetail.checkpoint.manifest import BrokenCheckpoint

    try:
        if args.out.exists():
            raise FileExistsError(f"{args.out} exists already; give a name that is free, or remove it.")
        folder = _checkpoint_folder(args.checkpoint)
        config = _run_config(folder, args.model)
        export_checkpoint(config, folder, args.out, dtype=args.dtype)
    except (ConfigError, BrokenCheckpoint, FileNotFoundError, FileExistsError) as error:
        sys.stderr.write(f"{error}\n")
        return 2
    sys.stdout.write(f"the policy of {folder} is in {args.out}\n")
    return 0


def export_checkpoint(config: DovetailConfig, folder: Path, out: Path, *, dtype: str | None = None) -> None:
    """Load `folder/actor` into the run's model and write it; `out` appears when it is whole."""
    import torch

    from dovetail.backends.export import export_hf_folder
    from dovetail.models.load import load_tokenizer, model_folder

    policy = config.actor_rollout_ref
    backend = (_megatron_policy if policy.actor.strategy == "megatron" else _plain_policy)(config, folder / "actor")
    tokenizer = load_tokenizer(policy.model.tokenizer_source, trust_remote_code=policy.model.trust_remote_code)
    wanted = None if dtype is None else getattr(torch, dtype)
    export_hf_folder(backend, out, tokenizer=tokenizer, dtype=wanted, source=model_folder(policy.model.path))


def _plain_policy(config: DovetailConfig, folder: Path) -> TrainBackend:
    import torch

    from dovetail.config.fsdp import FSDPConfig
    from dovetail.workers.build import build_policy

    policy = config.actor_rollout_ref
    backend = build_policy(
        policy.model,
        strategy="single",
        # The dtype of the weights matters here, nothing that belongs to sharding or to a device does.
        fsdp=FSDPConfig(model_dtype=policy.actor.fsdp_config.model_dtype),
        # Adapters are part of a model that trains; the optimizer itself is not loaded.
        optim=policy.actor.optim.model_copy(update={"total_training_steps": 1}),
        device=torch.device("cpu"),
    )
    backend.load_state(folder, contents=("model",))
    return backend


def _megatron_policy(config: DovetailConfig, folder: Path) -> TrainBackend:
    """On a layout of one process: Megatron's checkpoints fit every layout."""
    import torch

    from dovetail.config.megatron import MegatronConfig
    from dovetail.workers.build import build_policy

    policy = config.actor_rollout_ref
    used = policy.actor.megatron
    overrides = {name: value for name, value in used.override_transformer_config.items() if "pipeline" not in name}
    alone = MegatronConfig(
        dtype=used.dtype,
        use_dist_checkpointing=True,
        dist_checkpointing_path=str(folder),
        override_transformer_config=overrides,
        override_mcore_model_config=used.override_mcore_model_config,
    )
    return build_policy(
        policy.model,
        strategy="megatron",
        fsdp=policy.actor.fsdp_config,
        megatron=alone,
        optim=None,
        device=torch.device("cpu"),
    )


def _checkpoint_folder(given: Path) -> Path:
    from dovetail.checkpoint.manifest import MANIFEST_NAME, verify_folder
    from dovetail.checkpoint.store import CheckpointStore

    if not given.is_dir():
        raise FileNotFoundError(f"{given} is no folder; give a global_step_N folder or the run folder it is in.")
    if (given / MANIFEST_NAME).exists():
        verify_folder(given)
        return given
    newest = CheckpointStore(given).latest()
    if newest is None:
        raise FileNotFoundError(
            f"{given} is no checkpoint and holds none; give a global_step_N folder or the run folder it is in."
        )
    return newest


def _run_config(folder: Path, model: str | None) -> DovetailConfig:
    file = folder.resolve().parent / CONFIG
    if not file.is_file():
        raise FileNotFoundError(f"{file} is missing: it says which model {folder} belongs to; keep it beside it.")
    overrides = [] if model is None else [f"actor_rollout_ref.model.path={model}"]
    return load_config([file], overrides).config
