"""256 trajectories with slow tools: the stream of trajectories against the same loop in lock step, in one run, on CPU.

Few long turns and many short ones; after each of them an environment takes a log-normal time (median 0.2 s, 99th
percentile 2 s) and 1 % of its calls fail as infrastructure does, and are tried again. In lock step all trajectories
wait for the slowest call of a turn, as loops over a batch do. The stream is measured twice: until the last of the 256
has ended, as a synchronous step does it, and with 256 in flight all the time, as `async_training` does it, where a
trajectory that ends makes room for the next. The model is tiny and random: what is measured is who waits for whom.
Busy is the share of the measured time in which the engine has something to generate.
"""

from __future__ import annotations

import asyncio
import math
import os
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch

from dovetail.agents.calls import CallSettings
from dovetail.agents.chat import ChatRenderer
from dovetail.agents.environments import Environment, Environments, Step
from dovetail.agents.loops import agent_loop
from dovetail.agents.session import Session, SessionSettings
from dovetail.agents.stream import Agents, AgentStream
from dovetail.agents.types import InfrastructureError, Task
from dovetail.config.root import DovetailConfig
from dovetail.demo.smollm2 import smollm2_folder
from dovetail.models.load import load_tokenizer
from dovetail.protocol import DataProto
from dovetail.rollout.native.engine import NativeEngine

GROUPS, GROUP_SIZE = 32, 8
ROUNDS = 2
"""How many times `GROUPS` are measured where trajectories are carried on, after as many that are not."""
SHAPES = ((4, 8), (4, 32), (16, 4))
"""Turns of a trajectory, and tokens of a turn."""
MEDIAN_S, P99_S, FAULT_SHARE = 0.2, 2.0, 0.01
MAX_NUM_SEQS = 64
GOAL = ">= 3x, busy >= 85 %"
_SIGMA = math.log(P99_S / MEDIAN_S) / 2.326  # the 99th percentile of a normal distribution


class SlowTool(Environment):
    """Takes its time, and sometimes is not there. The same for the same trajectory."""

    def reset(self, task: Task) -> None:
        self._random = random.Random(f"{task.uid}/{task.sample}")
        self._turns = 0

    async def step(self, action: str) -> Step:
        await asyncio.sleep(self._random.lognormvariate(math.log(MEDIAN_S), _SIGMA))
        if self._random.random() < FAULT_SHARE:
            raise InfrastructureError("the sandbox is not there")
        self._turns += 1
        return Step("go on", done=self._turns == TALK.turns)


@dataclass
class LockStep:
    """Nobody begins a phase before everybody has ended the one before."""

    count: int
    _barrier: asyncio.Barrier | None = field(default=None)

    async def wait(self) -> None:
        if self.count:
            self._barrier = self._barrier or asyncio.Barrier(self.count)
            await self._barrier.wait()


@dataclass
class Talk:
    """How many turns a trajectory has, and how long one is."""

    turns: int
    max_new_tokens: int


LOCK_STEP, TALK = LockStep(0), Talk(0, 0)


@agent_loop("throughput")
async def talk(task: Task, session: Session) -> float:
    """Turns of a fixed length; a trajectory whose tool stays away still comes to the barriers."""
    messages, gone = list(task.messages), False
    for _ in range(TALK.turns):
        turn = await session.chat(messages, max_new_tokens=TALK.max_new_tokens)
        await LOCK_STEP.wait()
        try:
            observed = None if gone else await session.tools.respond([*messages, turn.message], turn)
        except InfrastructureError:
            observed, gone = None, True
        await LOCK_STEP.wait()
        messages += [turn.message, {"role": "user", "content": "go on" if observed is None else observed.text}]
    return 0.0


def run() -> list[dict]:
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    tokenizer = load_tokenizer(smollm2_folder())
    rows = []
    for TALK.turns, TALK.max_new_tokens in SHAPES:
        seconds, busy = {}, {}
        sides = {"lock step": (GROUPS * GROUP_SIZE, _drained), "stream": (0, _drained), "carried on": (0, _carried_on)}
        for name, (LOCK_STEP.count, work) in sides.items():
            LOCK_STEP._barrier = None
            seconds[name], busy[name] = _measure(tokenizer, work)
        turns = f"{GROUPS * GROUP_SIZE} trajectories, slow tools, {TALK.turns} turns of {TALK.max_new_tokens} tokens"
        for name in ("stream", "carried on"):
            rows.append(
                {
                    "name": f"{turns}, {name}: lock step, busy {busy[name]:.0%} against {busy['lock step']:.0%}",
                    "ours_s": seconds[name],
                    "other_s": seconds["lock step"],
                    "ratio": seconds["lock step"] / seconds[name],
                    "goal": GOAL,
                }
            )
    return rows


def _drained(stream: AgentStream, start_clock: Callable[[], None]) -> None:
    """All trajectories of one batch until the last has ended."""
    start_clock()
    stream.start(_prompts(0, GROUPS))
    stream.run(GROUPS)
    batch = stream.take()
    assert batch is not None, "all trajectories have ended"
    assert len(batch) == GROUPS * GROUP_SIZE, "each is one row"


def _carried_on(stream: AgentStream, start_clock: Callable[[], None]) -> None:
    """As many groups in flight all the time; the first ones to end, which are the quick ones, are not measured."""
    stream.start(_prompts(0, GROUPS))
    stream.generate_in_background()
    started, taken, measured_from = GROUPS, 0, None
    while measured_from is None or taken < measured_from + ROUNDS * GROUPS:
        stream.wait(60.0)
        batch = stream.take()
        assert batch is not None, "no trajectory ended in a minute"
        ended = len(batch) // GROUP_SIZE
        taken += ended
        stream.start(_prompts(started, ended))
        started += ended
        if measured_from is None and taken >= GROUPS:
            measured_from = taken
            start_clock()


def _measure(tokenizer, work: Callable[[AgentStream, Callable[[], None]], None]) -> tuple[float, float]:
    """Seconds for the tokens of `GROUPS` groups, and the share of them in which the engine was busy.

    By tokens, because groups that end say too little where they are carried on: those in flight have written more when
    the clock stops than when it starts.
    """
    keys = {"prompt_length": 64, "response_length": 512, "ignore_eos": True}
    rollout = DovetailConfig(actor_rollout_ref={"rollout": keys}).actor_rollout_ref.rollout
    settings = SessionSettings(
        ChatRenderer(tokenizer), lambda ids, tools=(): (tokenizer.decode(ids), ()), 64, rollout.response_length
    )
    agents = Agents(settings, CallSettings(), Environments(SlowTool), default_loop="throughput")
    with NativeEngine(_tiny_model(len(tokenizer)), max_num_seqs=MAX_NUM_SEQS) as engine:
        stream = AgentStream(engine, rollout, agents, pad_token_id=int(tokenizer.pad_token_id))
        ended, samples, began, tokens_before = threading.Event(), [], 0.0, 0

        def watch() -> None:
            while not ended.wait(0.005):
                health = engine.health()
                samples.append(health.num_running + health.num_waiting > 0)

        watcher = threading.Thread(target=watch, daemon=True)

        def start_clock() -> None:
            nonlocal began, tokens_before
            watcher.start()
            began, tokens_before = time.perf_counter(), engine.stats.decode_tokens

        work(stream, start_clock)
        elapsed, tokens = time.perf_counter() - began, engine.stats.decode_tokens - tokens_before
        ended.set()
        watcher.join()
        stream.close()
    wanted = GROUPS * GROUP_SIZE * TALK.turns * TALK.max_new_tokens
    return elapsed * wanted / tokens, sum(samples) / max(1, len(samples))


def _tiny_model(vocabulary: int):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=vocabulary, max_position_embeddings=1024, **shape, **heads)).eval()


def _prompts(first: int, count: int) -> DataProto:
    numbers = range(first, first + count)
    columns = {
        "uid": [f"draw-{number}" for number in numbers],
        "raw_prompt": [[{"role": "user", "content": f"task {number}"}] for number in numbers],
        "sampling_seed": np.array(numbers),
    }
    return DataProto.from_dict(non_tensors=columns, meta_info={"n": GROUP_SIZE})


if __name__ == "__main__":
    from benchmarks.run import format_table

    print(format_table(run()))
