"""From a role's configuration to a `MegatronBackend`: version, layout, model, weights, optimizer, schedule."""

from __future__ import annotations

import importlib
import os
import warnings
from pathlib import Path
from typing import Any

import torch

from dovetail.backends.megatron.versions import check_version
from dovetail.backends.schedule import LearningRateSchedule, learning_rate
from dovetail.config.megatron import MegatronConfig
from dovetail.config.optim import OptimConfig
from dovetail.models.load import Role


def build_megatron_backend(
    hf_config: Any,
    role: Role,
    *,
    weights: Path,
    megatron: MegatronConfig,
    optim: OptimConfig | None = None,
    max_grad_norm: float = 1.0,
    recompute: bool = False,
    chunked_head: bool = False,
    compile_layers: bool = False,
    device: torch.device | str = "cpu",
) -> Any:
    """A backend for the model of the Hugging Face folder `weights`. `optim=None` builds one for inference.

    The default process group must exist unless this process is alone; every rank calls this alike. `recompute` makes
    layers forget their activations (unless `override_transformer_config` says how); `chunked_head` never holds all
    logits; `compile_layers` compiles the layers of a model that `dense_layer.layers_compile` allows.
    """
    check_version()
    device = torch.device(device)
    # Products overlap with the exchange of their inputs only if the device runs them in the order of their launch.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    _import_quietly()
    from dovetail.backends.megatron.no_te import work_without_transformer_engine
    from dovetail.backends.megatron.shim import cuda_to_cpu

    work_without_transformer_engine()
    with cuda_to_cpu():
        return _build(
            hf_config, role, weights, megatron, optim, max_grad_norm, recompute, chunked_head, compile_layers, device
        )


def _import_quietly() -> None:
    """Megatron says of each of its modules what is not installed. That is known, and is what `no_te` is for."""
    with warnings.catch_warnings():
        for message in (r"Transformer Engine and Apex are not installed", r"Apex is not installed"):
            warnings.filterwarnings("ignore", message=message)
        importlib.import_module("dovetail.backends.megatron.backend")


def _build(
    hf_config: Any,
    role: Role,
    weights: Path,
    megatron: MegatronConfig,
    optim: OptimConfig | None,
    max_grad_norm: float,
    recompute: bool,
    chunked_head: bool,
    compile_layers: bool,
    device: torch.device,
) -> Any:
    from dovetail.backends.megatron.backend import MegatronBackend
    from dovetail.backends.megatron.checkpoint import load_dist_weights
    from dovetail.backends.megatron.families.registry import family_for
    from dovetail.backends.megatron.layout import create_layout
    from dovetail.backends.megatron.model import build_model, wrap_for_training
    from dovetail.backends.megatron.optimizer import MegatronStepper

    family = family_for(hf_config)
    model = build_model(
        family,
        hf_config.get_text_config(),
        role,
        megatron,
        create_layout(megatron, device),
        recompute=recompute and optim is not None,
        chunked_head=chunked_head,
        compile_layers=compile_layers,
        device=device,
    )
    if megatron.use_dist_checkpointing:
        if megatron.dist_checkpointing_path is None:
            raise ValueError(
                "megatron.use_dist_checkpointing=True needs megatron.dist_checkpointing_path: the folder of a Megatron "
                "checkpoint; or leave it off to read the Hugging Face folder."
            )
        load_dist_weights(model, Path(megatron.dist_checkpointing_path), prefix=megatron.dist_checkpointing_prefix)
    else:
        family.load_hf_weights(model, weights)
    if optim is None:
        return MegatronBackend(model, family, device=device)
    model = wrap_for_training(model, megatron)
    stepper = MegatronStepper(model, optim, megatron, max_grad_norm)
    schedule = LearningRateSchedule(
        stepper.optimizer, lambda step: learning_rate(step, optim, optim.total_training_steps)
    )
    return MegatronBackend(
        model, family, device=device, stepper=stepper, schedule=schedule, frees_gradients=megatron.grad_offload
    )
