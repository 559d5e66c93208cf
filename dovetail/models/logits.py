"""What a model does to its logits after the output layer: a factor, a cap, or both.

Read from the config, where every family has names of its own, and compared with the model's own forward, in which the
layers and the output layer are stood in for by given numbers. Computes no logits of a batch.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dovetail.models.errors import ModelError

logger = logging.getLogger(__name__)

_FACTORS = ("logit_scale", "lm_head_multiplier", "output_multiplier")
_DIVISORS = ("logits_scaling", "logits_mup_width_multiplier")
_CAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")

_LEAVE_OUT_SCALE = ("aya_vision", "cohere2_vision")
"""transformers 5.19: these classes leave out the `logit_scale` of their language model, which the text-only class,
vLLM and transformers up to 4.51 apply. `test_logits.py` says when upstream has mended it."""


def logit_transform(hf_model: Any) -> tuple[float, float | None]:
    """Factor and cap of the logits z after the output layer: `factor * cap * tanh(z / cap)`, or `factor * z`."""
    config = hf_model.config
    text = config.get_text_config()
    if (getattr(text, "unpadded_vocab_size", None) or text.vocab_size) < text.vocab_size:
        raise ModelError(
            f"model_type={text.model_type} leaves out the logits from {text.unpadded_vocab_size} on "
            "(unpadded_vocab_size), which dovetail does not; use a model without."
        )
    factors, divisors = _FACTORS, _DIVISORS
    if text.model_type == "hyperclovax":  # the one that multiplies by what others divide by
        factors, divisors = (*_FACTORS, *_DIVISORS), ()
    factor = _product(text, factors) / _product(text, divisors)
    cap = next((cap for name in _CAPS if (cap := getattr(text, name, None))), None)
    if leaves_out_scale(hf_model):
        logger.warning(
            "%s in transformers leaves out logit_scale=%s of its language model. dovetail applies it in training, as "
            "vLLM does in generation; transformers' own generate() samples from other probabilities.",
            type(hf_model).__name__, text.logit_scale,
        )  # fmt: skip
        return factor, cap
    return _as_the_model_does(hf_model, factor, cap)


def leaves_out_scale(hf_model: Any) -> bool:
    """Whether transformers computes other logits than the model was trained with."""
    scale = getattr(hf_model.config.get_text_config(), "logit_scale", None)
    return hf_model.config.model_type in _LEAVE_OUT_SCALE and scale not in (None, 1)


def _product(config: Any, names: Sequence[str]) -> float:
    return math.prod(float(getattr(config, name, None) or 1.0) for name in names)


def _as_the_model_does(hf_model: Any, factor: float, cap: float | None) -> tuple[float, float | None]:
    given = torch.linspace(-64, 64, 33)  # exact in bfloat16, and far beyond any cap
    try:
        own = _own_logits(hf_model, given)
    except Exception as error:  # any code of a model's author may run here
        message = f"how {type(hf_model).__name__} makes logits of its states cannot be told ({error})"
        if type(hf_model).__module__.startswith("transformers."):
            raise ModelError(f"{message}, and dovetail would train on others; use another model.") from error
        logger.warning("%s; log-probs are right if it applies a linear layer and no more.", message)
        return factor, cap
    candidates = [(factor, cap)] if cap is None else [(factor, cap), (factor, cap / factor)]  # capped before, or after
    for factor, cap in candidates:
        capped = given if cap is None else torch.tanh(given / cap) * cap
        if own.numel() == given.numel() and torch.allclose(own.flatten().float(), factor * capped, rtol=0.01, atol=0.1):
            return factor, cap
    settings = {name: value for name in (*_FACTORS, *_DIVISORS, *_CAPS) if (value := _setting(hf_model, name))}
    raise ModelError(
        f"{type(hf_model).__name__} changes its logits in a way that dovetail does not compute, or leaves out what its "
        f"config says ({settings}); use another model, or take these fields out with override_config."
    )


def _setting(hf_model: Any, name: str) -> Any:
    return getattr(hf_model.config.get_text_config(), name, None)


@torch.no_grad()
def _own_logits(hf_model: Any, given: Tensor) -> Tensor:
    """What the model's own forward makes of the numbers that come out of its output layer."""
    base, head = hf_model.base_model, hf_model.get_output_embeddings()
    replica = copy.copy(hf_model)  # the modules are shared, but for those that are stood in for
    replica._modules = {
        name: _StandIn(part, lambda *args, **kwargs: _States(given.view(1, 1, -1)))
        if part is base
        else _StandIn(part, lambda states: states)
        if part is not None and any(inner is head for inner in part.modules())
        else part
        for name, part in hf_model._modules.items()
    }
    ids = torch.zeros(1, 1, dtype=torch.long)
    return type(hf_model).forward(replica, input_ids=ids, use_cache=False, return_dict=True).logits


class _States:
    """The output of a backbone with every other field None."""

    def __init__(self, last_hidden_state: Tensor) -> None:
        self.last_hidden_state = last_hidden_state

    def __getitem__(self, index: int) -> Tensor | None:
        return self.last_hidden_state if index == 0 else None

    def __getattr__(self, name: str) -> None:
        return None


class _StandIn(nn.Module):
    """Calls `compute` in the place of a module, and has the module's attributes. Its decoder is itself."""

    def __init__(self, part: nn.Module, compute: Callable[..., Any]) -> None:
        super().__init__()
        self.__dict__["_part"], self._compute = part, compute

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._compute(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return self if name == "decoder" else getattr(self.__dict__["_part"], name)
