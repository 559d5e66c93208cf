"""Engine and trainer on the same devices, taking turns: `rollout_mode`, generate, `trainer_mode`.

Keeps one promise: the engine never writes a token with weights older than the trainer's. Proves it when asked:
checksums of what arrived, and a greedy probe held against the trainer's own forward. Knows no reward and no loss.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from dovetail.agents.build import build_agents
from dovetail.agents.stops import with_stop_ids
from dovetail.backends.base import TrainBackend
from dovetail.backends.device_memory import driver_is_short, free_device_cache, mark_memory
from dovetail.config.fsdp import full_dtype
from dovetail.config.root import DovetailConfig
from dovetail.models.load import load_tokenizer, model_folder
from dovetail.protocol import DataProto
from dovetail.rollout.base import EngineError, GenerationRequest, GenerationResult, RolloutEngine
from dovetail.rollout.open_groups import OpenGroups
from dovetail.rollout.registry import engine_class_for
from dovetail.weight_sync import in_engine_dtype
from dovetail.workers.adapters import adapter_of, sends_adapter, with_base_and_adapter
from dovetail.workers.cache_room import CacheRoom
from dovetail.workers.generation import answers_of, requests_of
from dovetail.workers.group_stream import open_groups, own_rows
from dovetail.workers.parity import ParityProbe, ParityReport
from dovetail.workers.restarts import generate_together
from dovetail.workers.weight_check import WatchedWeights, compare_answers

logger = logging.getLogger(__name__)


class HybridEngine:
    """One engine beside one backend."""

    def __init__(self, config: DovetailConfig, backend: TrainBackend, *, device: torch.device, rank: int = 0) -> None:
        self._backend = backend
        self._rank = rank
        self._model = config.actor_rollout_ref.model
        self._sends_adapter = sends_adapter(config)
        tokenizer = load_tokenizer(
            config.tokenizer_source,
            trust_remote_code=self._model.trust_remote_code,
            chat_template=self._model.custom_chat_template,
        )
        self._rollout = with_stop_ids(config, tokenizer)
        if self._sends_adapter:
            self._rollout = with_base_and_adapter(self._rollout, self._model)
        self._offloading = config.actor_rollout_ref.actor.offloading
        self._dtype = full_dtype(self._rollout.dtype)
        whole = backend.unsharded_model(getattr(torch, self._dtype)) if self._rollout.name == "native" else None
        self.shares_weights = whole is not None
        """Whether the engine reads the trainer's own tensors: nothing is copied between them then."""
        engine_class = engine_class_for(self._rollout)
        self.engine: RolloutEngine = engine_class.from_config(
            self._rollout,
            str(model_folder(self._model.path)),
            device=device,
            shared=whole,
            trust_remote_code=self._model.trust_remote_code,
            override_config=self._model.override_config,
            external_lib=self._model.external_lib,
        )
        self.engine_size = self._rollout.engine_world_size
        """Processes that share one engine: they are asked for the same answers, and the first of them gives them."""
        # Gathering weights takes all ranks: with several of them a dead engine is everybody's affair.
        self._restarts_together = self.engine.restarts_left > 0 and backend.rank_info.world_size > 1
        if not self.shares_weights and backend.rank_info.world_size == 1:
            self.engine.reload_weights = self._reload
        self._room = CacheRoom.beside_training(config, device) if self.shares_weights else None
        self._version = 0  # of the weights that the engine has, or is given next
        self._is_stale = True  # the engine does not hold the trainer's weights
        self._num_compared = 0
        self._pad_token_id = tokenizer.pad_token_id
        self._probe = ParityProbe(config, tokenizer)
        self._agents = build_agents(config, tokenizer) if self._rollout.uses_agents else None
        self._groups: OpenGroups[Any, Any] | None = None  # groups that outlive the engine's turn
        self._num_calls = 0
        self._num_restarts = 0
        logger.info(
            "engine %s %s the trainer's weights", self._rollout.name, "shares" if whole is not None else "copies"
        )

    def weights_changed(self) -> None:
        """The trainer's weights are newer than the engine's from here on."""
        self._is_stale = True

    @contextmanager
    def generating(self, *, check: bool = False) -> Iterator[None]:
        """Engine's turn inside, trainer's turn after, also when generation fails."""
        self.rollout_mode(check=check)
        try:
            yield
        except BaseException:
            try:
                self.trainer_mode()
            except EngineError as error:  # of an engine that is dead: what killed it is the error to raise
                logger.warning("the engine could not be put to sleep after a failure: %s", error)
            raise
        self.trainer_mode()

    def rollout_mode(self, *, check: bool = False) -> None:
        """Wake the engine and bring its weights up to date; then only the engine needs the device.

        With `check`, or `rollout.verify_weights`, what arrived is compared with what was sent.
        """
        self._make_room()
        self.engine.wake(["weights"])
        if self._is_stale or self.shares_weights:
            self._backend.onload(params=True, optimizer=False)
        if self._is_stale:
            self._send_weights(self.engine, check=check or self._rollout.verify_weights)
            self._is_stale = False
            if not self.shares_weights:
                self._backend.offload(params=self._offloading.param_offload, optimizer=False)
                self._make_room()
        self.engine.wake(["kv_cache"])
        if self._groups is not None:
            self.engine.continue_()
        mark_memory(self._backend.device)

    def trainer_mode(self) -> None:
        """Give the engine's memory back. Shared weights stay: they are the trainer's.

        Responses that are unfinished stay in the engine, paused.
        """
        if self._groups is not None:
            self.engine.pause()
        if self._rollout.free_cache_engine is False or not self.engine.on_trainer_devices:
            return
        mark_memory(self._backend.device)
        if self.shares_weights:
            if not self._cache_may_stay():
                self.engine.sleep(["kv_cache"])
            self._backend.offload(params=self._offloading.param_offload, optimizer=False)
        else:
            self.engine.sleep(["weights", "kv_cache"])
            self._is_stale = True

    def generate(self, prompts: DataProto) -> DataProto:
        """Responses in the order of the prompts, `meta_info["n"]` of each side by side; see `requests_of`.

        `meta_info["weight_version"]` is the global step that left the trainer's weights.

        The engine's turn and back. With `rollout.verify_weights`, weights that are new to the engine are proved first.
        """
        self._set_version(int(prompts.meta_info.get("weight_version", self._version)))
        is_new = self._is_stale
        with self.generating():
            probed = self._probe.ask(self.engine) if is_new and self._rollout.verify_weights else None
            if self._agents is None:
                batch = self._generate_turns(prompts)
            else:
                batch = self._agents.generate(self.engine, self._rollout, prompts, pad_token_id=self._pad_token_id)
        if probed is not None:
            with self._loaded():
                compare_answers(self._probe, probed, self._backend).require(self._rollout.name)
        batch.meta_info["metrics"] = {"rollout/engine_restarts": self.engine.num_restarts - self._num_restarts}
        self._num_restarts = self.engine.num_restarts
        return batch

    def generate_groups(
        self,
        prompts: DataProto | None,
        snapshot: DataProto | None,
        *,
        count: int,
        must_finish: Sequence[str],
        max_begun: int,
        version: int,
    ) -> DataProto | None:
        """Add these prompts to what is unfinished and generate until `count` groups have finished, and those of
        `must_finish`. The others go on in the next call, under the weights that the trainer has then; at most
        `max_begun` groups have begun by then, the finished ones among them.
        """
        self._set_version(version)
        if self._groups is None:
            self._groups = open_groups(self.engine, self._rollout, self._agents, pad_token_id=self._pad_token_id)
        with self.generating():
            if prompts is not None:
                self._groups.start(own_rows(prompts, self._rank), snapshot)
            self._groups.run(count, must_finish, max_begun=max_begun)
        return self._groups.take()

    def snapshot_groups(self) -> DataProto | None:
        """What the unfinished groups have so far."""
        return None if self._groups is None else self._groups.snapshot()

    def abort_groups(self, uids: Sequence[str]) -> None:
        """Forget these groups, finished or not."""
        if self._groups is not None:
            self._groups.abort(uids)

    def close_agents(self) -> None:
        """The run is over: give back what its tools hold."""
        if self._agents is not None:
            if self._groups is not None:
                self._groups.close()
            self._agents.close()

    def close(self) -> None:
        """End the engine, and what it still generates."""
        if self._groups is not None:
            self._groups.close()
        self.engine.close()

    def verify(self) -> ParityReport:
        """Send the weights and compare both sides: tensors by checksum, a few greedy answers by log-prob.

        Raises WeightMismatchError naming tensors. Whether the answers agree is in the report.
        """
        self._is_stale = True
        with self.generating(check=True):
            answers = self._probe.ask(self.engine)
        # The trainer computes when the engine has given its memory back.
        with self._loaded():
            report = compare_answers(self._probe, answers, self._backend)
        logger.info(
            "engine and trainer: %d tensors equal, log-probs of %d greedy tokens within %.2g on average",
            self._num_compared,
            len(report.tokens),
            report.mean_abs_diff,
        )
        return report

    def _set_version(self, version: int) -> None:
        """What the engine is given next has this version: tokens say so also where the weights did not change."""
        self._is_stale |= version != self._version
        self._version = version

    def _make_room(self) -> None:
        """Let an engine have what torch keeps for later, where it may take its memory from the driver.

        One that reads the trainer's weights takes it from torch: giving memory back to the driver and asking for it
        again would only cost time. Its graphs are the driver's, though, and must not find it empty.
        """
        if not self.engine.on_trainer_devices:
            return
        if not self.shares_weights or driver_is_short(self._backend.device):
            free_device_cache(self._backend.device)

    def _cache_may_stay(self) -> bool:
        return self._room is not None and self._room.holds(self.engine.health().kv_cache_bytes)

    def _generate_turns(self, prompts: DataProto) -> DataProto:
        self._num_calls += 1
        name = f"{self._rank // self.engine_size}-{self._num_calls}"
        unseeded = name if self.engine_size > 1 else None
        requests = requests_of(prompts, self._rollout, name=name, unseeded=unseeded)
        results = self._generate(requests)
        return answers_of(prompts, requests, results, self._rollout, pad_token_id=self._pad_token_id)

    def _generate(self, requests: list[GenerationRequest]) -> list[GenerationResult]:
        if not self._restarts_together:
            return self.engine.generate(requests)
        return generate_together(self.engine, requests, reload=self._reload_together, gather=_words_of_all_ranks)

    def _reload(self, engine: RolloutEngine) -> None:
        """The current weights for an engine that was started again."""
        with self._loaded():
            self._send_weights(engine, check=False)

    def _reload_together(self, mine: bool) -> None:
        with self._loaded():
            if mine:
                self._send_weights(self.engine, check=False)
                return
            stream = self._backend.named_adapters() if self._sends_adapter else self._backend.named_weights()
            for _ in stream:  # gathering is collective: every rank takes every tensor
                pass

    def _send_weights(self, engine: RolloutEngine, *, check: bool) -> None:
        if self._sends_adapter:
            engine.update_adapter(adapter_of(self._backend, self._model), self._version)
            return
        weights = self._backend.named_weights()
        watched = WatchedWeights(weights, self._backend.hf_config, self._dtype) if check else None
        if self.shares_weights:
            engine.update_weights(None, self._version)
            for _ in watched or ():
                pass
        else:
            stream = in_engine_dtype(weights if watched is None else watched, self._rollout.weights_dtype)
            engine.update_weights(stream, self._version)
        if watched is not None:
            self._num_compared = watched.sent().compare(engine)

    @contextmanager
    def _loaded(self) -> Iterator[None]:
        self._backend.onload(params=True, optimizer=False)
        try:
            yield
        finally:
            self._backend.offload(params=self._offloading.param_offload, optimizer=False)


def _words_of_all_ranks(word: str) -> list[str]:
    words = [""] * dist.get_world_size()
    dist.all_gather_object(words, word)
    return words
