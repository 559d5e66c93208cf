"""vLLM as a rollout engine. vLLM itself is imported only when an engine is built."""

from dovetail.rollout.vllm.engine import VLLMEngine, vLLMRollout
from dovetail.rollout.vllm.settings import VLLMSettings

__all__ = ["VLLMEngine", "VLLMSettings", "vLLMRollout"]
