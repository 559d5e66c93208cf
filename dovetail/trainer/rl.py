"""`trainer.method=rl`: prompts, rewards and the PPO family of trainers, made into a run."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

from dovetail.agents.build import audit_template, refuse_broken_tools
from dovetail.config.root import DovetailConfig
from dovetail.data.build import PromptLoader, build_train_loader, build_val_loader
from dovetail.data.errors import DataError
from dovetail.data.prompts import PromptDataset
from dovetail.observability.tracker import Tracker
from dovetail.rewards.build import build_reward_runner, other_scoring_nodes
from dovetail.trainer.base import BaseTrainer
from dovetail.trainer.dapo import RayDAPOTrainer
from dovetail.trainer.devices import joins_cluster, uses_gpu
from dovetail.trainer.groups import RoleGroups, create_groups
from dovetail.trainer.method import Method, RunOptions
from dovetail.trainer.model_folders import try_readers
from dovetail.trainer.ppo import RayPPOTrainer
from dovetail.trainer.refusals import Refusals
from dovetail.trainer.registered import refuse_unmet_names


class RLMethod(Method):
    """The prompts, their rewards, and `RayPPOTrainer` or `RayDAPOTrainer`."""

    def __init__(self, config: DovetailConfig, options: RunOptions, open_things: ExitStack) -> None:
        super().__init__(config, options, open_things)
        # The devices of a cluster are known once it is joined.
        self._knows_devices = not (options.use_ray and joins_cluster(config))
        on_gpu = uses_gpu(config) if self._knows_devices else False
        train_loader = val_loader = None
        uses_agents = config.actor_rollout_ref.rollout.uses_agents
        with Refusals() as refused:
            self._tokenizer, processor = try_readers(config, refused)
            with refused.part():
                val_loader = build_val_loader(config, self._tokenizer, processor)
            with refused.part():
                if config.data.train_paths:
                    train_loader = build_train_loader(config, self._tokenizer, processor)
            with refused.part():
                if uses_agents:
                    refuse_broken_tools(config)
            with refused.part():
                # An agent, and a class of the user's, may add to what the file has.
                adds = uses_agents or config.data.custom_cls.path or config.reward_model.reward_manager_module.path
                columns = None if adds else _reward_columns(_prompts_of(train_loader, val_loader))
                self._rewards = open_things.enter_context(build_reward_runner(config, self._tokenizer, columns))
                # An agent's environment may score; a source without a rule is then met, and named, when a row needs it.
                if config.scores_training and not uses_agents:
                    for dataset in _prompts_of(train_loader, val_loader):
                        self._rewards.check_data_sources(dataset.data_sources())
        self._use_loaders(train_loader, val_loader)
        if self._knows_devices:
            self._refuse_unread_images(on_cuda=on_gpu)
        refuse_unmet_names(config, self._train_loader.dataset[0])
        self._audit = audit_template(config, self._tokenizer) if uses_agents else None

    def cluster_started(self, *, use_gpu: bool) -> None:
        if self._options.use_ray:
            self._rewards.use_nodes(other_scoring_nodes(self._config))
        if not self._knows_devices:
            self._refuse_unread_images(on_cuda=use_gpu)

    def create_groups(self, *, use_gpu: bool) -> RoleGroups:
        generates = self._options.recording is None
        return create_groups(self._config, use_ray=self._options.use_ray, use_gpu=use_gpu, generates=generates)

    def create_trainer(self, tracker: Tracker, **run: Any) -> BaseTrainer[Any]:
        if self._audit is not None:
            tracker.folder.write_template_audit(self._audit.to_dict())
        return super().create_trainer(tracker, **run)

    def _trainer(self) -> Callable[..., RayPPOTrainer]:
        kind, recording = self._options.trainer_class or self._trainer_class, self._options.recording
        return partial(kind, tokenizer=self._tokenizer, rewards=self._rewards, recording=recording)

    @property
    def _trainer_class(self) -> type[RayPPOTrainer]:
        return RayDAPOTrainer if self._config.algorithm.filter_groups.enable else RayPPOTrainer

    def _refuse_unread_images(self, *, on_cuda: bool) -> None:
        """Fail here, instead of at the first request that a text-only engine refuses."""
        rollout = self._config.actor_rollout_ref.rollout
        if rollout.reads_images(on_cuda=on_cuda) and not rollout.uses_agents:
            return
        if not any(dataset.has_media() for dataset in _prompts_of(self._train_loader, self._val_loader)):
            return
        if rollout.uses_agents:
            raise DataError(
                "there are prompts with images or videos, and agents (rollout.multi_turn, rollout.agent) read text "
                "only. Leave the image and video columns out, or train without agents."
            )
        where = "on CUDA" if rollout.name == "native" else "by URL" if rollout.server_urls else "here"
        raise DataError(
            f"there are prompts with images or videos, and rollout.name={rollout.name} reads token ids only {where}. "
            "Use rollout.name=vllm without server_urls (or native on CPU), or leave the image and video columns out."
        )


def _prompts_of(*loaders: PromptLoader | None) -> list[PromptDataset]:
    """Those that are not of a user's class."""
    datasets = [loader.dataset for loader in loaders if loader is not None]
    return [dataset for dataset in datasets if isinstance(dataset, PromptDataset)]


def _reward_columns(datasets: list[PromptDataset]) -> tuple[str, ...] | None:
    """What all of them have: the function scores rows of each."""
    columns = [dataset.reward_columns() for dataset in datasets]
    return tuple(name for name in columns[0] if all(name in others for others in columns)) if columns else None
