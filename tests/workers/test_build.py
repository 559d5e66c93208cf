"""Options of a role that are decided when it is built: the kernel of the head, a frozen tower, determinism."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from dovetail.config.root import DovetailConfig
from dovetail.controller import LocalWorkerGroup, RayClassWithInitArgs
from dovetail.models.head import EntropyMemory, LogProbs, plain_log_prob_entropy
from dovetail.models.packing import pack_batch
from dovetail.models.policy import PolicyModel
from dovetail.protocol import DataProto
from dovetail.workers.actor import DataParallelPPOActor
from dovetail.workers.actor_rollout_ref import ActorRolloutRefWorker
from dovetail.workers.build import build_policy
from dovetail.workers.critic_worker import CriticWorker
from dovetail.workers.micro_batches import MicroBatchLimit, plan_micro_batches
from dovetail.workers.training_role import TrainingRole
from tests.backends.tiny import as_numpy, largest_difference
from tests.models.tiny import save_tiny_model
from tests.workers.test_multimodal_roles import image_rollouts
from tests.workers.tiny_run import (
    PROMPT,
    RESPONSE,
    TOLERANCE,
    rollout_batch,
    run_config,
    small_model,
    with_old_log_probs,
)

pytestmark = pytest.mark.unit

CPU = torch.device("cpu")


def built(config: DovetailConfig, **options: Any) -> Any:
    actor = config.actor_rollout_ref.actor
    return build_policy(
        config.actor_rollout_ref.model, strategy="single", fsdp=actor.fsdp_config, optim=actor.optim, device=CPU,
        **options,
    )  # fmt: skip


@pytest.mark.parametrize(("impl_backend", "told"), [("auto", None), ("torch", False)])
def test_the_fused_head_is_told_which_kernel_to_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, impl_backend: str, told: bool | None
) -> None:
    seen: list[bool | None] = []
    plain = PolicyModel.__init__

    def noted(self: PolicyModel, hf_model: Any, **options: Any) -> None:
        plain(self, hf_model, **options)
        seen.append(self.use_triton)

    monkeypatch.setattr(PolicyModel, "__init__", noted)
    built(
        run_config(
            small_model(tmp_path), {"actor_rollout_ref.model.fused_kernel_options": {"impl_backend": impl_backend}}
        )
    )
    assert seen == [told]


def test_the_fused_head_keeps_nothing_that_would_be_copied_to_the_host(tmp_path: Path) -> None:
    model, keeps = small_model(tmp_path), []
    for offload in (False, True):
        keys = {"enable_gradient_checkpointing": True, "enable_activation_offload": offload}
        actor = built(run_config(model, {f"actor_rollout_ref.model.{key}": value for key, value in keys.items()}))
        keeps.append(next(m for m in actor.module.modules() if isinstance(m, PolicyModel)).keep_head_gradient)
    assert keeps == [None, False]


def test_the_actors_head_saves_memory_on_the_entropy_and_trains_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One row at a time and computed again in backward; the reference, which is asked for no entropy, is left alone."""
    folder, actor = small_model(tmp_path), "actor_rollout_ref.actor"
    monkeypatch.setattr("dovetail.models.policy.chunk_rows", lambda num_tokens, device: 1)
    seen: list[EntropyMemory] = []

    def noted(*args: Any, entropy_memory: EntropyMemory, **options: Any) -> LogProbs:
        seen.append(entropy_memory)
        return plain_log_prob_entropy(*args, entropy_memory=entropy_memory, **options)

    monkeypatch.setattr("dovetail.models.policy.plain_log_prob_entropy", noted)
    trained = []
    for keys in ({}, {f"{actor}.entropy_from_logits_with_chunking": True, f"{actor}.entropy_checkpointing": True}):
        seen.clear()
        config = run_config(folder, {f"{actor}.entropy_coeff": 0.1, f"{actor}.use_kl_loss": True, **keys})
        worker = ActorRolloutRefWorker(config, role="actor_ref")
        worker.init_model(1)
        batch = rollout_batch()
        found = worker.compute_log_prob(batch)
        assert set(seen) == {EntropyMemory(1, True) if keys else EntropyMemory()}
        seen.clear()
        worker.compute_ref_log_prob(batch)
        assert set(seen) == {EntropyMemory()}
        metrics = worker.update_actor(with_old_log_probs(batch, found.tensors["old_log_probs"])).meta_info["metrics"]
        assert worker.actor is not None
        trained.append((metrics["actor/entropy"], as_numpy(worker.actor.backend.named_weights())))
    (plain_entropy, plain), (saving_entropy, saving) = trained
    assert saving_entropy == pytest.approx(plain_entropy, abs=TOLERANCE)
    assert largest_difference(plain, saving) < TOLERANCE


def test_prompts_computed_once_train_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of one prompt lie apart in the batch; they come into one micro-batch, and its row holds the prompt once."""
    folder, batch = small_model(tmp_path), rollout_batch()
    columns = {name: column.clone() for name, column in batch.tensors.items()}
    for row in range(2, len(batch)):  # two prompts in turn
        for name in ("input_ids", "attention_mask"):
            columns[name][row, :PROMPT] = columns[name][row % 2, :PROMPT]
    columns["position_ids"] = (columns["attention_mask"].cumsum(1) - 1).clamp(min=0)
    columns["prompts"] = columns["input_ids"][:, :PROMPT]
    batch = DataProto.from_dict(columns, meta_info=batch.meta_info)
    computed: list[int] = []

    def noted(*args: Any, **options: Any) -> Any:
        packed = pack_batch(*args, **options)
        computed.append(packed.input_ids.numel())
        return packed

    monkeypatch.setattr("dovetail.models.backbone.pack_batch", noted)
    trained, counts = [], []
    for share in (False, True):
        computed.clear()
        keys = {
            "actor_rollout_ref.actor.use_prefix_grouper": share,
            "actor_rollout_ref.actor.use_kl_loss": True,
            "actor_rollout_ref.actor.use_dynamic_bsz": True,
            "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": 60,
            "actor_rollout_ref.rollout.log_prob_use_dynamic_bsz": True,
            "actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu": 1024,
            "actor_rollout_ref.ref.log_prob_use_dynamic_bsz": True,
        }
        worker = ActorRolloutRefWorker(run_config(folder, keys), role="actor_ref")
        worker.init_model(1)
        found = worker.compute_log_prob(batch).tensors["old_log_probs"]
        reference = worker.compute_ref_log_prob(batch).tensors["ref_log_prob"]
        worker.update_actor(with_old_log_probs(batch, found))
        assert worker.actor is not None
        trained.append((found, reference, as_numpy(worker.actor.backend.named_weights())))
        counts.append(list(computed))
    (plain, plain_ref, plain_weights), (shared, shared_ref, shared_weights) = trained
    mask = columns["attention_mask"][:, -RESPONSE:]
    assert ((plain - shared) * mask).abs().max() < TOLERANCE
    assert ((plain_ref - shared_ref) * mask).abs().max() < TOLERANCE
    assert largest_difference(plain_weights, shared_weights) < TOLERANCE
    assert len(counts[0]) == len(counts[1])
    prompts = int(columns["attention_mask"][:2, :PROMPT].sum())
    assert counts[1][0] == prompts + int(mask.sum())  # both prompts once, in the micro-batch of the log-probs
    assert sum(counts[1]) < sum(counts[0])


def test_log_probs_of_actor_and_reference_are_cut_as_their_own_keys_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[MicroBatchLimit] = []

    def noted(data: Any, limit: MicroBatchLimit, backend: Any) -> Any:
        seen.append(limit)
        return plan_micro_batches(data, limit, backend)

    monkeypatch.setattr("dovetail.workers.actor.plan_micro_batches", noted)
    keys = {
        "actor_rollout_ref.actor.use_kl_loss": True,
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu": 2,
        "actor_rollout_ref.ref.log_prob_use_dynamic_bsz": True,
        "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu": 30,
    }
    worker = ActorRolloutRefWorker(run_config(small_model(tmp_path), keys), role="actor_ref")
    worker.init_model(1)
    own, reference = worker.compute_log_prob(rollout_batch()), worker.compute_ref_log_prob(rollout_batch())
    assert seen == [MicroBatchLimit(rows=2), MicroBatchLimit(tokens=30, by_prompt=True)]
    mask = rollout_batch().tensors["attention_mask"][:, -RESPONSE:]
    gap = (own.tensors["old_log_probs"] - reference.tensors["ref_log_prob"]) * mask
    assert gap.abs().max() < TOLERANCE


@pytest.mark.parametrize("section", ["actor_rollout_ref.model", "critic.model"])
def test_a_module_of_the_user_is_imported_before_the_network_is_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, section: str
) -> None:
    name = f"dovetail_test_{section.replace('.', '_')}"
    (tmp_path / f"{name}.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    config = run_config(small_model(tmp_path / "model"), {f"{section}.external_lib": name})
    worker = CriticWorker(config) if section.startswith("critic") else ActorRolloutRefWorker(config, role="actor")
    assert name not in sys.modules
    worker.init_model(1)
    assert name in sys.modules


def test_an_update_of_the_critic_reports_memory(tmp_path: Path) -> None:
    """While only the critic is trained (`trainer.critic_warmup`), no other role does."""
    worker = CriticWorker(run_config(small_model(tmp_path)))
    worker.init_model(1)
    assert worker.update_critic(rollout_batch()).meta_info["metrics"]["memory/host_peak_gib"] > 0


def test_triton_without_cuda_is_refused_with_the_way_out(tmp_path: Path) -> None:
    keys = {"actor_rollout_ref.model.fused_kernel_options": {"impl_backend": "triton"}}
    with pytest.raises(ValueError, match=re.escape("impl_backend=triton needs CUDA")):
        built(run_config(small_model(tmp_path), keys))


def test_a_frozen_vision_tower_keeps_its_weights_and_the_rest_is_trained(tmp_path: Path) -> None:
    config = run_config(save_tiny_model("qwen2_5_vl", tmp_path))
    backend = built(config, freeze_vision_tower=True)
    before = as_numpy(backend.named_weights())
    batch = image_rollouts()
    actor = DataParallelPPOActor(
        config.actor_rollout_ref.actor, backend, mini_batch_rows=len(batch), log_prob_limit=MicroBatchLimit(rows=3)
    )
    log_probs, _ = actor.compute_log_prob(batch)
    columns = {**batch.tensors, "old_log_probs": log_probs}
    actor.update_policy(type(batch).from_dict(columns, dict(batch.non_tensor_batch), dict(batch.meta_info)))
    after = as_numpy(backend.named_weights())
    changed = {name for name in before if (before[name] != after[name]).any()}
    tower = {name for name in before if "visual" in name}
    assert tower
    assert not changed & tower
    assert len(changed) > len(set(before) - tower) // 2


@pytest.fixture
def deterministic_after() -> Iterator[None]:
    yield
    torch.use_deterministic_algorithms(False)


def test_full_determinism_reaches_torch(deterministic_after: None) -> None:
    TrainingRole(DovetailConfig()).join_group()
    assert not torch.are_deterministic_algorithms_enabled()
    TrainingRole(DovetailConfig(trainer={"full_determinism": True})).join_group()
    assert torch.are_deterministic_algorithms_enabled()


def test_a_group_of_this_process_ends_its_engine_when_it_is_shut_down(tmp_path: Path) -> None:
    """A notebook lives on after a run: servers and device memory of an engine must not."""
    config = run_config(small_model(tmp_path, "llama"), {"actor_rollout_ref.rollout.verify_start": False})
    group = LocalWorkerGroup(RayClassWithInitArgs(ActorRolloutRefWorker, config, "actor_rollout"))
    group.init_model(1)
    worker = group.worker
    assert isinstance(worker, ActorRolloutRefWorker)
    assert worker.hybrid is not None
    assert worker.hybrid.engine.health().ok
    group.shutdown()
    assert worker.hybrid.engine.health().reason == "the engine is closed"
