"""SGLang as a rollout engine: servers on this machine, in an environment that may have no dovetail."""

from dovetail.rollout.sglang.engine import SGLangRollout
from dovetail.rollout.sglang.settings import SGLangSettings

__all__ = ["SGLangRollout", "SGLangSettings"]
