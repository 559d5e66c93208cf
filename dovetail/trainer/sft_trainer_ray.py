"""`python -m dovetail.trainer.sft_trainer_ray key=value ...`: the same as `sft_trainer`, which always uses Ray."""

from __future__ import annotations

import sys

from dovetail.trainer.sft_trainer import main

if __name__ == "__main__":
    sys.exit(main())
