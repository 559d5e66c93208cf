"""`python -m dovetail.trainer.sft_trainer key=value ...`: `dovetail sft`, by the name in verl's scripts."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from dovetail.config.translate import canonical
from dovetail.trainer import main_ppo

_DEFAULTS = (
    *("data.train_batch_size=256", "data.micro_batch_size_per_gpu=4", "data.max_length=1024"),
    *("data.use_dynamic_bsz=True", "data.max_token_len_per_gpu=8192", "optim.lr=1e-3"),
    *("trainer.total_epochs=4", "trainer.seed=1", "trainer.nnodes=1", "trainer.n_gpus_per_node=1"),
)
"""What verl's launch lists leave unsaid and mean, where it is not the default here, too."""
_SAVE_FREQ = "trainer.save_freq"
_NO_FREQUENCY = (f"{_SAVE_FREQ}=-1", f"{_SAVE_FREQ}=0", f"{_SAVE_FREQ}=null")
_OF_TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def main(argv: Sequence[str] | None = None, defaults: Sequence[str] = _DEFAULTS) -> int:
    """Overrides as in a launch script, and what they leave unsaid; returns the exit code.

    Under `torchrun` the first process drives the run, with as many devices as `--nproc_per_node` says; Ray starts the
    workers, so the other processes have nothing to do. The last step is saved whatever the frequency, as verl does.
    """
    if int(os.environ.get("RANK", "0")) != 0:
        return 0
    given = [text for text in (sys.argv[1:] if argv is None else argv) if text.lstrip("+") not in _NO_FREQUENCY]
    values = dict(text.split("=", 1) for text in (*defaults, f"{_SAVE_FREQ}=at_end"))
    if "LOCAL_WORLD_SIZE" in os.environ:
        devices, world = int(os.environ["LOCAL_WORLD_SIZE"]), int(os.environ["WORLD_SIZE"])
        values |= {"trainer.n_gpus_per_node": str(devices), "trainer.nnodes": str(world // devices)}
        for name in _OF_TORCHRUN:
            os.environ.pop(name, None)  # workers have ranks of their own
    said = {canonical(text.partition("=")[0].lstrip("+"))[0] for text in given}
    unsaid = [f"{key}={value}" for key, value in values.items() if canonical(key)[0] not in said]
    return main_ppo.main([*unsaid, *given, "trainer.method=sft"])


if __name__ == "__main__":
    sys.exit(main())
