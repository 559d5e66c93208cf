"""Engine and trainer on the same devices, taking turns: `rollout_mode`, generate, `trainer_mode`.

Keeps one promise: the engine never writes a token with weights older than the trainer's. Knows no reward and no loss.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from dovetail.backends.base import TrainBackend
from dovetail.config.fsdp import full_dtype
from dovetail.config.rollout import RolloutConfig
from dovetail.config.root import DovetailConfig
from dovetail.models.load import load_tokenizer
from dovetail.protocol import DataProto
from dovetail.rollout.assemble import assemble
from dovetail.rollout.base import GenerationRequest, RolloutEngine, SamplingParams
from dovetail.rollout.registry import get_engine_class

logger = logging.getLogger(__name__)


class HybridEngine:
    """One engine beside one backend. With `backend=None` the engine keeps the weights of the model folder."""

    def __init__(
        self, config: DovetailConfig, backend: TrainBackend | None, *, device: torch.device, rank: int = 0
    ) -> None:
        self._config = config
        self._backend = backend
        self._rank = rank
        self._rollout = config.actor_rollout_ref.rollout
        self._fsdp = config.actor_rollout_ref.actor.fsdp_config
        dtype = getattr(torch, full_dtype(self._rollout.dtype))
        whole = backend.whole_model(dtype) if backend is not None and self._rollout.name == "native" else None
        self.shares_weights = whole is not None
        """Whether the engine reads the trainer's own tensors: nothing is copied between them then."""
        folder = config.actor_rollout_ref.model.path
        engine_class = get_engine_class(self._rollout.name)
        self.engine: RolloutEngine = engine_class.from_config(self._rollout, folder, device=device, shared=whole)
        # Gathering weights takes all ranks, and only the one whose engine died would be asking.
        if backend is not None and not self.shares_weights and backend.place.world_size == 1:
            self.engine.reload_weights = self._send_weights
        self._trainer_version = 1
        self._engine_version: int | None = None  # None: the engine holds no weights of this trainer
        model = config.actor_rollout_ref.model
        tokenizer = load_tokenizer(model.tokenizer_source, trust_remote_code=model.trust_remote_code)
        self._pad_token_id = tokenizer.pad_token_id
        self._num_calls = 0
        logger.info(
            "engine %s %s the trainer's weights", self._rollout.name, "shares" if whole is not None else "copies"
        )

    def weights_changed(self) -> None:
        """The trainer's weights are newer than the engine's from here on."""
        self._trainer_version += 1

    @contextmanager
    def generating(self) -> Iterator[None]:
        """Engine's turn inside, trainer's turn after, also when generation fails."""
        self.rollout_mode()
        try:
            yield
        finally:
            self.trainer_mode()

    def rollout_mode(self) -> None:
        """Wake the engine and bring its weights up to date; then only the engine needs the device."""
        self.engine.wake(["weights"])
        is_stale = self._engine_version != self._trainer_version
        if self._backend is not None and (is_stale or self.shares_weights):
            self._backend.onload(params=True, optimizer=False)
        if self._backend is not None and is_stale:
            self._send_weights(self.engine)
            self._engine_version = self._trainer_version
            if not self.shares_weights:
                self._backend.offload(params=self._fsdp.param_offload, optimizer=False)
        self.engine.wake(["kv_cache"])

    def _send_weights(self, engine: RolloutEngine) -> None:
        assert self._backend is not None, "an engine alone keeps its own weights"
        engine.update_weights(None if self.shares_weights else self._backend.named_weights(), self._trainer_version)

    def trainer_mode(self) -> None:
        """Give the engine's memory back. Shared weights stay: they are the trainer's."""
        if not self._rollout.free_cache_engine:
            return
        if self._backend is None or self.shares_weights:
            self.engine.sleep(["kv_cache"])
        else:
            self.engine.sleep(["weights", "kv_cache"])
            self._engine_version = None
        if self._backend is not None and self.shares_weights:
            self._backend.offload(params=self._fsdp.param_offload, optimizer=False)

    def generate(self, prompts: DataProto) -> DataProto:
        """Responses in the order of the prompts, `meta_info["n"]` of each side by side.

        `meta_info["validate"]` takes the sampling of `rollout.val_kwargs`, `meta_info["do_sample"]=False` the most
        likely token. The column `sampling_seed` makes a prompt's answers independent of the batch and of the number
        of workers.
        """
        meta = prompts.meta_info
        n = int(meta.get("n", 1))
        sampling = sampling_params(
            self._rollout, n=n, validate=bool(meta.get("validate", False)), greedy=not meta.get("do_sample", True)
        )
        ids = prompt_token_ids(prompts)
        seeds = prompts.non_tensor_batch.get("sampling_seed", [None] * len(ids))
        self._num_calls += 1
        requests = [
            GenerationRequest(
                f"{self._rank}-{self._num_calls}-{index}",
                prompt,
                replace(sampling, seed=None if seed is None else int(seed)),
                multi_modal=_images(prompts, index),
            )
            for index, (prompt, seed) in enumerate(zip(ids, seeds, strict=True))
        ]
        results = self.engine.generate(requests)
        batch = assemble(
            [prompt for prompt in ids for _ in range(n)],
            results,
            pad_token_id=self._pad_token_id,
            prompt_length=self._rollout.prompt_length,
            response_length=self._rollout.response_length,
        )
        batch.meta_info["temperature"] = sampling.temperature
        return batch


def sampling_params(rollout: RolloutConfig, *, n: int, validate: bool, greedy: bool = False) -> SamplingParams:
    """How training or validation samples; the seed is each request's own."""
    source = rollout.val_kwargs if validate else rollout
    greedy = greedy or not source.do_sample
    if greedy or source.temperature == 0:
        return SamplingParams(
            temperature=0.0, n=n, max_new_tokens=rollout.response_length, ignore_eos=rollout.ignore_eos
        )
    return SamplingParams(
        temperature=source.temperature,
        top_p=source.top_p,
        top_k=source.top_k,
        min_p=source.min_p,
        n=n,
        max_new_tokens=rollout.response_length,
        ignore_eos=rollout.ignore_eos,
    )


def prompt_token_ids(prompts: DataProto) -> list[list[int]]:
    """The prompts without padding, as the dataset wrote them."""
    if "raw_prompt_ids" in prompts.non_tensor_batch:
        return [list(ids) for ids in prompts.non_tensor_batch["raw_prompt_ids"]]
    columns = prompts.tensors
    return [
        ids[mask].tolist() for ids, mask in zip(columns["input_ids"], columns["attention_mask"].bool(), strict=True)
    ]


def _images(prompts: DataProto, index: int) -> dict | None:
    column = prompts.non_tensor_batch.get("multi_modal_data")
    return None if column is None else column[index]
