"""What a vLLM server needs in its workers to be driven from elsewhere: `--worker-extension-cls` names this class.

Imported by vLLM's workers, never by the trainer. Answers are plain JSON values.
"""

from __future__ import annotations

import logging
from typing import Any

from torch import Tensor

from dovetail.rollout.remote.dialect import model_shape
from dovetail.rollout.vllm.worker_extension import WeightUpdateExtension

logger = logging.getLogger(__name__)


class ServerExtension(WeightUpdateExtension):
    """Weight updates, and what a client must know before it trusts the server."""

    def dovetail_server_info(self) -> dict[str, Any]:
        """From every worker alike. `weight_version` is None in a server that has had no whole update."""
        config = self.vllm_config
        return {
            "weight_version": getattr(self, "_dovetail_version", None),
            "num_workers": config.parallel_config.world_size,
            "dtype": str(config.model_config.dtype).removeprefix("torch."),
            "logprobs": self._dovetail_logprobs(),
            "shape": model_shape(config.model_config.hf_config),
        }

    def _dovetail_logprobs(self) -> str:
        """What log-probs mean here, in the words of `dovetail.rollout.base`."""
        if self._dovetail_gives_temperature_logprobs:
            return "temperature"
        return "processed" if "processed" in str(self.vllm_config.model_config.logprobs_mode) else "raw"

    def dovetail_start_update(
        self, shapes: dict[str, list[int]], ties: dict[str, str], optional: dict[str, list[int]] | None = None
    ) -> None:
        """From here to `dovetail_set_version` the weights are of no version."""
        self._dovetail_version = None
        self.dovetail_begin_update(shapes, ties, optional)

    def dovetail_load(self, named: list[tuple[str, Tensor]]) -> str | None:
        """As in one process, but whatever goes wrong comes back in words: the rest of a broadcast must be received,
        or its sender and all other servers wait for this one."""
        try:
            return super().dovetail_load(named)
        except Exception as error:
            logger.exception("weights could not be loaded")
            return f"loading weights failed with {type(error).__name__}: {error}"

    def dovetail_set_version(self, version: int) -> None:
        self._dovetail_version = version
