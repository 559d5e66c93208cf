"""Export: `dovetail export CHECKPOINT_FOLDER OUT`. Writes the policy as a folder that transformers and vLLM load.

Of a run of `dovetail reward` it writes the reward model, for `reward_model.model.path`.

CHECKPOINT_FOLDER is a `global_step_N` folder, or a run folder: its newest checkpoint is taken, or with --best the best
one of a run with `trainer.save_best`; --list names all of them. One process on the CPU does it, whatever number of
processes saved the checkpoint. LoRA adapters are merged in; with --adapter they are written alone, as a folder that
peft and vLLM load on top of the model. With --push-to-hub the folder is uploaded, too, to a repository that is private
if it is new.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dovetail.cli.option_types import output_folder
from dovetail.config import ConfigError, DovetailConfig, load_config
from dovetail.observability.disk import explaining_full_disk
from dovetail.trainer.saved_model import WITH_OWN_ADAPTERS, checkpoint_folder, override, run_config_file

if TYPE_CHECKING:
    from dovetail.backends.base import TrainBackend
    from dovetail.config.actor import ActorConfig
    from dovetail.config.critic import CriticConfig

DTYPES = ("float32", "bfloat16", "float16")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", type=Path, metavar="CHECKPOINT_FOLDER", help="global_step_N, or a run folder")
    parser.add_argument(
        "out", type=output_folder, nargs="?", metavar="OUT", help="folder to write; an existing one is refused"
    )
    parser.add_argument("--list", action="store_true", help="list the checkpoints of a run folder; writes nothing")
    parser.add_argument("--best", action="store_true", help="the best checkpoint of a run folder (trainer.save_best)")
    parser.add_argument("--adapter", action="store_true", help="the LoRA adapter alone, in peft's format")
    parser.add_argument(
        "--push-to-hub", metavar="ORG/NAME", help="upload the folder; needs `hf auth login`, or HF_TOKEN"
    )
    parser.add_argument("--dtype", choices=DTYPES, help="dtype of the written weights; default: as trained")
    parser.add_argument("--model", metavar="PATH", help="folder of the first weights, if it has moved since the run")


def run(args: argparse.Namespace) -> int:
    # torch comes with these; `dovetail export --help` does without.
    from dovetail.checkpoint.manifest import BrokenCheckpoint

    if args.list:
        return _list_checkpoints(args.checkpoint)
    try:
        if args.out is None:
            raise FileNotFoundError("OUT is missing: name the folder to write, or ask for --list.")
        options = {"dtype": args.dtype, "model": args.model, "adapter": args.adapter, "best": args.best}
        folder = export_run(args.checkpoint, args.out, push_to_hub=args.push_to_hub, **options)
    except (ConfigError, BrokenCheckpoint, FileNotFoundError, FileExistsError) as error:
        sys.stderr.write(f"{error}\n")
        return 2
    trained = "reward model" if _run_config(folder, args.model).trainer.method == "reward" else "policy"
    pushed = "" if args.push_to_hub is None else f" and on the hub as {args.push_to_hub}"
    sys.stdout.write(f"the {'adapter' if args.adapter else trained} of {folder} is in {args.out}{pushed}\n")
    return 0


def export_run(
    given: Path,
    out: Path,
    *,
    dtype: str | None = None,
    model: str | None = None,
    adapter: bool = False,
    best: bool = False,
    push_to_hub: str | None = None,
) -> Path:
    """Export a checkpoint folder, or the newest (`best`: the best) one of a run folder; returns its folder."""
    from dovetail.config.hub import make_repository, push_folder

    if out.exists():
        raise FileExistsError(f"{out} exists already; give a name that is free, or remove it.")
    folder = checkpoint_folder(given, best=best)
    config = _run_config(folder, model)
    if push_to_hub is not None:
        make_repository(push_to_hub)  # first: an export of a large model takes minutes
    with explaining_full_disk(out, advice="free some space, or name a folder on another disk"):
        (export_adapter if adapter else export_checkpoint)(config, folder, out, dtype=dtype)
    if push_to_hub is not None:
        push_folder(out, push_to_hub)
    return folder


def export_checkpoint(config: DovetailConfig, folder: Path, out: Path, *, dtype: str | None = None) -> None:
    """Load what the run trained, its policy or its reward model, and write it; `out` appears when it is whole."""
    import torch

    from dovetail.agents.stops import run_stop_ids
    from dovetail.backends.export import export_hf_folder
    from dovetail.models.load import model_folder

    is_reward = config.trainer.method == "reward"
    model = config.critic.model if is_reward else config.actor_rollout_ref.model
    build = _megatron_backend if _section(config).strategy == "megatron" else _plain_backend
    backend = build(config, folder / ("critic" if is_reward else "actor"))
    tokenizer = _tokenizer(config)
    wanted = None if dtype is None else getattr(torch, dtype)
    source = None if is_reward else model_folder(model.path)
    stop_ids = () if is_reward else run_stop_ids(config, tokenizer).all
    export_hf_folder(backend, out, tokenizer=tokenizer, dtype=wanted, source=source, stop_ids=stop_ids)


def export_adapter(config: DovetailConfig, folder: Path, out: Path, *, dtype: str | None = None) -> None:
    """Write the LoRA adapter of `folder/actor` in peft's format, with the name of the model it belongs to, and the
    generation config of the run: the model's own may not name what ends an answer of the adapter."""
    import torch

    from dovetail.agents.stops import run_stop_ids
    from dovetail.models.load import model_folder
    from dovetail.models.save import publish_folder
    from dovetail.models.stop_ids import GENERATION_CONFIG, name_stop_ids
    from dovetail.weight_sync import write_peft_folder
    from dovetail.workers.adapters import adapter_of

    policy = config.actor_rollout_ref
    if config.trainer.method == "reward":
        raise FileNotFoundError(
            f"{folder} holds a reward model; export it without --adapter: its adapters are merged in."
        )
    if not policy.model.uses_lora or policy.actor.strategy == "megatron":
        why = f"model.lora_rank={policy.model.lora_rank}, actor.strategy={policy.actor.strategy}"
        raise FileNotFoundError(f"the run of {folder} trained no LoRA adapter ({why}); export it without --adapter.")
    backend = _plain_backend(config, folder / "actor")
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as work:
        adapter = adapter_of(backend, policy.model)
        if dtype is not None:
            wanted = getattr(torch, dtype)
            adapter = replace(adapter, tensors=((name, tensor.to(wanted)) for name, tensor in adapter.tensors))
        write_peft_folder(adapter, Path(work) / out.name, base_model=policy.model.path)
        source, ids = model_folder(policy.model.path), run_stop_ids(config, _tokenizer(config)).all
        if (source / GENERATION_CONFIG).is_file():
            shutil.copyfile(source / GENERATION_CONFIG, Path(work) / out.name / GENERATION_CONFIG)
        name_stop_ids(Path(work) / out.name, backend.hf_config, ids)
        publish_folder(Path(work) / out.name, out)


def _tokenizer(config: DovetailConfig) -> Any:
    """Of what the run trained."""
    from dovetail.models.load import load_tokenizer

    is_reward, policy = config.trainer.method == "reward", config.actor_rollout_ref.model
    model = config.critic.model if is_reward else policy
    source = model.tokenizer_source if is_reward else config.tokenizer_source
    trusted, template = model.trust_remote_code, policy.custom_chat_template
    return load_tokenizer(source, trust_remote_code=trusted, chat_template=template)


def _build(config: DovetailConfig, **options: Any) -> TrainBackend:
    import torch

    from dovetail.workers.build import build_policy, build_value

    device = torch.device("cpu")
    if config.trainer.method == "reward":
        return build_value(config.critic.model, role="reward", device=device, **options)
    return build_policy(config.actor_rollout_ref.model, device=device, **options)


def _section(config: DovetailConfig) -> ActorConfig | CriticConfig:
    return config.critic if config.trainer.method == "reward" else config.actor_rollout_ref.actor


def _plain_backend(config: DovetailConfig, folder: Path) -> TrainBackend:
    from dovetail.config.fsdp import FSDPConfig

    section = _section(config)
    backend = _build(
        config,
        strategy="single",
        # The dtype of the weights matters here, nothing that belongs to sharding or to a device does.
        fsdp=FSDPConfig(model_dtype=section.fsdp_config.model_dtype),
        # Adapters are part of a model that trains; the optimizer itself is not loaded.
        optim=section.optim.model_copy(update={"total_training_steps": 1}),
    )
    backend.load_state(folder, contents=("model",))
    return backend


def _megatron_backend(config: DovetailConfig, folder: Path) -> TrainBackend:
    """On a layout of one process: Megatron's checkpoints fit every layout."""
    from dovetail.config.megatron import MegatronConfig

    section = _section(config)
    used = section.megatron
    overrides = {name: value for name, value in used.override_transformer_config.items() if "pipeline" not in name}
    alone = MegatronConfig(
        dtype=used.dtype,
        use_dist_checkpointing=True,
        dist_checkpointing_path=str(folder),
        override_transformer_config=overrides,
        override_mcore_model_config=used.override_mcore_model_config,
    )
    return _build(config, strategy="megatron", fsdp=section.fsdp_config, megatron=alone, optim=None)


def _run_config(folder: Path, model: str | None) -> DovetailConfig:
    config = load_config([file := run_config_file(folder)], WITH_OWN_ADAPTERS).config
    if model is None:
        return config
    key = "critic.model.path" if config.trainer.method == "reward" else "actor_rollout_ref.model.path"
    return load_config([file], [*WITH_OWN_ADAPTERS, override(key, model)]).config


def _list_checkpoints(run: Path) -> int:
    """One line for each checkpoint, the oldest first. Sizes are compared, checksums are not: `dovetail audit` does."""
    from dovetail.checkpoint.manifest import BrokenCheckpoint, verify_folder
    from dovetail.checkpoint.store import CheckpointStore

    store = CheckpointStore(run)
    if not (steps := store.steps()):
        sys.stderr.write(f"{run} holds no checkpoint; a run saves them with trainer.save_freq.\n")
        return 2
    scores, best = store.scores(), store.best()
    for step in steps:
        folder = store.folder(step)
        try:
            size = sum(record.size for record in verify_folder(folder, checksums=False).files.values())
        except BrokenCheckpoint as problem:
            sys.stdout.write(f"step {step:>7}  broken: {problem}\n")
            continue
        saved = datetime.fromtimestamp(folder.stat().st_mtime)
        score = f"  {scores[step].metric} {scores[step].value:.6g}" if step in scores else ""
        mark = " (best)" if folder == best else ""
        sys.stdout.write(f"step {step:>7}  {size / 2**20:>9.1f} MiB  {saved:%Y-%m-%d %H:%M}  {folder}{score}{mark}\n")
    return 0
