"""The driver's own part of a large step: memory, seconds outside the workers, bytes sent to them.

The trainer, its dispatch and its scoring processes are the real ones; the workers are not: a group of `--ranks` ranks
answers at once with columns of the right shape, so that a batch of 8,192 x 16 k tokens fits on a laptop. Results reach
the driver as Ray would hand them over, in read-only memory outside its heap (files here). Arguments are pickled and
copied once, as into Ray's store. Lengths have a long tail: median 1/8 of the longest, some cut off.

A parent process watches the driver's private memory (RssAnon). `driver s` is the wall time of the second step without
the time in which fake workers make their responses; waiting for scores counts. `cpu s` is the CPU time of the driver
over the same step, also that of its threads. Run: ``python -m benchmarks.driver_step [--rows 1024 --response 4096]``.
"""

from __future__ import annotations

import argparse
import json
import mmap
import pickle
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dovetail.config.root import DovetailConfig
from dovetail.controller.futures import BatchFuture, GroupFuture
from dovetail.controller.worker_group import Launch, WorkerGroup
from dovetail.demo.toy import save_toy_model
from dovetail.models.load import load_tokenizer
from dovetail.observability.run_folder import RunFolder
from dovetail.observability.tracker import Tracker
from dovetail.protocol import DataProto
from dovetail.rewards.build import build_reward_runner
from dovetail.rollout.base import GenerationResult
from dovetail.trainer.groups import RoleGroups
from dovetail.trainer.ppo import RayPPOTrainer
from dovetail.workers.actor_rollout_ref import ActorRolloutRefWorker
from dovetail.workers.critic_worker import CriticWorker
from dovetail.workers.generation import answers_of, requests_of

ANSWERS = 8
"""Answers to each prompt."""


class FakeRanks(WorkerGroup):
    """Real registrations, dispatch and collection; each rank answers with made-up columns."""

    takes_slices = False

    def __init__(self, config: DovetailConfig, worker_cls: type, folder: Path) -> None:
        super().__init__(worker_cls.__name__, worker_cls, config.trainer.world_size)
        self._rollout = config.actor_rollout_ref.rollout
        self._folder = folder
        self._scratch = np.empty(2**26, dtype=np.uint8)
        self.bytes_sent: dict[str, int] = {}
        self.seconds = 0.0
        self.cpu_seconds = 0.0

    def spawn(self, prefix_set: Any) -> dict[str, Any]:
        raise NotImplementedError("the fake group plays one role.")

    def shutdown(self) -> None: ...

    def take_spans(self) -> list[list[Any]]:
        return [[]]

    def freeze_gc(self) -> None: ...

    def mesh_layout(self, mesh_name: str) -> Any:
        from dovetail.controller.dispatch import MeshLayout

        return MeshLayout(tuple(range(self.world_size)), tuple(range(self.world_size)))

    def _launch(self, launch: Launch) -> GroupFuture:
        name, outputs = launch.call.method, {}
        for rank in launch.ranks:
            args, kwargs = launch.arguments.of(rank)
            self.bytes_sent[name] = self.bytes_sent.get(name, 0) + self._send([args, kwargs])
            start, cpu = time.perf_counter(), time.process_time()
            output = getattr(self, f"_{name}", lambda *_: None)(rank, *args)
            outputs[rank] = _received(output, self._folder) if isinstance(output, DataProto) else output
            self.seconds += time.perf_counter() - start
            self.cpu_seconds += time.process_time() - cpu
        done = _Done(outputs)
        if launch.batch_ranks is None:
            return GroupFuture(done, launch.collect)
        return BatchFuture(done, launch.collect, parts=(), lazy=False)

    def _send(self, value: Any) -> int:
        buffers: list[pickle.PickleBuffer] = []
        total = len(pickle.dumps(value, protocol=5, buffer_callback=buffers.append))
        for buffer in buffers:
            raw = np.frombuffer(buffer.raw(), dtype=np.uint8)
            for first in range(0, len(raw), len(self._scratch)):
                piece = raw[first : first + len(self._scratch)]
                self._scratch[: len(piece)] = piece
            total += len(raw)
        return total

    def _generate_sequences(self, rank: int, prompts: DataProto) -> DataProto:
        rng = np.random.default_rng(rank)
        longest = self._rollout.response_length
        requests = requests_of(prompts, self._rollout, name=str(rank))
        lengths = np.clip(rng.lognormal(np.log(longest / 8), 1.0, len(requests) * ANSWERS), 1, longest).astype(int)
        results = [
            GenerationResult(
                request_id=str(row),
                sample_index=row % ANSWERS,
                token_ids=rng.integers(20, 250, length).tolist(),
                log_probs=[-1.0] * length,
                weight_versions=[1] * length,
                finish_reason="length" if length == longest else "stop",
            )
            for row, length in enumerate(lengths.tolist())
        ]
        return answers_of(prompts, requests, results, self._rollout, pad_token_id=0)

    def _compute_log_prob(self, rank: int, data: DataProto) -> DataProto:
        return DataProto.from_dict({"old_log_probs": _numbers(data), "entropys": _numbers(data)})

    def _compute_ref_log_prob(self, rank: int, data: DataProto) -> DataProto:
        return DataProto.from_dict({"ref_log_prob": _numbers(data)})

    def _compute_values(self, rank: int, data: DataProto) -> DataProto:
        return DataProto.from_dict({"values": _numbers(data)})

    def _update_actor(self, rank: int, data: DataProto) -> DataProto:
        return DataProto(meta_info={"metrics": {"actor/pg_loss": 0.0}})

    def _update_critic(self, rank: int, data: DataProto) -> DataProto:
        return DataProto(meta_info={"metrics": {"critic/vf_loss": 0.0}})


class Prompts:
    """A loader that never ends."""

    epoch = 0

    def __init__(self, count: int, length: int) -> None:
        self._count, self._length = count, length

    def __len__(self) -> int:
        return 1

    def next_batch(self) -> DataProto:
        rng = np.random.default_rng(0)
        ids = [
            rng.integers(20, 250, rng.integers(self._length // 4, self._length)).tolist() for _ in range(self._count)
        ]
        columns = {name: torch.zeros(self._count, self._length, dtype=torch.long) for name in _PADDED}
        facts = {
            "raw_prompt_ids": ids,
            "data_source": ["openai/gsm8k"] * self._count,
            "reward_model": [{"ground_truth": "7"}] * self._count,
            "extra_info": [{"index": row} for row in range(self._count)],
        }
        return DataProto.from_dict(columns, facts)

    def show_batch(self, batch: DataProto) -> None: ...


_PADDED = ("input_ids", "attention_mask", "position_ids")


class _Done:
    def __init__(self, outputs: dict[int, Any]) -> None:
        self._outputs = outputs

    def wait(self, timeout: float | None = None, meanwhile: Any = None) -> dict[int, Any]:
        outputs, self._outputs = self._outputs, {}
        return outputs

    def done(self) -> bool:
        return True


def _numbers(data: DataProto) -> torch.Tensor:
    return torch.full(data.tensors["responses"].shape, -1.0)


def _received(batch: DataProto, folder: Path) -> DataProto:
    """The batch as a reader of Ray's store has it: read-only, in memory that is not this process's own."""
    buffers: list[pickle.PickleBuffer] = []
    data = pickle.dumps(batch, protocol=5, buffer_callback=buffers.append)
    views = []
    for buffer in buffers:
        raw = buffer.raw()
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(raw)
            file.flush()
            views.append(memoryview(mmap.mmap(file.fileno(), len(raw), prot=mmap.PROT_READ)) if len(raw) else raw)
    return pickle.loads(data, buffers=views)


def step(rows: int, response: int, prompt: int, ranks: int, workers: int) -> dict[str, Any]:
    """Two steps in this process; numbers of the second."""
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as name:
        folder = Path(name)
        config = _config(folder, rows, response, prompt, ranks, workers)
        tokenizer = load_tokenizer(str(folder / "model"))
        policy = FakeRanks(config, ActorRolloutRefWorker, folder)
        critic = FakeRanks(config, CriticWorker, folder)
        groups = RoleGroups(policy, actor_rollout=policy, ref=policy, critic=critic, reward_model=None)
        run = RunFolder(folder / "run")
        run.path.mkdir()
        run.start()
        with (
            build_reward_runner(config, tokenizer) as rewards,
            Tracker(["file"], run, project="p", experiment="e", config={}) as tracker,
        ):
            trainer = RayPPOTrainer(
                config,
                tokenizer=tokenizer,
                train_loader=Prompts(rows // ANSWERS, prompt),  # type: ignore[arg-type]
                val_loader=None,
                rewards=rewards,
                tracker=tracker,
                create_groups=lambda: groups,
            )
            trainer._groups = groups
            for number in (1, 2):
                trainer.global_step = number
                policy.seconds = critic.seconds = policy.cpu_seconds = critic.cpu_seconds = 0.0
                policy.bytes_sent, critic.bytes_sent = {}, {}
                trainer.timers.take()
                start, cpu = time.perf_counter(), time.process_time()
                trainer._train_step()
                wall = time.perf_counter() - start - policy.seconds - critic.seconds
                trainer._answer_files.wait()
                used = time.process_time() - cpu - policy.cpu_seconds - critic.cpu_seconds
                phases = {key: round(value, 2) for key, value in trainer.timers.seconds().items()}
        return {
            "driver_s": round(wall, 2),
            "driver_cpu_s": round(used, 2),
            "sent_gib": round((sum(policy.bytes_sent.values()) + sum(critic.bytes_sent.values())) / 2**30, 2),
            "sent_gib_by_call": {k: round(v / 2**30, 3) for k, v in (policy.bytes_sent | critic.bytes_sent).items()},
            "phases_s": phases,
        }


def _config(folder: Path, rows: int, response: int, prompt: int, ranks: int, workers: int) -> DovetailConfig:
    model = str(save_toy_model(folder / "model"))
    return DovetailConfig(
        data={"max_prompt_length": prompt, "max_response_length": response, "train_batch_size": rows // ANSWERS},
        actor_rollout_ref={
            "model": {"path": model},
            "actor": {"ppo_mini_batch_size": rows // ANSWERS // 2, "use_kl_loss": True},
            "rollout": {"n": ANSWERS, "calculate_log_probs": True},
        },
        critic={"model": {"path": model}},
        algorithm={"adv_estimator": "gae"},
        reward_model={"num_workers": workers},
        trainer={"n_gpus_per_node": ranks, "device": "cpu", "total_training_steps": 2},
    )


def measure(arguments: list[str]) -> dict[str, Any]:
    """Run the step in a process of its own and watch its memory."""
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.driver_step", "--child", *arguments], stdout=subprocess.PIPE, text=True
    )
    peak = 0
    while process.poll() is None:
        try:
            status = Path(f"/proc/{process.pid}/status").read_text()
            peak = max(peak, int(status.split("RssAnon:")[1].split()[0]))
        except (FileNotFoundError, IndexError):
            pass
        time.sleep(0.01)
    assert process.stdout is not None, "asked for above"
    text = process.stdout.read()
    if process.returncode:
        raise SystemExit(f"the step failed with exit code {process.returncode}.")
    return {"driver_peak_gib": round(peak / 2**20, 2), **json.loads(text.splitlines()[-1])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--response", type=int, default=4096)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--workers", type=int, default=2, help="scoring processes")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.child:
        print(json.dumps(step(args.rows, args.response, args.prompt, args.ranks, args.workers)))
        return
    given = [
        word
        for name in ("rows", "response", "prompt", "ranks", "workers")
        for word in (f"--{name}", str(getattr(args, name)))
    ]
    print(json.dumps({"rows": args.rows, "response": args.response, **measure(given)}))


if __name__ == "__main__":
    main()
