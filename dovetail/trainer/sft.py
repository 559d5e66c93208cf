"""`trainer.method=sft`: conversations, made into a run. Validation also shows, and scores, what the model answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

from dovetail.config.errors import Notice
from dovetail.config.root import DovetailConfig
from dovetail.data.build import PromptLoader
from dovetail.data.conversations import ConversationDataset, TokenRow
from dovetail.data.errors import DataError
from dovetail.observability.sinks import choose_answers
from dovetail.rewards.build import build_reward_runner
from dovetail.rewards.runner import RewardRunner
from dovetail.trainer.base import Metrics
from dovetail.trainer.generate import prompt_batch, responses_of
from dovetail.trainer.method import RunOptions
from dovetail.trainer.offline import OfflineGroups, OfflineTrainer, create_offline_groups
from dovetail.trainer.offline_method import OfflineMethod
from dovetail.trainer.sft_scores import with_scores
from dovetail.trainer.validation import score_metrics
from dovetail.workers.sft import SFTWorker

_TEMPLATE = "actor_rollout_ref.model.custom_chat_template"


class Sample(NamedTuple):
    """A prompt with its answer in the validation data, to be generated again, and the file's row that it is of."""

    tokens: TokenRow
    file_row: Mapping[str, Any]


class SFTTrainer(OfflineTrainer):
    """Generates `samples` by `tokenizer` at each validation; `rewards` scores them, where a function is given."""

    def __init__(
        self,
        config: DovetailConfig,
        *,
        tokenizer: Any,
        samples: list[Sample],
        rewards: RewardRunner | None = None,
        **run: Any,
    ) -> None:
        super().__init__(config, **run)
        self.tokenizer, self.samples, self.rewards = tokenizer, samples, rewards

    def _validate(self) -> Metrics:
        metrics = super()._validate()
        if self.samples:
            rows = self._answered()
            if self.rewards is not None:
                metrics |= score_metrics(rows)
            self.tracker.folder.write_answers(self.global_step, rows, "validation")
            named = [
                {"input": row["prompt"], "output": row["response"], "score": row["values"].get("reward")}
                for row in rows
            ]
            if shown := choose_answers(named, self.config.trainer.log_val_generations):
                self.tracker.show_answers(self.global_step, shown)
        return metrics

    def _answered(self) -> list[dict[str, Any]]:
        """A line for each sample, with the names that the validation of RL has."""
        prompts, answers = zip(*(sample.tokens.first_answer() for sample in self.samples), strict=True)
        batch = self.groups.group.generate_sequences(prompt_batch(prompts, n=1))
        # Special tokens of a prompt say where a message begins: the dashboard shows the last one.
        texts = [self.tokenizer.batch_decode(prompts), self.tokenizer.batch_decode(answers, skip_special_tokens=True)]
        rows = [
            {
                "uid": f"val-{number}",
                "data_source": "validation",
                "prompt": prompt,
                "response": response.text,
                "ground_truth": truth,
                "values": {},
                "length": response.num_tokens,
                "truncated": response.finish_reason == "length",
                "failed": False,
            }
            for number, (prompt, truth, response) in enumerate(
                zip(*texts, responses_of(batch, self.tokenizer), strict=True)
            )
        ]
        if self.rewards is None:
            return rows
        return with_scores(rows, batch, [sample.file_row for sample in self.samples], self.rewards, self.config)


class SFTMethod(OfflineMethod):
    """Conversations."""

    worker, trainer = SFTWorker, SFTTrainer

    def __init__(self, config: DovetailConfig, options: RunOptions, open_things: ExitStack) -> None:
        super().__init__(config, options, open_things)
        loaders = [loader for loader in (self._train_loader, self._val_loader) if loader is not None]
        datasets = [_conversations(loader) for loader in loaders]
        if config.actor_rollout_ref.actor.strategy == "megatron" and any(dataset.has_media for dataset in datasets):
            raise DataError(
                "there are conversations with images or videos, and actor_rollout_ref.actor.strategy=megatron trains "
                "models of text alone here; use fsdp2."
            )
        sft = config.sft
        self._unlike_template = [
            f"rows have {what}. Set {_TEMPLATE} to one that {does}."
            for is_so, what, does in (
                (
                    any(dataset.hides_tools for dataset in datasets),
                    f"{sft.tools_key}, but the model's chat template shows no tools: the model is trained without "
                    "their schemas",
                    "shows them",
                ),
                (
                    any(dataset.ignores_thinking for dataset in datasets),
                    f"{sft.enable_thinking_key}, but the model's chat template does not read enable_thinking: it "
                    "changes nothing",
                    "reads it",
                ),
                (
                    any(dataset.drops_text for dataset in datasets),
                    "text beside tool calls, but the model's chat template writes the calls alone, and only these "
                    "are trained",
                    "writes both",
                ),
            )
            if is_so
        ]
        self._samples = self._read_samples()
        self._rewards = None
        if config.scores_val_samples and self._samples:
            rows = [sample.file_row for sample in self._samples]
            names = [["prompt", *row, *(row.get("extra_info") or {})] for row in rows]
            columns = tuple(name for name in names[0] if all(name in others for others in names))
            self._rewards = open_things.enter_context(build_reward_runner(config, self._tokenizer, columns))

    def notices(self) -> tuple[Notice, ...]:
        return (*super().notices(), *(Notice(_TEMPLATE, why) for why in self._unlike_template))

    def create_groups(self, *, use_gpu: bool) -> OfflineGroups:
        config, use_ray = _with_room_for(self._config, self._samples), self._options.use_ray
        return create_offline_groups(config, self.worker, use_ray=use_ray, use_gpu=use_gpu)

    def _trainer(self) -> Callable[..., OfflineTrainer]:
        return partial(super()._trainer(), tokenizer=self._tokenizer, samples=self._samples, rewards=self._rewards)

    def _read_samples(self) -> list[Sample]:
        """The first conversations of text alone that have a prompt before their first answer."""
        if self._val_loader is None:
            return []
        dataset = _conversations(self._val_loader)
        rows = ((number, dataset[number][0]) for number in range(len(dataset)))
        fitting = ((number, row) for number, row in rows if row.first_answer()[0] and not any(row.media))
        return [Sample(row, dataset.row_of(number)) for number, row in islice(fitting, self._config.num_val_samples)]


def _conversations(loader: PromptLoader) -> ConversationDataset:
    assert isinstance(loader.dataset, ConversationDataset), "what this method reads"
    return loader.dataset


def _with_room_for(config: DovetailConfig, samples: list[Sample]) -> DovetailConfig:
    """The engine's lengths: those of the samples, whatever the rows of training have.

    A few short answers need no CUDA graphs, and no cache between two validations.
    """
    if not samples:
        return config.model_copy(update={"sft": config.sft.model_copy(update={"val_samples": 0})})
    policy = config.actor_rollout_ref
    prompt, response = max(len(sample.tokens.first_answer()[0]) for sample in samples), config.sft.val_sample_tokens
    room = {"prompt_length": prompt, "response_length": response, "max_model_len": prompt + response}
    room |= {"enforce_eager": True, "free_cache_engine": True}
    policy = policy.model_copy(update={"rollout": policy.rollout.model_copy(update=room)})
    return config.model_copy(update={"actor_rollout_ref": policy})
