"""What is wrong with a model folder is said in one line that names the file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from dovetail.models.errors import ModelError
from dovetail.models.folder import check_model_folder
from dovetail.models.load import build_meta_model, load_config, load_tokenizer, materialize
from dovetail.models.policy import PolicyModel
from dovetail.models.save import save_hf_folder
from dovetail.models.weights import iter_checkpoint_tensors, load_weights
from tests.models.tiny import FAMILIES, save_tiny_model

pytestmark = pytest.mark.unit


def _edit(folder: Path, **changes: object) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def _load(folder: Path) -> None:
    policy = PolicyModel(build_meta_model(folder))
    materialize(policy, "cpu")
    load_weights(policy, folder)


def _in_shards(folder: Path) -> Path:
    """The same weights as several files with an index."""
    tensors = {name: tensor.load() for name, tensor in iter_checkpoint_tensors(folder)}
    return save_hf_folder(
        tensors.items(),
        load_config(folder),
        load_tokenizer(folder),
        folder.with_name("shards"),
        max_shard_bytes=100_000,
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_a_folder_of_each_family_passes_as_policy_and_as_critic(family: str, tmp_path: Path) -> None:
    save_tiny_model(family, tmp_path)
    check_model_folder(tmp_path)
    check_model_folder(tmp_path, "value")


def test_a_model_that_cannot_be_packed_is_refused_where_sequences_are(tmp_path: Path) -> None:
    folder = save_tiny_model("falcon_h1", tmp_path)
    check_model_folder(folder)
    with pytest.raises(ModelError, match=r"hybrid layers.* set use_remove_padding=False"):
        check_model_folder(folder, packs=True)


def test_a_language_model_is_refused_as_a_reward_model(tmp_path: Path) -> None:
    folder = save_tiny_model("llama", tmp_path)
    with pytest.raises(ModelError, match=r"is no reward model: its weights have no head .* `dovetail reward`"):
        check_model_folder(folder, "reward")
    head = {"v_head.summary.weight": torch.ones(1, 128)}  # TRL's name
    save_file(load_file(folder / "model.safetensors") | head, folder / "model.safetensors", metadata={"format": "pt"})
    check_model_folder(folder, "reward")


def test_a_reward_model_is_refused_as_a_policy(tmp_path: Path) -> None:
    folder = save_tiny_model("qwen2", tmp_path)  # its head is tied to the embedding: no tensor is missing
    head = {"score.weight": torch.ones(1, 128)}
    save_file(load_file(folder / "model.safetensors") | head, folder / "model.safetensors", metadata={"format": "pt"})
    check_model_folder(folder, "value")
    with pytest.raises(ModelError, match=r"is a reward model: its weights have a head that scores .score.weight."):
        check_model_folder(folder)


@pytest.mark.parametrize("in_shards", [False, True])
def test_layers_on_disk_that_the_config_does_not_have_are_an_error(in_shards: bool, tmp_path: Path) -> None:
    folder = save_tiny_model("llama", tmp_path / "model")
    folder = _in_shards(folder) if in_shards else folder
    check_model_folder(folder)
    _edit(folder, num_hidden_layers=1)
    with pytest.raises(ModelError, match=r"9 tensors have no place .* with 1 layers\): model\.layers\.1\.") as caught:
        check_model_folder(folder)
    assert str(folder) in str(caught.value)
    # One extra layer that predicts a further token is known to be left out.
    _edit(folder, num_nextn_predict_layers=1)
    check_model_folder(folder)


def test_numbers_that_are_not_finite_are_named_with_their_tensor(tmp_path: Path) -> None:
    folder = save_tiny_model("llama", tmp_path)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = torch.nan
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    message = r"1 of the 20480 numbers of model\.layers\.1\.mlp\.up_proj\.weight are NaN or infinite"
    with pytest.raises(ModelError, match=message):
        _load(folder)


def test_a_tensor_that_is_missing_or_of_another_shape_is_named_with_the_folder(tmp_path: Path) -> None:
    folder = save_tiny_model("llama", tmp_path)
    tensors = load_file(folder / "model.safetensors")
    norm = tensors.pop("model.norm.weight")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=rf"{tmp_path} holds no weights for hf_model\.model\.norm\.weight"):
        _load(folder)
    save_file(tensors | {"model.norm.weight": norm[:7]}, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=rf"{tmp_path}: model\.norm\.weight has shape \(7,\) on disk and \(128,\)"):
        _load(folder)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("config.json", b'{"model_type": "quantum"}', "quantum"),
        ("config.json", b"{]", "config.json cannot be used"),
        ("config.json", b"[1]", "config.json cannot be used"),
        ("model.safetensors", b"\x00" * 100, r"model.safetensors cannot be read as safetensors"),
        ("model.safetensors", b"", r"model.safetensors cannot be read as safetensors"),
    ],
)
def test_a_broken_file_is_named(name: str, content: bytes, words: str, tmp_path: Path) -> None:
    folder = save_tiny_model("llama", tmp_path)
    (folder / name).write_bytes(content)
    with pytest.raises(ModelError, match=words) as caught:
        check_model_folder(folder)
    assert name in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_broken_tokenizer_is_named(tmp_path: Path) -> None:
    folder = save_tiny_model("llama", tmp_path)
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match=rf"the tokenizer in {tmp_path} cannot be read .* tokenizer\.json"):
        load_tokenizer(folder)


def test_an_index_must_agree_with_its_files(tmp_path: Path) -> None:
    folder = _in_shards(save_tiny_model("llama", tmp_path / "model"))
    check_model_folder(folder)
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    files = sorted(set(content["weight_map"].values()))
    content["weight_map"]["model.extra.weight"] = files[0]
    index.write_text(json.dumps(content))
    with pytest.raises(ModelError, match=rf"index\.json says that model\.extra\.weight is in {files[0]}"):
        check_model_folder(folder)
    (folder / files[1]).unlink()
    with pytest.raises(ModelError, match=rf"index\.json names 1 files that are not there: {files[1]}"):
        check_model_folder(folder)
    index.write_text('{"weights": 1}')
    with pytest.raises(ModelError, match=r"index\.json cannot be read .*KeyError: 'weight_map'"):
        check_model_folder(folder)


def test_the_same_weights_in_another_layout_beside_the_model_are_not_read(tmp_path: Path) -> None:
    folder = save_tiny_model("llama", tmp_path)
    save_file({"layers.0.attention.wq.weight": torch.zeros(2)}, folder / "consolidated.safetensors")
    check_model_folder(folder)
