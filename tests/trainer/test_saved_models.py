"""`dovetail eval`, `generate` and `export` on what a run saved: the numbers and the words are those of the run."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GenerationConfig

from dovetail.cli.main import main
from dovetail.models.errors import ModelError
from dovetail.observability.run_folder import RunFolder
from dovetail.trainer.saved_model import SavedModel
from tests.trainer.toy_run import Toy, make_toy, save_toy_model, train

pytestmark = pytest.mark.e2e

LORA = {"actor_rollout_ref.model.lora_rank": 4, "actor_rollout_ref.actor.optim.lr": 1e-2}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three steps with a critic and a reference, validated and saved after each; the export of the last one.

    The model has a layer that predicts a further token, as DeepSeek-V3 and GLM-4.5 have.
    """
    folder = tmp_path_factory.mktemp("saved")
    toy = make_toy(folder)
    config, weights = toy.model / "config.json", toy.model / "model.safetensors"
    described = json.loads(config.read_text())
    config.write_text(json.dumps(described | {"num_nextn_predict_layers": 1}))
    further = {f"model.layers.{described['num_hidden_layers']}.eh_proj.weight": torch.ones(3, 5)}
    save_file(load_file(weights) | further, weights, metadata={"format": "pt"})
    keys = {
        "data.val_files": str(toy.data / "val.parquet"),
        "custom_reward_function.name": "mostly",
        "algorithm.adv_estimator": "gae",
        "actor_rollout_ref.actor.use_kl_loss": True,
        "trainer.test_freq": 1,
        "trainer.save_freq": 1,
        "actor_rollout_ref.actor.checkpoint.save_contents": ["model", "optimizer", "extra", "hf_model"],
    }
    train(toy.config(folder / "run", keys))
    assert main(["export", str(folder / "run"), str(folder / "exported")]) == 0
    return folder


def evaluate(*arguments: str) -> dict[str, Any]:
    out = arguments[arguments.index("--out") + 1]
    assert main(["eval", *arguments]) == 0
    return json.loads((Path(out) / "eval.json").read_text())


def last_messages(folder: Path, step: int) -> dict[str, str]:
    lines = (folder / "validation" / f"step_{step}.jsonl").read_text().splitlines()
    return {row["prompt"]: row["response"] for row in map(json.loads, lines)}


@pytest.mark.parametrize(("given", "step"), [("run", 3), ("run/global_step_2", 2)])
def test_a_checkpoint_scores_what_its_run_measured(saved: Path, tmp_path: Path, given: str, step: int) -> None:
    run = RunFolder(saved / "run")
    before = (run.path / "config.yaml").read_bytes(), run.read_metrics()
    found = evaluate(str(saved / given), "--out", str(tmp_path))
    row = before[1][step - 1]
    assert found["metrics"] == {name: value for name, value in row.items() if name.startswith("val-")}
    assert found["step"] == step
    [source] = found["sources"]
    assert (source["data_source"], source["value"], source["prompts"], source["failed"]) == ("toy", "acc", 4, 0)
    assert source["scores"] == {"mean@1": row["val-core/toy/acc/mean@1"]}
    # The run folder is as it was.
    assert ((run.path / "config.yaml").read_bytes(), run.read_metrics()) == before


def test_the_exported_folder_scores_what_the_checkpoint_does(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, reward = saved / "data" / "val.parquet", saved / "data" / "reward.py"
    sampling = ("-n", "4", "--temperature", "0.7", "--max-tokens", "5")
    first = evaluate(str(saved / "run"), "--out", str(tmp_path / "a"), *sampling)
    keys = (f"custom_reward_function.path={reward}", "custom_reward_function.name=mostly", "data.max_prompt_length=32")
    folder = str(saved / "exported")
    second = evaluate(folder, "--data", str(data), "--out", str(tmp_path / "b"), *sampling, *keys)
    assert first["metrics"] == second["metrics"]
    assert list(first["sources"][0]["scores"]) == ["mean@4", "pass@2", "pass@4", "best@2", "best@4", "maj@2", "maj@4"]
    assert first["sources"][0]["mean_tokens"] <= 5
    shown = capsys.readouterr().out
    assert "pass@4" in shown
    assert str(tmp_path / "b" / "eval.json") in shown


def test_scores_of_another_evaluation_in_the_same_folder_are_kept(saved: Path, tmp_path: Path) -> None:
    first = evaluate(str(saved / "run"), "--out", str(tmp_path), "--max-tokens", "3")
    second = evaluate(str(saved / "run"), "--out", str(tmp_path), "--max-tokens", "5")
    assert [found["sampling"]["max_tokens"] for found in (first, second)] == [3, 5]
    assert json.loads((tmp_path / "previous_1" / "eval.json").read_text()) == first
    assert last_messages(tmp_path / "previous_1", 3) != last_messages(tmp_path, 3)


@pytest.mark.parametrize(
    ("given", "lengths"),
    [
        ((), (256, 256)),
        (("data.max_prompt_length=100",), (100, 412)),
        (("actor_rollout_ref.rollout.response_length=8", "data.max_response_length=8"), (504, 8)),
        (("data.max_prompt_length=500", "data.max_response_length=500"), (500, 500)),
        (("data.max_prompt_length=600",), (600, 512)),
    ],
)
def test_lengths_of_a_model_that_nobody_set_fit_its_context(
    tmp_path: Path, given: tuple[str, ...], lengths: tuple[int, int]
) -> None:
    model = save_toy_model(tmp_path)
    context = json.loads((model / "config.json").read_text())["max_position_embeddings"]
    rollout = SavedModel(str(model), is_checkpoint=False).config(overrides=given).config.actor_rollout_ref.rollout
    assert (context, rollout.prompt_length, rollout.response_length) == (512, *lengths)


def test_a_model_with_a_short_context_is_evaluated_with_default_lengths(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = (f"custom_reward_function.path={saved / 'data' / 'reward.py'}", "--data", str(saved / "data/val.parquet"))
    [source] = evaluate(str(saved / "exported"), "--out", str(tmp_path), *keys)["sources"]
    assert source["prompts"] == 4
    assert 0 < source["mean_tokens"] <= 256
    assert main(["eval", str(saved / "exported"), "--out", str(tmp_path), *keys, "data.max_prompt_length=512"]) == 2
    assert "exceed the model's context of 512" in capsys.readouterr().err


def test_generate_writes_what_the_run_validated(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = last_messages(saved / "run", 3)
    prompts, out = list(expected), tmp_path / "out.jsonl"
    assert main(["generate", str(saved / "run"), *prompts, "--jsonl", str(out)]) == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert {row["prompt"]: row["response"] for row in rows} == expected
    said = capsys.readouterr().out
    assert all(f"> {prompt}\n{response}" in said for prompt, response in expected.items())
    # From a folder, and prompts from a file or from standard input.
    (tmp_path / "prompts.txt").write_text("\n".join(prompts))
    again = tmp_path / "again.jsonl"
    folder, options = str(saved / "exported"), ("--max-tokens", "8", "--jsonl", str(again))
    assert main(["generate", folder, "--file", str(tmp_path / "prompts.txt"), *options]) == 0
    assert again.read_text() == out.read_text()
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(prompts)))
    assert main(["generate", folder, *options]) == 0
    assert again.read_text() == out.read_text()


def test_a_reward_model_generates_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = save_toy_model(tmp_path)  # its head is tied to the embedding: no tensor is missing
    head, file = {"score.weight": torch.ones(1, 64)}, folder / "model.safetensors"
    save_file(load_file(file) | head, file, metadata={"format": "pt"})
    assert main(["generate", str(folder), "hello"]) == 2
    assert "is a reward model: its weights have a head that scores (score.weight)" in capsys.readouterr().err


def test_generate_samples_several_and_takes_chats_and_long_prompts(saved: Path, tmp_path: Path) -> None:
    chat = [
        {"role": "user", "content": "a" * 100},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ]
    (tmp_path / "chats.jsonl").write_text(json.dumps({"prompt": chat}) + "\n")
    out = tmp_path / "out.jsonl"
    options = ("--file", str(tmp_path / "chats.jsonl"), "--system", "Be brief.", "-n", "3", "--jsonl", str(out))
    assert main(["generate", str(saved / "run"), *options]) == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["prompt"] for row in rows] == [[{"role": "system", "content": "Be brief."}, *chat]] * 3
    assert len({row["response"] for row in rows}) > 1, "several responses are sampled"
    assert all(row["tokens"] <= 8 and row["finish_reason"] in ("length", "stop") for row in rows)


def test_what_cannot_be_evaluated_is_said_in_one_line(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    exported, empty = str(saved / "exported"), str(tmp_path / "empty")
    Path(empty).mkdir()
    (adapter := tmp_path / "adapter").mkdir()
    (adapter / "adapter_config.json").write_text("{}")
    for arguments, says in [
        (["eval", str(tmp_path / "nothing")], "nothing is no folder"),
        (["eval", "empty/nothing"], "empty/nothing is no folder"),
        (["eval", empty], "trainer.save_freq"),
        (["eval", str(adapter)], "give the model under it"),
        (["eval", exported], "data.val_files is empty"),
        (["eval", exported, "--data", "no.parquet", "--max-tokens", "8", "data.max_prompt_length=32"], "no.parquet"),
        (["generate", exported], "there is no prompt"),
        (["generate", exported, "a", "data.seed=3 4"], "give it as --set 'data.seed=3 4'"),
        (["generate", exported, "lr=1"], "'lr=1' stands where a prompt is read"),
        (["generate", exported, "a", "--best"], "--best chooses a checkpoint of a run folder"),
        (["eval", "org/name", "--best"], "org/name is a model"),
        (["eval", str(saved / "run"), "--best"], "none was validated with trainer.save_best"),
        (["generate", exported, "--file", "no.txt"], "no.txt: there is no such file"),
        (["generate", exported, "--set", "data.max_response_lenght=3", "a"], "data.max_response_length"),
        (["export", empty, "--list"], "holds no checkpoint"),
        (["export", str(saved / "run")], "OUT is missing"),
        (["export", str(saved / "run"), "out", "--adapter"], "trained no LoRA adapter"),
    ]:
        assert main(arguments) == 2, arguments
        said = capsys.readouterr().err
        assert says in said
        assert "Traceback" not in said
    assert not (tmp_path / "out").exists()


def test_the_checkpoints_of_a_run_are_listed_with_their_sizes(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", str(saved / "run"), "--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines] == ["1", "2", "3"]
    assert all("MiB" in line and f"global_step_{number}" in line for number, line in enumerate(lines, 1))


def test_both_exports_have_the_layer_that_predicts_a_further_token_as_it_was(saved: Path) -> None:
    in_checkpoint = saved / "run" / "global_step_3" / "actor" / "huggingface"
    for folder in (saved / "exported", in_checkpoint):
        tensors = load_file(folder / "model.safetensors")
        [name] = [name for name in tensors if "eh_proj" in name]
        assert torch.equal(tensors[name], torch.ones(3, 5))
        described = json.loads((folder / "config.json").read_text())
        assert described["num_nextn_predict_layers"] == 1
        assert name == f"model.layers.{described['num_hidden_layers']}.eh_proj.weight"
        _, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
        assert (report["missing_keys"], report["unexpected_keys"]) == (set(), {name})


def test_an_exported_adapter_on_its_model_is_the_merged_policy(toy: Toy, tmp_path: Path) -> None:
    """peft reads the adapter, and so does `dovetail generate` the checkpoint of a LoRA run."""
    from peft import PeftModel

    stop = {"actor_rollout_ref.rollout.stop_token_ids": [9]}
    train(toy.config(tmp_path / "run", {**LORA, **stop, "trainer.save_freq": 3}))
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "merged")]) == 0
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "adapter"), "--adapter"]) == 0
    assert json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["base_model_name_or_path"] == str(
        toy.model
    )
    ends = [GenerationConfig.from_pretrained(tmp_path / name).eos_token_id for name in ("adapter", "merged")]
    assert ends[0] == ends[1]
    assert 9 in ends[0]
    half = [str(tmp_path / "run"), str(tmp_path / "half"), "--adapter", "--dtype", "bfloat16"]
    assert main(["export", *half]) == 0
    assert {tensor.dtype for tensor in load_file(tmp_path / "half" / "adapter_model.safetensors").values()} == {
        torch.bfloat16
    }
    base = AutoModelForCausalLM.from_pretrained(toy.model, dtype=torch.float32)
    ids = torch.arange(3, 35)[None]
    with torch.no_grad():
        plain = base(ids).logits
        adapted = PeftModel.from_pretrained(base, tmp_path / "adapter").eval()(ids).logits
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)(ids).logits
    torch.testing.assert_close(adapted, merged, atol=1e-4, rtol=0)
    assert not torch.allclose(adapted, plain, atol=1e-2)
    for folder in ("run", "merged"):
        options = ("--max-tokens", "8", "--jsonl", str(tmp_path / f"{folder}.jsonl"))
        assert main(["generate", str(tmp_path / folder), "say 7", *options]) == 0
    assert (tmp_path / "run.jsonl").read_text() == (tmp_path / "merged.jsonl").read_text()


def test_a_run_that_read_no_mini_batch_is_evaluated(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(
        "trainer: {method: sft}\ndata: {train_batch_size: 16, train_files: rows.jsonl}\n"
    )
    config = SavedModel(str(tmp_path / "global_step_20"), is_checkpoint=True).config().config
    assert (config.data.train_batch_size, config.actor_rollout_ref.actor.ppo_mini_batch_size) == (16, 16)


def test_a_run_that_trained_a_reward_model_has_nothing_to_generate_with(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("trainer: {method: reward}\ndata: {train_files: rows.jsonl}\n")
    with pytest.raises(ModelError, match=r"is a checkpoint of a reward model, .* `dovetail export`"):
        SavedModel(str(tmp_path / "global_step_2"), is_checkpoint=True).config()
