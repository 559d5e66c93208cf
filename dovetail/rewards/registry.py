"""Which rule scores which data set. Users add their own with `register_reward`; an unknown name is an error."""

from __future__ import annotations

import fnmatch
import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from dovetail.config.wording import did_you_mean
from dovetail.rewards.errors import RewardError
from dovetail.rewards.sandbox import announce_isolation

RewardFn = Callable[..., Any]
"""`(data_source, solution_str, ground_truth, extra_info, **kwargs)`, giving a number or a dict with `score`."""

_Fn = TypeVar("_Fn", bound=Callable[..., Any])

_RULES = "dovetail.rewards.rules"
# Name -> module and function; imported on first use, so that scoring arithmetic does not load what scores code.
RULES: dict[str, tuple[str, str]] = {
    "gsm8k": (f"{_RULES}.gsm8k", "compute_score"),
    "math": (f"{_RULES}.math", "compute_score"),
    "math_dapo": (f"{_RULES}.math_dapo", "compute_score"),
    "math_strings": (f"{_RULES}.math_strings", "compute_score"),
    "math_symbolic": (f"{_RULES}.math_symbolic", "compute_score"),
    "geometry3k": (f"{_RULES}.math_symbolic", "compute_geometry_score"),
    "multiple_choice": (f"{_RULES}.multiple_choice", "compute_score"),
    "exact": (f"{_RULES}.exact", "compute_score"),
    "search_qa": (f"{_RULES}.exact", "compute_tagged_score"),
    "format": (f"{_RULES}.exact", "compute_format_score"),
    "countdown": (f"{_RULES}.countdown", "compute_score"),
    "arithmetic": (f"{_RULES}.arithmetic", "compute_score"),
    "list": (f"{_RULES}.arithmetic", "compute_list_score"),
    "code": (f"{_RULES}.code", "compute_score"),
}

# Data source (or pattern) -> rule. The names are those of the published data sets; verl's are scored as verl does.
DATA_SOURCES: dict[str, str] = {
    "openai/gsm8k": "gsm8k",
    "gsm8k": "gsm8k",
    "lighteval/MATH": "math_strings",
    "DigitalLearningGmbH/MATH-lighteval": "math_strings",
    "HuggingFaceH4/MATH-500": "math_strings",
    "hiyouga/geometry3k": "geometry3k",
    "numina_*": "math_symbolic",
    "math": "math_dapo",
    "math_dapo": "math_dapo",
    "math_dapo_reasoning": "math_dapo",
    "aime*": "math_dapo",
    "codecontests": "code",
    "apps": "code",
    "codeforces": "code",
    "taco": "code",
    "searchR1_*": "search_qa",
    "multiple_choice": "multiple_choice",
    "exact": "exact",
    "dovetail/addition": "arithmetic",
    "dovetail/multiplication": "arithmetic",
    "dovetail/arithmetic": "arithmetic",
    "dovetail/letters": "arithmetic",
    "dovetail/sorting": "list",
    "dovetail/reversal": "exact",
    "dovetail/countdown": "countdown",
}

_CUSTOM: dict[str, RewardFn] = {}


def register_reward(*data_sources: str) -> Callable[[_Fn], _Fn]:
    """Decorator: score these data sources with a function of the usual signature. Name its module in
    `trainer.import_modules`, which the scoring processes import too.
    """

    def decorate(fn: _Fn) -> _Fn:
        for name in data_sources:
            if name in _CUSTOM and _CUSTOM[name] is not fn:
                raise ValueError(f"data source {name!r} is already scored by {_CUSTOM[name]}; choose another name.")
            _CUSTOM[name] = fn
        return fn

    return decorate


def default_compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Any = None,
    *,
    sandbox_url: str | None = None,
    memory_limit_mb: int = 1024,
    programs_at_once: int = 1,
    code_isolation: str = "auto",
    **kwargs: Any,
) -> Any:
    """Score an answer by the rule of its data source. `kwargs` go to the rule."""
    if data_source in _CUSTOM:
        return _CUSTOM[data_source](data_source, solution_str, ground_truth, extra_info, **kwargs)
    rule = rule_of(data_source)
    if rule == "code":
        kwargs = {
            "sandbox_url": sandbox_url,
            "memory_limit_mb": memory_limit_mb,
            "programs_at_once": programs_at_once,
            "code_isolation": code_isolation,
            **kwargs,
        }
    return find_rule(rule)(solution_str, ground_truth, **kwargs)


def score_by_rule(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None, *, rule: str, **kwargs: Any
) -> Any:
    """Score every answer by one rule, whatever its data source."""
    return find_rule(rule)(solution_str, ground_truth, **kwargs)


def rule_of(data_source: str) -> str:
    """The name of the rule for a data source."""
    for pattern, rule in DATA_SOURCES.items():
        if pattern == data_source or fnmatch.fnmatchcase(data_source, pattern):
            return rule
    raise ValueError(unknown_source_message(data_source))


def has_rule(data_source: str) -> bool:
    """Whether a data source can be scored without a custom function."""
    return data_source in _CUSTOM or any(fnmatch.fnmatchcase(data_source, pattern) for pattern in DATA_SOURCES)


def check_sources(data_sources: Sequence[str], kwargs: Mapping[str, Any]) -> None:
    """Before training: every source has a rule, and programs of answers run where the user allows it."""
    unknown = [source for source in data_sources if not has_rule(source)]
    if unknown:
        raise RewardError(unknown_source_message(unknown[0]))
    runs_programs = any(source not in _CUSTOM and rule_of(source) == "code" for source in data_sources)
    if runs_programs and not kwargs.get("sandbox_url"):
        announce_isolation(required=kwargs.get("code_isolation") == "required")


def unknown_source_message(data_source: str) -> str:
    known = sorted({*DATA_SOURCES, *_CUSTOM})
    hint = did_you_mean(data_source, known)
    return (
        f"there is no reward rule for data_source {data_source!r}.{hint} Known: {', '.join(known)}. "
        "Score it with a function of your own (reward=FILE.py:NAME, in full custom_reward_function.path); an agent's "
        "environment may score in get_reward."
    )


def find_rule(name: str) -> RewardFn:
    """A rule by its own name."""
    if name not in RULES:
        raise ValueError(
            f"there is no reward rule {name!r}.{did_you_mean(name, RULES)} There are {', '.join(sorted(RULES))}."
        )
    module, function = RULES[name]
    return getattr(importlib.import_module(module), function)
