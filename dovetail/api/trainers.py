"""`GRPO`, `SFT`, `DPO` and the others: a training run as a Python object. Each is a preset of one configuration."""

from __future__ import annotations

import datetime
import itertools
import logging
import os
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal

from dovetail.api.inputs import Data, Reward, data_files, parameters, reward_text
from dovetail.api.run import Run
from dovetail.config import ConfigError, DovetailConfig, LoadedConfig, Notice, load_config
from dovetail.config.errors import Problem
from dovetail.config.translate import expand
from dovetail.config.tree import leaves
from dovetail.config.validate import unknown_keys
from dovetail.observability.disk import why_not_writable
from dovetail.rewards.signatures import takes_lists

logger = logging.getLogger(__name__)

OnStep = Callable[[int, dict[str, float]], Literal["stop"] | bool | None]
"""`(step, metrics)`, called after every step; the run ends there, with a checkpoint, on `"stop"` or True."""


class Trainer:
    """What every method shares: the configuration, the run folder, `train`. Use `GRPO` or one of the others.

    Args:
        model: Folder of the model, or its name on the hub (`Qwen/Qwen2.5-0.5B-Instruct`).
        data: Prompts: a path (parquet, JSON lines, `hf://datasets/...`), a list of dicts, a `datasets.Dataset` or a
            `pandas.DataFrame`. A row has `prompt`, text or chat messages, and any other columns.
        val_data: Prompts for validation, before and after training.
        engine: What generates: `native`, `vllm` or `sglang`.
        output: Run folder. A run that was stopped there continues. Default: a new folder below `runs/`.
        steps: Training steps. Default: every prompt once.
        lr: Learning rate.
        config: Any other key of docs/configuration.md: sections in sections, dotted keys, or both.
        ray: True: workers are Ray actors, here or on the cluster of `ray_init.address`. False: everything in this
            process, on one device. Default: Ray where there is more than one device.
        on_step: Called with `(step, metrics)` after every step; return `"stop"` or True to end the run.
        **overrides: Dotted keys too, as in `**{"trainer.seed": 1}`.
    """

    preset: ClassVar[Mapping[str, Any]] = {}
    """The keys that make this method what it is. Keys that the caller sets win."""

    def __init__(
        self,
        model: str | Path,
        data: Data | None = None,
        *,
        val_data: Data | None = None,
        engine: str | None = None,
        output: str | Path | None = None,
        steps: int | None = None,
        lr: float | None = None,
        config: Mapping[str, Any] | None = None,
        ray: bool | None = None,
        on_step: OnStep | None = None,
        **overrides: Any,
    ) -> None:
        _check_kind("model", model, str | os.PathLike, _MODEL)
        if output is not None:
            _check_kind("output", output, str | os.PathLike, "the path of the run folder")
        if ray is not None:
            _check_kind("ray", ray, bool, "True or False")
        if on_step is not None:
            _check_kind("on_step", on_step, Callable, "a function of (step, metrics)")
        if config is not None:
            _check_kind("config", config, Mapping, "a dict of keys")
        self._data, self._val_data = data, val_data
        self._ray, self._on_step = ray, on_step
        short = {"model": str(model), "engine": engine, "steps": steps, "lr": lr}
        self._short = {name: value for name, value in short.items() if value is not None}
        self._keys = {**dict(leaves(config or {})), **overrides}
        if data is None and not {"data.train_files", "data.custom_cls.path"} & set(self._keys):
            # Scripts for TRL give `train_dataset`.
            raise ConfigError(unknown_keys(self._keys) or [Problem("data", "data is not set; give a path or rows.")])
        folder = output or self._keys.get("trainer.default_local_dir") or self._keys.get("output")
        self._given_folder = Path(folder).expanduser() if folder else None
        self._loaded: LoadedConfig | None = None

    @property
    def config(self) -> DovetailConfig:
        """The whole configuration of the run, with what was chosen for open keys."""
        return self._load().config

    @property
    def choices(self) -> tuple[Notice, ...]:
        """What was chosen for open keys, and why."""
        return self._load().choices

    def check(self) -> bool:
        """Print what `dovetail check` prints: choices, plan and problems. True when the run can start."""
        from dovetail.cli.check import VALID, check
        from dovetail.cli.show_plan import show

        checked = check(self._load())
        show(checked)
        return checked.exit_code == VALID

    def train(self) -> Run:
        """Train to the last step, and return the run. Called again, it continues from the newest checkpoint."""
        from dovetail.trainer.run import run_training

        config, notices = self._load().config, self._load().notices

        def say() -> None:
            for notice in notices:
                logger.warning("%s", notice)

        run_training(config, use_ray=self._uses_ray(config), on_step=self._on_step, on_checked=say)
        return Run(config.trainer.run_dir)

    @cached_property
    def _folder(self) -> Path:
        folder = self._given_folder or _new_folder(type(self).__name__.lower())
        if (why := why_not_writable(folder, is_folder=True)) is not None:
            words = f"output={folder} cannot be written: {why}; give a folder that you may write to."
            raise ConfigError([Problem("output", words)])
        return folder

    def _load(self) -> LoadedConfig:
        if self._loaded is None:
            from dovetail.trainer.choose import choose_open_keys

            loaded = load_config(values=self._values())
            self._loaded = choose_open_keys(loaded, one_process=self._ray is False)
        return self._loaded

    def _values(self) -> dict[str, Any]:
        """Later entries win."""
        given = {"data": self._data, "val_data": self._val_data}
        own_class = "data.custom_cls.path" in self._keys
        data = {
            name: data_files(each, self._folder, name, own_class=own_class)
            for name, each in given.items()
            if each is not None
        }
        named = {**self._short, **data}
        self._refuse_twice(named)
        return {**self.preset, **named, **self._keys, "output": str(self._folder)}

    def _refuse_twice(self, named: Mapping[str, Any]) -> None:
        """An argument that a key says otherwise: in a sweep over `lr=`, every run would train with the key's."""
        arguments = {key: (name, value) for name, each in named.items() for key, value in _keys_of(name, each).items()}
        for spelling, each in self._keys.items():
            for key, value in _keys_of(spelling, each).items():
                name, other = arguments.get(key, (spelling, value))
                if value is not None and value != other:
                    words = f"{name}={other} and {spelling}={value} set the same key; leave one of them out."
                    raise ConfigError([Problem(key, words)])

    def _uses_ray(self, config: DovetailConfig) -> bool:
        if self._ray is not None:
            return self._ray
        return config.num_devices > 1 or config.ray_init.address is not None


class _RL(Trainer):
    """Trainers that learn from a reward."""

    def __init__(
        self,
        model: str | Path,
        data: Data | None = None,
        reward: Reward | None = None,
        *,
        val_data: Data | None = None,
        engine: str | None = None,
        output: str | Path | None = None,
        steps: int | None = None,
        lr: float | None = None,
        config: Mapping[str, Any] | None = None,
        ray: bool | None = None,
        on_step: OnStep | None = None,
        **overrides: Any,
    ) -> None:
        super().__init__(
            model, data, val_data=val_data, engine=engine, output=output, steps=steps, lr=lr, config=config, ray=ray,
            on_step=on_step, **overrides,
        )  # fmt: skip
        self._reward = reward

    def _values(self) -> dict[str, Any]:
        values = super()._values()
        if self._reward is None:
            return values
        if takes_lists(parameters(self._reward)):
            values.setdefault("reward_model.reward_manager", "batch")
        reward = reward_text(self._reward, self._folder)
        self._refuse_twice({"reward": reward})
        return {"reward": reward, **values}


class GRPO(_RL):
    """Group relative policy optimisation: each response against the others to its prompt.

        def score(response, answer):
            return float(answer in response)

        rows = [{"prompt": "What is 2+3?", "answer": "5"}, ...]
        run = dovetail.GRPO("Qwen/Qwen2.5-0.5B-Instruct", rows, reward=score).train()

    `reward` is a function, `file.py:function`, the name of a built-in rule (`gsm8k`), a reward model's path, or a list
    of functions whose scores are added. A function takes what it names: `response`, `prompt` and columns of the row; or
    verl's `(data_source, solution_str, ground_truth, extra_info)`; or TRL's lists, `(prompts, completions, **columns)`.
    It returns a number, or a dict with `score`. It runs in processes of its own, also when a notebook defines it.
    Without a reward, the column `data_source` of a row names the built-in rule.

    The other arguments are those of `Trainer`.
    """

    preset: ClassVar[Mapping[str, Any]] = {"algorithm.adv_estimator": "grpo"}


class RLOO(_RL):
    """REINFORCE with the mean of the other responses to the prompt as its baseline. Arguments as for `GRPO`."""

    preset: ClassVar[Mapping[str, Any]] = {"algorithm.adv_estimator": "rloo"}


class PPO(_RL):
    """Proximal policy optimisation with a value network. Arguments as for `GRPO`."""

    preset: ClassVar[Mapping[str, Any]] = {"algorithm.adv_estimator": "gae"}


class DAPO(_RL):
    """GRPO with a wider upper clip and dynamic sampling: groups that all score the same are generated anew.

    Arguments as for `GRPO`.
    """

    preset: ClassVar[Mapping[str, Any]] = {
        "algorithm.adv_estimator": "grpo",
        "algorithm.filter_groups.enable": True,
        "algorithm.filter_groups.metric": "seq_reward",
        "algorithm.filter_groups.max_num_gen_batches": 10,
        "actor_rollout_ref.actor.clip_ratio_low": 0.2,
        "actor_rollout_ref.actor.clip_ratio_high": 0.28,
        "actor_rollout_ref.actor.loss_agg_mode": "token-mean",
    }


class Distill(_RL):
    """On-policy distillation: the model samples, and a teacher's log-probs of its tokens are the signal.

    `teacher` is a folder or a name on the hub, with the same tokenizer. Several are a dict, by the value of the column
    `distill.teacher_key`. Without a `reward` rows need a prompt only. The other arguments are those of `GRPO`.
    """

    preset: ClassVar[Mapping[str, Any]] = {"trainer.method": "distill"}

    def __init__(
        self,
        model: str | Path,
        data: Data,
        teacher: str | Path | Mapping[str, str | Path],
        reward: Reward | None = None,
        **more: Any,
    ):
        super().__init__(model, data, reward, **more)
        several = isinstance(teacher, Mapping)
        for path in teacher.values() if several else [teacher]:
            _check_kind("teacher", path, str | os.PathLike, _MODEL)
        named = {f"distill.teachers.{name}": str(path) for name, path in teacher.items()} if several else {}
        self._keys = {**(named or {"distill.teacher.path": str(teacher)}), **self._keys}


class SFT(Trainer):
    """Fine-tuning on conversations: the loss is on the assistant's tokens. Rows have `messages`, or `prompt` and
    `response`.

        rows = [{"messages": [{"role": "user", "content": "2+3?"}, {"role": "assistant", "content": "5"}]}, ...]
        run = dovetail.SFT("Qwen/Qwen2.5-0.5B-Instruct", rows).train()

    The arguments are those of `Trainer`.
    """

    preset: ClassVar[Mapping[str, Any]] = {"trainer.method": "sft"}


class DPO(Trainer):
    """Direct preference optimisation: rows have `prompt`, `chosen` and `rejected`. IPO, KTO, ORPO and SimPO are
    `config={"dpo.loss_type": ...}`. The arguments are those of `Trainer`."""

    preset: ClassVar[Mapping[str, Any]] = {"trainer.method": "dpo"}


class RewardModel(Trainer):
    """A reward model from preferences: rows as for `DPO`. What `Run.export` writes is a `reward=` of `GRPO`.

    The arguments are those of `Trainer`.
    """

    preset: ClassVar[Mapping[str, Any]] = {"trainer.method": "reward"}


_MODEL = "a folder (of a model in memory: what its save_pretrained wrote, with the tokenizer), or a name on the hub"


def _check_kind(name: str, given: object, kind: Any, words: str) -> None:
    if not isinstance(given, kind):
        raise ConfigError([Problem(name, f"{name} is a {type(given).__name__}; it must be {words}.")])


def _keys_of(name: str, value: Any) -> dict[str, Any]:
    keys = expand(name, value)
    return {name: value} if keys is None else keys


def _new_folder(name: str) -> Path:
    """A folder that no run has. It is made here: another run, or process, may start in the same second."""
    stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    for number in itertools.count(1):
        folder = Path("runs").absolute() / (f"{name}-{stamp}" + (f"-{number}" if number > 1 else ""))
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        return folder
    raise AssertionError("numbers do not end")
