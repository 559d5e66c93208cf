"""`python -m dovetail.trainer.main_fully_async key=value ...`: train with `async_training.mode=fully_async`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from dovetail.trainer import main_ppo


def main(argv: Sequence[str] | None = None) -> int:
    """As `main_ppo.main`; a mode among the arguments wins."""
    return main_ppo.main(["async_training.mode=fully_async", *(sys.argv[1:] if argv is None else argv)])


if __name__ == "__main__":
    sys.exit(main())
