"""Router replay: tokens go to the experts that were recorded for them, not to those that the routers choose now.

Only the choice is replayed. The weights of the chosen experts are computed from the router's own scores, as it would
compute them had it chosen so, and gradients reach the router through them. A router that replays its own choice gives
what it gives without. Knows no batch and no engine.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dovetail.models.errors import ModelError
from dovetail.models.lora import stacked_experts
from dovetail.protocol.routed_experts import expert_dtype


def _softmax_weights(router: Any, logits: Tensor, experts: Tensor) -> Tensor:
    weights = torch.softmax(logits, dim=-1, dtype=torch.float32).gather(1, experts)
    if getattr(router, "norm_topk_prob", True):  # Mixtral always does, and has no such field
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return weights


def _sigmoid_weights(router: Any, logits: Tensor, experts: Tensor) -> Tensor:
    weights = logits.sigmoid().gather(1, experts)
    if router.norm_topk_prob:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
    return weights * router.routed_scaling_factor


_WEIGHTS: dict[str, Callable[[Any, Tensor, Tensor], Tensor]] = {
    "MixtralTopKRouter": _softmax_weights,
    "FlexOlmoTopKRouter": _softmax_weights,
    "OlmoeTopKRouter": _softmax_weights,
    "Qwen2MoeTopKRouter": _softmax_weights,
    "Qwen3MoeTopKRouter": _softmax_weights,
    "Qwen3NextTopKRouter": _softmax_weights,
    "DeepseekV3TopkRouter": _sigmoid_weights,
    "Glm4MoeTopkRouter": _sigmoid_weights,
}
"""By class of transformers: the weights `[n, k]` of these experts, from the router's logits `[n, num_experts]`."""


class RouterReplay:
    """Hooks on the routers of a model, which may be on the meta device; ModelError if they are not all known.

    Between two calls of `begin` the model runs as it was told: also the layers that gradient checkpointing runs again.
    """

    def __init__(self, hf_model: Any) -> None:
        refuse_unknown_routers(hf_model)
        modules: list[Any] = _routers_of(hf_model)
        self._dtype = expert_dtype(max(module.num_experts for module in modules))
        self._num_chosen = sum(module.top_k for module in modules)
        self._routers = [_Router(module, self._dtype) for module in modules]

    def begin(self, routed_experts: Tensor | None, *, record: bool) -> None:
        """Of the next forward: the experts to replay, `[n, layers, k]`, and whether to `record` those it takes."""
        for number, router in enumerate(self._routers):
            router.replayed = None if routed_experts is None else routed_experts[:, number]
            router.records = record
            router.recorded = router.changed = None

    def recorded(self) -> Tensor:
        """`[n, layers, k]`: the experts that the tokens of the last forward were sent to."""
        return torch.stack([_present(router.recorded) for router in self._routers], dim=1)

    def as_array(self, entries: Tensor) -> np.ndarray:
        """`[tokens, layers, k]`, on the host, of entries that hold as many bytes for each token."""
        return entries.view(self._dtype).unflatten(1, (len(self._routers), -1)).cpu().numpy().copy()

    @property
    def bytes_per_token(self) -> int:
        return self._num_chosen * self._dtype.itemsize

    def changed(self) -> Tensor:
        """`[n]` float32: for each token of the last forward the share of replayed experts that the routers would not
        have chosen, over all layers."""
        return torch.stack([_present(router.changed) for router in self._routers]).mean(dim=0)


def refuse_unknown_routers(hf_model: Any) -> None:
    """ModelError unless every layer with experts has a router whose choice can be replayed."""
    layers = {name.rpartition(".")[0] for name in stacked_experts(hf_model)}
    known = sum(1 for _ in _routers_of(hf_model))
    if known and known == len(layers):
        return
    families = ", ".join(name.partition("Top")[0] for name in _WEIGHTS)
    has = f"{len(layers)} layers with experts, {known} of them with such a router" if layers else "no experts"
    raise ModelError(
        f"{type(hf_model).__name__} has {has}: router replay knows the routers of {families}; set "
        "actor_rollout_ref.actor.router_replay.mode=disabled for this model."
    )


class _Router:
    """The hook of one router: what it replays, and what it has seen since `begin`."""

    def __init__(self, module: Any, dtype: torch.dtype) -> None:
        self.replayed: Tensor | None = None
        self.records = False
        self.recorded: Tensor | None = None
        self.changed: Tensor | None = None
        self._dtype = dtype
        self._weights = _WEIGHTS[type(module).__name__]
        module.register_forward_hook(self)

    # Outside compiled graphs, which are then the same whatever is recorded or replayed, and may be compiled ahead.
    @torch.compiler.disable
    def __call__(self, module: Any, args: tuple, output: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, ...]:
        logits, weights, chosen = output
        experts = chosen
        if self.replayed is not None:
            experts = torch.where(self.replayed < module.num_experts, self.replayed, chosen)
            with torch.no_grad():
                stays = (experts[:, :, None] == chosen[:, None, :]).any(dim=-1)
                self.changed = 1 - stays.float().mean(dim=-1)
            weights = self._weights(module, logits, experts).to(weights.dtype)
        if self.records:
            self.recorded = experts.to(self._dtype)
        return logits, weights, experts


def _routers_of(hf_model: Any) -> list[nn.Module]:
    return [module for module in hf_model.modules() if type(module).__name__ in _WEIGHTS]


def _present(seen: Tensor | None) -> Tensor:
    assert seen is not None, "the last forward went through every router, and was told to record or replay"
    return seen
