"""An exported folder has the layers that predict further tokens as its source has them, or declares none."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, Glm4MoeConfig, PreTrainedConfig, Qwen3_5TextConfig

from dovetail.models.folder import check_model_folder
from dovetail.models.load import build_meta_model, materialize
from dovetail.models.save import save_hf_folder
from dovetail.models.weights import iter_checkpoint_tensors, load_weights, remember_prefixes, to_checkpoint_tensors
from tests.models.tiny import save_tiny_model

pytestmark = pytest.mark.unit

_SIZES = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "head_dim": 8}
_SIZES |= {"num_attention_heads": 2, "num_key_value_heads": 1}


def _glm() -> tuple[PreTrainedConfig, dict[str, Tensor], str]:
    """Layers behind the last one, counted in the config; its experts are one parameter in memory."""
    experts = {"n_routed_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8, "first_k_dense_replace": 1}
    config = Glm4MoeConfig(**_SIZES, **experts, n_group=1, topk_group=1, num_nextn_predict_layers=1)
    names = ["eh_proj", "enorm", "shared_head.norm", "mlp.experts.0.gate_proj", "mlp.experts.1.gate_proj"]
    return config, {f"model.layers.2.{name}.weight": torch.randn(3, 4) for name in names}, "num_nextn_predict_layers"


def _qwen() -> tuple[PreTrainedConfig, dict[str, Tensor], str]:
    """A module of its own beside the model's."""
    linear = {"linear_key_head_dim": 8, "linear_value_head_dim": 8}
    config = Qwen3_5TextConfig(**_SIZES, **linear, mtp_num_hidden_layers=1)
    names = ["fc", "norm", "layers.0.mlp.up_proj"]
    return config, {f"mtp.{name}.weight": torch.randn(3, 4).bfloat16() for name in names}, "mtp_num_hidden_layers"


FAMILIES = {"glm4_moe": _glm, "qwen3_5": _qwen}


def _source(family: str, folder: Path, *, has_layers: bool = True) -> tuple[dict[str, Tensor], str]:
    torch.manual_seed(0)
    config, extra, key = FAMILIES[family]()
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    file = folder / "model.safetensors"
    if has_layers:
        save_file(load_file(file) | extra, file, metadata={"format": "pt"})
    assert _declared(folder, key) == 1
    return extra, key


def _declared(folder: Path, key: str) -> Any:
    return json.loads((folder / "config.json").read_text()).get(key)


def _exported(source: Path, out: Path, *, max_shard_bytes: int = 1 << 30, **override_config: Any) -> dict[str, Tensor]:
    """The way of a backend, with every weight changed by the training."""
    model = build_meta_model(source, override_config=override_config)
    materialize(model, "cpu")
    load_weights(torch.nn.ModuleDict({"hf_model": model}), source)
    remember_prefixes(model, source)
    trained = ((name, parameter + 1) for name, parameter in model.state_dict().items())
    weights = to_checkpoint_tensors(model, trained)
    save_hf_folder(weights, model.config, None, out, source=source, max_shard_bytes=max_shard_bytes)
    return {name: tensor.load() for name, tensor in iter_checkpoint_tensors(out)}


@pytest.mark.parametrize("max_shard_bytes", [1 << 30, 4000])
@pytest.mark.parametrize("family", FAMILIES)
def test_they_are_copied_as_they_are(
    family: str, max_shard_bytes: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    extra, key = _source(family, source)
    check_model_folder(source)
    with caplog.at_level(logging.WARNING):
        written = _exported(source, out, max_shard_bytes=max_shard_bytes)
    stored = {name: tensor.load() for name, tensor in iter_checkpoint_tensors(source)}
    assert written.keys() == stored.keys()
    for name in extra:
        assert torch.equal(written[name], extra[name])
        assert written[name].dtype == extra[name].dtype
    changed = {name for name in written if not torch.equal(written[name], stored[name])}
    assert changed == stored.keys() - extra.keys()
    assert _declared(out, key) == 1
    assert f"{len(extra)} tensors of layers that predict further tokens are copied from {source}" in caplog.text
    check_model_folder(out)
    again, report = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not report["missing_keys"]
    assert all(name.startswith(("mtp.", "model.layers.2.")) for name in report["unexpected_keys"])
    torch.testing.assert_close(again.lm_head.weight.data, written["lm_head.weight"])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("why", ["the source has none", "there are fewer layers", "no source is known"])
def test_none_are_declared_where_none_are_written(
    why: str, family: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    extra, key = _source(family, source, has_layers=why != "the source has none")
    if why == "no source is known":
        model = AutoModelForCausalLM.from_pretrained(source)
        weights = to_checkpoint_tensors(model, model.state_dict().items())
        save_hf_folder(weights, model.config, None, out)
        assert getattr(model.config, key) == 1  # of the model that goes on training
        written: dict[str, Any] = load_file(out / "model.safetensors")
    else:
        fewer: dict[str, Any] = {"num_hidden_layers": 1} if why == "there are fewer layers" else {}
        if fewer and family == "qwen3_5":
            fewer["layer_types"] = ["linear_attention"]
        written = _exported(source, out, **fewer)
    assert not written.keys() & extra.keys()
    assert _declared(out, key) == 0
    assert f"the exported config.json has {key}=0 instead of 1" in caplog.text
    AutoModelForCausalLM.from_pretrained(out)


def test_an_ordinary_model_is_exported_without_a_word(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = Qwen3_5TextConfig(**_SIZES, linear_key_head_dim=8, linear_value_head_dim=8)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "source")
    _exported(tmp_path / "source", tmp_path / "out")
    assert caplog.text == ""


def test_a_model_of_the_folders_own_code_is_exported(tmp_path: Path) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    save_tiny_model("qwen2", source, tokenizer=False)
    own = {"model_type": "own", "auto_map": {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.OwnModel"}}
    (source / "config.json").write_text(json.dumps(json.loads((source / "config.json").read_text()) | own))
    (source / "own.py").write_text(
        "from transformers import Qwen2Config, Qwen2ForCausalLM\n\n\nclass Own(Qwen2Config):\n    model_type = 'own'\n"
        "\n\nclass OwnModel(Qwen2ForCausalLM):\n    config_class = Own\n"
    )
    model = build_meta_model(source, trust_remote_code=True)
    weights = load_file(source / "model.safetensors")
    save_hf_folder(weights.items(), model.config, None, out, source=source)
    assert load_file(out / "model.safetensors").keys() == weights.keys()
