"""All roles of a run in this process, and in two Ray processes that shard them: the same calls, the same results.

The run in this process keeps everything on the device; the two processes offload weights and optimizer state between
calls. Tolerance 1e-5 in float32, as in the parity tests.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from dovetail.config.root import DovetailConfig
from dovetail.controller import start_ray, stop_ray
from dovetail.protocol import DataProto, validate_stage
from dovetail.trainer.arrange import arrange_rows
from dovetail.trainer.groups import RoleGroups, create_groups
from tests.models.tiny import tiny_tokenizer
from tests.ray_workers import quick_workers
from tests.workers.tiny_run import (
    MINI_BATCH,
    PROMPT,
    RESPONSE,
    TOLERANCE,
    rollout_batch,
    run_config,
    save_classifier,
    small_model,
)

pytestmark = pytest.mark.distributed

NUM_PROMPTS = 4


@dataclass(frozen=True)
class Run:
    """The groups of a run and what it found, in the order of the calls of `play`."""

    config: DovetailConfig
    groups: RoleGroups
    folder: Path
    found: dict[str, torch.Tensor]
    metrics: dict[str, dict[str, list[float]]]
    sampled: DataProto
    greedy: DataProto


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    reward = save_classifier(tmp_path_factory.mktemp("reward"))
    tiny_tokenizer().save_pretrained(reward)
    return {"policy": small_model(tmp_path_factory.mktemp("policy"), "llama"), "reward": reward}


def config_of(models: dict[str, Path], num_workers: int, **changes: Any) -> DovetailConfig:
    return run_config(
        models["policy"],
        {
            "trainer.n_gpus_per_node": num_workers,
            "trainer.nnodes": 1,
            "actor_rollout_ref.actor.use_kl_loss": True,
            "reward_model.enable": True,
            "reward_model.model.path": str(models["reward"]),
            **changes,
        },
    )


@pytest.fixture(scope="module")
def here(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Run:
    config = config_of(models, 1)
    return play(config, create_groups(config, use_ray=False, use_gpu=False), tmp_path_factory.mktemp("here"))


@pytest.fixture(scope="module")
def two_processes(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    training, frozen = ("actor_rollout_ref.actor", "critic"), ("actor_rollout_ref.ref", "reward_model.model")
    offload = {f"{role}.fsdp_config": {"param_offload": True} for role in frozen}
    offload |= {f"{role}.fsdp_config": {"param_offload": True, "optimizer_offload": True} for role in training}
    config = config_of(models, 2, **offload)
    start_ray(num_cpus=4, object_store_memory=256 * 1024**2, runtime_env=quick_workers())
    groups = create_groups(config, use_ray=True, use_gpu=False)
    yield play(config, groups, tmp_path_factory.mktemp("two"))
    groups.shutdown()
    stop_ray()


def prompts() -> DataProto:
    columns = rollout_batch(NUM_PROMPTS, seed=3).tensors
    mask = columns["attention_mask"][:, :PROMPT]
    return DataProto.from_dict(
        {
            "input_ids": columns["prompts"],
            "attention_mask": mask,
            "position_ids": (mask.cumsum(1) - 1).clamp(min=0),
        },
        {"sampling_seed": np.arange(NUM_PROMPTS) + 100},
        {"n": 2},
    )


def greedy_prompts() -> DataProto:
    batch = prompts()
    batch.meta_info = {"n": 1, "do_sample": False}
    return batch


def play(config: DovetailConfig, groups: RoleGroups, folder: Path) -> Run:
    """One training step with every role, then a checkpoint and an export."""
    actor, critic, reward, ref = groups.actor_rollout, groups.critic, groups.reward_model, groups.ref
    assert critic is not None
    assert reward is not None
    assert ref is not None
    for group in (actor, critic, reward):
        group.init_model()
    batch = rollout_batch()
    sampled = actor.generate_sequences(prompts())
    found = {
        "old_log_probs": actor.compute_log_prob(batch).tensors["old_log_probs"],
        "entropys": actor.compute_log_prob(batch).tensors["entropys"],
        "ref_log_prob": ref.compute_ref_log_prob(batch).tensors["ref_log_prob"],
        "values": critic.compute_values(batch).tensors["values"],
        "rm_scores": reward.compute_rm_score(batch).tensors["rm_scores"],
    }
    metrics = update(config, groups, batch, found)
    found["log_probs after"] = actor.compute_log_prob(batch).tensors["old_log_probs"]
    found["ref after"] = ref.compute_ref_log_prob(batch).tensors["ref_log_prob"]
    found["values after"] = critic.compute_values(batch).tensors["values"]
    actor.save_checkpoint(str(folder / "actor"), {"step": 1})
    critic.save_checkpoint(str(folder / "critic"))
    actor.export_model(str(folder / "export"))
    asked = greedy_prompts()
    asked.meta_info["weight_version"] = 2
    greedy = actor.generate_sequences(asked)
    return Run(config, groups, folder, found, metrics, sampled, greedy)


def update(
    config: DovetailConfig, groups: RoleGroups, batch: DataProto, found: dict[str, torch.Tensor]
) -> dict[str, dict[str, list[float]]]:
    columns = {**batch.tensors, **{name: found[name] for name in ("old_log_probs", "ref_log_prob", "values")}}
    whole = DataProto.from_dict(columns, meta_info=batch.meta_info)
    lengths = batch.tensors["attention_mask"].sum(1).tolist()
    laid_out = whole.select_idxs(torch.tensor(arrange_rows(lengths, config.trainer.world_size, MINI_BATCH)))
    assert groups.critic is not None
    answers = {
        "critic": groups.critic.update_critic(laid_out).meta_info["metrics"],
        "actor": groups.actor_rollout.update_actor(laid_out).meta_info["metrics"],
    }
    return {
        role: {name: np.atleast_1d(value).tolist() for name, value in metrics.items() if name.startswith(role)}
        for role, metrics in answers.items()
    }


def test_two_processes_with_offload_give_what_one_without_gives(here: Run, two_processes: Run) -> None:
    for name, expected in here.found.items():
        torch.testing.assert_close(two_processes.found[name], expected, atol=TOLERANCE, rtol=0, msg=name)
    for role, metrics in here.metrics.items():
        assert set(metrics) == set(two_processes.metrics[role])
        for name, (expected,) in metrics.items():
            on_ranks = two_processes.metrics[role][name]
            assert on_ranks == pytest.approx([expected, expected], abs=TOLERANCE, rel=TOLERANCE), name


def test_the_reference_stays_and_the_policy_moves(here: Run) -> None:
    found = here.found
    assert torch.equal(found["ref_log_prob"], found["ref after"])
    torch.testing.assert_close(found["ref_log_prob"], found["old_log_probs"], atol=TOLERANCE, rtol=0)
    for before, after in (("old_log_probs", "log_probs after"), ("values", "values after")):
        assert (found[before] - found[after]).abs().max() > 100 * TOLERANCE


def test_roles_share_processes(two_processes: Run) -> None:
    groups = two_processes.groups
    roles: list[Any] = [groups.actor_rollout, groups.critic, groups.reward_model]
    pids = [[identity.pid for identity in group.identities] for group in roles]
    assert pids[0] == pids[1] == pids[2]
    assert len(set(pids[0])) == 2


def test_generated_batches_have_the_columns_of_the_schema(here: Run, two_processes: Run) -> None:
    for run in (here, two_processes):
        validate_stage(run.sampled, "generate_sequences", done=True)
        assert run.sampled.tensors["responses"].shape == (2 * NUM_PROMPTS, RESPONSE)
        assert run.sampled.meta_info["temperature"] == 1.0


def test_answers_depend_on_their_seed_and_not_on_the_number_of_workers(here: Run, two_processes: Run) -> None:
    one, two = here.sampled.tensors, two_processes.sampled.tensors
    assert torch.equal(one["responses"], two["responses"])
    torch.testing.assert_close(one["rollout_log_probs"], two["rollout_log_probs"], atol=TOLERANCE, rtol=0)
    assert not torch.equal(one["responses"][0], one["responses"][1]), "two samples of a prompt differ"


def test_log_probs_of_the_engine_are_those_of_the_trainer(models: dict[str, Path], here: Run) -> None:
    config = config_of(models, 1)
    groups = create_groups(config, use_ray=False, use_gpu=False)
    groups.actor_rollout.init_model()
    batch = here.sampled.select()
    kept = batch.tensors["response_mask"].bool()
    found = groups.actor_rollout.compute_log_prob(batch).tensors["old_log_probs"]
    torch.testing.assert_close(found[kept], batch.tensors["rollout_log_probs"][kept], atol=TOLERANCE, rtol=0)


def test_an_exported_folder_is_the_trained_policy_in_plain_transformers(here: Run, two_processes: Run) -> None:
    states = []
    for run in (here, two_processes):
        model = AutoModelForCausalLM.from_pretrained(run.folder / "export", dtype=torch.float32).eval()
        states.append(model.state_dict())
        columns = rollout_batch().tensors
        kept = columns["attention_mask"][0].bool()
        ids = columns["input_ids"][0][kept]
        count = int(kept[-RESPONSE:].sum())
        with torch.no_grad():
            log_p = (model(input_ids=ids[None]).logits[0, -count - 1 : -1] / 0.9).log_softmax(-1)
        expected = run.found["log_probs after"][0, :count]
        torch.testing.assert_close(log_p.gather(-1, ids[-count:, None]).squeeze(-1), expected, atol=TOLERANCE, rtol=0)
    for name, tensor in states[0].items():
        torch.testing.assert_close(states[1][name], tensor, atol=TOLERANCE, rtol=0, msg=name)


def test_after_an_update_the_engine_writes_with_the_new_weights(here: Run, two_processes: Run) -> None:
    for run in (here, two_processes):
        model = AutoModelForCausalLM.from_pretrained(run.folder / "export", dtype=torch.float32).eval()
        columns = greedy_prompts().tensors
        for row in range(NUM_PROMPTS):
            ids = columns["input_ids"][row][columns["attention_mask"][row].bool()]
            seen = torch.ones_like(ids)[None]  # the padding token among the ids is meant as a word
            out = model.generate(ids[None], attention_mask=seen, do_sample=False, max_new_tokens=RESPONSE)[
                0, len(ids) :
            ]
            answer = run.greedy.tensors["responses"][row][run.greedy.tensors["response_mask"][row].bool()]
            assert answer.tolist() == out[: len(answer)].tolist()
        assert (run.greedy.tensors["weight_version"].max(dim=1).values == 2).all()


def engine_facts(worker: Any, share: DataProto) -> DataProto:
    return DataProto.from_dict({"shares": torch.full((len(share),), int(worker.hybrid.shares_weights))})


def test_the_engine_shares_weights_that_are_whole_and_copies_sharded_ones(here: Run, two_processes: Run) -> None:
    for run, shares in ((here, 1), (two_processes, 0)):
        facts = run.groups.actor_rollout.execute_with_func_generator(engine_facts, prompts())
        assert facts.tensors["shares"].tolist() == [shares] * NUM_PROMPTS


def test_a_checkpoint_of_two_processes_continues_on_one_and_back(
    models: dict[str, Path], here: Run, two_processes: Run
) -> None:
    """Run after the others: both runs take one more step, each from the other's checkpoint."""
    config = config_of(models, 1)
    groups = create_groups(config, use_ray=False, use_gpu=False)
    assert groups.critic is not None
    assert two_processes.groups.critic is not None
    groups.actor_rollout.init_model()
    groups.critic.init_model()
    assert groups.actor_rollout.load_checkpoint(str(two_processes.folder / "actor")) == [{"step": 1}]
    groups.critic.load_checkpoint(str(two_processes.folder / "critic"))
    two_processes.groups.actor_rollout.load_checkpoint(str(here.folder / "actor"))
    two_processes.groups.critic.load_checkpoint(str(here.folder / "critic"))
    batch = rollout_batch()
    results = []
    for run_config_, run_groups in (
        (config, groups), (two_processes.config, two_processes.groups), (here.config, here.groups),
    ):  # fmt: skip
        metrics = update(run_config_, run_groups, batch, here.found)
        assert run_groups.critic is not None
        results.append(
            (
                {f"{role}/{name}": value[0] for role, found in metrics.items() for name, value in found.items()},
                run_groups.actor_rollout.compute_log_prob(batch).tensors["old_log_probs"],
                run_groups.critic.compute_values(batch).tensors["values"],
            )
        )
    for metrics, log_probs, values in results[:2]:
        assert metrics == pytest.approx(results[2][0], abs=TOLERANCE, rel=TOLERANCE)
        torch.testing.assert_close(log_probs, results[2][1], atol=TOLERANCE, rtol=0)
        torch.testing.assert_close(values, results[2][2], atol=TOLERANCE, rtol=0)


def test_with_lora_the_reference_is_the_actor_with_its_adapter_off(models: dict[str, Path], here: Run) -> None:
    lora = {"actor_rollout_ref.model.lora_rank": 4, "actor_rollout_ref.model.lora_alpha": 8}
    config = config_of(models, 1, **lora)
    groups = create_groups(config, use_ray=False, use_gpu=False)
    actor: Any = groups.actor_rollout
    assert groups.ref is not None
    assert groups.critic is not None
    actor.init_model()
    groups.critic.init_model()
    assert actor.worker.refs[""].backend is actor.worker.actor.backend
    assert not actor.worker.hybrid.shares_weights
    batch = rollout_batch()
    update(config, groups, batch, here.found)
    frozen = groups.ref.compute_ref_log_prob(batch).tensors["ref_log_prob"]
    torch.testing.assert_close(frozen, here.found["ref_log_prob"], atol=TOLERANCE, rtol=0)
    moved = actor.compute_log_prob(batch).tensors["old_log_probs"]
    assert (moved - frozen).abs().max() > 100 * TOLERANCE


def test_a_role_that_was_not_built_says_so(models: dict[str, Path]) -> None:
    from dovetail.workers.actor_rollout_ref import ActorRolloutRefWorker

    worker = ActorRolloutRefWorker(config_of(models, 1), role="ref")
    worker.init_model()
    assert worker.compute_ref_log_prob(rollout_batch()).tensors["ref_log_prob"].shape == (16, RESPONSE)
    with pytest.raises(RuntimeError, match="was not built as actor"):
        worker.update_actor(rollout_batch())
    with pytest.raises(ValueError, match="role='policy' is not one of actor, ref, actor_rollout"):
        ActorRolloutRefWorker(config_of(models, 1), role="policy")
