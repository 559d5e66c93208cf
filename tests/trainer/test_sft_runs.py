"""Whole fine-tuning runs on a tiny model: they learn, resume exactly, export, and name what is wrong."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from dovetail.cli.main import main
from dovetail.config import load_config
from dovetail.config.root import DovetailConfig
from dovetail.dashboard.report import write_report
from dovetail.data.files import write_rows
from dovetail.observability.run_folder import read_json_lines
from dovetail.rewards.errors import RewardError
from dovetail.trainer import fsdp_sft_trainer, main_ppo, sft_trainer, sft_trainer_ray
from dovetail.trainer.examples import example_lengths
from dovetail.trainer.method import RunOptions, open_method
from dovetail.trainer.run import run_training
from tests.trainer.toy_run import Toy, repeatable, save_toy_model, train, with_quick_workers

ACTOR = "actor_rollout_ref.actor"
TALKS = [
    {
        "messages": [
            {"role": "user", "content": f"number {index}"},
            {"role": "assistant", "content": "abc" * (1 + index % 3)},
            {"role": "user", "content": "again"},
            {"role": "assistant", "content": "abc"},
        ]
    }
    for index in range(12)
]


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    folder = tmp_path_factory.mktemp("sft")
    write_rows(TALKS[:10], folder / "train.parquet")
    write_rows(TALKS[10:], folder / "val.jsonl")
    return Toy(save_toy_model(folder / "model"), folder)


def keys(toy: Toy, **changes: Any) -> dict[str, Any]:
    return {
        "trainer.method": "sft",
        "custom_reward_function.path": None,
        "data.train_files": str(toy.data / "train.parquet"),
        "data.val_files": str(toy.data / "val.jsonl"),
        "data.max_length": 256,
        "trainer.total_training_steps": 6,
        "trainer.val_before_train": True,
        "sft.val_sample_tokens": 16,
        f"{ACTOR}.optim.lr": 1e-2,
        **changes,
    }


def config(toy: Toy, run: Path, **changes: Any) -> DovetailConfig:
    return toy.config(run, keys(toy, **changes))


def test_a_run_learns_what_the_assistant_says_and_its_export_is_the_trained_model(toy: Toy, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    result, rows = train(config(toy, tmp_path / "run", **{"trainer.save_freq": 6}))
    assert result.steps == 6
    assert rows[-1]["train/loss"] < 0.5 * rows[1]["train/loss"]
    assert result.validation["val/loss"] < 0.5 * rows[0]["val/loss"]
    assert rows[1]["train/trained_tokens"] > 0
    assert rows[1]["actor/lr"] == pytest.approx(1e-2)
    out = tmp_path / "exported"
    assert main(["export", str(tmp_path / "run" / "global_step_6"), str(out)]) == 0
    exported = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).state_dict()
    before = AutoModelForCausalLM.from_pretrained(toy.model, dtype=torch.float32).state_dict()
    assert max(float((exported[name] - before[name]).abs().max()) for name in before) > 1e-3
    _assert_samples_are_greedy_answers_of(out, tmp_path / "run", 6)
    _assert_samples_are_greedy_answers_of(toy.model, tmp_path / "run", 0)
    write_report(tmp_path / "run", tmp_path / "report.html")
    assert "Responses to held-out prompts" in (tmp_path / "report.html").read_text()


def test_a_template_that_hides_the_tools_of_training_and_validation_is_named_once(toy: Toy, tmp_path: Path) -> None:
    files = {name: str(tmp_path / f"{name}.jsonl") for name in ("train", "val")}
    for file in files.values():
        write_rows([{**talk, "tools": [{"type": "function", "function": {"name": "f"}}]} for talk in TALKS], file)
    with_tools = config(toy, tmp_path / "run", **{f"data.{name}_files": file for name, file in files.items()})
    assert example_lengths(with_tools) is not None
    with ExitStack() as open_things:
        notices = open_method(with_tools, RunOptions(use_ray=False), open_things).notices()
    assert [str(notice).count("the model's chat template shows no tools") for notice in notices] == [1]


def _assert_samples_are_greedy_answers_of(model: Path, run: Path, step: int) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(model)
    rows = list(read_json_lines(run / "validation" / f"step_{step}.jsonl"))
    assert [row["ground_truth"] for row in rows] == [talk["messages"][1]["content"] for talk in TALKS[10:]]
    for row, talk in zip(rows, TALKS[10:], strict=True):
        asked = tokenizer.apply_chat_template(
            talk["messages"][:1], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        ids = network.generate(**asked, do_sample=False, max_new_tokens=16)[0, asked["input_ids"].shape[1] :]
        assert row["response"] == tokenizer.decode(ids, skip_special_tokens=True)
        assert talk["messages"][0]["content"] in row["prompt"]


def test_samples_are_generated_where_the_engine_reads_the_weights_in_place_or_where_they_are_asked_for(
    toy: Toy, tmp_path: Path
) -> None:
    assert config(toy, tmp_path).num_val_samples == 4
    assert config(toy, tmp_path, **{"data.val_files": []}).num_val_samples == 0
    for copied in ({"trainer.n_gpus_per_node": 2}, {"actor_rollout_ref.model.lora_rank": 2}):
        assert config(toy, tmp_path, **copied).num_val_samples == 0
        assert config(toy, tmp_path, **copied, **{"sft.val_samples": 1}).num_val_samples == 1
    run = tmp_path / "run"
    adapters = {"actor_rollout_ref.model.lora_rank": 2, "sft.val_samples": 1, "trainer.total_training_steps": 1}
    train(config(toy, run, **adapters, **{"sft.val_sample_tokens": 4, "trainer.log_val_generations": 1}))
    assert [row["length"] <= 4 for row in read_json_lines(run / "validation" / "step_1.jsonl")] == [True]
    train(config(toy, tmp_path / "off", **{"sft.val_samples": 0, "trainer.total_training_steps": 1}))
    assert not list((tmp_path / "off").glob("validation/*"))


def test_a_resumed_run_repeats_the_curve_to_the_bit(toy: Toy, tmp_path: Path) -> None:
    """10 rows in batches of 4: the stop is inside the second epoch."""
    _, whole = train(config(toy, tmp_path / "whole"))
    saving = {"trainer.save_freq": 4, "trainer.total_training_steps": 4}
    schedule = {f"{ACTOR}.optim.total_training_steps": 6}
    train(config(toy, tmp_path / "parts", **saving, **schedule))
    result, parts = train(config(toy, tmp_path / "parts"))
    assert result.steps == 6
    # The first part validated at its own last step, too.
    parts = [{name: value for name, value in row.items() if not name.startswith("val/")} for row in repeatable(parts)]
    whole = [{name: value for name, value in row.items() if not name.startswith("val/")} for row in repeatable(whole)]
    assert [row for row in parts if row["step"]] == [row for row in whole if row["step"]]


@pytest.mark.slow
@pytest.mark.distributed
def test_a_run_on_two_processes_of_ray_is_that_of_one(toy: Toy, tmp_path: Path) -> None:
    """Driver, layout with padding (7 rows on 2 ranks), FSDP2, checkpoints and samples together; units show the
    parts."""
    batches = {"data.train_batch_size": 7, "trainer.total_training_steps": 3}
    _, one = train(config(toy, tmp_path / "one", **batches))
    two_ranks = {**batches, "trainer.n_gpus_per_node": 2, "trainer.save_freq": 3, "sft.val_samples": 2}
    two_ranks = with_quick_workers(two_ranks)
    _, two = train(config(toy, tmp_path / "two", **two_ranks), use_ray=True)
    for first, second in zip(one, two, strict=True):
        for name in ("train/loss", "val/loss", "actor/grad_norm"):
            if name in first:
                assert second[name] == pytest.approx(first[name], rel=1e-4), (first["step"], name)
    samples = [list(read_json_lines(tmp_path / run / "validation" / "step_3.jsonl")) for run in ("one", "two")]
    assert samples[0] == samples[1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data.max_length": 20}, "more than data.max_length=20"),
        ({"sft.messages_key": "talk"}, "neither 'talk' nor both of 'prompt' and 'response'"),
        ({"data.truncation": "middle"}, "use error, left or right"),
        ({"data.train_batch_size": 11}, "fewer than one batch of 11"),
        ({"data.custom_cls.path": "mine.py"}, "data.custom_cls.path=mine.py makes prompts"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_the_command_says_in_one_line_what_is_wrong(
    toy: Toy, tmp_path: Path, changes: dict[str, Any], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [word for word in toy.arguments(tmp_path / "run", keys(toy, **changes)) if "trainer.method" not in word]
    assert main(["sft", "--local", *arguments]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_samples_are_scored_by_the_reward_function_in_the_numbers_of_rls_validation(toy: Toy, tmp_path: Path) -> None:
    given = {"data_source": "given", "reward_model": {"ground_truth": "abd"}, "level": 3}
    write_rows([{**TALKS[10], **given}, {**TALKS[11], **given, "data_source": None}], tmp_path / "val.jsonl")
    (tmp_path / "score.py").write_text(
        "def score(response, ground_truth, level):\n"
        "    return {'score': level + len(response), 'acc': response[:2] == ground_truth[:2]}\n"
    )
    run = tmp_path / "run"
    function = {"custom_reward_function.path": str(tmp_path / "score.py"), "custom_reward_function.name": "score"}
    changes = {"data.val_files": [str(tmp_path / "val.jsonl"), str(toy.data / "val.jsonl")], **function}
    with pytest.raises(RewardError, match="level"):  # the rows of the second file have none
        train(config(toy, run, **changes))
    assert not run.exists()
    changes["data.val_files"] = str(tmp_path / "val.jsonl")
    result, _ = train(config(toy, run, **changes))
    rows = list(read_json_lines(run / "validation" / "step_6.jsonl"))
    assert [row["data_source"] for row in rows] == ["given", "custom"]
    assert [row["ground_truth"] for row in rows] == ["abd", "abd"]
    assert [row["values"]["reward"] for row in rows] == [3 + len(row["response"]) for row in rows]
    for row in rows:
        assert result.validation[f"val-core/{row['data_source']}/acc/mean@1"] == float(row["response"][:2] == "ab")
    assert result.validation["val-aux/failed"] == 0
    assert result.validation["val/loss"] > 0


def test_without_a_truth_of_its_own_a_sample_is_compared_with_what_the_assistant_wrote(
    toy: Toy, tmp_path: Path
) -> None:
    (tmp_path / "score.py").write_text("def score(response, ground_truth):\n    return float(len(ground_truth))\n")
    function = {"custom_reward_function.path": str(tmp_path / "score.py"), "custom_reward_function.name": "score"}
    result, _ = train(config(toy, tmp_path / "run", **function, **{"trainer.total_training_steps": 1}))
    wrote = [talk["messages"][1]["content"] for talk in TALKS[10:]]
    assert result.validation["val-core/custom/reward/mean@1"] == sum(map(len, wrote)) / len(wrote)


def test_keys_that_only_generation_reads_are_noticed() -> None:
    loaded = load_config(overrides=["trainer.method=sft", "algorithm.gamma=0.5"])
    assert any(
        "algorithm.gamma=0.5" in str(notice) and "samples no responses" in str(notice) for notice in loaded.notices
    )


def test_verls_entry_fills_in_what_its_lists_leave_unsaid(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def remember(config: DovetailConfig, **_: Any) -> Any:
        asked.append(config)
        raise FileNotFoundError("enough")

    monkeypatch.setattr(main_ppo, "run_ppo", remember)
    for name, value in {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    lists = [
        "model.partial_pretrain=m",
        "data.train_files=t.parquet",
        "optim.lr_warmup_steps_ratio=0.2",
        "optim.lr=3e-5",
    ]
    assert fsdp_sft_trainer.main(lists) == 2
    (config,) = asked
    optim = config.actor_rollout_ref.actor.optim
    assert (config.trainer.method, config.trainer.world_size, config.data.max_length) == ("sft", 4, 1024)
    assert (optim.lr, optim.lr_warmup_steps_ratio, optim.lr_scheduler_type) == (3e-5, 0.2, "cosine")
    assert (config.data.prompt_key, config.sft.response_key) == ("question", "answer")
    monkeypatch.setenv("RANK", "1")
    assert fsdp_sft_trainer.main(lists) == 0
    assert len(asked) == 1


THINKING = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}</s>{% endfor %}{% if add_generation_prompt %}"
    "assistant: {% if enable_thinking is defined and not enable_thinking %}<no>{% endif %}{% endif %}"
)


def test_a_run_of_verls_entry_thinks_row_by_row_validates_each_epoch_and_saves_its_end(
    toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """8 rows in batches of 4 and two epochs: steps 2 and 4 end one. `save_freq=-1` still saves the last step."""
    talks = [{**talk, "enable_thinking": bool(number % 2)} for number, talk in enumerate(TALKS)]
    write_rows(talks[:8], tmp_path / "train.parquet")
    write_rows(talks[8:10], tmp_path / "val.parquet")
    monkeypatch.setattr(main_ppo, "run_ppo", partial(run_training, use_ray=False))
    files = [f"data.{name}_files={tmp_path / name}.parquet" for name in ("train", "val")]
    run = tmp_path / "run"
    lists = [
        *(*files, "data.train_batch_size=4", "data.max_token_len_per_gpu=1024", "engine=fsdp", "engine.strategy=fsdp2"),
        *("engine.dtype=float32", "model=hf_model", f"model.path={toy.model}", f'data.chat_template="{THINKING}"'),
        *("data.pad_mode=no_padding", "data.num_workers=2", "optim=fsdp", "optim.lr=1e-2", "trainer.total_epochs=2"),
        *("trainer.test_freq=after_each_epoch", "trainer.save_freq=-1", "trainer.logger=[file]", "trainer.device=cpu"),
        *(f"trainer.default_local_dir={run}", "checkpoint.save_contents=[model,hf_model]", "sft.val_sample_tokens=4"),
    ]
    assert sft_trainer_ray.main(lists) == 0
    rows = list(read_json_lines(run / "metrics.jsonl"))
    assert [row["step"] for row in rows if "val/loss" in row] == [0, 2, 4]
    assert rows[-1]["val/loss"] < rows[0]["val/loss"]
    assert [path.name for path in sorted(run.glob("global_step_*"))] == ["global_step_4"]
    asked = [row["prompt"] for row in read_json_lines(run / "validation" / "step_4.jsonl")]
    assert [prompt.endswith("assistant: <no>") for prompt in asked] == [True, False]


def test_the_current_entry_has_the_defaults_of_verls_current_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[Any] = []

    def remember(config: DovetailConfig, **_: Any) -> Any:
        asked.append(config)
        raise FileNotFoundError("enough")

    monkeypatch.setattr(main_ppo, "run_ppo", remember)
    lists = ["model.path=m", "data.train_files=t.parquet", "data.micro_batch_size_per_gpu=2"]
    assert sft_trainer.main([*lists, "trainer.save_freq=7"]) == 2
    assert sft_trainer.main([*lists, "optim.lr=1e-4", "data.use_dynamic_bsz=False"]) == 2
    first, second = (config.actor_rollout_ref.actor for config in asked)
    assert (first.use_dynamic_bsz, first.ppo_max_token_len_per_gpu, first.optim.lr) == (True, 8192, 1e-3)
    assert (second.use_dynamic_bsz, second.ppo_micro_batch_size_per_gpu, second.optim.lr) == (False, 2, 1e-4)
    # What a file says is said, too.
    (tmp_path / "run.yaml").write_text("{optim: {lr: 2.0e-5}, data: {train_batch_size: 8}, trainer: {save_freq: -1}}")
    for file in ([str(tmp_path / "run.yaml")], [f"--config-path={tmp_path}", "--config-name=run"]):
        assert sft_trainer.main([*lists, *file]) == 2
        config = asked.pop()
        assert (config.actor_rollout_ref.actor.optim.lr, config.data.train_batch_size) == (2e-5, 8)
        assert (config.trainer.save_freq, config.trainer.total_epochs) == ("at_end", 4)
    assert (first.optim.lr_scheduler_type, first.optim.betas, first.optim.weight_decay) == (
        "constant",
        (0.9, 0.999),
        0.01,
    )
    for config, freq in zip(asked, (7, "at_end"), strict=True):
        assert (config.trainer.method, config.data.train_batch_size, config.data.max_length) == ("sft", 256, 1024)
        assert (config.trainer.total_epochs, config.trainer.world_size, config.trainer.seed) == (4, 1, 1)
        assert (config.trainer.save_freq, config.sft.messages_key) == (freq, "messages")
