"""Read all that a run reads before it starts a process: for the run itself, and for `dovetail check`."""

from __future__ import annotations

from contextlib import ExitStack

from dovetail.config.errors import Problem
from dovetail.config.root import DovetailConfig
from dovetail.config.user_code import import_user_modules
from dovetail.trainer.method import Method, RunOptions, open_method
from dovetail.trainer.model_folders import fetch_models, refuse_broken_models, refuse_unknown_fields
from dovetail.trainer.refusals import USER_ERRORS, Refusals, problems_of
from dovetail.trainer.shared_folder import with_absolute_folders

MOST_ROWS = 10_000
"""Of each data set that `dovetail check` reads: some seconds."""
LOOKED_AT = (
    "architecture and weights (not of a model on the hub), tokenizer, rows (of more than "
    f"{MOST_ROWS:,} a sample), your own functions and classes."
)


def read_inputs(config: DovetailConfig, options: RunOptions, open_things: ExitStack, *, starts: bool = True) -> Method:
    """The method with its inputs. Raises all that is wrong with models, rows and functions at once.

    Of a run that does not start, nobody will load the weights: all of them are read here for numbers that are not
    finite. None are downloaded for that, so models on the hub are not looked at.
    """
    if starts:
        fetch_models(config)
    with Refusals() as refused:
        with refused.part():
            refuse_unknown_fields(config)
            generates = options.recording is None
            refuse_broken_models(config, on_hub=starts, headers_only=starts, generates=generates)
        with refused.part():
            method = open_method(config, options, open_things)
    return method


def unusable_inputs(config: DovetailConfig) -> tuple[Problem, ...]:
    """What `read_inputs` refuses, or else notices, of some rows where there are many. Closes all that it opens."""
    data, reward = config.data, config.reward_model
    most = max(MOST_ROWS, config.generation_batch_size)
    fewer = {key: most for key in ("train_max_samples", "val_max_samples") if not 0 <= getattr(data, key) <= most}
    sections = {
        "data": data.model_copy(update=fewer),
        "reward_model": reward.model_copy(update={"num_workers": 1}),
    }
    try:
        import_user_modules(config.trainer.import_modules)
        with ExitStack() as open_things:
            small = with_absolute_folders(config.model_copy(update=sections))
            return read_inputs(small, RunOptions(), open_things, starts=False).notices()
    except USER_ERRORS as error:
        return problems_of(error)
