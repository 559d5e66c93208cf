"""Models that the embedded engine or Megatron does not compute, told before a worker builds one."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

from dovetail.models.errors import ModelError


def refuse_for_native_engine(model: PreTrainedModel, *, advice: str = "") -> None:
    """ModelError with what to use instead, and `advice`; the model is on the meta device."""
    from dovetail.rollout.native.model import refuse_unsupported

    try:
        refuse_unsupported(model)
    except NotImplementedError as error:
        raise ModelError(f"{error}{advice}") from error


def refuse_for_megatron(hf_config: Any) -> None:
    """ModelError with what to use instead."""
    from dovetail.backends.megatron.families.registry import family_for

    try:
        family_for(hf_config).transformer_config(hf_config.get_text_config())
    except ValueError as error:
        raise ModelError(str(error)) from error
