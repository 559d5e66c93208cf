"""`model=`, `data=`, `reward=`: what they set, from a launch line, a file and Python."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from dovetail.config import ConfigError, DovetailConfig, load_config
from dovetail.config.keys import find_key
from dovetail.config.overrides import sets_known_key
from dovetail.config.translate.peers import AREAL_NAMES, OPENRLHF_NAMES, SLIME_NAMES, USUAL_NAMES
from dovetail.config.translate.short import SHORT_NAMES

pytestmark = pytest.mark.unit

REWARDS = "reward_model.reward_kwargs.rewards"
RULE = {"path": "pkg://dovetail.rewards.registry", "name": "score_by_rule", "kwargs": {"rule": "gsm8k"}}


def flat(**values: Any) -> dict[str, Any]:
    return {name.replace("__", "."): value for name, value in values.items()}


@pytest.mark.parametrize(
    ("text", "sets"),
    [
        ("lr=1e-6", True),
        ("data.system_prompt=Be brief.", True),
        ("x=5", False),
        ("model = LinearRegression()", False),
        ("data.columns= ['a']", False),
        ("data=[1,2]\nprint(data)", False),
    ],
)
def test_prompts_with_equations_and_code_are_not_taken_for_settings(text: str, sets: bool) -> None:
    assert sets_known_key(text) is sets


@pytest.mark.parametrize(
    ("reward", "keys"),
    [
        ("my.py:score", flat(custom_reward_function__path="my.py", custom_reward_function__name="score")),
        ("my.py", flat(custom_reward_function__path="my.py", custom_reward_function__name="compute_score")),
        ("pkg://a.b:f", flat(custom_reward_function__path="pkg://a.b", custom_reward_function__name="f")),
        ("pkg://a.b", flat(custom_reward_function__path="pkg://a.b", custom_reward_function__name="compute_score")),
        ("gsm8k", {f"custom_reward_function.{name}": RULE[name] for name in ("path", "name")}),
        ("gsm8k", flat(custom_reward_function__reward_kwargs={"rule": "gsm8k"})),
        ("org/reward-7b", flat(reward_model__enable=True, reward_model__model__path="org/reward-7b")),
        ("./reward", flat(reward_model__enable=True, reward_model__model__path="./reward")),
        ("[gsm8k,my.py:f]", {REWARDS: [RULE, {"path": "my.py", "name": "f"}]}),
    ],
)
def test_a_reward_is_a_function_a_rule_or_a_model(reward: str, keys: dict[str, Any]) -> None:
    config = load_config(overrides=[f"reward={reward}"]).config
    for key, value in keys.items():
        place: Any = config
        for part in key.split("."):
            place = place[part] if isinstance(place, dict) else getattr(place, part)
        assert place == value, key


def test_a_folder_of_a_model_is_a_reward_without_a_slash_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("judge", "math"):
        (tmp_path / name).mkdir()
    (tmp_path / "judge" / "config.json").touch()
    assert load_config(overrides=["reward=judge"]).config.reward_model.model.path == "judge"
    assert load_config(overrides=["reward=math"]).config.custom_reward_function.reward_kwargs == {"rule": "math"}


def test_files_launch_lines_and_python_mean_the_same(tmp_path: Path) -> None:
    words = ["model=m", "data=[a.jsonl,b.jsonl]", "reward=f.py", "steps=3", "lr=1e-5", "data.seed=4"]
    (tmp_path / "run.yaml").write_text("model: m\ndata: [a.jsonl, b.jsonl]\nreward: f.py\nsteps: 3\nlr: 1.0e-5\n")
    values = {"model": "m", "data": ["a.jsonl", "b.jsonl"], "reward": "f.py", "steps": 3, "lr": 1e-5}
    line = load_config(overrides=words)
    file = load_config([tmp_path / "run.yaml"], ["data.seed=4"])
    python = load_config(values={**values, "data.seed": 4})
    sections = load_config(values={**values, "trainer": {"seed": 42}, "data.seed": 4})
    assert line.config == file.config == python.config == sections.config
    assert line.config.data.train_paths == ("a.jsonl", "b.jsonl")
    assert line.config.actor_rollout_ref.model.path == "m"
    assert line.config.trainer.total_training_steps == 3
    assert line.uses_short_names
    assert file.uses_short_names
    assert not line.notices


def test_a_section_is_no_short_name_and_full_keys_win_when_they_come_later() -> None:
    loaded = load_config(values={"data": {"seed": 3}, "reward": {"num_workers": 1}})
    assert not loaded.uses_short_names
    assert loaded.config.data.seed == 3
    later = load_config(overrides=["model=a", "actor_rollout_ref.model.path=b"])
    assert later.config.actor_rollout_ref.model.path == "b"


def test_a_wrong_value_names_the_key_it_is_for() -> None:
    with pytest.raises(ConfigError, match=r"trainer.total_training_steps='many' is not accepted"):
        load_config(overrides=["steps=many"])


def test_usual_names_are_refused_with_the_name_that_they_have_here() -> None:
    tables = (USUAL_NAMES, OPENRLHF_NAMES, AREAL_NAMES, {f"--{name}": here for name, here in SLIME_NAMES.items()})
    for name, here in (item for table in tables for item in table.items()):
        with pytest.raises(
            ConfigError, match=f"{re.escape(name)}.* is not a known key; that is {re.escape(here)} here"
        ):
            load_config(overrides=[f"{name}=1"])
        key = here.partition(" ")[0]
        assert key in SHORT_NAMES or find_key(DovetailConfig, key), key
    assert sum(map(len, tables)) == len(set().union(*tables))
    with pytest.raises(ConfigError, match=r"--rollout\.batch_size is not a known key; that is data\.train_batch_size"):
        load_config(overrides=["--rollout.batch_size", "128"])  # as in a launch list of OpenRLHF
    with pytest.raises(ConfigError, match=r"--rollout-batch-size is not a .*from-slime\.md"):
        load_config(overrides=["--rollout-batch-size", "32"])
    with pytest.raises(ConfigError, match="that is steps here"):
        load_config(values={"trainer": {"max_steps": 3}})


def test_a_section_is_suggested_by_the_key_that_takes_its_path() -> None:
    with pytest.raises(ConfigError, match=r"teacher is not a known key; did you mean distill\.teacher\.path\?"):
        load_config(overrides=["teacher=org/large"])
