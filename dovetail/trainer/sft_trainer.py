"""`python -m dovetail.trainer.sft_trainer key=value ...`: `dovetail sft`, by the name in verl's scripts."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from dovetail.config import ConfigError, load_config
from dovetail.config.overrides import split_arguments
from dovetail.config.translate import canonical
from dovetail.config.tree import leaves
from dovetail.trainer import main_ppo

_DEFAULTS = (
    *("data.train_batch_size=256", "data.micro_batch_size_per_gpu=4", "data.max_length=1024"),
    *("data.use_dynamic_bsz=True", "data.max_token_len_per_gpu=8192", "optim.lr=1e-3"),
    *("trainer.total_epochs=4", "trainer.seed=1", "trainer.nnodes=1", "trainer.n_gpus_per_node=1"),
)
"""What verl's launch lists leave unsaid and mean, where it is not the default here, too."""
_SAVE_FREQ = "trainer.save_freq"
_METHOD = "trainer.method=sft"
_OF_TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def main(argv: Sequence[str] | None = None, defaults: Sequence[str] = _DEFAULTS) -> int:
    """Files and overrides as in a launch script, and what they leave unsaid; returns the exit code.

    Under `torchrun` the first process drives the run, with as many devices as `--nproc_per_node` says; Ray starts the
    workers, so the other processes have nothing to do. The last step is saved whatever the frequency, as verl does.
    """
    if int(os.environ.get("RANK", "0")) != 0:
        return 0
    given = list(sys.argv[1:] if argv is None else argv)
    files, overrides = split_arguments([*given, _METHOD])
    try:
        said = dict(leaves(load_config(files, overrides).tree))
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    if said.get(_SAVE_FREQ) in (-1, 0):
        del said[_SAVE_FREQ]
    values = dict(text.split("=", 1) for text in (*defaults, f"{_SAVE_FREQ}=at_end"))
    if "LOCAL_WORLD_SIZE" in os.environ:
        devices, world = int(os.environ["LOCAL_WORLD_SIZE"]), int(os.environ["WORLD_SIZE"])
        values |= {"trainer.n_gpus_per_node": str(devices), "trainer.nnodes": str(world // devices)}
        for name in _OF_TORCHRUN:
            os.environ.pop(name, None)  # workers have ranks of their own
    unsaid = [f"{key}={value}" for key, value in values.items() if canonical(key)[0] not in said]
    return main_ppo.main([*given, *unsaid, _METHOD])


if __name__ == "__main__":
    sys.exit(main())
