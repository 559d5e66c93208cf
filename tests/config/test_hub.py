"""Names on the hub: found in its cache, downloaded once, and a clear message where neither is possible."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dovetail.cli.main import main
from dovetail.config.hub import HubError, fetch_file, fetch_model, is_hub_name, make_repository, push_folder
from tests.hub import COMMIT, FakeApi, put_in_cache, serve_hub

pytestmark = pytest.mark.unit

CONFIG = {
    "model_type": "qwen2", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 96, "vocab_size": 320, "max_position_embeddings": 512,
}  # fmt: skip


def model_files(folder: Path) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("Qwen/Qwen2.5-0.5B-Instruct", True),
        ("Qwen/Qwen2.5-0.5B-Instruct@main", True),
        ("/models/Qwen2.5", False),
        ("./models/Qwen2.5", False),
        ("../Qwen2.5", False),
        ("a/b/c", False),
        ("gpt2", False),
        ("", False),
    ],
)
def test_a_name_on_the_hub_is_an_organisation_and_a_model(path: str, expected: bool) -> None:
    assert is_hub_name(path) is expected


def test_a_folder_of_this_machine_is_never_taken_for_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "models" / "mine").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert not is_hub_name("models/mine")
    assert is_hub_name("models/other")


def test_the_cache_of_the_hub_is_used_as_it_is(cache: Path, tmp_path: Path) -> None:
    snapshot = put_in_cache(cache, "org/tiny", model_files(tmp_path / "tiny"))
    assert fetch_model("org/tiny", weights=True) == snapshot
    assert fetch_model(f"org/tiny@{COMMIT}", weights=False) == snapshot
    assert fetch_file("org/tiny", "config.json") == snapshot / "config.json"


def test_offline_the_message_names_the_folder_to_put_the_model_in(cache: Path) -> None:
    with pytest.raises(HubError) as raised:
        fetch_model("org/absent", weights=True)
    message = str(raised.value)
    assert "org/absent is no folder on this machine" in message
    assert "HF_HUB_OFFLINE=1" in message
    assert str(cache / "models--org--absent") in message
    assert "hf download org/absent" in message


def test_a_misspelt_folder_that_looks_like_a_name_of_the_hub_is_named_with_the_folder_that_is_there(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    model_files(tmp_path / "models" / "tiny-instruct")
    with pytest.raises(HubError, match=r"is no folder on this machine \(did you mean models/tiny-instruct\?\), and"):
        fetch_model("models/tiny-instrct", weights=True)


def test_check_plans_a_model_of_the_hub_from_its_config_alone(
    cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = model_files(tmp_path / "tiny")
    (folder / "model.safetensors").unlink()
    put_in_cache(cache, "org/tiny", folder)
    launch = ["data.train_files=x.parquet", "--format", "json", "trainer.device=cpu"]
    main(["check", "actor_rollout_ref.model.path=org/tiny", *launch])
    shown = json.loads(capsys.readouterr().out)
    assert not [notice for notice in shown["notices"] if "no memory part" in notice["message"]]
    main(["check", "actor_rollout_ref.model.path=org/absent", *launch])
    (notice,) = [n for n in json.loads(capsys.readouterr().out)["notices"] if "no memory part" in n["message"]]
    assert str(cache / "models--org--absent") in notice["message"]


_FETCH = """
import sys
from dovetail.config.hub import HubError, fetch_file, fetch_model
assert "torch" not in sys.modules and "transformers" not in sys.modules
try:
    for weights in (False, True):
        folder = fetch_model(sys.argv[1], weights=weights)
        print(",".join(sorted(file.name for file in folder.iterdir())))
except HubError as error:
    print(error)
"""


def fetch_elsewhere(cache: Path, endpoint: str, name: str) -> subprocess.Popen[str]:
    """In a process of its own: huggingface_hub reads its variables when it is imported."""
    env = os.environ | {
        "HF_HUB_CACHE": str(cache),
        "HF_ENDPOINT": endpoint,
        "HF_HUB_OFFLINE": "0",
        "HF_HUB_DISABLE_XET": "1",
    }
    return subprocess.Popen(
        [sys.executable, "-c", _FETCH, name], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_two_processes_download_each_file_once_and_weights_only_when_they_are_wanted(tmp_path: Path) -> None:
    """Real downloads from a hub on loopback, by two processes at once, as two workers of a node make them."""
    files = {
        "config.json": json.dumps(CONFIG).encode(),
        "tokenizer.json": b"{}",
        "model.safetensors": b"w" * 100_000,
        "pytorch_model.bin": b"w" * 100_000,
        "README.md": b"# tiny",
    }
    with serve_hub({"models/org/tiny": files}) as hub:
        both = [fetch_elsewhere(tmp_path / "cache", hub.url, "org/tiny") for _ in range(2)]
        for process in both:
            out, err = process.communicate(timeout=120)
            assert process.returncode == 0, err
            first, second = out.split()
            assert "config.json" in first
            assert second == "config.json,model.safetensors,tokenizer.json"
        assert hub.count == {"config.json": 1, "tokenizer.json": 1, "model.safetensors": 1}
        absent = fetch_elsewhere(tmp_path / "cache", hub.url, "org/tinny")
        assert "there is no such repository, or it is private" in absent.communicate(timeout=120)[0]
    unreachable = fetch_elsewhere(tmp_path / "empty", hub.url, "org/tiny")
    out, err = unreachable.communicate(timeout=120)
    assert f"{hub.url} cannot be reached" in out, err
    assert str(tmp_path / "empty" / "models--org--tiny") in out


def test_without_a_network_nobody_waits_for_the_hub(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "https://no-such-host.invalid")
    monkeypatch.setattr("dovetail.config.hub.getproxies", dict)

    def asked(*args: object, **kwargs: object) -> None:
        raise AssertionError("the hub was asked")

    monkeypatch.setattr("huggingface_hub.file_download.get_hf_file_metadata", asked)
    for fetch in (lambda: fetch_file("org/name", "config.json"), lambda: fetch_model("org/name", weights=False)):
        with pytest.raises(HubError, match=r"no-such-host\.invalid cannot be reached"):
            fetch()


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> type[FakeApi]:
    return FakeApi.install(monkeypatch)


def test_a_folder_is_pushed_to_a_repository_that_is_private_when_new(api: type[FakeApi], tmp_path: Path) -> None:
    (tmp_path / "note.txt").write_text("hi")
    make_repository("org/mine")
    push_folder(tmp_path, "org/mine")
    assert api.made == [("org/mine", {"private": True, "exist_ok": True})]
    assert api.uploads == {"org/mine": ["note.txt"]}


def test_what_cannot_be_pushed_says_why(api: type[FakeApi], monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(name: str, says: str) -> None:
        with pytest.raises(HubError, match=says):
            make_repository(name)

    refused("mine", "mine is no name on the hub")
    refused("org/mine@v2", "names a revision")
    refused("theirs/model", r"403 Forbidden\. Check that the token may write to theirs")
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    refused("org/mine", "run `hf auth login`, or set HF_TOKEN")
    monkeypatch.setattr("dovetail.config.hub._can_be_asked", lambda: False)
    refused("org/mine", "cannot be reached. Export to a folder, and run `hf upload org/mine FOLDER` later")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    refused("org/mine", "HF_HUB_OFFLINE=1 forbids it")
    assert api.made == []
