"""`RolloutWorker`: an engine on devices of its own (`actor_rollout_ref.hybrid_engine=False`). Trains nothing.

Weights come from the trainer's rank 0 over a group that the driver introduces. Processes of the engine join it where
they can (SGLang's); else this one does, and hands on what it receives. Until the first update has arrived nothing is
generated.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor

from dovetail.agents.build import build_agents
from dovetail.agents.stops import with_stop_ids
from dovetail.agents.stream import Agents
from dovetail.config.root import DovetailConfig
from dovetail.controller import Dispatch, register
from dovetail.controller.errors import WorkerError
from dovetail.models.load import load_tokenizer, model_folder
from dovetail.protocol import DataProto
from dovetail.rollout.base import EngineDiedError, EngineError, GenerationResult, RolloutEngine
from dovetail.rollout.open_groups import OpenGroups
from dovetail.rollout.registry import engine_class_for
from dovetail.weight_sync import GroupAddress, WeightReceiver
from dovetail.workers.generation import answers_of, requests_of
from dovetail.workers.group_stream import open_groups, own_rows
from dovetail.workers.parity import ParityProbe
from dovetail.workers.training_role import TrainingRole
from dovetail.workers.weight_check import SentWeights

NO_WEIGHTS = "the engine has no weights of the trainer yet; call receive_weights first."


class RolloutWorker(TrainingRole):
    """One engine, or one process of an engine that several processes share."""

    def __init__(self, config: DovetailConfig) -> None:
        super().__init__(config)
        self._rollout = config.actor_rollout_ref.rollout
        self.engine: RolloutEngine | None = None
        self._receiver: WeightReceiver | None = None
        self._has_weights = False
        self._groups: OpenGroups[Any, Any] | None = None
        self._agents: Agents | None = None
        self._num_calls = 0
        self._held: list[tuple[float, float]] = []
        self._answered: list[tuple[float, float]] = []

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Start the engine. It may read the model folder, but generates from the trainer's weights only."""
        policy, size = self.config.actor_rollout_ref, self._rollout.engine_world_size
        if size > 1:  # processes that share an engine must know each other before it starts
            self.join_group()
        tokenizer = load_tokenizer(
            self.config.tokenizer_source,
            trust_remote_code=policy.model.trust_remote_code,
            chat_template=policy.model.custom_chat_template,
        )
        self._rollout = with_stop_ids(self.config, tokenizer)
        self.engine = engine_class_for(self._rollout).from_config(
            self._rollout,
            str(model_folder(policy.model.path)),
            device=self.device,
            trust_remote_code=policy.model.trust_remote_code,
            override_config=policy.model.override_config,
            external_lib=policy.model.external_lib,
        )
        self._pad_token_id = int(tokenizer.pad_token_id)
        self._probe = ParityProbe(self.config, tokenizer)
        self._agents = build_agents(self.config, tokenizer) if self._rollout.uses_agents else None
        self._register_dispatch_collect_info("rollout", self.rank // size, self.rank % size == 0)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def num_weight_ranks(self) -> int:
        """Receivers of a weight group that are this worker's."""
        return self._started().num_weight_ranks or 1

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def join_weight_group(self, address: GroupAddress, ranks_each: Sequence[int]) -> None:
        """Meet the trainer's rank 0, on the ranks after those of the workers before; blocks until all receivers have.
        `ranks_each` is what `num_weight_ranks` said."""
        engine, first_rank = self._started(), 1 + sum(ranks_each[: self.rank])
        if engine.num_weight_ranks:
            engine.join_weight_group(address, first_rank)
            return
        if self._receiver is not None:
            self._receiver.close()
        device = self.device if address.backend == "nccl" else "cpu"
        self._receiver = WeightReceiver(address, first_rank, device)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def receive_weights(self, version: int) -> float:
        """Take the update that the trainer is sending; returns the seconds during which nothing was generated.

        While groups are generated in the background, weights arrive beside those in use and are swapped between two
        tokens, where the engine can.
        """
        engine = self._started()
        start = time.time()
        if engine.num_weight_ranks:
            engine.receive_weights(version)
        elif self._groups is None:
            self._pass_on(engine.update_weights, version)
        else:
            self._pass_on(engine.stage_weights, version)
            start = time.time()
            engine.commit_weights(version)
        self._has_weights = True
        self._held = [*self._held[-99:], (start, time.time())]
        return self._held[-1][1] - start

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def compare_weights(self, sent: SentWeights) -> int:
        """How many tensors are those that the trainer sent; WeightMismatchError names the others."""
        return sent.compare(self._started())

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def answer_probe(self) -> list[GenerationResult]:
        """Greedy answers to the prompts on which engine and trainer are compared."""
        return self._probe.ask(self._started())

    @register(dispatch_mode=Dispatch.mesh("rollout", pad=True))
    def generate_sequences(self, prompts: DataProto) -> DataProto:
        """Responses for these prompts, `meta_info["n"]` of each side by side."""
        start = time.time()
        try:
            return self._answers(self._started(), prompts)
        finally:
            self._answered = [*self._answered[-99:], (start, time.time())]

    def _answers(self, engine: RolloutEngine, prompts: DataProto) -> DataProto:
        if not self._has_weights:
            raise EngineError(NO_WEIGHTS)
        if self._agents is not None:
            return self._agents.generate(engine, self._rollout, prompts, pad_token_id=self._pad_token_id)
        self._num_calls += 1
        size = self._rollout.engine_world_size
        name = f"{self.rank // size}-{self._num_calls}"
        requests = requests_of(prompts, self._rollout, name=name, unseeded=name if size > 1 else None)
        results = engine.generate(requests)
        return answers_of(prompts, requests, results, self._rollout, pad_token_id=self._pad_token_id)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def submit_groups(self, prompts: DataProto, snapshot: DataProto | None = None) -> None:
        """Start to generate the prompts whose column `engine` is this engine's number, in the background.

        With `snapshot` (of `snapshot_groups`) they go on from what is in it.
        """
        engine = self._started()
        if not self._has_weights:
            raise EngineError(NO_WEIGHTS)
        if self._groups is None:
            self._groups = open_groups(engine, self._rollout, self._agents, pad_token_id=self._pad_token_id)
            self._groups.generate_in_background()
        self._groups.start(own_rows(prompts, self.rank), snapshot)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def take_groups(self, wait_s: float = 0.0) -> DataProto | None:
        """Groups that have finished since the last call; waits up to `wait_s` for one."""
        if self._groups is None:
            return None
        self._groups.wait(wait_s)
        return self._groups.take()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def take_activity(self) -> list[tuple[str, float, float]]:
        """What the engine did since the last call: `(generate_groups or commit_weights, start, end)`."""
        held, self._held, answered, self._answered = self._held, [], self._answered, []
        busy = [] if self._groups is None else self._groups.take_busy()
        spans = [("generate_groups", start, end) for start, end in [*answered, *busy]]
        return spans + [("commit_weights", start, end) for start, end in held]

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def snapshot_groups(self) -> DataProto | None:
        """What the unfinished groups of this engine have so far; they go on."""
        return None if self._groups is None else self._groups.snapshot()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def tool_calls(self) -> dict[str, tuple[str, float]]:
        """Of groups of this engine that wait for a tool: its name, and for how many seconds."""
        return {} if self._groups is None else self._groups.tool_calls()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def num_tokens(self) -> int:
        """The engine's count of tokens, which shows its progress."""
        return self._started().num_tokens()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def abort_groups(self, uids: Sequence[str]) -> None:
        """Forget these groups, finished or not."""
        if self._groups is not None:
            self._groups.abort(uids)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def close_agents(self) -> None:
        """The run is over: give back what the agents' tools hold."""
        if self._agents is not None:
            if self._groups is not None:
                self._groups.close()
            self._agents.close()

    def close(self) -> None:
        if self._groups is not None:
            self._groups.close()
        if self.engine is not None:
            self.engine.close()

    def _pass_on(self, take: Callable[[Iterator[tuple[str, Tensor]], int], None], version: int) -> None:
        if self._receiver is None:
            raise EngineError("this worker has not joined a weight group; call join_weight_group first.")
        stream = _received(self._receiver)
        try:
            take(stream, version)
        finally:
            for _ in stream:  # the sender and the other engines wait for every tensor to be taken
                pass

    def _started(self) -> RolloutEngine:
        if self.engine is None:
            raise EngineError("the engine is not started; call init_model first.")
        return self.engine


def says_engine_died(error: WorkerError) -> bool:
    """Whether this is a worker's word that its engine's own processes are gone: only a new engine helps."""
    return isinstance(error.exception, EngineDiedError)


def _received(receiver: WeightReceiver) -> Iterator[tuple[str, Tensor]]:
    for bucket in receiver.buckets():
        yield from bucket.tensors()
