"""How fast the configured run is on this machine: its own workers on prompts of random tokens, answers of full length.

Measures the phases that hold the devices: generation, old log-probs, the policy's update. Reads no data set, asks for
no reward, writes nothing; critic and reference are not measured.
"""

from __future__ import annotations

import statistics
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
import torch

from dovetail.config.checks import check_config, refuse_errors
from dovetail.config.effects import refuse_unsupported
from dovetail.config.plan import make_plan, read_shapes
from dovetail.config.root import DovetailConfig
from dovetail.config.units import GIB
from dovetail.controller import stop_ray
from dovetail.models.flops import StepUtilisation
from dovetail.observability.timers import PhaseTimers
from dovetail.protocol import DataProto
from dovetail.trainer.arrange import arrange_rows
from dovetail.trainer.devices import ray_runs_here, start_cluster, uses_gpu
from dovetail.trainer.groups import RoleGroups, create_groups
from dovetail.trainer.model_folders import fetch_models
from dovetail.trainer.own_log_probs import first_mini_batch, score_others
from dovetail.trainer.step_metrics import update_metrics

# What the table, the plan and the metrics call a phase.
_PHASES = {
    "gen": ("rollout", "rollout", "perf/mfu/rollout"),
    "old_log_prob": ("old log-probs", "log-probs", "perf/mfu/actor_infer"),
    "update_actor": ("actor update", "update actor", "perf/mfu/actor"),
}


@dataclass(frozen=True)
class PhaseSpeed:
    """One phase: median seconds over the measured steps, tokens per second, share of the peak, memory in GiB."""

    name: str
    seconds: float
    tokens: int
    mfu: float | None = None
    planned_gib: float | None = None

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds


@dataclass(frozen=True)
class BenchResult:
    phases: tuple[PhaseSpeed, ...]
    warm_up_s: float
    """The first step: it compiles, captures graphs and makes the optimizer's state."""
    peak_gib: float | None
    """Largest memory in use on a device in training; None on a CPU."""

    @property
    def step_s(self) -> float:
        return sum(phase.seconds for phase in self.phases)


def bench_training(config: DovetailConfig, *, steps: int, use_ray: bool) -> BenchResult:
    """Start the run's workers, measure them, stop them."""
    shapes = read_shapes(config)
    refuse_errors(check_config(config, shapes.policy))
    refuse_unsupported(config)
    fetch_models(config)
    with ExitStack() as open_things:
        if use_ray and not ray_runs_here():
            open_things.callback(stop_ray)
        use_gpu = start_cluster(config) if use_ray else uses_gpu(config)
        groups = create_groups(config, use_ray=use_ray, use_gpu=use_gpu)
        open_things.callback(groups.shutdown)
        return bench(config, groups, steps=steps)


def bench(config: DovetailConfig, groups: RoleGroups, *, steps: int) -> BenchResult:
    """Run `steps` steps and one before them that does not count. The configuration must force full answers."""
    if steps < 1:
        raise ValueError(f"steps={steps} must be at least 1.")
    policy = groups.actor_rollout
    policy.init_model(steps + 1)
    utilisation = StepUtilisation(config)
    utilisation.ask_peaks(trains=policy, generates=policy)
    seconds: list[dict[str, float]] = []
    shares: list[dict[str, float]] = []
    tokens: dict[str, int] = {}
    peak: float | None = None
    for step in range(steps + 1):
        timers = PhaseTimers()
        request = random_prompts(config, step)
        with timers("gen"):
            batch = policy.generate_sequences(request)
        batch.meta_info = {"temperature": batch.meta_info["temperature"]}
        names = np.repeat(np.arange(config.data.train_batch_size), config.actor_rollout_ref.rollout.n)
        batch.non_tensor_batch["uid"] = names.astype(str).astype(object)
        batch = with_advantages(config, batch, policy.dp_size("actor"))
        utilisation.count_generation(batch)
        share = 1.0
        if config.skips_first_mini_batch:
            first = first_mini_batch(len(batch), policy.dp_size("actor"), mini_batch_rows(config))
            utilisation.unscored, share = first, 1 - mini_batch_rows(config) / len(batch)  # rows are equally long
            with timers("old_log_prob"):
                batch = batch.union(score_others(batch, first, policy.compute_log_prob).columns)
        elif config.has_log_prob_pass:
            with timers("old_log_prob"):
                batch = batch.union(policy.compute_log_prob(batch))
        elif config.needs_old_log_probs:
            batch = batch.union(DataProto.from_dict({"old_log_probs": batch.tensors["rollout_log_probs"].clone()}))
        with timers("update_actor"):
            metrics = update_metrics(policy.update_actor(batch))
        times = timers.seconds()
        seconds.append(times)
        shares.append(utilisation.take(batch, times))
        peak = metrics.get("memory/peak_allocated_gib", peak)
        whole, written = (int(batch.tensors[name].sum()) for name in ("attention_mask", "response_mask"))
        tokens = {"gen": written, "old_log_prob": round(share * whole), "update_actor": whole}
    planned = _planned(config)
    measured = seconds[1:]
    phases = tuple(
        PhaseSpeed(
            label,
            statistics.median(step[phase] for step in measured),
            tokens[phase],
            mfu=_median([step.get(mfu) for step in shares[1:]]),
            planned_gib=planned.get(planned_as),
        )
        for phase, (label, planned_as, mfu) in _PHASES.items()
        if phase in measured[0]
    )
    return BenchResult(phases, warm_up_s=sum(seconds[0].values()), peak_gib=peak)


def random_prompts(config: DovetailConfig, step: int) -> DataProto:
    """A batch of prompts of `data.max_prompt_length` tokens; another one every step, the same in every run."""
    shape = read_shapes(config).policy
    if shape is None:
        path = config.actor_rollout_ref.model.path
        raise FileNotFoundError(f"{path} has no config.json to take the size of the vocabulary from.")
    random = np.random.default_rng((config.trainer.seed, step))
    ids = random.integers(0, shape.vocab_size, (config.data.train_batch_size, config.data.max_prompt_length))
    column = np.empty(len(ids), dtype=object)
    column[:] = [row.tolist() for row in ids]
    seeds = np.empty(len(ids), dtype=object)
    seeds[:] = [int(seed) for seed in random.integers(0, 2**31, len(ids))]
    return DataProto.from_dict(
        {},
        non_tensors={"raw_prompt_ids": column, "sampling_seed": seeds},
        meta_info={"n": config.actor_rollout_ref.rollout.n},
    )


def with_advantages(config: DovetailConfig, batch: DataProto, ranks: int) -> DataProto:
    """Advantages of either sign, rows in the order in which ranks take them."""
    mask = batch.tensors["response_mask"]
    signs = torch.where(torch.arange(len(mask)) % 2 == 0, 1.0, -1.0).unsqueeze(-1)
    batch = batch.union(DataProto.from_dict({"advantages": signs * mask}))
    rows = min(mini_batch_rows(config), len(batch))
    lengths = batch.tensors["attention_mask"].sum(dim=1).tolist()
    batch.reorder(arrange_rows(lengths, ranks, rows, balance=config.trainer.balance_batch))
    return batch


def mini_batch_rows(config: DovetailConfig) -> int:
    """Responses of one mini-batch, over all ranks."""
    return config.actor_rollout_ref.actor.ppo_mini_batch_size * config.actor_rollout_ref.rollout.n


def _planned(config: DovetailConfig) -> dict[str, float]:
    plan = make_plan(config, read_shapes(config))
    return {} if plan.memory is None else {phase.name: phase.total / GIB for phase in plan.memory.phases}


def _median(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None
