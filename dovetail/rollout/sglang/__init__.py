"""SGLang as a rollout engine. SGLang itself is imported only when an engine is started inside this process."""

from dovetail.rollout.sglang.engine import SGLangRollout
from dovetail.rollout.sglang.settings import SGLangSettings

__all__ = ["SGLangRollout", "SGLangSettings"]
