"""Low-rank adapters through peft: put in, switch off, merge out.

Adapters are injected into the transformers model itself, so every other part sees the same classes and, but for
`.base_layer`, the same names. The reference policy is the actor with its adapter off. peft is imported only here.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from dovetail.config.model import ModelConfig
from dovetail.models.errors import ModelError
from dovetail.models.weights import ADAPTER, LORA_BASE

logger = logging.getLogger(__name__)


def add_lora(
    hf_model: Any,
    *,
    rank: int,
    alpha: float,
    target_modules: str | Sequence[str] = "all-linear",
    dropout: float = 0.0,
    exclude_modules: str | Sequence[str] | None = None,
) -> Any:
    """Inject adapters and freeze everything else; returns the same model. Call it before FSDP, meta device or not.

    "all-linear" is every linear layer but the output layer. Experts, which are one parameter a layer, and their routers
    get none. A scalar head, which starts from random numbers, gets no adapter and is trained itself.
    """
    from peft import LoraConfig, inject_adapter_in_model

    targets = target_modules if isinstance(target_modules, str) else list(target_modules)
    excluded = exclude_modules if exclude_modules is None or isinstance(exclude_modules, str) else list(exclude_modules)
    place: Any = hf_model
    if targets == "all-linear":
        targets = _linear_layers(hf_model)
        # The same modules without a config, by which peft adds the experts and routers of some mixtures.
        place = nn.Module()
        place._modules = hf_model._modules
        _say_what_gets_none(hf_model)
    config = LoraConfig(
        r=rank,
        lora_alpha=alpha,  # pyrefly: ignore[bad-argument-type]
        target_modules=targets,
        exclude_modules=excluded,
        lora_dropout=dropout,
        bias="none",
    )
    try:
        inject_adapter_in_model(config, place, adapter_name=ADAPTER)
    except ValueError as error:
        raise ModelError(
            f"target_modules={target_modules} with exclude_modules={exclude_modules} cannot be adapted in "
            f"{type(hf_model).__name__}: {error} all-linear adapts every linear layer."
        ) from error
    _refuse_what_cannot_be_merged(hf_model)
    for name, parameter in hf_model.named_parameters():
        parameter.requires_grad_(is_lora_name(name))
    for head in _scalar_heads(hf_model):
        head.requires_grad_(True)
    return hf_model


def add_adapters(hf_model: Any, model: ModelConfig) -> None:
    """`add_lora` as a section of the configuration says."""
    add_lora(
        hf_model,
        rank=model.lora_rank,
        alpha=model.lora_alpha,
        target_modules=model.target_modules,
        dropout=model.lora_dropout,
        exclude_modules=model.exclude_modules,
    )


def _linear_layers(hf_model: Any) -> list[str]:
    heads = [hf_model.get_output_embeddings(), *_scalar_heads(hf_model)]
    return [
        name
        for name, part in hf_model.named_modules()
        # No class of their kind: PhiMoE's router is one and returns a pair, DeepSeek-V4 has layers in groups.
        if type(part) in (nn.Linear, Conv1D)
        and all(part is not head for head in heads)
        and not _is_read(name, hf_model)
    ]


_READ = {
    "jamba": ".dt_proj", "mamba": ".dt_proj", "falcon_mamba": ".dt_proj", "longcat_flash": ".router.classifier"
}  # fmt: skip


def _is_read(name: str, hf_model: Any) -> bool:
    """Whether the model reads a layer's weight and never calls it: an adapter would act in merged weights alone."""
    ending = _READ.get(hf_model.config.model_type)
    return ending is not None and name.endswith(ending)


def _say_what_gets_none(hf_model: Any) -> None:
    if experts := stacked_experts(hf_model):
        logger.warning(
            "target_modules=all-linear: the experts of %s are one parameter a layer (%s) and get no adapter; its other "
            "linear layers do.", type(hf_model).__name__, experts[0],
        )  # fmt: skip


def stacked_experts(hf_model: Any) -> list[str]:
    """Names of the parameters that hold all experts of a layer."""
    return [name for name, parameter in hf_model.named_parameters() if parameter.dim() == 3 and "experts" in name]


def _scalar_heads(hf_model: Any) -> list[nn.Module]:
    heads = (getattr(hf_model, name, None) for name in ("score", "classifier"))
    return [head for head in heads if head is not None]


def _refuse_what_cannot_be_merged(hf_model: Any) -> None:
    from peft.tuners.lora.layer import ParamWrapper

    adapted = {name: layer for name, layer in hf_model.named_modules() if _is_adapted(layer)}
    experts = [name for name, layer in adapted.items() if isinstance(layer, ParamWrapper)]
    if experts:
        raise ModelError(
            f"{type(hf_model).__name__} holds all experts of a layer in one parameter ({experts[0]}), which gets no "
            "adapter here; set target_modules=all-linear, which leaves it out, or to layers of its attention, such as "
            "[q_proj, k_proj, v_proj, o_proj]."
        )
    if read := [name for name in adapted if _is_read(name, hf_model)]:
        raise ModelError(
            f"{type(hf_model).__name__} reads the weight of {read[0]} and never calls it, so an adapter would not act "
            "in training; take it out of target_modules."
        )
    embedding = hf_model.get_input_embeddings().weight
    for name, layer in adapted.items():
        if getattr(layer.get_base_layer(), "weight", None) is embedding:
            raise ModelError(
                f"{name} of {type(hf_model).__name__} is its embedding, or tied to it, and an adapter cannot be merged "
                "into both; take it out of target_modules."
            )


def is_lora_name(name: str) -> bool:
    return ".lora_" in name


def has_lora(module: nn.Module) -> bool:
    return any(is_lora_name(name) for name, _ in module.named_parameters())


@contextmanager
def adapter_disabled(module: nn.Module) -> Iterator[None]:
    """Inside this block the model computes as if it had no adapter."""
    layers = _adapted_layers(module)
    adapters = [p for layer in layers for name, p in layer.named_parameters() if is_lora_name(f".{name}")]
    trainable = [parameter for parameter in adapters if parameter.requires_grad]
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)
        for parameter in trainable:  # switching an adapter on leaves its parameters frozen in some peft releases
            parameter.requires_grad_(True)


def merged_weights(module: nn.Module, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Full weights under plain names, with each adapter added in: what an engine or a checkpoint wants.

    `weights` are `(parameter name in module, full tensor)` in any order, adapters included, as a backend gathers them.
    Only weights that wait for their adapter are held.
    """
    layers: dict[str, Any] = {name: layer for name, layer in module.named_modules() if _is_adapted(layer)}
    waiting: dict[str, dict[str, Tensor]] = {}
    for name, tensor in weights:
        layer, part = _split(name, layers)
        if layer is None:
            yield name, tensor
            continue
        if part == "bias":
            yield f"{layer}.bias", tensor
            continue
        parts = waiting.setdefault(layer, {})
        parts[part] = tensor
        if len(parts) == 3:
            del waiting[layer]
            yield f"{layer}.weight", _merge(parts["weight"], parts["A"], parts["B"], layers[layer])
    assert not waiting, f"weights of adapted layers did not all arrive: {sorted(waiting)}"


def _merge(weight: Tensor, a: Tensor, b: Tensor, layer: Any) -> Tensor:
    # float32: a small update added in bfloat16 would mostly be rounded away.
    delta = torch.mm(b.float(), a.float()).mul_(layer.scaling[ADAPTER])
    if layer.fan_in_fan_out:  # GPT-2 keeps its matrices the other way round
        delta = delta.t().contiguous()
    return delta.add_(weight.to(delta.device).float()).to(weight.dtype)


def _split(name: str, layers: dict[str, Any]) -> tuple[str | None, str]:
    """(adapted layer, "weight" | "bias" | "A" | "B") or (None, "")."""
    for marker, part in ((f".lora_A.{ADAPTER}.weight", "A"), (f".lora_B.{ADAPTER}.weight", "B")):
        if name.endswith(marker):
            return name.removesuffix(marker), part
    head, separator, part = name.rpartition(LORA_BASE)
    return (head, part) if separator and head in layers else (None, "")


def _is_adapted(layer: nn.Module) -> bool:
    from peft.tuners.lora import LoraLayer

    return isinstance(layer, LoraLayer)


def _adapted_layers(module: nn.Module) -> list[Any]:
    layers = [layer for layer in module.modules() if _is_adapted(layer)]
    if not layers:
        raise ValueError(f"{type(module).__name__} has no LoRA adapter to switch off; set lora_rank above 0.")
    return layers
