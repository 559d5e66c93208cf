"""`python -m dovetail.trainer.fsdp_sft_trainer key=value ...`: `sft_trainer`, with verl's older defaults."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from dovetail.trainer import sft_trainer

_DEFAULTS = (
    *("data.train_batch_size=256", "data.micro_batch_size_per_gpu=4", "data.max_length=1024"),
    *("data.prompt_key=question", "data.response_key=answer"),
    *("optim.lr=1e-5", "optim.betas=[0.9,0.95]", "optim.warmup_steps_ratio=0.1", "optim.lr_scheduler=cosine"),
    *("trainer.total_epochs=4", "trainer.seed=1"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """As `sft_trainer.main`."""
    return sft_trainer.main(argv, _DEFAULTS)


if __name__ == "__main__":
    sys.exit(main())
