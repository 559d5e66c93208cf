"""The ids at which a response of a run ends: the model folder's, the chat template's, and those that are asked for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dovetail.agents.stops import KEY, StopIds, find_stop_ids, run_stop_ids, stop_notice, with_stop_ids
from dovetail.config import ConfigError, load_config
from dovetail.config.root import DovetailConfig
from dovetail.models.load import load_config as load_model_config
from dovetail.models.load import load_tokenizer
from dovetail.models.save import save_hf_folder
from dovetail.models.stop_ids import GENERATION_CONFIG, folder_stop_ids
from dovetail.rollout.native.engine import NativeEngine
from dovetail.rollout.request_rules import sampling_params, stop_tokens
from tests.agents.chatml import EOS, TURN_END, save_chatml_model
from tests.agents.fakes import STOP, FakeEngine, in_virtual_time, session_over
from tests.agents.tokenizers import FAMILIES, family_tokenizer
from tests.models.tiny import save_tiny_model

pytestmark = pytest.mark.unit

ROLLOUT, MODEL = "actor_rollout_ref.rollout", "actor_rollout_ref.model"


@pytest.fixture(scope="module")
def chatml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its generation config names the end of a text, its template ends a turn with another token."""
    return save_chatml_model(tmp_path_factory.mktemp("chatml"))


@pytest.fixture(scope="module")
def alike(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Template, tokenizer and generation config name the same token."""
    return save_tiny_model("qwen2", tmp_path_factory.mktemp("alike"))


def run_of(folder: Path, *overrides: str) -> tuple[DovetailConfig, Any]:
    config = load_config(overrides=[f"{MODEL}.path={folder}", *overrides]).config
    template = config.actor_rollout_ref.model.custom_chat_template
    return config, load_tokenizer(folder, chat_template=template)


def ends(folder: Path, *overrides: str) -> frozenset[int]:
    """What every engine stops a response of this run at."""
    rollout = with_stop_ids(*run_of(folder, *overrides))
    own = folder_stop_ids(folder, override_config=run_of(folder, *overrides)[0].actor_rollout_ref.model.override_config)
    return stop_tokens(sampling_params(rollout, n=1, validate=False), own)


def rename_ends(folder: Path, ids: Any, *, file: str = GENERATION_CONFIG) -> None:
    values = json.loads((folder / file).read_text())
    (folder / file).write_text(json.dumps(values | {"eos_token_id": ids}))


def test_a_response_ends_with_the_turn_of_the_template_and_with_what_the_model_names(chatml: Path) -> None:
    assert ends(chatml) == {EOS, TURN_END}
    assert ends(chatml, f"{ROLLOUT}.stop_token_ids=[70,71]") == {EOS, TURN_END, 70, 71}


def test_where_all_name_one_token_nothing_is_added_and_nothing_is_said(alike: Path) -> None:
    assert ends(alike) == {EOS}
    assert stop_notice(*run_of(alike)) is None


def test_ignore_eos_leaves_the_ids_that_were_asked_for(chatml: Path) -> None:
    assert ends(chatml, f"{ROLLOUT}.ignore_eos=True") == set()
    assert ends(chatml, f"{ROLLOUT}.ignore_eos=True", f"{ROLLOUT}.stop_token_ids=[70]") == {70}
    assert stop_notice(*run_of(chatml, f"{ROLLOUT}.ignore_eos=True")) is None


def test_an_agents_turn_ends_also_with_ignore_eos(chatml: Path) -> None:
    assert ends(chatml, f"{ROLLOUT}.ignore_eos=True", f"{ROLLOUT}.multi_turn.enable=True") == {EOS, TURN_END}


def test_a_template_of_the_runs_own_counts(chatml: Path) -> None:
    plain = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}</s>{% endfor %}"
    assert ends(chatml, f"{MODEL}.custom_chat_template={json.dumps(plain)}") == {EOS}


def test_without_a_template_the_tokenizers_end_counts(chatml: Path) -> None:
    tokenizer = load_tokenizer(chatml)
    tokenizer.chat_template, tokenizer.eos_token = None, "<|im_end|>"
    found = find_stop_ids(chatml, tokenizer)
    assert (found.model, found.tokenizer, found.trained_end) == ((EOS,), (TURN_END,), None)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_a_family_is_trained_to_end_with_ends_its_responses(family: str, alike: Path) -> None:
    found = find_stop_ids(alike, family_tokenizer(family))
    assert found.trained_end in found.tokenizer


def test_all_ids_of_a_generation_config_count(tmp_path: Path) -> None:
    folder = save_chatml_model(tmp_path)
    rename_ends(folder, [5, EOS, TURN_END])
    assert ends(folder) == {5, EOS, TURN_END}
    assert stop_notice(*run_of(folder)) is None


def test_an_end_in_override_config_takes_the_place_of_the_generation_configs(chatml: Path) -> None:
    override = f"+{MODEL}.override_config.eos_token_id=7"
    assert folder_stop_ids(chatml, override_config={"eos_token_id": 7}) == (7,)
    assert 7 in ends(chatml, override)
    assert EOS in ends(chatml, override), "the tokenizer's end is trained by plain text"
    assert NativeEngine(chatml, override_config={"eos_token_id": 7})._eos_ids == (7,)


def test_the_text_model_of_a_composite_config_names_the_end(tmp_path: Path) -> None:
    folder = save_tiny_model("qwen2_5_vl", tmp_path, tokenizer=False)
    (folder / GENERATION_CONFIG).unlink(missing_ok=True)
    values = json.loads((folder / "config.json").read_text())
    values.pop("eos_token_id", None)
    values["text_config"]["eos_token_id"] = [2, 9]
    (folder / "config.json").write_text(json.dumps(values))
    assert set(folder_stop_ids(folder)) == {2, 9}


def test_an_id_that_the_model_does_not_have_is_refused(chatml: Path) -> None:
    with pytest.raises(ConfigError, match=r"stop_token_ids has 320, and the ids of .* are 0 to 319; take it out"):
        run_stop_ids(*run_of(chatml, f"{ROLLOUT}.stop_token_ids=[3,320]"))


def test_a_mismatch_is_one_sentence_with_both_tokens(chatml: Path) -> None:
    notice = stop_notice(*run_of(chatml))
    assert notice is not None
    assert notice.key == KEY
    assert notice.message == (
        "the chat template ends a turn with '<|im_end|>' (id 261), and the model's folder names '</s>' (id 2): "
        "responses end at any of them, and an export of the trained model names them all in generation_config.json."
    )


def test_an_architecture_that_workers_alone_know_is_not_looked_at(tmp_path: Path) -> None:
    folder = save_chatml_model(tmp_path)
    config, tokenizer = run_of(folder, f"{MODEL}.external_lib=my_models")
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"model_type": "my_model"}))
    assert stop_notice(config, tokenizer) is None


def test_answers_that_are_trained_without_an_end_are_named(alike: Path) -> None:
    open_end = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }};{% endfor %}"
    template = f"{MODEL}.custom_chat_template={json.dumps(open_end)}"
    notice = stop_notice(*run_of(alike, template, "trainer.method=sft"))
    assert notice is not None
    assert "the chat template ends a turn with ';'" in notice.message
    assert "no end at which generation stops" in notice.message
    assert stop_notice(*run_of(alike, template)) is None, "nothing is trained as the template writes it"


def test_a_model_without_any_end_is_named(alike: Path) -> None:
    notice = StopIds((), ()).notice(load_tokenizer(alike), trains_turns=False)
    assert notice is not None
    assert "every response runs to its longest length" in notice.message


def _saved(folder: Path, out: Path, stop_ids: tuple[int, ...]) -> Path:
    return save_hf_folder((), load_model_config(folder), None, out, source=folder, stop_ids=stop_ids)


def test_an_export_names_the_runs_ids_after_those_that_were_there(chatml: Path, tmp_path: Path) -> None:
    before = json.loads((chatml / GENERATION_CONFIG).read_text())
    after = json.loads((_saved(chatml, tmp_path / "out", (EOS, TURN_END)) / GENERATION_CONFIG).read_text())
    assert after == before | {"eos_token_id": [EOS, TURN_END]}
    assert folder_stop_ids(tmp_path / "out") == (EOS, TURN_END)


def test_an_export_does_not_name_an_id_that_the_run_has_replaced(tmp_path: Path) -> None:
    folder = save_chatml_model(tmp_path / "model")
    rename_ends(folder, [5, EOS])
    ids = run_stop_ids(*run_of(folder, f"+{MODEL}.override_config.eos_token_id={TURN_END}")).all
    assert folder_stop_ids(_saved(folder, tmp_path / "out", ids)) == (EOS, TURN_END), "the tokenizer's and its own"


def test_an_export_with_nothing_to_add_has_the_files_bytes(alike: Path, tmp_path: Path) -> None:
    out = _saved(alike, tmp_path / "out", (EOS,))
    assert (out / GENERATION_CONFIG).read_bytes() == (alike / GENERATION_CONFIG).read_bytes()


@pytest.mark.parametrize(("stop_ids", "wanted"), [((EOS,), None), ((EOS, TURN_END), [EOS, TURN_END])], ids=str)
def test_a_folder_without_a_generation_config_gets_one_only_for_an_id_that_is_missing(
    stop_ids: tuple[int, ...], wanted: list[int] | None, tmp_path: Path
) -> None:
    folder = save_chatml_model(tmp_path / "model")
    (folder / GENERATION_CONFIG).unlink()
    file = _saved(folder, tmp_path / "out", stop_ids) / GENERATION_CONFIG
    values = json.loads(file.read_text()) if file.exists() else None
    assert values == (wanted and {"bos_token_id": 1, "pad_token_id": 0, "eos_token_id": wanted})


def test_a_turn_that_ends_with_an_id_of_its_text_keeps_it_and_is_closed_by_the_template() -> None:
    async def conversation(text_stop_ids: frozenset[int]) -> tuple[str, list[int]]:
        engine = FakeEngine("one", "two")
        session = session_over(engine, text_stop_ids=text_stop_ids)
        user: dict[str, Any] = {"role": "user", "content": "go"}
        turn = await session.chat([user])
        await session.chat([user, turn.message, {"role": "user", "content": "on"}])
        first, second = (list(request.prompt_token_ids) for request in engine.requests)
        return turn.text, second[len(first) :][:5]

    # The engine of this test always ends with STOP: once it is the end of a turn, once a part of its text.
    said = list(map(ord, "one"))
    assert in_virtual_time(conversation(frozenset()))[0] == ("one", [*said, STOP, 1001])
    assert in_virtual_time(conversation(frozenset({STOP})))[0] == (f"one{chr(STOP)}", [*said, STOP, STOP])
