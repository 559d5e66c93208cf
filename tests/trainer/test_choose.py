"""Open keys are fitted to the model, the data and the machine; what is set is never changed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from dovetail.cli.main import main
from dovetail.config import LoadedConfig, load_config
from dovetail.config.checks import check_config
from dovetail.config.plan import make_plan, read_shapes
from dovetail.config.tree import leaves
from dovetail.trainer import choose
from dovetail.trainer.choose import choose_open_keys
from tests.config.plan.known_models import QWEN2_5_7B
from tests.trainer.toy_run import Toy

pytestmark = pytest.mark.unit

REWARD = """
def score(response, answer):
    return float(answer in response)


def many(completions, **columns):
    return [0.0 for _ in completions]
"""


@pytest.fixture
def words(toy: Toy, tmp_path: Path) -> list[str]:
    rows = [{"prompt": f"say {'x' * (n % 7)}", "answer": str(n)} for n in range(100)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "reward.py").write_text(REWARD)
    return [f"model={toy.model}", f"data={tmp_path}/rows.jsonl", f"reward={tmp_path}/reward.py:score"]


def chosen(words: list[str], *more: str, **options: Any) -> LoadedConfig:
    return choose_open_keys(load_config(overrides=[*words, *more]), **options)


def test_three_things_make_a_configuration_without_a_finding(words: list[str]) -> None:
    loaded = chosen(words)
    config = loaded.config
    assert check_config(config, read_shapes(config).policy) == []
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    assert (config.trainer.device, config.trainer.n_gpus_per_node) == ("cpu", 1)
    assert (rollout.dtype, actor.compute_dtype) == ("float32", "float32")
    assert (config.algorithm.adv_estimator, rollout.n) == ("grpo", 8)
    # Bytes, in a chat template: the longest prompt of the toy is 10 letters and what the template adds.
    assert config.data.max_prompt_length == 32
    assert config.data.max_response_length == 128
    assert (config.data.train_batch_size, actor.ppo_mini_batch_size) == (8, 8)
    assert (config.trainer.total_epochs, config.trainer.save_freq) == (1, 12)
    assert actor.use_dynamic_bsz
    assert rollout.log_prob_use_dynamic_bsz
    said = " ".join(choice.message for choice in loaded.choices)
    assert "trainer.device=cpu: this machine shows no GPU" in said
    assert "data.train_batch_size=8: 100 prompts make 12 steps" in said


def test_what_is_set_stays(words: list[str]) -> None:
    keys = {
        "data.max_prompt_length": 64,
        "data.train_batch_size": 20,
        "actor_rollout_ref.actor.ppo_mini_batch_size": 10,
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 2,
        "actor_rollout_ref.rollout.n": 4,
        "algorithm.adv_estimator": "rloo",
        "trainer.total_epochs": 7,
    }
    loaded = chosen(words, *(f"{key}={value}" for key, value in keys.items()))
    assert not {choice.key for choice in loaded.choices} & set(keys)
    assert loaded.config.data.train_batch_size == 20
    assert not loaded.config.actor_rollout_ref.actor.use_dynamic_bsz
    assert loaded.config.trainer.total_epochs == 7


def test_a_run_in_full_keys_keeps_its_defaults_and_gets_only_a_micro_batch() -> None:
    loaded = load_config(overrides=["data.train_files=x.parquet", "actor_rollout_ref.model.path=nowhere"])
    fitted = choose_open_keys(loaded, look_at_machine=False)
    assert [choice.key.rpartition(".")[2] for choice in fitted.choices] == [
        "use_dynamic_bsz",
        "ppo_max_token_len_per_gpu",
    ]
    assert fitted.config.data == loaded.config.data
    assert fitted.config.trainer == loaded.config.trainer
    given = load_config(overrides=["actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2"])
    assert choose_open_keys(given) is given


def test_rows_of_a_data_set_get_the_length_they_need(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The toy's tokens are bytes, and its context is 512 of them."""
    long = {"messages": [{"role": "user", "content": "x" * 200}, {"role": "assistant", "content": "y" * 220}]}
    pair = {"prompt": "x" * 100, "chosen": "y" * 150, "rejected": "z"}
    for name, row in (("long", long), ("pair", pair)):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(row) + "\n")
    talks = [words[0], f"data={tmp_path}/long.jsonl", "trainer.method=sft"]
    config = chosen(talks).config
    assert 420 < config.data.longest <= 480
    assert config.actor_rollout_ref.actor.ppo_max_token_len_per_gpu >= config.data.longest
    assert not config.data.filter_overlong_prompts
    assert chosen(talks, "data.max_length=64").config.data.max_length == 64
    config = chosen([words[0], f"data={tmp_path}/pair.jsonl", "trainer.method=dpo"]).config
    assert (config.data.max_prompt_length, config.data.max_response_length) == (128, 160)
    longer = {"messages": [{"role": "user", "content": "x" * 600}, long["messages"][1]]}
    with (tmp_path / "long.jsonl").open("a") as file:
        file.write(json.dumps(longer) + "\n")
    config = chosen(talks).config
    assert (config.data.max_length, config.data.filter_overlong_prompts) == (512, True)
    monkeypatch.setattr("dovetail.trainer.examples.MOST_ROWS", 1)
    assert chosen(talks).config.data.filter_overlong_prompts
    (tmp_path / "long.jsonl").write_text(json.dumps({"neither": 1}) + "\n")
    assert chosen(talks).config.data.max_length is None, "the run says what is wrong with the row"


LR = "actor_rollout_ref.actor.optim.lr"


@pytest.mark.parametrize(
    ("method", "rate_key", "rate"),
    [("sft", LR, 1e-5), ("dpo", LR, 1e-6), ("reward", "critic.optim.lr", 1e-5), ("distill", LR, 1e-5)],
)
def test_a_method_beside_rl_has_defaults_of_its_own_in_every_spelling(
    words: list[str], method: str, rate_key: str, rate: float
) -> None:
    model, data = (word.partition("=")[2] for word in words[:2])
    full = [f"actor_rollout_ref.model.path={model}", f"data.train_files={data}", f"trainer.method={method}"]
    fitted = chosen(full)
    assert fitted.config == chosen([*words[:2], f"trainer.method={method}"]).config
    assert dict(leaves(fitted.tree))[rate_key] == rate
    assert (fitted.config.trainer.total_epochs, fitted.config.data.train_batch_size) == (1, 8)
    assert (fitted.config.trainer.n_gpus_per_node, fitted.config.trainer.save_freq) == (1, 12)
    trained = fitted.config.critic if method == "reward" else fitted.config.actor_rollout_ref.actor
    assert (trained.use_dynamic_bsz, trained.compute_dtype) == (True, "float32")
    own = {rate_key: 3e-4, "trainer.total_epochs": 2, "data.train_batch_size": 4, "trainer.save_freq": -1}
    kept = chosen(full, *(f"{key}={value}" for key, value in own.items()))
    assert {key: value for key, value in leaves(kept.tree) if key in own} == own


@pytest.mark.parametrize(
    ("more", "rate"),
    [
        (["trainer.method=sft", "actor_rollout_ref.model.lora_rank=8"], 1e-4),
        (["trainer.method=dpo", "dpo.loss_type=orpo"], 1e-5),
        (["actor_rollout_ref.model.lora_rank=8"], 3e-5),
    ],
)
def test_adapters_and_orpo_learn_faster(words: list[str], more: list[str], rate: float) -> None:
    assert chosen(words[:2], *more).config.actor_rollout_ref.actor.optim.lr == pytest.approx(rate)


def test_a_critic_of_adapters_learns_faster(words: list[str]) -> None:
    adapters = ["algorithm.adv_estimator=gae", "critic.model.lora_rank=8"]
    assert chosen(words, *adapters).config.critic.optim.lr == pytest.approx(1e-4)


def test_launch_lists_of_verls_sft_trainer_keep_what_they_set(words: list[str]) -> None:
    data = words[1].partition("=")[2]
    list_ = [f"data.train_files={data}", f"model.partial_pretrain={words[0].partition('=')[2]}", "optim.lr=2e-5"]
    more = ["data.train_batch_size=32", "data.micro_batch_size_per_gpu=4", "trainer.total_epochs=3"]
    config = chosen(list_, *more, "trainer.method=sft").config
    actor = config.actor_rollout_ref.actor
    assert (actor.optim.lr, actor.ppo_micro_batch_size_per_gpu, actor.use_dynamic_bsz) == (2e-5, 4, False)
    assert (config.data.train_batch_size, config.trainer.total_epochs) == (32, 3)


def test_check_shows_the_defaults_of_the_method(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    full = [f"actor_rollout_ref.model.path={words[0].partition('=')[2]}", f"data.train_files={words[1][5:]}"]
    assert main(["check", "--no-files", *full, "trainer.method=sft"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert f"{LR}=1e-05: a usual rate for fine-tuning." in out


@pytest.mark.parametrize("command", ["check", "train"])
def test_a_gpu_that_is_not_there_is_named_and_not_a_number_that_follows_from_it(
    command: str, words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choose, "_machine", lambda: choose._Machine(0, None))
    assert main([command, *words, "trainer.device=cuda"]) == 2
    shown = " ".join("".join(capsys.readouterr()).split())
    assert "trainer.device=cuda, but this machine shows no GPU" in shown
    assert "n_gpus_per_node=0" not in shown


def test_a_file_without_a_prompt_is_not_given_the_column_that_it_lacks(words: list[str], tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"messages": []}\n')
    assert not [choice for choice in chosen(words).choices if choice.key == "data.prompt_key"]


@pytest.mark.parametrize("gib", [24.0, 40.0, 80.0])
def test_the_token_budget_fits_the_memory_of_the_device(tmp_path: Path, gib: float) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN2_5_7B))
    words = [f"model={tmp_path}", "trainer.n_gpus_per_node=8", "trainer.device=cuda", "data.max_response_length=2048"]
    loaded = chosen(words, look_at_files=False, look_at_machine=False, device_memory_gib=gib)
    plan = make_plan(loaded.config, read_shapes(loaded.config), device_memory_gib=gib)
    assert plan.memory is not None
    update = next(phase for phase in plan.memory.phases if phase.name == "update actor")
    budget = loaded.config.actor_rollout_ref.actor.ppo_max_token_len_per_gpu
    longest = plan.batches.max_sequence_length
    assert budget >= longest
    assert update.fits or budget == longest
    # With more room the budget grows, up to what is worth while.
    assert budget <= 16384
    if gib == 80.0:
        assert budget > 2 * longest


def test_the_gradient_that_the_fused_head_keeps_takes_nothing_from_the_token_budget(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN2_5_7B))
    words = [f"model={tmp_path}", "trainer.n_gpus_per_node=8", "trainer.device=cuda", "data.max_response_length=12000"]
    model = "actor_rollout_ref.model"
    words += [f"{model}.use_fused_kernels=True", f"{model}.enable_gradient_checkpointing=False"]
    budgets = []
    for backend in ("triton", "torch"):
        loaded = chosen(
            [*words, f"{model}.fused_kernel_options.impl_backend={backend}"],
            look_at_files=False, look_at_machine=False, device_memory_gib=100.0,
        )  # fmt: skip
        budgets.append(loaded.config.actor_rollout_ref.actor.ppo_max_token_len_per_gpu)
    assert budgets[0] == budgets[1] < 16384


@pytest.mark.parametrize(("method", "section"), [("dpo", "actor_rollout_ref.actor"), ("reward", "critic")])
def test_the_token_budget_of_preferences_holds_a_pair_and_fits_the_device(
    tmp_path: Path, method: str, section: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN2_5_7B))
    words = [f"model={tmp_path}", "trainer.n_gpus_per_node=8", "trainer.device=cuda", f"trainer.method={method}"]
    longest = {"data.max_prompt_length": 2048, "data.max_response_length": 6144}
    words += [f"{key}={value}" for key, value in longest.items()]
    budgets = []
    for gib in (16.0, 60.0):
        options = {"look_at_files": False, "look_at_machine": False, "device_memory_gib": gib}
        loaded = chosen(words, "data.train_files=pairs.jsonl", **options)
        assert [problem for problem in check_config(loaded.config) if problem.severity == "error"] == []
        budgets.append(dict(leaves(loaded.tree))[f"{section}.ppo_max_token_len_per_gpu"])
    assert budgets[0] == 16384, "a pair of longest rows, though the device is too small for it"
    assert budgets[1] >= budgets[0]
    small = load_config(
        overrides=[*words, f"{section}.use_dynamic_bsz=True", f"{section}.ppo_max_token_len_per_gpu=9000"]
    )
    assert "a pair of sequences" in " ".join(problem.message for problem in check_config(small.config))


def test_several_gpus_are_used_unless_one_process_is_asked_for(
    words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choose, "_machine", lambda: choose._Machine(4, 80.0))
    config = chosen(words).config
    assert (config.trainer.device, config.trainer.n_gpus_per_node) == ("auto", 4)
    assert config.actor_rollout_ref.rollout.dtype == "bfloat16"
    assert config.actor_rollout_ref.model.use_fused_kernels
    assert chosen(words, one_process=True).config.trainer.n_gpus_per_node == 1


def test_a_bad_row_does_not_keep_the_others_from_being_measured(words: list[str], tmp_path: Path) -> None:
    with (tmp_path / "rows.jsonl").open("a") as file:
        file.write('{"prompt": null, "answer": "1"}\n')
    assert chosen(words).config.data.max_prompt_length == 32


def test_prompts_that_cannot_be_measured_leave_room_for_a_response(words: list[str], toy: Toy, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": null, "answer": "1"}\n')
    folder = shutil.copytree(toy.model, tmp_path / "small")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 256}))
    loaded = chosen([f"model={folder}", *words[1:]])
    assert loaded.config.data.max_prompt_length == 128
    assert check_config(loaded.config, read_shapes(loaded.config).policy) == []


def test_few_rows_make_small_batches(words: list[str], tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "say", "answer": "1"}) + "\n")
    assert chosen(words).config.data.train_batch_size == 1


def test_a_large_file_is_measured_in_part_and_longer_prompts_are_left_out(
    words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choose, "_MOST_ROWS_READ", 10)
    loaded = chosen(words)
    assert loaded.config.data.filter_overlong_prompts
    assert "the longest of 10 of 100 prompts" in " ".join(choice.message for choice in loaded.choices)


def test_a_function_of_lists_gets_the_batch_and_another_prompt_column_is_found(
    words: list[str], tmp_path: Path
) -> None:
    rows = [{"question": "say it", "answer": "4"}] * 8
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = chosen([*words[:2], f"reward={tmp_path}/reward.py:many"]).config
    assert config.reward_model.reward_manager == "batch"
    assert config.data.prompt_key == "question"


def test_check_says_what_was_chosen_and_why(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", *words]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "Chosen (" in out
    assert "algorithm.adv_estimator=grpo: it needs no value network." in out
    assert main(["check", "--format", "json", *words]) == 0
    chosen_keys = [choice["key"] for choice in json.loads(capsys.readouterr().out)["chosen"]]
    assert "data.max_prompt_length" in chosen_keys


def test_a_missing_file_is_reported_by_the_checks_and_not_here(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", words[0], f"data={tmp_path}/gone.jsonl", words[2]]) == 2
    assert "there is no file" in " ".join(capsys.readouterr().out.split())
