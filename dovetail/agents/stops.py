"""At which ids a response of a run ends: those of the model's folder, of the tokenizer with its chat template, and
`rollout.stop_token_ids`. Engines, agents, exports and `dovetail check` all ask here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dovetail.agents.chat import ChatRenderer, ChatTemplateError
from dovetail.config.errors import ConfigError, Notice, Problem
from dovetail.config.rollout import RolloutConfig
from dovetail.config.root import DovetailConfig
from dovetail.models.load import load_config
from dovetail.models.stop_ids import folder_stop_ids

KEY = "actor_rollout_ref.rollout.stop_token_ids"
_PROBE = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "zebra"}]


@dataclass(frozen=True, slots=True)
class StopIds:
    """Ids that end a response, by who names them."""

    model: tuple[int, ...]
    """`generation_config.json`, else `config.json`; `override_config.eos_token_id` in the place of both."""
    tokenizer: tuple[int, ...]
    """The end of a turn in the chat template, and the tokenizer's end of sequence: what SFT and DPO train."""
    asked: tuple[int, ...] = ()
    """`rollout.stop_token_ids`."""
    trained_end: int | None = None
    """The last id of an answer as the chat template writes it. None without a template."""

    @property
    def all(self) -> tuple[int, ...]:
        return tuple(sorted({*self.model, *self.tokenizer, *self.asked}))

    @property
    def text(self) -> frozenset[int]:
        """Those that only the run asks for: part of the text that they end."""
        return frozenset(self.asked) - {*self.model, *self.tokenizer}

    def of_requests(self, *, ignore_eos: bool) -> list[int]:
        """What a request says. Engines add the model's own to it, unless told to ignore them."""
        return sorted({*self.asked, *(() if ignore_eos else self.tokenizer)})

    def notice(self, tokenizer: Any, *, trains_turns: bool) -> Notice | None:
        """What a user should know, in a sentence; None where all agree. `trains_turns`: whether answers are trained as
        the template writes them."""
        unnamed = sorted({*self.tokenizer} - {*self.model})
        if not self.all:
            why = (
                "no token ends a response: neither generation_config.json and config.json nor the tokenizer names one, "
                f"so every response runs to its longest length; set {KEY}."
            )
        elif trains_turns and self.trained_end not in (None, *self.all):
            why = (
                f"the chat template ends a turn with {_named([self.trained_end], tokenizer)}, which is no special "
                "token: what is trained so has no end at which generation stops. Give a template that closes turns "
                "with a special token in actor_rollout_ref.model.custom_chat_template."
            )
        elif unnamed:
            who = "the chat template ends a turn" if self.trained_end in unnamed else "the tokenizer ends a text"
            why = (
                f"{who} with {_named(unnamed, tokenizer)}, and the model's folder names "
                f"{_named(self.model, tokenizer) or 'no token'}: responses end at any of them, and an export of "
                "the trained model names them all in generation_config.json."
            )
        else:
            return None
        return Notice(KEY, why)


def find_stop_ids(
    path: str | Path,
    tokenizer: Any,
    *,
    template_kwargs: Mapping[str, Any] | None = None,
    asked: Sequence[int] = (),
    **model_args: Any,
) -> StopIds:
    """Of a model's folder, or hub name, with a tokenizer that has the run's chat template."""
    eos = tokenizer.eos_token_id
    ids: tuple[int, ...] = () if eos is None else (int(eos),)
    trained_end = None
    if tokenizer.chat_template:
        renderer = ChatRenderer(tokenizer, **(template_kwargs or {}))
        ids = renderer.stop_token_ids
        try:
            trained_end = renderer.answer(_PROBE)[-1]
        except ChatTemplateError:  # reading the rows says what the template refuses
            trained_end = None
    return StopIds(folder_stop_ids(path, **model_args), ids, tuple(asked), trained_end)


def run_stop_ids(config: DovetailConfig, tokenizer: Any) -> StopIds:
    """Of a run, with the tokenizer and chat template of its prompts. ConfigError where it asks for an id that the model
    does not have."""
    policy = config.actor_rollout_ref
    model, asked = policy.model, policy.rollout.stop_token_ids
    model_args: dict[str, Any] = {
        "trust_remote_code": model.trust_remote_code,
        "override_config": model.override_config,
        "external_lib": model.external_lib,
    }
    if asked:
        size = load_config(model.path, **model_args).get_text_config().vocab_size
        if unknown := [one for one in asked if not 0 <= one < size]:
            why = f"{KEY} has {unknown[0]}, and the ids of {model.path} are 0 to {size - 1}; take it out."
            raise ConfigError([Problem(KEY, why)])
    template_kwargs = config.data.apply_chat_template_kwargs
    return find_stop_ids(model.path, tokenizer, template_kwargs=template_kwargs, asked=asked, **model_args)


def stop_notice(config: DovetailConfig, tokenizer: Any) -> Notice | None:
    """What to say once, before a run whose responses end, or whose answers are trained to end."""
    rollout, method = config.actor_rollout_ref.rollout, config.trainer.method
    if config.actor_rollout_ref.model.external_lib is not None:  # workers alone may know the architecture
        return None
    if method == "reward" or (config.generates and _ignores_eos(rollout)):
        return None
    return run_stop_ids(config, tokenizer).notice(tokenizer, trains_turns=not config.generates)


def with_stop_ids(config: DovetailConfig, tokenizer: Any) -> RolloutConfig:
    """The section `rollout` with all that requests of the run say. An agent's turn ends also with ignore_eos."""
    rollout = config.actor_rollout_ref.rollout
    ids = run_stop_ids(config, tokenizer).of_requests(ignore_eos=_ignores_eos(rollout))
    return rollout.model_copy(update={"stop_token_ids": ids})


def _ignores_eos(rollout: RolloutConfig) -> bool:
    return rollout.ignore_eos and not rollout.uses_agents


def _named(ids: Iterable[int | None], tokenizer: Any) -> str:
    return " or ".join(f"{tokenizer.decode([one])!r} (id {one})" for one in ids)
