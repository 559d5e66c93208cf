"""vLLM's executor for ranks that somebody else launched, with a name of its own for what the ranks share.

On CPU the ranks of a tensor-parallel engine exchange through files in /dev/shm, named after the rendezvous address.
Under "external_launcher" vLLM (seen in 0.32) takes that to be "env://" for everybody: two engines on a machine, or one
after another that was killed, would meet in the same file. Imports vLLM.
"""

from __future__ import annotations

import uuid
from pathlib import Path

import torch.distributed as dist
from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher

_SHARED_MEMORY = Path("/dev/shm")


class NamedLauncher(ExecutorWithExternalLauncher):
    """Built on all ranks of the trainer's world alike, which is initialised already: the address is only a name."""

    def _init_executor(self) -> None:
        self._dovetail_name = _agreed_name()
        super()._init_executor()
        # All ranks have mapped the files by now; without their names nothing is left behind, however a rank ends.
        for file in _SHARED_MEMORY.glob(f"{self._dovetail_name}*"):
            file.unlink(missing_ok=True)

    def _distributed_args(self) -> tuple[str, int, int]:
        _, rank, local_rank = super()._distributed_args()
        return f"file:///{self._dovetail_name}", rank, local_rank


def _agreed_name() -> str:
    name = [f"dovetail-{uuid.uuid4().hex[:12]}"]
    dist.broadcast_object_list(name, src=0)
    return name[0]
