"""`python -m dovetail.trainer.main_ppo key=value ...`: train with PPO's loop. The same as `dovetail train`."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence

from dovetail.config import load_config
from dovetail.trainer.ppo import RayPPOTrainer
from dovetail.trainer.run import USER_ERRORS, run_training


def main(argv: Sequence[str] | None = None, trainer_class: type[RayPPOTrainer] | None = RayPPOTrainer) -> int:
    """Overrides as in a launch script; YAML files by path. Returns the exit code."""
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    arguments = list(sys.argv[1:] if argv is None else argv)
    files = [argument for argument in arguments if argument.endswith((".yaml", ".yml")) and "=" not in argument]
    try:
        loaded = load_config(files, [argument for argument in arguments if argument not in files])
        for notice in loaded.notices:
            logging.getLogger(__name__).info("%s: %s", notice.key, notice.message)
        run_training(loaded.config, trainer_class=trainer_class)
    except USER_ERRORS as error:
        sys.stderr.write(f"{error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
