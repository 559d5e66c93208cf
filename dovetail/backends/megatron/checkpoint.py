"""Megatron checkpoints: each rank writes what it holds, any other layout reads it back. The format is Megatron's own.

    <folder>/mcore/          weights and optimizer state, `torch_dist` format of megatron.core.dist_checkpointing
    <folder>/state.json      what is there, by which layout
    <folder>/extra.safetensors        schedule and the caller's own, of rank 0
    <folder>/rng_<rank>.safetensors   random state, of use to the same layout only
    <folder>/part_<rank>.json         what each rank wrote, with checksums

Whether a folder is whole is the business of `dovetail.checkpoint.store`. Refuses folders of other backends.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from dovetail.backends.megatron.families.local_weights import HEAD, HEAD_BIAS
from dovetail.backends.megatron.parts import MegatronModel, padded_vocab_size
from dovetail.backends.megatron.shim import cuda_to_cpu
from dovetail.checkpoint.manifest import BrokenCheckpoint
from dovetail.checkpoint.sharded import (
    CONTENTS,
    STATE_VERSION,
    capture_rng,
    first_failure,
    read_description,
    read_extra,
    require_contents,
    restore_rng,
    set_random_state,
    together,
    write_small_files,
)
from dovetail.models.weights import scalar_head

logger = logging.getLogger(__name__)

BACKEND = "megatron"
_SHARDS = "mcore"
_SIZES = ("tp_size", "pp_size", "vpp_size", "cp_size", "ep_size", "etp_size", "dp_size")


def save_megatron(
    folder: Path,
    model: MegatronModel,
    optimizer: Any | None,
    *,
    extra: Mapping[str, Any],
    contents: Collection[str] = CONTENTS,
) -> None:
    """Write `contents`: weights, optimizer state, and every rank's random state with `extra` of rank 0. Collective.

    An error on any rank is raised on all of them.
    """
    from megatron.core import dist_checkpointing

    from dovetail.backends.megatron.torch_dist import PlainSave

    saved = [name for name in CONTENTS if name in contents and (name != "optimizer" or optimizer is not None)]
    together((folder / _SHARDS).mkdir, parents=True, exist_ok=True)
    steps = _steps_taken(optimizer) if optimizer is not None and "optimizer" in saved else 0
    with cuda_to_cpu():
        weights = _sharded_weights(model)
        state: dict[str, Any] = {}
        if "model" in saved:
            state["model"] = weights
        if steps and optimizer is not None:
            state["optimizer"], _ = _split(optimizer.sharded_state_dict(_flat(weights), metadata=_metadata(model)))
        try:
            dist_checkpointing.save(state, str(folder / _SHARDS), PlainSave())
        except CheckpointException as failure:  # not an Exception: it would pass every handler on its way out
            raise OSError(f"{folder} could not be written: {first_failure(failure)}") from failure
    description = {
        "version": STATE_VERSION,
        "backend": BACKEND,
        "world_size": dist.get_world_size(),
        "contents": saved,
        "optimizer_steps": steps,
        "layout": _sizes(model),
    }
    random_state = {**capture_rng(), "megatron": _tracked_rng()}
    together(write_small_files, folder, description, extra, random_state, dist.get_rank())


def load_megatron(
    folder: Path, model: MegatronModel, optimizer: Any | None, *, contents: Collection[str] = CONTENTS
) -> dict[str, Any] | None:
    """Read `contents` into whatever layout this is; return `extra`, or None when it is not among them. Collective."""
    description = read_description(folder)
    if description.get("backend") != BACKEND:
        raise BrokenCheckpoint(
            folder, "it was saved by another training backend; export it to a Hugging Face folder and start from that"
        )
    wanted = [name for name in CONTENTS if name in contents and (name != "optimizer" or optimizer is not None)]
    require_contents(folder, description, wanted)
    with cuda_to_cpu(), torch.no_grad():
        if "model" in wanted:
            _refuse_other_model(folder / _SHARDS, model, saved_tp_size=description["layout"]["tp_size"])
        steps = description["optimizer_steps"] if "optimizer" in wanted else 0
        _read(folder / _SHARDS, model, optimizer, weights="model" in wanted, steps=steps)
        if optimizer is not None and not steps:
            if "optimizer" in wanted:
                _forget_steps(optimizer)
            # The float32 copies are made from the weights that were just read.
            optimizer.reload_model_params()
    if "extra" not in wanted:
        return None
    _restore_random_state(folder, description, model)
    return read_extra(folder)


def load_dist_weights(model: MegatronModel, folder: Path, *, prefix: str = "") -> None:
    """Weights only, from a folder that Megatron (or a run of this program) wrote. Any layout; collective.

    A scalar head that is not in it starts as from a Hugging Face folder without one.
    """
    from megatron.core import dist_checkpointing

    folder = folder / _SHARDS if (folder / _SHARDS).is_dir() else folder
    if not dist_checkpointing.check_is_distributed_checkpoint(str(folder)):
        raise BrokenCheckpoint(folder, "it has no metadata.json of megatron.core.dist_checkpointing")
    with cuda_to_cpu(), torch.no_grad():
        sharded = _sharded_weights(model, prefix)
        stored = _tensors_in(folder)
        shapes = {name: tuple(tensor.global_shape) for name, tensor in stored.items()}
        heads = _fresh_heads(model, sharded, shapes, prefix)
        may_miss = (HEAD, HEAD_BIAS) if heads else ()
        _refuse_other_model(folder, model, prefix, may_miss)
        _load_weights(folder, model, sharded, prefix, may_miss)
        for parameter, value in heads:
            parameter.copy_(value)


def _read(shards: Path, model: MegatronModel, optimizer: Any | None, *, weights: bool, steps: int) -> None:
    if weights:
        _load_weights(shards, model, _sharded_weights(model))
    if not steps or optimizer is None:
        return
    from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace, merge
    from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject

    # Loading puts tensors in the place of descriptions, so the weights are described anew.
    sharded = _flat(_sharded_weights(model))
    asked = optimizer.sharded_state_dict(sharded, is_loading=True, metadata=_metadata(model))
    stored, kept = _split(asked)
    dict_list_map_inplace(lambda value: value.unwrap() if isinstance(value, LocalNonpersistentObject) else value, kept)
    for group in _parameter_groups(kept):
        group["step"] = steps
    loaded = _load(shards, {"optimizer": stored})["optimizer"]
    optimizer.load_state_dict(merge(kept, loaded))


def _load_weights(
    shards: Path, model: MegatronModel, sharded: dict[str, Any], prefix: str = "", may_miss: Collection[str] = ()
) -> None:
    loaded = _load(shards, {"model": sharded})["model"]
    for number, chunk in enumerate(model.chunks):
        state = {name.removeprefix(prefix): value for name, value in loaded[str(number)].items()}
        result = chunk.load_state_dict(state, strict=False)
        absent = [name for name in result.missing_keys if not name.endswith("_extra_state") and name not in may_miss]
        assert not absent, f"{shards} gave nothing for {absent}"


def _load(shards: Path, state: dict[str, Any]) -> Any:
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.core import CheckpointingException

    from dovetail.backends.megatron.torch_dist import SafeCommon, SafeLoad

    try:
        return dist_checkpointing.load(state, str(shards), SafeLoad(), SafeCommon())
    except CheckpointingException as error:
        raise BrokenCheckpoint(shards, str(error)) from error
    except ValueError as error:  # UnsafeFileError, or a metadata.json that is no JSON
        raise BrokenCheckpoint(shards, str(error), damaged=True) from error
    except CheckpointException as failure:
        raise BrokenCheckpoint(shards, first_failure(failure), damaged=True) from failure


def _tensors_in(shards: Path) -> Any:
    from megatron.core import dist_checkpointing

    from dovetail.backends.megatron.torch_dist import SafeLoad

    try:
        return dist_checkpointing.load_tensors_metadata(str(shards), SafeLoad())
    except ValueError as error:
        raise BrokenCheckpoint(shards, str(error), damaged=True) from error


def _refuse_other_model(
    shards: Path,
    model: MegatronModel,
    prefix: str = "",
    may_miss: Collection[str] = (),
    saved_tp_size: int | None = None,
) -> None:
    """Before anything is loaded, and on all ranks: Megatron leaves out layers and tokens that only the file has.

    `saved_tp_size`: what the vocabulary was padded for, where that is known.
    """
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories

    stored = {name: tuple(tensor.global_shape) for name, tensor in _tensors_in(shards).items()}
    described = _sharded_weights(model, prefix)
    apply_factories(described)
    asked = {value.key: value for value in nested_values(described) if isinstance(value, ShardedTensor)}
    optional = {prefix + name for name in may_miss}
    num_tokens = model.hf_config.vocab_size

    def is_padded(size: int) -> bool:
        return size >= num_tokens if saved_tp_size is None else size == padded_vocab_size(num_tokens, saved_tp_size)

    def misfit() -> str | None:
        for name, tensor in asked.items():
            shape, own = stored.get(name), tuple(tensor.global_shape)
            if name in optional or shape == own:
                continue
            if shape is None:
                return f"it has no {name}"
            if not (tensor.allow_shape_mismatch and shape[1:] == own[1:] and is_padded(shape[0])):
                return f"{name} has shape {shape} in it and {own} in this run"
        return None

    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, (misfit(), list(asked)))
    known = {name for _, names in ranks for name in names}
    surplus = [name for name in stored if name.startswith(f"{prefix}decoder.layers.") and name not in known]
    reasons = [reason for reason, _ in ranks if reason] + [f"this run's model has no {name}" for name in surplus]
    if reasons:
        raise BrokenCheckpoint(
            shards,
            f"{reasons[0]}; set what the model was saved with (model.path, override_config), or start from a Hugging "
            "Face folder",
        )


def _sharded_weights(model: MegatronModel, prefix: str = "") -> dict[str, Any]:
    """One entry for each chunk; the stored names count layers over the whole model, so chunks are of no matter."""
    metadata = _metadata(model)
    return {
        str(number): chunk.sharded_state_dict(prefix=prefix, metadata=metadata)  # pyrefly: ignore[not-callable]
        for number, chunk in enumerate(model.chunks)
    }


def _metadata(model: MegatronModel) -> dict[str, Any]:
    return {
        "dp_cp_group": model.layout.dp_cp_group,
        # The one format that a layout with other tensor- or pipeline-parallel sizes can read.
        "distrib_optim_sharding_type": "fully_reshardable",
        # A stage without experts has one optimizer and others have two: names must not depend on that.
        "chained_optim_avoid_prefix": True,
    }


def _flat(weights: dict[str, Any]) -> dict[str, Any]:
    """What an optimizer looks its parameters up in."""
    return weights["0"] if len(weights) == 1 else weights


def _split(state: Any) -> tuple[Any, Any]:
    """Tensors that are spread over ranks, and the rest. The rest (parameter groups) follows from the layout, and
    Megatron would store that of rank 0 for all: it is left out and made again on loading."""
    from megatron.core.dist_checkpointing.utils import extract_sharded_base

    return extract_sharded_base(state)


def _inner_optimizers(optimizer: Any) -> list[Any]:
    chained = getattr(optimizer, "chained_optimizers", None)
    return [optimizer.optimizer] if chained is None else [one for part in chained for one in _inner_optimizers(part)]


def _steps_taken(optimizer: Any) -> int:
    groups = [group for inner in _inner_optimizers(optimizer) for group in inner.param_groups]
    most = torch.tensor([max((int(group.get("step", 0)) for group in groups), default=0)])
    # A rank may hold no parameter of a group and still counts.
    counts: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(counts, int(most))
    return max(counts)


def _forget_steps(optimizer: Any) -> None:
    for inner in _inner_optimizers(optimizer):
        inner.state.clear()
        for group in inner.param_groups:
            group.pop("step", None)


def _parameter_groups(state: Any) -> Iterator[dict[str, Any]]:
    if isinstance(state, dict):
        for name, value in state.items():
            if name == "param_groups":
                yield from value
            else:
                yield from _parameter_groups(value)
    elif isinstance(state, list):
        for value in state:
            yield from _parameter_groups(value)


def _fresh_heads(
    model: MegatronModel, sharded: dict[str, Any], shapes: Mapping[str, tuple[int, ...]], prefix: str
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Take scalar heads that the folder does not have out of what is asked of it; with what they start.

    A policy's folder has a head of the same name over the vocabulary.
    """
    if model.role == "policy":
        return []
    fresh: list[tuple[torch.Tensor, torch.Tensor]] = []
    for number, chunk in enumerate(model.chunks):
        parameters = dict(chunk.named_parameters())
        for name in (HEAD, HEAD_BIAS):
            own = parameters.get(name)
            if own is not None and shapes.get(prefix + name) != tuple(own.shape):
                sharded[str(number)].pop(prefix + name)
                fresh.append((own, scalar_head(None, name.replace("output_layer", "score"), tuple(own.shape))))
    return fresh


def _restore_random_state(folder: Path, description: dict[str, Any], model: MegatronModel) -> None:
    if description["layout"] == _sizes(model):
        set_random_state(folder, dist.get_rank(), _set_rng)
    elif dist.get_rank() == 0:
        logger.warning(
            "%s was saved with %s and is loaded with %s: random state is not restored",
            folder,
            _words(description["layout"]),
            _words(_sizes(model)),
        )


def _tracked_rng() -> dict[str, torch.Tensor]:
    """Megatron's named random states, one for what tensor-parallel ranks must draw differently."""
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    return get_cuda_rng_tracker().get_states()


def _set_rng(state: dict[str, Any]) -> None:
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    restore_rng(state)
    get_cuda_rng_tracker().set_states(state["megatron"])


def _sizes(model: MegatronModel) -> dict[str, int]:
    return {name: getattr(model.layout, name) for name in _SIZES}


def _words(sizes: Mapping[str, int]) -> str:
    return (
        ", ".join(f"{name.removesuffix('_size').upper()} {size}" for name, size in sizes.items() if size > 1) or "TP 1"
    )
