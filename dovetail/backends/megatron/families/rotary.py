"""Rotary position embeddings: what a Hugging Face configuration asks for, told to Megatron. Refuses what it cannot do.

Frequencies are taken from transformers' own functions, so every scaling that only changes frequencies (linear, Llama 3)
is exact for all of its parameters; YaRN also scales sines and cosines, which Megatron derives from the factors.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch import nn

_KINDS = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True)
class Rotary:
    """`kind` is one of default, linear, llama3, yarn; `values` are transformers' `rope_parameters`."""

    kind: str
    theta: float
    values: dict[str, Any]

    @classmethod
    def of(cls, hf_config: Any, *, kinds: tuple[str, ...] = _KINDS) -> Rotary:
        """Read and check; a kind outside `kinds` is refused with its name."""
        values = dict(hf_config.rope_parameters)
        kind = values.get("rope_type", "default")
        if kind not in kinds:
            raise ValueError(
                f"rope_type={kind} of {hf_config.model_type} is not computed on Megatron here (only "
                f"{', '.join(kinds)}); use strategy=fsdp2, or change rope_parameters with model.override_config."
            )
        if values.get("partial_rotary_factor", 1.0) != 1.0:
            raise ValueError(
                f"partial_rotary_factor={values['partial_rotary_factor']} is not built on Megatron here; use "
                "strategy=fsdp2."
            )
        rotary = cls(kind, float(values["rope_theta"]), values)
        if kind == "yarn":
            rotary._check_attention_factor()
        return rotary

    @property
    def factor(self) -> float:
        return float(self.values["factor"])

    @property
    def yarn_scales(self) -> tuple[float, float] | None:
        """`mscale` and `mscale_all_dim`, which count only together; None when transformers ignores them."""
        first, second = self.values.get("mscale"), self.values.get("mscale_all_dim")
        return (float(first), float(second)) if first and second else None

    @property
    def original_length(self) -> int:
        return int(self.values["original_max_position_embeddings"])

    @property
    def betas(self) -> tuple[float, float]:
        return float(self.values.get("beta_fast") or 32), float(self.values.get("beta_slow") or 1)

    def _check_attention_factor(self) -> None:
        given = self.values.get("attention_factor")
        if self.values.get("factor") is None:
            raise ValueError("rope_type=yarn without a factor is not built on Megatron here; write the factor.")
        if given is None:
            return
        scales = self.yarn_scales
        derived = _yarn_scale(self.factor) if scales is None else _ratio(self.factor, *scales)
        if not math.isclose(given, derived, rel_tol=1e-6):
            raise ValueError(
                f"rope_parameters.attention_factor={given}: Megatron derives {derived:.6f} from the factor, always; "
                "leave it out, or use strategy=fsdp2."
            )


def set_frequencies(chunk: nn.Module, hf_config: Any) -> None:
    """Give a built `GPTModel` chunk (not latent attention) the frequencies that transformers computes."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rotary = Rotary.of(hf_config)
    if rotary.kind == "default":
        return
    embedding: Any = chunk.rotary_pos_emb
    frequencies, _ = ROPE_INIT_FUNCTIONS[rotary.kind](hf_config, device=embedding.inv_freq.device)
    embedding.inv_freq = frequencies.to(embedding.inv_freq.dtype)
    if rotary.kind == "yarn":
        # Attention reads the factor of sines and cosines from these; they are no fields of the configuration class.
        config: Any = chunk.config
        config.yarn_rotary_scaling_factor = rotary.factor
        config.yarn_mscale, config.yarn_mscale_all_dim = rotary.yarn_scales or (None, None)


def latent_rotary_fields(hf_config: Any) -> dict[str, Any]:
    """The fields of `MLATransformerConfig` about positions."""
    rotary = Rotary.of(hf_config, kinds=("default", "yarn"))
    if rotary.kind == "default":
        # The factor scales the softmax too, whatever the type: 1 leaves it alone.
        return {"rope_type": "rope", "rotary_base": rotary.theta, "rotary_scaling_factor": 1.0}
    if rotary.yarn_scales is None and rotary.values.get("mscale_all_dim"):
        raise ValueError("mscale_all_dim without mscale is not built on Megatron here; use strategy=fsdp2.")
    mscale, mscale_all_dim = rotary.yarn_scales or (1.0, 0.0)
    beta_fast, beta_slow = rotary.betas
    if not rotary.values.get("truncate", True):
        raise ValueError("rope_parameters.truncate=False is not built on Megatron's latent attention; use fsdp2.")
    return {
        "rope_type": "yarn",
        "rotary_base": rotary.theta,
        "rotary_scaling_factor": rotary.factor,
        "original_max_position_embeddings": rotary.original_length,
        "beta_fast": beta_fast,
        "beta_slow": beta_slow,
        "mscale": mscale,
        "mscale_all_dim": mscale_all_dim,
    }


def _ratio(factor: float, mscale: float, mscale_all_dim: float) -> float:
    return _yarn_scale(factor, mscale) / _yarn_scale(factor, mscale_all_dim)


def _yarn_scale(factor: float, mscale: float = 1.0) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0
