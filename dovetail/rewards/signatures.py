"""Call a reward function with the arguments that its signature names. Torch-free: it runs in the scoring processes.

    f(data_source, solution_str, ground_truth, extra_info)    verl's form; plural names take a batch
    f(response, answer)                                       by name: the response, and columns of the prompt's row
    f(prompts, completions, answer, **kwargs)                 TRL's form: lists, and one score for each response

`response`, `completion` and `solution_str` are the same text; `final_response` is an agent's last turn alone, elsewhere
the same text, too. Columns of the row are looked up in `extra_info`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from dovetail.config.signatures import missing_arguments, named_arguments
from dovetail.config.wording import did_you_mean

ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")
BATCH_ARGUMENTS = ("data_sources", "solution_strs", "ground_truths", "extra_infos")
_RESPONSE = ("response", "completion", "solution_str")
_FINAL = "final_response"
_GIVEN = ("data_source", "ground_truth")
_LISTS = ("completions", "solution_strs")


class MissingColumnError(TypeError):
    """The function asks for a column that the row does not have."""


def takes_lists(names: Iterable[str]) -> bool:
    """Whether a function with these parameters scores many responses at once."""
    return not set(_LISTS).isdisjoint(names)


def score_list(results: Any, rows: int, name: str) -> list[Any]:
    """What a function that takes lists returned: one score for each response."""
    try:
        scores = list(results) if not isinstance(results, (str, Mapping)) else None
    except TypeError:
        scores = None
    if scores is None:
        kind = type(results).__name__
        raise ValueError(f"{name} returned a {kind} for {rows} responses; return a list with one score per response.")
    if len(scores) != rows:
        raise ValueError(f"{name} returned {len(scores)} scores for {rows} responses; return one per response.")
    return scores


def adapt_function(
    function: Callable[..., Any],
    arguments: Sequence[str],
    kwargs: Mapping[str, Any],
    columns: Sequence[str] | None = None,
) -> Callable[..., Any]:
    """`function` as one that takes `arguments` (of a row or a batch) and `kwargs` by name. TypeError if it cannot, or
    if it asks for what is not among the `columns` that rows have."""
    try:
        signature = inspect.signature(function)
    except ValueError:
        return function  # built-in callables without a signature are taken at their word
    try:
        signature.bind(**dict.fromkeys(arguments), **kwargs)
    except TypeError as error:
        names = {p.name for p in signature.parameters.values() if p.kind not in (p.VAR_POSITIONAL, p.POSITIONAL_ONLY)}
        is_batch = tuple(arguments) == BATCH_ARGUMENTS
        if "completions" in names:
            _refuse_missing(signature, [*_GIVEN, "prompts", "completions", *kwargs], columns)
            return _around(function, (_with_lists if is_batch else _with_lists_of_one)(function, signature))
        if is_batch or {*_RESPONSE, _FINAL}.isdisjoint(names):
            raise TypeError(
                f"{error}. A reward function takes ({', '.join(arguments)}, **kwargs)"
                + ("" if is_batch else ", or `response` and any columns of the row by name")
                + ", or lists as TRL gives them (completions, **kwargs)."
            ) from None
        _refuse_missing(signature, [*_GIVEN, "extra_info", *_RESPONSE, _FINAL, *kwargs], columns)
        return _around(function, _by_name(function, signature))
    return function


def _around(function: Callable[..., Any], adapted: Any) -> Callable[..., Any]:
    adapted.adapted_from = function
    return adapted


def _by_name(function: Callable[..., Any], signature: inspect.Signature) -> Callable[..., Any]:
    def score(
        *, data_source: Any, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any] | None, **kwargs: Any
    ) -> Any:
        info = extra_info or {}
        given = {"data_source": data_source, "ground_truth": ground_truth, "extra_info": info}
        values = {_FINAL: solution_str, **info, **given, **dict.fromkeys(_RESPONSE, solution_str), **kwargs}
        return function(**_wanted(signature, values, info))

    return score


def _with_lists(function: Callable[..., Any], signature: inspect.Signature) -> Callable[..., Any]:
    def score(
        *, data_sources: Any, solution_strs: Sequence[str], ground_truths: Any, extra_infos: Any, **kwargs: Any
    ) -> Any:
        infos = [info or {} for info in extra_infos]
        columns = {name: [info.get(name) for info in infos] for name in dict.fromkeys(n for i in infos for n in i)}
        prompts = columns.pop("prompt", [None] * len(infos))
        completions = [_completion(text, prompt) for text, prompt in zip(solution_strs, prompts, strict=True)]
        given = {"data_source": data_sources, "ground_truth": ground_truths}
        values = {**columns, **given, "prompts": prompts, "completions": completions, **kwargs}
        return function(**_wanted(signature, values, columns))

    return score


def _with_lists_of_one(function: Callable[..., Any], signature: inspect.Signature) -> Callable[..., Any]:
    batch = _with_lists(function, signature)

    def score(*, data_source: Any, solution_str: str, ground_truth: Any, extra_info: Any, **kwargs: Any) -> Any:
        row = dict(zip(BATCH_ARGUMENTS, ([data_source], [solution_str], [ground_truth], [extra_info]), strict=True))
        results = batch(**row, **kwargs)
        return _only_when_done(results) if inspect.isawaitable(results) else _only(results)

    def _only(results: Any) -> Any:
        return score_list(results, 1, getattr(function, "__name__", "the reward function"))[0]

    async def _only_when_done(results: Any) -> Any:
        return _only(await results)

    return score


def _completion(text: str, prompt: Any) -> Any:
    """As TRL gives it: a message when the prompt is a conversation, text when it is text."""
    return text if prompt is None or isinstance(prompt, str) else [{"role": "assistant", "content": text}]


def _wanted(signature: inspect.Signature, values: Mapping[str, Any], columns: Iterable[str]) -> dict[str, Any]:
    _refuse_missing(signature, values, columns)
    return named_arguments(signature, values)


def _refuse_missing(signature: inspect.Signature, given: Iterable[str], columns: Iterable[str] | None) -> None:
    """`columns` None: those of the rows are not known."""
    if columns is None:
        return
    known = {*given, *columns}
    if missing := missing_arguments(signature, known):
        hint = did_you_mean(missing[0], known)
        named = ", ".join(sorted(map(str, columns))) or "no other columns"
        raise MissingColumnError(f"the reward function asks for {', '.join(missing)}; the row has {named}.{hint}")
