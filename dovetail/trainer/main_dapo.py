"""`python -m dovetail.trainer.main_dapo key=value ...`: train with dynamic sampling."""

from __future__ import annotations

import sys

from dovetail.trainer.dapo import RayDAPOTrainer
from dovetail.trainer.main_ppo import main

if __name__ == "__main__":
    sys.exit(main(trainer_class=RayDAPOTrainer))
