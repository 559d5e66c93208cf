"""`lora_adapter_path`: rank, alpha and modules are the adapter's; contradictions and other kinds are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dovetail.config import load_config
from dovetail.config.adapter import AdapterError, adapter_problems, read_adapter
from dovetail.config.model import ModelConfig

pytestmark = pytest.mark.unit

M = "actor_rollout_ref.model"
PLAIN: dict[str, Any] = {"peft_type": "LORA", "r": 8, "lora_alpha": 32, "target_modules": ["q_proj", "v_proj"]}


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    return write(tmp_path / "adapter")


def write(folder: Path, weights: str = "adapter_model.safetensors", **changes: Any) -> Path:
    """A folder whose weights nobody reads here."""
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(PLAIN | changes))
    (folder / weights).touch()
    return folder


def model_of(*overrides: str, section: str = M) -> ModelConfig:
    config = load_config(overrides=overrides).config
    return config.critic.model if section == "critic.model" else config.actor_rollout_ref.model


@pytest.mark.parametrize("section", [M, "critic.model"])
def test_what_is_not_set_is_the_adapters(section: str, adapter: Path) -> None:
    model = model_of(f"{section}.lora_adapter_path={adapter}", section=section)
    assert model.uses_lora
    assert (model.lora_rank, model.lora_alpha, model.target_modules) == (8, 32, ["q_proj", "v_proj"])
    assert list(adapter_problems(section, model)) == []
    assert model_of(f"{M}.lora.adapter_path={adapter}").lora_rank == 8  # as verl's section has it


def test_a_file_with_every_key_sets_none_of_them_and_says_so(adapter: Path) -> None:
    keys = [f"{M}.lora_rank=0", f"{M}.lora_alpha=16", f"{M}.target_modules=all-linear", f"{M}.exclude_modules=null"]
    loaded = load_config(overrides=[f"{M}.lora_adapter_path={adapter}", *keys])
    assert loaded.config.actor_rollout_ref.model.lora_alpha == 32
    assert loaded.config.actor_rollout_ref.model.target_modules == ["q_proj", "v_proj"]
    said = {notice.key: str(notice) for notice in loaded.notices}
    assert f"the adapter in {adapter} has its own" in said[f"{M}.lora_alpha"]
    assert f"{M}.target_modules" in said
    # The configuration of a run is read again by a run that continues it.
    again = load_config(values=loaded.config.model_dump(mode="json"))
    assert again.config.actor_rollout_ref.model == loaded.config.actor_rollout_ref.model


@pytest.mark.parametrize(("key", "own"), [("lora_rank=16", "8"), ("lora_alpha=64", "32")])
def test_a_key_that_contradicts_the_adapter_is_refused(key: str, own: str, adapter: Path) -> None:
    (problem,) = adapter_problems(M, model_of(f"{M}.lora_adapter_path={adapter}", f"{M}.{key}"))
    assert problem.message == (
        f"{M}.{key}, and the adapter that training continues has {own} ({M}.lora_adapter_path={adapter}); take "
        f"{M}.{key.split('=')[0]} out."
    )


def test_the_scale_of_an_rslora_adapter_is_kept(tmp_path: Path) -> None:
    own = read_adapter(str(write(tmp_path / "a", r=16, lora_alpha=8, use_rslora=True)))
    assert own["lora_alpha"] / own["lora_rank"] == 8 / 16**0.5


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"peft_type": "IA3"}, "peft_type=IA3, and only LORA"),
        ({"use_dora": True}, "use_dora=True, and only plain LoRA.*merge_and_unload"),
        ({"rank_pattern": {"q_proj": 4}}, "rank_pattern="),
        ({"bias": "all"}, "bias='all'"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa'"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save="),
        ({"target_parameters": ["experts.down_proj"]}, "target_parameters="),
        ({"a_field_of_tomorrow": {"x": 1}}, "a_field_of_tomorrow="),
        ({"r": 0}, "r=0"),
        ({"lora_alpha": 0}, "lora_alpha=0.*that the adapter was trained with"),
        ({"target_modules": None}, "target_modules=None"),
    ],
)
def test_an_adapter_that_is_not_plain_lora_is_refused(changes: dict[str, Any], says: str, tmp_path: Path) -> None:
    folder = write(tmp_path / "a", **changes)
    with pytest.raises(AdapterError, match=says):
        read_adapter(str(folder))
    (problem,) = adapter_problems(M, model_of(f"{M}.lora_adapter_path={folder}"))
    assert str(folder) in problem.message


def test_peft_writes_what_is_read(tmp_path: Path) -> None:
    from peft import LoraConfig

    LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj"], task_type="CAUSAL_LM").save_pretrained(str(tmp_path))
    assert read_adapter(str(tmp_path))["target_modules"] == ["q_proj"]


def test_pickled_weights_are_refused_with_the_way_out(tmp_path: Path) -> None:
    folder = write(tmp_path / "a", weights="adapter_model.bin")
    (problem,) = adapter_problems(M, model_of(f"{M}.lora_adapter_path={folder}"))
    assert "a pickle, which may run code" in problem.message
    assert "save_pretrained() to convert it" in problem.message


def test_an_adapter_on_the_hub_is_asked_for_its_settings_alone(adapter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str]] = []

    def fetch_file(name: str, file: str) -> Path:
        asked.append((name, file))
        return adapter / file

    monkeypatch.setattr("dovetail.config.adapter.fetch_file", fetch_file)
    model = model_of(f"{M}.lora_adapter_path=org/adapter")
    assert (model.lora_rank, model.lora_alpha) == (8, 32)
    assert list(adapter_problems(M, model)) == []
    assert set(asked) == {("org/adapter", "adapter_config.json")}


def test_a_folder_that_is_not_here_is_planned_with_and_refused_by_a_run(tmp_path: Path) -> None:
    model = model_of(f"{M}.lora_adapter_path={tmp_path / 'nowhere'}")
    assert model.uses_lora
    (problem,) = adapter_problems(M, model)
    assert "adapter_config.json cannot be read (No such file" in problem.message
