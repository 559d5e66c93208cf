"""`python -m dovetail.trainer.main_ppo key=value ...`: the same as `dovetail train`, dynamic sampling included."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence

from dovetail.config import load_config
from dovetail.config.arguments import split_arguments
from dovetail.observability.stalls import STALLED_EXIT_CODE, StalledError
from dovetail.trainer.choose import choose_open_keys
from dovetail.trainer.ppo import RayPPOTrainer
from dovetail.trainer.run import USER_ERRORS, run_training, stopped_message

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
        for notice in (*loaded.notices, *loaded.choices):
            logging.getLogger(__name__).info("%s: %s", notice.key, notice.message)
        result = run_ppo(loaded.config, trainer_class=trainer_class)
    except USER_ERRORS as error:
        sys.stderr.write(f"{error}\n")
        return 2
    except StalledError as error:
        sys.stderr.write(f"{error}\n")
        return STALLED_EXIT_CODE
    if result.stopped_by is not None:
        sys.stderr.write(stopped_message(result, loaded.config))
        return 128 + result.stopped_by
    return 0


if __name__ == "__main__":
    sys.exit(main())
