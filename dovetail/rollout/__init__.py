"""How text is generated: token ids in, token ids and log-probs out."""

from dovetail.rollout.assemble import Response, assemble
from dovetail.rollout.base import (
    EngineError,
    EngineHealth,
    GenerationRequest,
    GenerationResult,
    RolloutEngine,
    SamplingParams,
    UnsupportedPromptError,
    WeightUpdateError,
    derive_seed,
)
from dovetail.rollout.registry import get_engine_class, get_rollout_class, register_engine

__all__ = [
    "EngineError",
    "EngineHealth",
    "GenerationRequest",
    "GenerationResult",
    "Response",
    "RolloutEngine",
    "SamplingParams",
    "UnsupportedPromptError",
    "WeightUpdateError",
    "assemble",
    "derive_seed",
    "get_engine_class",
    "get_rollout_class",
    "register_engine",
]
