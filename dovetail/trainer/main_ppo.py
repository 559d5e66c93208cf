"""`python -m dovetail.trainer.main_ppo key=value ...`: the same as `dovetail train`, dynamic sampling included."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence

from dovetail.config import ConfigError, load_config
from dovetail.config.overrides import split_arguments
from dovetail.trainer.choose import choose_open_keys
from dovetail.trainer.ppo import RayPPOTrainer
from dovetail.trainer.run import exit_code_of, run_training

run_ppo = run_training
"""The name that scripts of verl import: a resolved configuration in, a finished run out."""


def main(argv: Sequence[str] | None = None, trainer_class: type[RayPPOTrainer] | None = None) -> int:
    """Overrides as in a launch script; YAML files by path. Returns the exit code.

    Without `trainer_class` the configuration chooses: a loop that cannot filter groups would pass over
    `algorithm.filter_groups.enable=True`.
    """
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    files, overrides = split_arguments(sys.argv[1:] if argv is None else argv)
    try:
        loaded = choose_open_keys(load_config(files, overrides))
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    for notice in (*loaded.notices, *loaded.choices):
        logging.getLogger(__name__).info("%s: %s", notice.key, notice.message)
    return exit_code_of(lambda: run_ppo(loaded.config, trainer_class=trainer_class), loaded.config)


if __name__ == "__main__":
    sys.exit(main())
