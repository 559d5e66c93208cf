"""The name by which vLLM servers are started (`--worker-extension-cls`, docs/rollout.md)."""

from dovetail.rollout.vllm_worker.extension import WorkerExtension as ServerExtension

__all__ = ["ServerExtension"]
