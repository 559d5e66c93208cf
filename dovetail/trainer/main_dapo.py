"""`python -m dovetail.trainer.main_dapo key=value ...`: train with dynamic sampling."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from dovetail.trainer import main_ppo
from dovetail.trainer.dapo import RayDAPOTrainer


def main(argv: Sequence[str] | None = None) -> int:
    """As `main_ppo.main`, always with `RayDAPOTrainer`."""
    return main_ppo.main(argv, trainer_class=RayDAPOTrainer)


if __name__ == "__main__":
    sys.exit(main())
