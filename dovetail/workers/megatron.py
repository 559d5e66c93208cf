"""The names under which verl has the roles on Megatron. They are the roles themselves: none knows its backend."""

from __future__ import annotations

from dovetail.workers.actor import DataParallelPPOActor as MegatronPPOActor
from dovetail.workers.critic import DataParallelPPOCritic as MegatronPPOCritic

__all__ = ["MegatronPPOActor", "MegatronPPOCritic"]
