"""`python -m dovetail.trainer.fsdp_sft_trainer key=value ...`: `dovetail sft`, by the name in verl's scripts."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from dovetail.config.translate import canonical
from dovetail.trainer import main_ppo

_DEFAULTS = (
    *("data.train_batch_size=256", "data.micro_batch_size_per_gpu=4", "data.max_length=1024"),
    *("data.prompt_key=question", "data.response_key=answer"),
    *("optim.lr=1e-5", "optim.betas=[0.9,0.95]", "optim.warmup_steps_ratio=0.1", "optim.lr_scheduler=cosine"),
    *("trainer.total_epochs=4", "trainer.seed=1"),
)
"""What verl's launch lists leave unsaid and mean."""


def main(argv: Sequence[str] | None = None) -> int:
    """Overrides as in a launch script; returns the exit code.

    Under `torchrun` the first process drives the run, with as many devices as `--nproc_per_node` says; Ray starts the
    workers, so the other processes have nothing to do.
    """
    if int(os.environ.get("RANK", "0")) != 0:
        return 0
    given = list(sys.argv[1:] if argv is None else argv)
    defaults = list(_DEFAULTS)
    if "LOCAL_WORLD_SIZE" in os.environ:
        devices, world = int(os.environ["LOCAL_WORLD_SIZE"]), int(os.environ["WORLD_SIZE"])
        defaults += [f"trainer.n_gpus_per_node={devices}", f"trainer.nnodes={world // devices}"]
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            os.environ.pop(name, None)  # workers have ranks of their own
    said = {canonical(text.partition("=")[0].lstrip("+"))[0] for text in given}
    unsaid = [text for text in defaults if canonical(text.partition("=")[0])[0] not in said]
    return main_ppo.main([*unsaid, *given, "trainer.method=sft"])


if __name__ == "__main__":
    sys.exit(main())
