"""Reward managers written for verl, run in a scoring process. One adapter for both of verl's contracts.

- `Manager(tokenizer, num_examine, compute_score, reward_fn_key, **kw)`, called with a batch: `manager(data,
  return_dict=True)` gives `reward_tensor` and `reward_extra_info`.
- `Manager(config, tokenizer, compute_score, **kw)` with `async def run_single(data)` for a batch of one row: it gives
  `reward_score` and `reward_extra_info`.

A row travels as a `DataProto` of its own in the place of `solution_str`. The score of a row goes on its last token.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from omegaconf import OmegaConf

from dovetail.config.user_code import load_user_object
from dovetail.protocol import DataProto
from dovetail.rewards.answers import Answer, Decoder
from dovetail.rewards.errors import RewardError
from dovetail.rewards.functions import FunctionSpec
from dovetail.rewards.managers import RewardManager
from dovetail.rewards.registry import default_compute_score, rule_of

# Without rm_scores: the runner adds them, and a manager of verl would return them in the place of its own.
_COLUMNS = ("prompts", "responses", "attention_mask", "response_mask")


@dataclass(frozen=True)
class VerlManagerSpec:
    """Where the manager is and what it is made with; pickled to the scoring processes."""

    path: str
    name: str
    tokenizer: Any
    function: FunctionSpec
    reward_fn_key: str
    config: Mapping[str, Any]
    options: Mapping[str, Any]


class VerlRewardManager(RewardManager):
    """The driver's half: sends rows as they are in the batch instead of text."""

    def __init__(self, *, scores_whole_batch: bool) -> None:
        self.scores_whole_batch = scores_whole_batch
        self._rows: dict[int, DataProto] = {}

    def read(self, batch: DataProto, tokenizer: Decoder, reward_fn_key: str) -> list[Answer]:
        answers = super().read(batch, tokenizer, reward_fn_key)
        tensors = [name for name in _COLUMNS if name in batch]
        rows = batch.select(batch_keys=tensors)
        self._rows = {id(answer): rows[row : row + 1] for row, answer in enumerate(answers)}
        return answers

    def prepare(self, answer: Answer) -> dict[str, Any]:
        return answer.arguments(self._rows.pop(id(answer)))


def is_verl_manager(manager: Any) -> bool:
    """Whether a class keeps one of verl's two contracts."""
    return isinstance(manager, type) and (hasattr(manager, "run_single") or "__call__" in vars_of(manager))


def vars_of(manager: type) -> set[str]:
    return {name for kind in manager.__mro__ if kind is not object for name in vars(kind)}


def adapt(manager: type, spec: VerlManagerSpec) -> tuple[VerlRewardManager, FunctionSpec]:
    """Our manager and the function of the scoring processes. Raises when the class cannot be built."""
    build(manager, spec)
    single = hasattr(manager, "run_single")
    function = "score_row" if single else "score_rows"
    key = "reward_model.reward_manager_module.path"
    return (
        VerlRewardManager(scores_whole_batch=not single),
        FunctionSpec("pkg://dovetail.rewards.verl_managers", function, {"spec": spec}, key=key),
    )


def build(manager: type, spec: VerlManagerSpec) -> Any:
    """The manager, with the arguments that its contract names."""
    given = {"tokenizer": spec.tokenizer, "compute_score": _compute_score(spec.function), **spec.options}
    if hasattr(manager, "run_single"):
        given["config"] = OmegaConf.create(dict(spec.config))
    else:
        given |= {"num_examine": 0, "reward_fn_key": spec.reward_fn_key}
    try:
        inspect.signature(manager).bind(**given)
    except TypeError as error:
        raise RewardError(
            f"{spec.name} of {spec.path} cannot be made with ({', '.join(given)}): {error}. verl's managers take "
            "(tokenizer, num_examine, compute_score, reward_fn_key, **kwargs), or (config, tokenizer, compute_score) "
            "with `run_single`; ours inherit from dovetail.rewards.managers.RewardManager."
        ) from None
    return manager(**given)


async def score_row(
    data_source: str, solution_str: DataProto, ground_truth: Any, extra_info: Any, *, spec: VerlManagerSpec
) -> dict[str, Any]:
    """One row through `run_single`."""
    result = await _manager(spec).run_single(solution_str)
    return {**(result.get("reward_extra_info") or {}), "score": result["reward_score"]}


def score_rows(
    data_sources: Sequence[str],
    solution_strs: Sequence[DataProto],
    ground_truths: Sequence[Any],
    extra_infos: Sequence[Any],
    *,
    spec: VerlManagerSpec,
) -> list[dict[str, Any]]:
    """All rows through one call."""
    batch = DataProto.concat(solution_strs)
    manager = _manager(spec)
    takes_dict = "return_dict" in inspect.signature(manager.__call__).parameters
    result = manager(batch, return_dict=True) if takes_dict else manager(batch)
    rewards, extra = (result, {}) if isinstance(result, torch.Tensor) else _parts(result)
    scores = _row_scores(rewards, batch)
    # A column that not every row filled cannot be given back to its rows.
    columns = {name: values for name, values in extra.items() if len(values) == len(scores) and name != "score"}
    return [
        {**{name: values[row] for name, values in columns.items()}, "score": scores[row]} for row in range(len(scores))
    ]


def _parts(result: Mapping[str, Any]) -> tuple[torch.Tensor, Mapping[str, Any]]:
    if "reward_tensor" not in result:
        raise ValueError(f"the reward manager returned {', '.join(result)}; verl's contract is `reward_tensor`.")
    return result["reward_tensor"], result.get("reward_extra_info") or {}


def _row_scores(rewards: torch.Tensor, batch: DataProto) -> list[float]:
    if rewards.shape != batch.tensors["responses"].shape:
        shape = list(batch.tensors["responses"].shape)
        raise ValueError(f"the reward manager returned a tensor of shape {list(rewards.shape)}; it must be {shape}.")
    several = ((rewards != 0).sum(dim=-1) > 1).nonzero().flatten().tolist()
    if several:
        raise ValueError(
            f"the reward manager put rewards on several tokens (row {several[0]}); a row has one score here, on its "
            "last token. Return the sum on one token, or use a reward model for rewards of every token."
        )
    return rewards.sum(dim=-1).tolist()


@functools.cache
def _by_address(path: str, name: str) -> dict[str, Any]:
    return {}


def _manager(spec: VerlManagerSpec) -> Any:
    """Built once in each scoring process."""
    built = _by_address(spec.path, spec.name)
    if "manager" not in built:
        key = "reward_model.reward_manager_module.path"
        built["manager"] = build(load_user_object(spec.path, spec.name, key=key), spec)
    return built["manager"]


def _compute_score(spec: FunctionSpec) -> Callable[..., Any]:
    """The function that verl would pass: the user's with its arguments, or the rules of the data sources."""
    if spec.name == default_compute_score.__name__:
        return functools.partial(_score_as_verl, **spec.kwargs)
    return functools.partial(load_user_object(spec.path, spec.name, key=spec.key), **spec.kwargs)


def _score_as_verl(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None, **kwargs: Any
) -> Any:
    """A bare number but for the DAPO sources: managers written for verl may compute with it."""
    result = default_compute_score(data_source, solution_str, ground_truth, extra_info, **kwargs)
    if isinstance(result, Mapping) and rule_of(data_source) != "math_dapo":
        return float(result["score"])
    return result
