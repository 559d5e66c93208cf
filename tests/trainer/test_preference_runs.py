"""`dovetail dpo` and `dovetail reward` as runs: they learn, resume exactly, and the reward model scores as trained."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification

from dovetail.cli.main import main
from dovetail.config import ConfigError
from dovetail.controller import LocalWorkerGroup, RayClassWithInitArgs
from dovetail.data.errors import DataError
from dovetail.data.files import write_rows
from dovetail.models.weights import scalar_head
from dovetail.protocol import DataProto
from dovetail.trainer.model_folders import refuse_broken_models
from dovetail.trainer.reference import FILE
from dovetail.workers.reward_model_worker import RewardModelWorker
from tests.models.tiny import tiny_tokenizer
from tests.trainer.toy_run import Toy, repeatable, save_toy_model, train

A = "actor_rollout_ref.actor"

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Digits are preferred to letters."""
    folder = tmp_path_factory.mktemp("pairs")
    for name, first, count in (("train", 0, 12), ("val", 50, 5)):
        rows = [
            {"prompt": f"say {first + i}", "chosen": str(first + i) * 2, "rejected": "abcdefgh"[i % 5 : i % 5 + 3]}
            for i in range(count)
        ]
        write_rows(rows, folder / f"{name}.jsonl")
    return folder


def keys(pairs: Path, **changes: Any) -> dict[str, Any]:
    return {
        "trainer.method": "dpo",
        "trainer.total_training_steps": 4,
        "trainer.test_freq": 2,
        "trainer.save_freq": 2,
        "data.train_files": str(pairs / "train.jsonl"),
        "data.val_files": str(pairs / "val.jsonl"),
        "data.max_prompt_length": 64,
        "data.max_response_length": 16,
        "data.train_batch_size": 5,
    } | {name.replace("__", "."): value for name, value in changes.items()}


def test_dpo_learns_and_a_stopped_run_goes_on_bit_for_bit(toy: Toy, pairs: Path, tmp_path: Path) -> None:
    result, rows = train(toy.config(tmp_path / "whole", keys(pairs, trainer__val_before_train=True)))
    assert result.steps == 4
    before, after = rows[0], rows[-1]
    # The policy is its own reference before the first step.
    assert before["val/loss"] == pytest.approx(0.6931472, abs=1e-6)
    assert before["val/rewards/margins"] == 0
    assert after["val/loss"] < 0.5
    assert after["val/rewards/accuracies"] == pytest.approx(1)
    assert after["train/rewards/chosen"] > after["train/rewards/rejected"]

    part = toy.config(tmp_path / "part", keys(pairs, trainer__val_before_train=True))
    first = part.model_copy(update={"trainer": part.trainer.model_copy(update={"total_training_steps": 2})})
    train(first)
    kept = (tmp_path / "part" / FILE).stat()
    _, again = train(part)
    assert (tmp_path / "part" / FILE).stat().st_mtime_ns == kept.st_mtime_ns
    assert repeatable(again) == repeatable(rows)


@pytest.mark.parametrize("loss_type", ["ipo", "kto", "orpo", "simpo"])
def test_every_other_loss_trains_and_only_some_keep_a_reference(
    toy: Toy, pairs: Path, tmp_path: Path, loss_type: str
) -> None:
    changes = keys(pairs, trainer__total_training_steps=2, trainer__val_before_train=True, dpo__loss_type=loss_type)
    result, rows = train(toy.config(tmp_path, changes))
    assert rows[-1]["val/loss"] < rows[0]["val/loss"]
    assert rows[-1]["val/rewards/margins"] > rows[0]["val/rewards/margins"]
    assert (result.folder / FILE).exists() == (loss_type in ("ipo", "kto"))
    # A batch of 5 pairs, or of 5 responses: those to other prompts, from which KTO's baseline comes, are not trained.
    assert rows[-1]["train/rows"] == (5 if loss_type == "kto" else 10)


def test_the_size_of_validation_batches_does_not_change_ktos_validation(toy: Toy, pairs: Path, tmp_path: Path) -> None:
    """Its KL baseline, held at 0 or above, is one of all validation rows."""
    rows = [{"prompt": f"say {n}", "completion": str(n) * 2 if n < 18 else "abcd", "label": n < 18} for n in range(20)]
    write_rows(rows, tmp_path / "rows.jsonl")
    changes = keys(pairs, trainer__total_training_steps=2, dpo__loss_type="kto")
    changes |= {"data.train_files": str(tmp_path / "rows.jsonl"), "data.val_files": str(tmp_path / "rows.jsonl")}
    once, by_three = (
        train(toy.config(tmp_path / str(size), changes | {"data.val_batch_size": size}))[1][-1] for size in (None, 3)
    )
    validation = {name: value for name, value in once.items() if name.startswith("val/")}
    assert validation["val/kl"] > 0
    assert {name: by_three[name] for name in validation} == pytest.approx(validation, rel=1e-5)


def test_with_fresh_adapters_the_reference_is_the_model(toy: Toy, pairs: Path, tmp_path: Path) -> None:
    rank = {"actor_rollout_ref.model.lora_rank": 4}
    changes = keys(pairs, trainer__total_training_steps=2)
    full, _ = train(toy.config(tmp_path / "full", changes))
    lora, rows = train(toy.config(tmp_path / "lora", changes | rank))
    # A later start computes some of it again, with adapters that are trained by then.
    train(toy.config(tmp_path / "lora", changes | rank | {"trainer.total_training_steps": 3}))
    tables = []
    for run in (full, lora):
        with safe_open(run.folder / FILE, framework="pt") as stored:
            tables.append(stored.get_tensor("train"))
    torch.testing.assert_close(*tables)
    assert tables[0].shape == (12, 2)
    assert rows[-1]["train/rewards/margins"] != 0


def test_a_resumed_run_may_have_a_validation_set_that_it_had_not(toy: Toy, pairs: Path, tmp_path: Path) -> None:
    changes = keys(pairs, trainer__total_training_steps=2)
    train(toy.config(tmp_path / "run", changes | {"data.val_files": []}))
    _, rows = train(toy.config(tmp_path / "run", changes | {"trainer.total_training_steps": 3}))
    _, always = train(toy.config(tmp_path / "always", changes | {"trainer.total_training_steps": 3}))
    assert rows[-1]["val/rewards/margins"] == pytest.approx(always[-1]["val/rewards/margins"], rel=1e-4)


def test_a_run_does_not_go_on_with_another_reference_or_other_data(toy: Toy, pairs: Path, tmp_path: Path) -> None:
    changes = keys(pairs, trainer__total_training_steps=2)
    train(toy.config(tmp_path / "run", changes))
    longer = changes | {"trainer.total_training_steps": 3}
    file = tmp_path / "run" / FILE
    content = file.read_bytes()

    other = save_toy_model(tmp_path / "other", seed=1)
    with pytest.raises(DataError, match=rf"{FILE} holds the reference's log-probs, and it has .* where the model of"):
        train(toy.config(tmp_path / "run", longer | {"actor_rollout_ref.model.path": str(other)}))

    file.write_bytes(content[: len(content) // 2])
    with pytest.raises(DataError, match="and it cannot be read"):
        train(toy.config(tmp_path / "run", longer))
    file.write_bytes(content)
    with pytest.raises(DataError, match=r"other val data"):
        train(toy.config(tmp_path / "run", longer | {"data.val_max_samples": 3}))
    # The model that the run began with may lie elsewhere.
    elsewhere = shutil.copytree(toy.model, tmp_path / "elsewhere")
    _, rows = train(toy.config(tmp_path / "run", longer | {"actor_rollout_ref.model.path": str(elsewhere)}))
    assert len(rows) == 3
    # A new run may take the folder.
    train(toy.config(tmp_path / "run", longer | {"data.val_max_samples": 3, "trainer.resume_mode": "disable"}))


def test_bad_rows_are_named_before_anything_starts(toy: Toy, tmp_path: Path) -> None:
    good = [{"prompt": f"say {i}", "chosen": "b", "rejected": "c"} for i in range(5)]
    rows = [{"prompt": "a", "chosen": "b"}, {"prompt": "a", "chosen": "b", "rejected": "b"}, *good]
    file = write_rows(rows, tmp_path / "rows.jsonl")
    changes = keys(tmp_path) | {"data.train_files": str(file), "data.val_files": []}
    said = r"2 rows cannot be used:\n.*row 0: there is no rejected.*\n.*row 1: chosen and rejected"
    with pytest.raises(DataError, match=said):
        train(toy.config(tmp_path / "run", changes))
    assert not (tmp_path / "run").exists()


REWARD = {"trainer.method": "reward", "critic.optim.lr": 3e-3, "reward_training.center_coefficient": 0.01}


def test_a_reward_model_learns_and_its_export_scores_as_it_did_in_training(
    toy: Toy, pairs: Path, tmp_path: Path
) -> None:
    changes = keys(pairs, trainer__total_training_steps=6) | REWARD
    result, rows = train(toy.config(tmp_path / "run", changes))
    assert rows[-1]["val/accuracy"] == pytest.approx(1)
    assert main(["export", str(result.folder), str(tmp_path / "reward")]) == 0
    batch = policy_batch(pairs / "val.jsonl")
    config = toy.config(
        tmp_path / "unused",
        {
            "reward_model.enable": True,
            "reward_model.model.path": str(tmp_path / "reward"),
            "reward_model.model.fsdp_config.mixed_precision.param_dtype": "float32",
        },
    )
    group: Any = LocalWorkerGroup(RayClassWithInitArgs(RewardModelWorker, config=config), role="reward_model")
    group.init_model()
    scores = group.compute_rm_score(batch).tensors["rm_scores"].sum(dim=1)
    chosen, rejected = scores[0::2], scores[1::2]
    assert (chosen - rejected).mean().item() == pytest.approx(rows[-1]["val/margin"], abs=1e-5)
    assert scores.mean().item() == pytest.approx(rows[-1]["val/mean_reward"], abs=1e-5)
    # Plain transformers reads the folder, and agrees row by row.
    plain = AutoModelForSequenceClassification.from_pretrained(tmp_path / "reward", dtype=torch.float32).eval()
    assert plain.config.architectures == [type(plain).__name__]
    for row in range(len(scores)):
        kept = batch.tensors["attention_mask"][row].bool()
        with torch.no_grad():
            expected = plain(input_ids=batch.tensors["input_ids"][row][kept][None]).logits[0, 0]
        assert scores[row].item() == pytest.approx(expected.item(), abs=1e-5)


def policy_batch(file: Path) -> DataProto:
    """The rows of a file as RL lays them out: prompts padded on the left, responses on the right."""
    tokenizer = tiny_tokenizer()
    entries = [json.loads(line) for line in file.read_text().splitlines()]
    rows = []
    for entry in entries:
        messages = [{"role": "user", "content": entry["prompt"]}]
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        for response in (entry["chosen"], entry["rejected"]):
            full = [*messages, {"role": "assistant", "content": response}]
            whole = tokenizer.apply_chat_template(full, return_dict=False)
            answer = whole[len(prompt) :]
            end = len(answer) - answer[::-1].index(tokenizer.eos_token_id)
            rows.append((prompt, answer[:end]))
    left, right = max(len(prompt) for prompt, _ in rows), max(len(answer) for _, answer in rows)
    ids, mask = torch.zeros(len(rows), left + right, dtype=torch.long), torch.zeros(len(rows), left + right)
    for number, (prompt, answer) in enumerate(rows):
        ids[number, left - len(prompt) : left + len(answer)] = torch.tensor([*prompt, *answer])
        mask[number, left - len(prompt) : left + len(answer)] = 1
    columns = {
        "input_ids": ids,
        "attention_mask": mask.long(),
        "position_ids": (mask.long().cumsum(1) - 1).clamp(min=0),
        "responses": ids[:, left:],
    }
    return DataProto.from_dict(columns)


def test_a_reward_run_goes_on_bit_for_bit(toy: Toy, pairs: Path, tmp_path: Path) -> None:
    changes = keys(pairs) | REWARD
    _, rows = train(toy.config(tmp_path / "whole", changes))
    config = toy.config(tmp_path / "part", changes)
    train(config.model_copy(update={"trainer": config.trainer.model_copy(update={"total_training_steps": 2})}))
    _, again = train(config)
    assert repeatable(again) == repeatable(rows)


def test_a_reward_model_of_adapters_trains_its_head_too_and_is_exported_whole(
    toy: Toy, pairs: Path, tmp_path: Path
) -> None:
    lora = REWARD | {"critic.model.lora_rank": 4, "critic.optim.lr": 1e-2}
    changes = keys(pairs, trainer__total_training_steps=6) | lora
    result, rows = train(toy.config(tmp_path / "run", changes))
    assert rows[-1]["val/accuracy"] == pytest.approx(1)
    assert main(["export", str(result.folder), str(tmp_path / "reward")]) == 0
    plain = AutoModelForSequenceClassification.from_pretrained(tmp_path / "reward", dtype=torch.float32).eval()
    batch = policy_batch(pairs / "val.jsonl")
    scores = []
    for ids, mask in zip(batch.tensors["input_ids"], batch.tensors["attention_mask"].bool(), strict=True):
        with torch.no_grad():
            scores.append(plain(input_ids=ids[mask][None]).logits[0, 0])
    margin = (torch.stack(scores[0::2]) - torch.stack(scores[1::2])).mean()
    assert margin.item() == pytest.approx(rows[-1]["val/margin"], abs=1e-4)
    after, before = plain.state_dict(), load_file(toy.model / "model.safetensors")
    assert not torch.equal(after["score.weight"], scalar_head(toy.model, "score.weight", (1, 64)))
    assert not torch.equal(after["model.layers.0.mlp.up_proj.weight"], before["model.layers.0.mlp.up_proj.weight"])
    assert torch.equal(after["model.norm.weight"], before["model.norm.weight"])
    folders = dict.fromkeys(("actor_rollout_ref.model.path", "critic.model.path"), str(tmp_path / "reward"))
    refuse_broken_models(toy.config(tmp_path / "again", changes | folders))  # a reward model may be trained on
    assert main(["export", str(result.folder), str(tmp_path / "adapter"), "--adapter"]) == 2
    assert main(["export", str(result.folder), str(tmp_path / "moved"), "--model", str(tmp_path / "nowhere")]) == 2


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"trainer.method": "rl", "algorithm.adv_estimator": "gae", "critic.model.lora_rank": 4}
            | {"critic.strategy": "megatron"},
            "use critic.strategy=fsdp2",
        ),
        ({**REWARD, "critic.model.lora_rank": 4, "critic.strategy": "megatron"}, "use critic.strategy=fsdp2"),
        ({"actor_rollout_ref.model.lora_rank": 4, f"{A}.strategy": "megatron"}, f"use {A}.strategy=fsdp2"),
    ],
    ids=["a critic", "a reward model on Megatron", "DPO on Megatron"],
)
def test_adapters_that_cannot_be_trained_are_refused(
    toy: Toy, pairs: Path, tmp_path: Path, changes: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        train(toy.config(tmp_path, keys(pairs) | changes))
