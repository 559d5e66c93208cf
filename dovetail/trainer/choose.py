"""Choose what a run leaves open, and say why: device, precision, lengths, batch sizes, steps, micro-batches.

A run that uses a short name (`model=`, `data=`, `reward=`) has every open key fitted to the model, the data and the
machine, and so has every method but `rl`: the defaults of the keys are those of RL. An RL run in full keys keeps them;
only a missing micro-batch size, which has none, is chosen. What is set is never changed. Torch and transformers are
imported where the machine or the prompts are looked at.
"""

from __future__ import annotations

import ast
import math
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dovetail.config.actor import ActorConfig
from dovetail.config.errors import ConfigError, Notice
from dovetail.config.load import LoadedConfig
from dovetail.config.plan import Shapes, make_plan, read_shapes
from dovetail.config.plan.layout import make_layouts
from dovetail.config.root import DovetailConfig
from dovetail.config.tree import Tree, leaves, nested
from dovetail.config.units import GIB
from dovetail.config.validate import build
from dovetail.trainer.inputs import no_gpu

_ARR = "actor_rollout_ref"
_ACTOR, _ROLLOUT = f"{_ARR}.actor", f"{_ARR}.rollout"
_CUTS = (f"{_ACTOR}.use_dynamic_bsz", f"{_ACTOR}.ppo_micro_batch_size_per_gpu")
_MOST_TOKENS = int(ActorConfig.model_fields["ppo_max_token_len_per_gpu"].default)
_MOST_ON_CPU = 4096
_SPARE = 0.1
"""Share of the memory that the estimate leaves free."""
_MOST_ROWS_READ = 10_000
_GIVEN = "the rate that was given"
_PROMPT_COLUMNS = ("question", "problem", "instruction", "query")


@dataclass(frozen=True)
class _Machine:
    num_gpus: int
    gib: float | None
    """Memory of one GPU."""


@dataclass(frozen=True)
class _Prompts:
    """What the training files hold. `longest` is None when the prompts could not be measured."""

    num_rows: int
    longest: int | None = None
    num_read: int = 0


def choose_open_keys(
    loaded: LoadedConfig,
    *,
    look_at_files: bool = True,
    look_at_machine: bool = True,
    one_process: bool = False,
    device_memory_gib: float | None = None,
) -> LoadedConfig:
    """`loaded` with its open keys filled in, and `choices` that say how.

    For a plan of another machine: without `look_at_files` no data is read, without `look_at_machine` no GPU is looked
    for.
    """
    choices = _Choices(loaded)
    if not loaded.fits_open_keys and not choices.is_open(*_CUTS):
        return loaded
    machine = _machine() if look_at_machine and not _on_cluster(loaded.config) else None
    if loaded.fits_open_keys:
        if loaded.config.generates:
            _choose_algorithm(choices)
        if machine is not None:
            _choose_devices(choices, machine, one_process=one_process)
        _choose_rate(choices)
    if machine is not None:
        device_memory_gib = device_memory_gib or machine.gib
    if not loaded.config.generates:
        num_rows = _count_rows(choices.config) if look_at_files else 0
        _choose_example_lengths(choices, num_rows)
        _choose_for_examples(choices, _Prompts(num_rows))
    elif loaded.fits_open_keys:
        shapes = read_shapes(choices.config)
        context = None if shapes.policy is None else shapes.policy.context_length
        _choose_lengths(choices, prompts := _prompts(choices) if look_at_files else _Prompts(0), context)
        _choose_batches(choices, prompts)
        _choose_run(choices, prompts)
    _choose_micro_batches(choices, device_memory_gib)
    return replace(loaded, config=choices.config, tree=choices.tree(), choices=tuple(choices.made))


class _Choices:
    """The keys that are set, and what was chosen for others. `config` is what they come to."""

    def __init__(self, loaded: LoadedConfig) -> None:
        self._set = dict(leaves(loaded.tree))
        self.made: list[Notice] = []
        self.config: DovetailConfig = loaded.config

    def is_open(self, *keys: str) -> bool:
        """Whether none of these keys is set; null leaves a key open."""
        return all(self._set.get(key) is None for key in keys)

    def choose(self, why: str, **values: Any) -> None:
        """Set those of `values` that are open (`data__seed` is `data.seed`), for one reason."""
        self.choose_all(why, {name.replace("__", "."): value for name, value in values.items()})

    def choose_all(self, why: str, values: Mapping[str, Any]) -> None:
        chosen = {key: value for key, value in values.items() if self.is_open(key)}
        if not chosen:
            return
        self._set |= chosen
        config, problems = build(self._set)
        if config is None:
            raise ConfigError(problems)
        self.config = config
        shown = " ".join(f"{key}={value}" for key, value in chosen.items())
        self.made.append(Notice(next(iter(chosen)), f"{shown}: {why}."))

    def tree(self) -> Tree:
        return nested(self._set)


def gpu_gib(config: DovetailConfig) -> float | None:
    """Memory of a GPU of this machine; None where there is none, or the run uses others."""
    if config.trainer.device == "cpu" or config.trainer.nnodes > 1 or _on_cluster(config):
        return None
    return _machine().gib


def _on_cluster(config: DovetailConfig) -> bool:
    return bool(config.ray_init.address or os.environ.get("RAY_ADDRESS"))


def _machine() -> _Machine:
    import torch

    if not torch.cuda.is_available():
        return _Machine(0, None)
    return _Machine(torch.cuda.device_count(), torch.cuda.get_device_properties(0).total_memory / GIB)


def _choose_devices(choices: _Choices, machine: _Machine, *, one_process: bool) -> None:
    device = choices.config.trainer.device
    if device == "auto" and not machine.num_gpus:
        choices.choose("this machine shows no GPU", trainer__device="cpu")
    if device == "cuda" and not machine.num_gpus:
        raise no_gpu()
    on_gpu = choices.config.trainer.device != "cpu"
    if one_process or not on_gpu:
        why = "one process uses one device" if on_gpu else "one process uses all cores of a CPU"
        choices.choose(why, trainer__n_gpus_per_node=1)
    else:
        choices.choose("the GPUs of this machine", trainer__n_gpus_per_node=machine.num_gpus)
    if on_gpu:
        if choices.config.actor_rollout_ref.actor.strategy != "megatron":
            key = f"{_ARR}.model.use_fused_kernels"
            choices.choose_all("log-probs without holding the logits of a whole micro-batch", {key: True})
        return
    config = choices.config
    roles = {f"{_ROLLOUT}.dtype": True, f"{_ACTOR}.fsdp_config.mixed_precision.param_dtype": True}
    roles[f"{_ARR}.ref.fsdp_config.mixed_precision.param_dtype"] = config.uses_reference
    roles["critic.fsdp_config.mixed_precision.param_dtype"] = config.uses_critic
    roles["reward_model.model.fsdp_config.mixed_precision.param_dtype"] = config.reward_model.enable
    why = "many CPUs compute bfloat16 hundreds of times slower"
    choices.choose_all(why, {key: "float32" for key, used in roles.items() if used})


def _trained_section(config: DovetailConfig) -> str:
    return "critic" if config.trainer.method == "reward" else _ACTOR


def _choose_rate(choices: _Choices) -> None:
    """The key's own default is one for RL."""
    config = choices.config
    method, section = config.trainer.method, _trained_section(config)
    if method == "rl":
        if config.actor_rollout_ref.model.uses_lora:
            choices.choose_all("a usual rate for adapters", {f"{section}.optim.lr": 3e-5})
        if config.uses_critic and config.critic.model.uses_lora:
            choices.choose_all("a usual rate for a critic, ten times that for adapters", {"critic.optim.lr": 1e-4})
        return
    if method == "reward" and not choices.is_open(f"{_ACTOR}.optim.lr"):
        rate, why = config.actor_rollout_ref.actor.optim.lr, _GIVEN
    elif method == "dpo" and config.dpo.loss_type != "orpo":
        rate, why = 1e-6, "preferences move a policy fast"
    else:
        rate, why = 1e-5, f"a usual rate for {'distillation' if method == 'distill' else 'fine-tuning'}"
    if (config.critic if method == "reward" else config.actor_rollout_ref).model.uses_lora and why != _GIVEN:
        rate, why = 10 * rate, f"{why}, ten times that for adapters"
    choices.choose_all(why, {f"{section}.optim.lr": rate})


def _choose_algorithm(choices: _Choices) -> None:
    choices.choose("it needs no value network", algorithm__adv_estimator="grpo")
    if choices.config.algorithm.adv_estimator != "gae":
        compared = choices.config.scores_training
        why = "responses to a prompt are compared with each other" if compared else "several responses to a prompt"
        choices.choose_all(why, {f"{_ROLLOUT}.n": 8})
    reward = choices.config.custom_reward_function
    if reward.path is not None and _takes_lists(reward.path, reward.name):
        choices.choose(f"{reward.name} takes lists of responses", reward_model__reward_manager="batch")


def _choose_lengths(choices: _Choices, prompts: _Prompts, context: int | None) -> None:
    if prompts.longest is not None and choices.is_open("data.max_prompt_length"):
        length = math.ceil(prompts.longest / 32) * 32
        sampled = prompts.num_read < prompts.num_rows
        if sampled:
            why = f"the longest of {prompts.num_read:,} of {prompts.num_rows:,} prompts has {prompts.longest} tokens"
            choices.choose("only some prompts were measured", data__filter_overlong_prompts=True)
        else:
            why = f"the longest prompt has {prompts.longest} tokens"
        choices.choose(why, data__max_prompt_length=length)
    if context is not None and choices.config.data.max_prompt_length >= context:
        choices.choose(f"half of the model's context of {context:,} tokens", data__max_prompt_length=context // 2)
    longest = 128 if choices.config.trainer.device == "cpu" else 1024
    why = "a CPU generates slowly" if longest == 128 else "room for a worked solution"
    room = None if context is None else context - choices.config.data.max_prompt_length
    if room is not None and 0 < room < longest:
        longest, why = room, f"the model's context of {context:,} tokens leaves no more"
    choices.choose(why, data__max_response_length=longest)


def _choose_batches(choices: _Choices, prompts: _Prompts) -> None:
    config = choices.config
    most = 8 if config.trainer.device == "cpu" else 64
    parallel, n = make_layouts(config)["actor"].data_parallel, config.actor_rollout_ref.rollout.n
    round_size = parallel // math.gcd(parallel, n)
    if prompts.num_rows:
        size = 2 ** int(math.log2(max(1, min(most, prompts.num_rows // 8))))
        steps = prompts.num_rows // size
        make = "1 prompt makes" if prompts.num_rows == 1 else f"{prompts.num_rows:,} prompts make"
        why = f"{make} {steps:,} step{'s' * (steps != 1)}"
    else:
        size, why = most, "a usual size"
    size = math.ceil(size / round_size) * round_size
    if prompts.num_rows:
        # Fewer prompts than one round of all devices: the checks of the run say so.
        size = min(size, prompts.num_rows)
    choices.choose(why, data__train_batch_size=size)
    key = f"{_ACTOR}.ppo_mini_batch_size"
    choices.choose_all("one update for each batch", {key: choices.config.data.train_batch_size})


def _choose_run(choices: _Choices, prompts: _Prompts) -> None:
    if choices.is_open("trainer.total_training_steps"):
        choices.choose(f"every {'prompt' if choices.config.generates else 'row'} once", trainer__total_epochs=1)
    if choices.is_open("trainer.save_freq"):
        trainer, size = choices.config.trainer, choices.config.data.train_batch_size
        steps = trainer.total_training_steps or prompts.num_rows // size * trainer.total_epochs
        freq = steps if 0 < steps < 50 else 50
        why = "a checkpoint at the end" if freq == steps else "a checkpoint every 50 steps and at the end"
        choices.choose(why, trainer__save_freq=freq)
        choices.choose("older checkpoints are deleted", trainer__max_actor_ckpt_to_keep=1)
    if choices.is_open("trainer.default_local_dir", "trainer.experiment_name"):
        config = choices.config
        parts = [config.actor_rollout_ref.model.path, *config.data.train_paths[:1]]
        stems = [Path(part.rstrip("/")).name.removesuffix(".parquet").removesuffix(".jsonl") for part in parts if part]
        name = re.sub(r"[^\w.-]+", "-", "-".join(stems)) or "run"
        choices.choose("the model and the data", trainer__experiment_name=name)


def _choose_example_lengths(choices: _Choices, num_rows: int) -> None:
    """Room for the longest row, as far as the model's context goes."""
    keys = ("data.max_length", "data.max_prompt_length", "data.max_response_length")
    if not num_rows or not choices.is_open(*keys):
        return
    from dovetail.trainer.examples import MOST_ROWS, example_lengths

    if (longest := example_lengths(choices.config)) is None:
        return  # the checks of the run name what is missing or wrong
    shape = read_shapes(choices.config).policy
    context = math.inf if shape is None or shape.context_length is None else shape.context_length
    if longest.row > context:
        choices.choose(f"the model's context has {context:,} tokens", data__filter_overlong_prompts=True)
    elif num_rows > MOST_ROWS:
        choices.choose("only some rows were measured", data__filter_overlong_prompts=True)
    row, prompt, response = (
        int(min(context, math.ceil(length / 32) * 32)) for length in (longest.row, longest.prompt, longest.response)
    )
    if choices.config.trainer.method == "sft":
        choices.choose(f"the longest conversation has {longest.row} tokens", data__max_length=row)
        return
    why = f"the longest prompt has {longest.prompt} tokens, the longest response {longest.response}"
    choices.choose(why, data__max_prompt_length=prompt, data__max_response_length=response)


def _choose_for_examples(choices: _Choices, examples: _Prompts) -> None:
    """Methods that train on a data set: batch and steps."""
    most, num_rows = 8 if choices.config.trainer.device == "cpu" else 64, examples.num_rows
    size = 2 ** int(math.log2(max(1, min(most, num_rows // 8)))) if num_rows else most
    choices.choose(f"{num_rows:,} rows" if num_rows else "a usual size", data__train_batch_size=size)
    _choose_run(choices, examples)


def _choose_micro_batches(choices: _Choices, device_memory_gib: float | None) -> None:
    """Cut by tokens where neither sequences nor tokens say how much a device computes at a time."""
    section = _trained_section(choices.config)
    dynamic, budget = f"{section}.use_dynamic_bsz", f"{section}.ppo_max_token_len_per_gpu"
    # What the critic's section leaves open it takes from the actor's.
    if not choices.is_open(*_CUTS, dynamic, f"{section}.ppo_micro_batch_size_per_gpu"):
        return
    choices.choose_all("micro-batches are split by tokens, whatever the lengths", {dynamic: True})
    if choices.is_open(budget):
        tokens, why = _token_budget(choices, budget, read_shapes(choices.config), device_memory_gib)
        choices.choose_all(why, {budget: tokens})


def _token_budget(choices: _Choices, key: str, shapes: Shapes, device_memory_gib: float | None) -> tuple[int, str]:
    """The most tokens of a micro-batch that the plan's memory estimate has room for in every pass."""
    config = choices.config
    longest = config.longest_sequence * config.sequences_trained_together
    most, limit = _MOST_TOKENS, "more tokens are no faster"
    if config.trainer.device == "cpu":
        most, limit = _MOST_ON_CPU, "more tokens are no faster on a CPU"
    trial = _Choices(LoadedConfig(config, (), choices.tree(), {}))
    trial.choose_all("a trial", {key: longest})
    plan = make_plan(trial.config, shapes, device_memory_gib=device_memory_gib)
    least = math.ceil(longest / plan.layouts[0].ranks_per_sequence)
    if plan.memory is None:
        return max(least, most), "the model's config.json was not read, so its memory is not known"
    phases = {phase.name: phase for phase in plan.memory.phases}
    room = math.inf
    for batch in plan.batches.passes:
        if (phase := phases.get(batch.name)) is None:
            continue
        flexible = phase.items["activations"] + phase.items["logits"] - phase.optional
        free = phase.device_bytes * (1 - _SPARE) - (phase.needed - flexible)
        room = min(room, batch.tokens_per_device * max(0.0, free) / max(1.0, flexible))
    gib = plan.memory.device_bytes / GIB
    if room < least:
        what = "pair" if config.sequences_trained_together > 1 else "sequence"
        return least, f"the longest {what}; the memory plan has room for less in {gib:.0f} GiB"
    if room < most:
        return max(least, int(room) // 256 * 256), f"what the memory plan has room for in {gib:.0f} GiB"
    return max(least, most), limit


def _prompts(choices: _Choices) -> _Prompts:
    """Count the rows of the training files and measure their prompts, some evenly spaced ones of large files."""
    config = choices.config
    data, model = config.data, config.actor_rollout_ref.model
    if data.custom_cls.path is not None or not data.train_paths or not model.path:
        return _Prompts(0)
    from dovetail.data.encode import PromptEncoder
    from dovetail.data.errors import DataError
    from dovetail.data.files import read_rows
    from dovetail.models.errors import ModelError
    from dovetail.models.load import load_tokenizer

    try:
        files = [read_rows(path) for path in data.train_paths]
        columns = files[0].columns
        if data.prompt_key not in columns:
            for column in [name for name in _PROMPT_COLUMNS if name in columns][:1]:
                choices.choose(f"there is no column {data.prompt_key!r}", data__prompt_key=column)
        num_rows = sum(len(file) for file in files)
        if 0 <= data.train_max_samples < num_rows:
            num_rows = data.train_max_samples
        if not choices.is_open("data.max_prompt_length") or any(
            key in columns for key in (data.image_key, data.video_key)
        ):
            return _Prompts(num_rows)
        tokenizer = load_tokenizer(
            data.tokenizer or model.tokenizer_source,
            trust_remote_code=model.trust_remote_code,
            chat_template=model.custom_chat_template,
        )
        encoder = PromptEncoder(tokenizer, dict(data.apply_chat_template_kwargs))
        stride = math.ceil(sum(len(file) for file in files) / _MOST_ROWS_READ)
        key, longest, num_read = choices.config.data.prompt_key, 0, 0
        for file in files:
            prompts = [file[row].get(key) for row in range(0, len(file), max(1, stride))]
            num_read += len(prompts)
            for prompt in prompts:
                with suppress(DataError):  # a bad row, which the run names; the others are measured
                    longest = max(longest, len(encoder.encode(prompt, file.path)))
    except (DataError, ModelError, FileNotFoundError):
        return _Prompts(0)  # the checks of the run name what is missing or wrong
    return _Prompts(num_rows, longest or None, min(num_read, num_rows))


def _count_rows(config: DovetailConfig) -> int:
    """Rows of the training files; 0 where they cannot be read, which the checks of the run report."""
    from dovetail.data.errors import DataError
    from dovetail.data.files import count_rows

    try:
        return sum(count_rows(path) for path in config.data.train_paths)
    except (DataError, FileNotFoundError):
        return 0


def _takes_lists(path: str, name: str) -> bool:
    """Whether a function of a file takes lists of responses. Read, not run; other functions are asked by the caller."""
    from dovetail.rewards.signatures import takes_lists

    file = Path(path).expanduser()
    if file.suffix != ".py" or not file.is_file():
        return False
    try:
        body = ast.parse(file.read_bytes()).body
    except (SyntaxError, ValueError):
        return False  # the checks of the run say so
    functions = [
        node for node in body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name
    ]
    arguments = [argument.arg for node in functions for argument in (*node.args.args, *node.args.kwonlyargs)]
    return takes_lists(arguments)
