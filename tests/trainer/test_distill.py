"""On-policy distillation: whole runs of a toy student and a toy teacher in this process."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from dovetail.cli.main import main
from dovetail.config import ConfigError
from dovetail.config.methods import DistillConfig
from dovetail.observability.run_folder import RunFolder
from dovetail.protocol import DataProto
from dovetail.trainer.distill import DistillTrainer, refuse_other_vocabulary, rows_by_teacher
from dovetail.trainer.run import run_training
from tests.trainer.toy_run import Toy, repeatable, save_toy_model, train, train_apart

pytestmark = [pytest.mark.e2e, pytest.mark.xdist_group("trainer-ray")]

A = "actor_rollout_ref.actor"


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another random model with the student's tokenizer."""
    return save_toy_model(tmp_path_factory.mktemp("teacher") / "model", seed=1)


def keys(teacher: Path, **distill: Any) -> dict[str, Any]:
    own = {f"distill.{name}": value for name, value in distill.items()}
    return {"trainer.method": "distill", "distill.teacher.path": str(teacher), f"{A}.ppo_mini_batch_size": 4, **own}


def token_advantages(run: Path, step: int = 1) -> np.ndarray:
    rows = [json.loads(line) for line in (run / "rollouts" / f"step_{step}.jsonl").read_text().splitlines()]
    return np.concatenate([row["token_advantages"] for row in rows])


CLAMPED = {"loss_max_clamp": 10.0, "log_prob_min_clamp": -10.0}
FORWARD = {"kl": "top_k", "divergence": "forward", "other_tokens": "ignored", **CLAMPED}
WAYS: list[dict[str, Any]] = [{"kl": "sampled"}, {"kl": "top_k"}, FORWARD, {"kl": "full"}]


def way_name(way: dict[str, Any]) -> str:
    return " ".join(str(value) for value in way.values())


@pytest.mark.parametrize("way", WAYS, ids=way_name)
def test_the_student_comes_closer_to_its_teacher(toy: Toy, teacher: Path, tmp_path: Path, way: dict[str, Any]) -> None:
    """Twelve steps, because one cannot show that it learns. The rows have a prompt and nothing else."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"say {n}"}) + "\n" for n in range(16)))
    changes = keys(teacher, **way) | {
        "data.train_files": str(prompts),
        "custom_reward_function.path": None,
        "trainer.total_training_steps": 12,
        f"{A}.optim.lr": 5e-3,
    }
    _, rows = train(toy.config(tmp_path / "run", changes))
    found = [row["distill/kl"] for row in rows]
    assert found[0] > 0.1
    assert np.mean(found[-3:]) < 0.5 * np.mean(found[:3])
    assert all("critic/score/mean" not in row or row["critic/score/mean"] == 0 for row in rows)
    if way["kl"] == "top_k":
        assert rows[-1]["distill/overlap_ratio"] > rows[0]["distill/overlap_ratio"]
        assert 0 < rows[0]["distill/teacher_mass"] <= 1


@pytest.mark.parametrize("way", [*WAYS[:2], FORWARD | {"other_tokens": "as_one"}, WAYS[-1]], ids=way_name)
def test_a_teacher_that_is_the_student_gives_no_signal(toy: Toy, tmp_path: Path, way: dict[str, Any]) -> None:
    _, rows = train(toy.config(tmp_path, keys(toy.model, **way) | {"trainer.total_training_steps": 1}))
    assert abs(rows[0]["distill/kl"]) < 1e-6
    assert rows[0]["actor/grad_norm"] < 1e-5


def test_the_task_reward_is_added_to_the_teachers_signal(toy: Toy, teacher: Path, tmp_path: Path) -> None:
    one = {"trainer.total_training_steps": 1, f"{A}.ppo_mini_batch_size": 4}
    train(toy.config(tmp_path / "rl", one))
    train(toy.config(tmp_path / "alone", keys(teacher, kl_coef=2.0) | one))
    _, rows = train(toy.config(tmp_path / "both", keys(teacher, kl_coef=2.0, reward_coef=0.5) | one))
    task, alone, both = (token_advantages(tmp_path / name) for name in ("rl", "alone", "both"))
    np.testing.assert_allclose(both, 0.5 * task + alone, atol=2e-5)
    assert np.abs(task).max() > 0.1
    assert rows[0]["critic/score/mean"] > 0
    # Minus the mean of the signal is the estimate of the divergence.
    assert rows[0]["distill/kl"] == pytest.approx(-alone.mean() / 2.0, abs=1e-4)


def test_an_estimate_is_a_loss_and_a_clamp_bounds_what_a_token_is_told(toy: Toy, teacher: Path, tmp_path: Path) -> None:
    one = {"trainer.total_training_steps": 1}
    for kl in ("k2", "k3"):
        _, rows = train(toy.config(tmp_path / kl, keys(teacher, kl=kl) | one))
        assert rows[0]["distill/kl"] > 0.1
        assert rows[0]["actor/grad_norm"] > 1e-2
        assert not token_advantages(tmp_path / kl).any()
    _, rows = train(toy.config(tmp_path / "clamped", keys(teacher, kl_coef=2.0, loss_max_clamp=0.25) | one))
    assert np.abs(token_advantages(tmp_path / "clamped")).max() == pytest.approx(0.5)
    assert rows[0]["distill/kl"] > 0.1, "that of the signal before the clamp"


def test_all_tokens_of_the_vocabulary_give_the_gradient_that_sampling_estimates(
    toy: Toy, teacher: Path, tmp_path: Path
) -> None:
    """Many samples of one step: the averages of the two divergences agree, the exact one with less noise."""
    many = {"trainer.total_training_steps": 1, "actor_rollout_ref.rollout.n": 128}
    values = {}
    for kl in ("sampled", "top_k"):
        _, rows = train(toy.config(tmp_path / kl, keys(teacher, kl=kl, top_k=100000) | many))
        values[kl] = rows[0]["distill/kl"], rows[0]["actor/grad_norm"]
    assert values["sampled"][0] == pytest.approx(values["top_k"][0], rel=0.15)
    assert values["top_k"][1] < values["sampled"][1]


@pytest.mark.parametrize(
    "way", [{}, {"divergence": "forward", "log_prob_min_clamp": -6.0}, {"divergence": "jsd"}], ids=way_name
)
def test_the_whole_vocabulary_is_all_of_its_tokens_listed(
    toy: Toy, teacher: Path, tmp_path: Path, way: dict[str, Any]
) -> None:
    values = {}
    for kl in ("top_k", "full"):
        one = keys(teacher, kl=kl, top_k=100000, **way) | {"trainer.total_training_steps": 1}
        _, rows = train(toy.config(tmp_path / kl, one))
        values[kl] = rows[0]["distill/kl"], rows[0]["actor/grad_norm"]
    assert values["full"] == pytest.approx(values["top_k"], rel=1e-4)


@pytest.mark.parametrize("kl", ["top_k", "full"])
def test_a_divergence_alone_trains_the_same_without_old_log_probs(
    toy: Toy, teacher: Path, tmp_path: Path, kl: str
) -> None:
    """No advantage is there for a ratio to weigh, so several updates on a batch need no forward before them."""
    two_updates = keys(teacher, kl=kl) | {f"{A}.ppo_mini_batch_size": 2, "trainer.total_training_steps": 2}
    _, without = train(toy.config(tmp_path / "without", two_updates))
    _, given = train(toy.config(tmp_path / "given", two_updates | {f"{A}.calculate_sum_pi_squared": True}))
    assert [("timing_s/old_log_prob" in row) for row in (*without, *given)] == [False, False, True, True]
    for left, right in zip(without, given, strict=True):
        assert left["actor/grad_norm"] > 0
        for name in ("distill/kl", "actor/grad_norm", "actor/pg_loss"):
            assert left[name] == right[name], name


def test_a_resumed_run_is_the_run_that_was_not_stopped(toy: Toy, teacher: Path, tmp_path: Path) -> None:
    changes = keys(teacher) | {
        "trainer.save_freq": 2,
        "trainer.total_training_steps": 4,
        f"{A}.optim.lr_warmup_steps": 1,
    }
    _, whole = train(toy.config(tmp_path / "whole", changes))
    shutil.copytree(tmp_path / "whole", tmp_path / "resumed")
    shutil.rmtree(tmp_path / "resumed" / "global_step_4")
    (tmp_path / "resumed" / "latest_checkpointed_iteration.txt").write_text("2\n")
    _, resumed = train(toy.config(tmp_path / "resumed", changes))
    assert repeatable(resumed) == repeatable(whole)
    assert main(["export", str(tmp_path / "resumed"), str(tmp_path / "out")]) == 0
    assert not np.array_equal(
        load_file(tmp_path / "out" / "model.safetensors")["model.norm.weight"],
        load_file(toy.model / "model.safetensors")["model.norm.weight"],
    )


@pytest.mark.parametrize("way", [{"kl": "sampled"}, {"kl": "top_k", "top_k": 5}], ids=way_name)
def test_each_row_learns_from_the_teacher_that_it_names(
    toy: Toy, teacher: Path, tmp_path: Path, way: dict[str, Any]
) -> None:
    """The first step samples the same responses in all three runs, so a row's divergence is that from its teacher."""
    third = save_toy_model(tmp_path / "third", seed=2)
    rows = [{"prompt": f"say {n}", "task": "odd" if n % 2 else "even", "data_source": "toy"} for n in range(16)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    base = {"data.train_files": str(tmp_path / "prompts.jsonl"), "custom_reward_function.path": None}
    base |= {"trainer.total_training_steps": 1, "actor_rollout_ref.rollout.n": 2}
    several = {"distill.teacher.path": None, "distill.teacher_key": "task"}
    several["distill.teachers"] = {"even": str(teacher), "odd": str(third)}
    runs: dict[str, tuple[DataProto, DataProto]] = {}
    for name, changes in (
        ("even", keys(teacher, **way)),
        ("odd", keys(third, **way)),
        ("both", keys(teacher, **way) | several),
    ):

        class Keeping(DistillTrainer):
            def _score_by_reference(self, ref: Any, batch: DataProto, name: str = name) -> DataProto:
                runs[name] = batch, super()._score_by_reference(ref, batch)
                return runs[name][1]

        result = run_training(toy.config(tmp_path / name, base | changes), use_ray=False, trainer_class=Keeping)
    metrics = RunFolder(result.folder).read_metrics()
    batch, scored = runs["both"]
    odd = torch.tensor([task == "odd" for task in batch.non_tensor_batch["task"]])
    assert 0 < odd.sum() < len(odd)
    for column, values in scored.tensors.items():
        ones = {name: runs[name][1].tensors[column] for name in ("odd", "even")}
        assert torch.equal(values[odd], ones["odd"][odd]), column
        assert torch.equal(values[~odd], ones["even"][~odd]), column
        assert not torch.equal(ones["odd"], ones["even"]), column
    shares = [metrics[0].get(f"distill/kl/{name}") for name in ("odd", "even")]
    if way["kl"] == "sampled":
        assert min(shares) < metrics[0]["distill/kl"] < max(shares)
    else:
        assert shares == [None, None]


def test_rows_without_a_teacher_are_found_before_the_run_starts(toy: Toy, teacher: Path, tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"prompt": "say 1", "task": "code"}) + "\n")
    base = keys(teacher) | {"data.train_files": str(tmp_path / "prompts.jsonl"), "custom_reward_function.path": None}
    base |= {"data.train_batch_size": 1, f"{A}.ppo_mini_batch_size": 1, "distill.teacher.path": None}
    for settings, says in (
        ({"distill.teacher_key": "task", "distill.teachers": {"math": str(teacher)}}, "rows have task=code"),
        ({"distill.teacher_key": "topic", "distill.teachers": {"math": str(teacher)}}, "topic names no column"),
        ({"distill.teachers": {"math": str(teacher)}}, "rows have data_source=custom"),
    ):
        with pytest.raises(ConfigError, match=says):
            run_training(toy.config(tmp_path / "run", base | settings), use_ray=False)
    settings = DistillConfig(teachers={"math": "a", "code": "b", "law": "c"})
    places = rows_by_teacher(["code", "math", "code"], settings)
    assert {name: rows.tolist() for name, rows in places.items()} == {"math": [1], "code": [0, 2]}
    with pytest.raises(ValueError, match="rows have data_source=art"):
        rows_by_teacher(["code", "art"], settings)


@pytest.mark.distributed
# The update of sampled tokens is that of RL, which has such a test of its own; listed tokens take the way of all.
@pytest.mark.parametrize(
    ("kl", "strategy"),
    [
        ("full", "fsdp2"),
        *(
            pytest.param(kl, strategy, marks=pytest.mark.slow)
            for kl, strategy in (("sampled", "fsdp2"), ("top_k", "fsdp2"), ("top_k", "megatron"), ("full", "megatron"))
        ),
    ],
)
def test_two_ranks_train_what_one_trains(
    toy: Toy, ray_here: None, teacher: Path, tmp_path: Path, kl: str, strategy: str
) -> None:
    """Two workers on Ray, teacher offloaded between turns: no cheaper test has both models sharded in one process."""
    changes = keys(teacher, kl=kl) | {"trainer.total_training_steps": 2, f"{A}.optim.eps": 1e-3}
    _, one = train(toy.config(tmp_path / "one", changes))
    sharded = {**changes, f"{A}.strategy": strategy, "trainer.n_gpus_per_node": 2}
    section = "fsdp_config" if strategy == "fsdp2" else "megatron"
    sharded[f"actor_rollout_ref.ref.{section}.param_offload"] = True
    if strategy == "megatron":
        sharded |= {f"{A}.megatron.dtype": "float32", f"{A}.megatron.tensor_model_parallel_size": 2}
    _, two = train(toy.config(tmp_path / "two", sharded), use_ray=True)
    for left, right in zip(one, two, strict=True):
        for name in ("distill/kl", "actor/grad_norm", "actor/pg_loss"):
            assert right[name] == pytest.approx(left[name], rel=1e-4, abs=1e-6), name


@pytest.mark.slow
@pytest.mark.distributed
def test_two_ranks_ask_several_teachers_as_one_asks_them(
    toy: Toy, ray_here: None, teacher: Path, tmp_path: Path
) -> None:
    """Teachers named by a number, with odd counts of rows in micro-batches by tokens (20 s): only teachers that are
    sharded could disagree about how many forwards each makes."""
    third = save_toy_model(tmp_path / "third", seed=2)
    rows = [{"prompt": f"say {n}" + "x" * (n % 4), "level": 1 if n % 4 == 1 else 2} for n in range(16)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    changes = keys(teacher, teacher_key="level", teachers={1: str(teacher), 2: str(third)}) | {
        "distill.teacher.path": None,
        "data.train_files": str(tmp_path / "prompts.jsonl"),
        "custom_reward_function.path": None,
        "trainer.total_training_steps": 2,
        "actor_rollout_ref.rollout.n": 1,
        f"{A}.use_dynamic_bsz": True,
        f"{A}.ppo_max_token_len_per_gpu": 60,
        f"{A}.optim.eps": 1e-3,
    }
    _, one = train(toy.config(tmp_path / "one", changes))
    sharded = {f"{A}.strategy": "fsdp2", "trainer.n_gpus_per_node": 2}
    sharded["actor_rollout_ref.ref.fsdp_config.param_offload"] = True
    _, two = train(toy.config(tmp_path / "two", changes | sharded), use_ray=True)
    for left, right in zip(one, two, strict=True):
        for name in ("distill/kl/1", "distill/kl/2", "actor/grad_norm"):
            assert right[name] == pytest.approx(left[name], rel=1e-4, abs=1e-6), name


@pytest.mark.slow
@pytest.mark.distributed
def test_a_teacher_on_devices_of_its_own_teaches_the_same(toy: Toy, teacher: Path, tmp_path: Path) -> None:
    """Two processes of Ray, one for each model: only a run on Ray has a second pool."""
    changes = keys(teacher, kl="top_k") | {"trainer.total_training_steps": 2, f"{A}.optim.eps": 1e-3}
    _, shared = train(toy.config(tmp_path / "shared", changes))
    apart = {**changes, "distill.teacher.nnodes": 1, "distill.teacher.n_gpus_per_node": 1}
    run = train_apart(tmp_path / "apart", apart, use_ray=True)
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for left, right in zip(shared, metrics, strict=True):
        for name in ("distill/kl", "actor/grad_norm", "actor/pg_loss"):
            assert right[name] == pytest.approx(left[name], rel=1e-4, abs=1e-6), name
    plan = json.loads((run / "plan.json").read_text())
    assert {layout["role"]: layout["pool"] for layout in plan["layouts"]}["ref"] == "teacher"
    with pytest.raises(ValueError, match="puts the teacher into processes of their own, which needs Ray"):
        run_training(toy.config(tmp_path / "local", apart), use_ray=False)


def test_another_tokenizer_is_refused_with_the_first_token_that_differs(
    toy: Toy, teacher: Path, tmp_path: Path
) -> None:
    config = toy.config(tmp_path, keys(teacher))
    refuse_other_vocabulary({"a": 0, "b": 1}, {"b": 1, "a": 0}, config, "teacher")
    with pytest.raises(
        ConfigError, match=r"'b' has id 2 in the teacher's and id 1 in the student's \(2 entries differ\)"
    ):
        refuse_other_vocabulary({"a": 0, "b": 1}, {"a": 0, "b": 2}, config, "teacher")
    other = shutil.copytree(teacher, tmp_path / "other")
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    first, second = list(vocabulary)[10:12]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ConfigError, match="have different tokenizers"):
        run_training(toy.config(tmp_path / "run", keys(other)), use_ray=False)
    assert not (tmp_path / "run").exists(), "found before anything was started"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"distill.teacher.path": None}, "distill.teacher.path is not set"),
        ({"distill.teacher.path": "nowhere"}, "distill.teacher.path=nowhere"),
        ({f"{A}.use_kl_loss": True}, "the teacher is in its place"),
        ({"algorithm.filter_groups.enable": True}, "learns from every token"),
        ({"async_training.mode": "one_step_off"}, "cannot be combined"),
        ({"distill.teachers": {"a": "x"}}, "keep one of the two"),
        ({"distill.teacher.path": None, "distill.teachers": {"a": "nowhere"}}, "distill.teachers.a=nowhere"),
        ({"distill.kl": "full", "distill.teachers": {"a": "x"}}, "use distill.kl=top_k with a large distill.top_k"),
        ({"distill.kl": "top_k", "distill.other_tokens": "ignored"}, "use distill.divergence=forward"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_distillation_cannot_do_is_said_before_it_starts(
    toy: Toy, teacher: Path, tmp_path: Path, change: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        run_training(toy.config(tmp_path / "run", keys(teacher) | change), use_ray=False)
