"""Loading shard by shard equals from_pretrained; saving round-trips; heads, LoRA and tied weights included."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, GPT2Config, Qwen3_5TextConfig

from dovetail.models.backbone import HF_PREFIX
from dovetail.models.errors import ModelError
from dovetail.models.load import build_meta_model, load_config, load_processor, load_tokenizer, materialize
from dovetail.models.policy import PolicyModel
from dovetail.models.save import publish_folder, save_hf_folder
from dovetail.models.value import RewardModel, ValueModel
from dovetail.models.weights import iter_checkpoint_tensors, iter_model_tensors, load_weights, to_checkpoint_tensors
from tests.models.tiny import (
    FAMILIES,
    image_batch,
    ragged_batch,
    run_model,
    save_tiny_model,
    save_tiny_vision_model,
    tiny_model,
)

pytestmark = pytest.mark.unit


def _batch(family: str) -> dict:
    return image_batch() if family == "qwen2_5_vl" else ragged_batch([5, 9], side="left")


def _policy(folder: Path, override_config: dict | None = None) -> PolicyModel:
    policy = PolicyModel(build_meta_model(folder, override_config=override_config))
    assert all(p.is_meta for p in policy.parameters())
    materialize(policy, "cpu")
    load_weights(policy, folder)
    return policy.eval()


@pytest.mark.parametrize("family", FAMILIES)
def test_loading_tensor_by_tensor_equals_from_pretrained(family: str, tmp_path: Path) -> None:
    save_tiny_model(family, tmp_path)
    auto = AutoModelForImageTextToText if family == "qwen2_5_vl" else AutoModelForCausalLM
    expected = auto.from_pretrained(tmp_path, dtype=torch.float32).eval()
    policy = _policy(tmp_path)
    state = policy.hf_model.state_dict()
    for name, tensor in expected.state_dict().items():
        torch.testing.assert_close(state[name], tensor, atol=0, rtol=0)
    for (name, got), (_, want) in zip(policy.hf_model.named_buffers(), expected.named_buffers(), strict=True):
        torch.testing.assert_close(got, want, atol=0, rtol=0, msg=name)
    batch = _batch(family)
    torch.testing.assert_close(
        run_model(policy, **batch).log_probs, run_model(PolicyModel(expected), **batch).log_probs, atol=0, rtol=0
    )


def test_buffers_of_layers_that_the_model_fills_are_filled(tmp_path: Path) -> None:
    model, loaded = tiny_model("falcon_h1"), build_meta_model(save_tiny_model("falcon_h1", tmp_path))
    materialize(loaded, "cpu")
    for (name, buffer), (_, expected) in zip(loaded.named_buffers(), model.named_buffers(), strict=True):
        torch.testing.assert_close(buffer, expected, atol=0, rtol=0, msg=name)


@pytest.mark.parametrize("family", ["llama_tied", "qwen2"])
def test_tied_embeddings_stay_one_parameter(family: str, tmp_path: Path) -> None:
    policy = _policy(save_tiny_model(family, tmp_path))
    assert policy.hf_model.lm_head.weight is policy.hf_model.model.embed_tokens.weight
    assert not any("lm_head" in name for name, _ in policy.named_parameters())


@pytest.mark.parametrize("family", FAMILIES)
def test_saved_folders_have_the_names_and_values_transformers_writes(family: str, tmp_path: Path) -> None:
    source = save_tiny_model(family, tmp_path / "source")
    policy = _policy(source)
    weights = ((name.removeprefix(HF_PREFIX), p) for name, p in policy.named_parameters())
    out = save_hf_folder(
        to_checkpoint_tensors(policy.hf_model, weights),
        policy.hf_model.config,
        load_tokenizer(source),
        tmp_path / "out",
        max_shard_bytes=200_000,
    )
    assert (out / "model.safetensors.index.json").exists()
    want, got = (dict(iter_checkpoint_tensors(folder)) for folder in (source, out))
    assert want.keys() == got.keys()
    for name, tensor in want.items():
        assert torch.equal(tensor.load(), got[name].load()), name
    again = _policy(out)
    batch = _batch(family)
    torch.testing.assert_close(
        run_model(again, **batch).log_probs, run_model(policy, **batch).log_probs, atol=0, rtol=0
    )
    assert load_tokenizer(out).decode(load_tokenizer(out)("hello")["input_ids"]) == "hello"


@pytest.mark.parametrize("prefix", ["model.", "model.language_model."])
def test_a_text_only_checkpoint_is_saved_under_the_names_it_was_read_under(prefix: str, tmp_path: Path) -> None:
    """Taken out of its multimodal parent, as Qwen3.5 and Gemma 3n can be, with the parent's prefix or without."""
    sizes = {"linear_key_head_dim": 8, "linear_value_head_dim": 8, "head_dim": 8, "vocab_size": 40, "hidden_size": 16}
    config = Qwen3_5TextConfig(**sizes, intermediate_size=16, num_hidden_layers=4, num_attention_heads=2)
    model = AutoModelForCausalLM.from_config(config)
    source, out = tmp_path / "source", tmp_path / "out"
    model.save_pretrained(source)
    stored = load_file(source / "model.safetensors")
    renamed = {name.replace("model.", prefix, 1): tensor for name, tensor in stored.items()}
    save_file(renamed, source / "model.safetensors", metadata={"format": "pt"})

    loaded = build_meta_model(source)
    materialize(loaded, "cpu")
    load_weights(torch.nn.ModuleDict({"hf_model": loaded}), source)
    save_hf_folder(to_checkpoint_tensors(loaded, loaded.named_parameters()), loaded.config, None, out)
    assert load_file(out / "model.safetensors").keys() == renamed.keys()
    again, report = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    for name, parameter in again.named_parameters():
        assert torch.equal(parameter, model.get_parameter(name)), name


def test_experts_are_single_matrices_on_disk_and_one_parameter_in_memory(tmp_path: Path) -> None:
    save_tiny_model("qwen3_moe", tmp_path)
    on_disk = dict(iter_checkpoint_tensors(tmp_path))
    assert "model.layers.0.mlp.experts.3.gate_proj.weight" in on_disk
    in_memory = dict(iter_model_tensors(build_meta_model(tmp_path), tmp_path))
    assert in_memory["model.layers.0.mlp.experts.gate_up_proj"].shape == (4, 96, 128)
    gate = on_disk["model.layers.0.mlp.experts.3.gate_proj.weight"].load()
    assert torch.equal(in_memory["model.layers.0.mlp.experts.gate_up_proj"][3, :48], gate)


def test_a_save_that_fails_leaves_the_old_folder_alone(tmp_path: Path) -> None:
    source = save_tiny_model("llama", tmp_path / "model")
    before = sorted(p.name for p in source.iterdir())

    def broken():
        yield "model.norm.weight", torch.ones(2)
        raise RuntimeError("disk on fire")

    with pytest.raises(RuntimeError, match="disk on fire"):
        save_hf_folder(broken(), load_config(source), None, source)
    assert sorted(p.name for p in source.iterdir()) == before
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


def test_a_folder_that_cannot_take_the_name_of_the_old_one_leaves_the_old_one_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "work").mkdir()
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "old").touch()
    rename = os.rename

    def full_disk(source: Path, target: Path) -> None:
        if source.name == "work":
            raise OSError("no space left")
        rename(source, target)

    monkeypatch.setattr(os, "rename", full_disk)
    with pytest.raises(OSError, match="no space left"):
        publish_folder(tmp_path / "work", tmp_path / "model")
    assert (tmp_path / "model" / "old").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "work"]


def test_a_critic_from_a_language_model_gets_the_same_new_head_every_time(tmp_path: Path) -> None:
    save_tiny_model("llama", tmp_path)
    heads = []
    for _ in range(2):
        critic = ValueModel(build_meta_model(tmp_path, "value"))
        materialize(critic, "cpu")
        load_weights(critic, tmp_path)
        heads.append(critic.hf_model.score.weight.detach().clone())
    assert torch.equal(*heads)
    assert 0.005 < heads[0].std() < 0.05


def test_a_trl_value_head_checkpoint_loads_into_the_critic(tmp_path: Path) -> None:
    save_tiny_model("llama", tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    state |= {"v_head.summary.weight": torch.randn(1, 128), "v_head.summary.bias": torch.randn(1)}
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    critic = ValueModel(build_meta_model(tmp_path, "value")).eval()
    materialize(critic, "cpu")
    load_weights(critic, tmp_path)
    batch = ragged_batch([4, 7], total=8, side="left")
    values = run_model(critic, **batch)
    alone = batch["input_ids"][1][batch["attention_mask"][1].bool()][None]
    hidden = tiny_model("llama").model(input_ids=alone).last_hidden_state[0]
    want = hidden @ state["v_head.summary.weight"][0] + state["v_head.summary.bias"]
    # The value before token t is read at token t - 1.
    torch.testing.assert_close(values[1, -6:], want[:-1], atol=1e-5, rtol=1e-5)
    assert values[1, :2].abs().sum() == 0


@pytest.mark.parametrize("family", ["llama", "qwen2_5_vl"])
@pytest.mark.parametrize("use_remove_padding", [False, True])
def test_a_critic_and_a_reward_model_take_text_and_images(
    family: str, use_remove_padding: bool, tmp_path: Path
) -> None:
    save_tiny_model(family, tmp_path)
    batch = _batch(family)
    for role, wrapper in (("value", ValueModel), ("reward", RewardModel)):
        model = wrapper(build_meta_model(tmp_path, role), use_remove_padding=use_remove_padding).eval()
        materialize(model, "cpu")
        load_weights(model, tmp_path)
        out = run_model(model, **batch)
        out.sum().backward()
        assert out.shape == (batch["input_ids"].shape if role == "value" else batch["input_ids"].shape[:1])
        assert out.abs().sum() > 0
        assert all(p.grad is not None for n, p in model.named_parameters() if "score" in n)


def test_reward_scores_equal_transformers_sequence_classification(tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForSequenceClassification

    save_tiny_model("llama", tmp_path)
    config = AutoConfig.from_pretrained(tmp_path, num_labels=1)
    expected = AutoModelForSequenceClassification.from_config(config).eval()
    expected.save_pretrained(tmp_path)
    model = RewardModel(build_meta_model(tmp_path, "reward")).eval()
    materialize(model, "cpu")
    load_weights(model, tmp_path)
    batch = ragged_batch([4, 9, 6], total=10, side="right")
    torch.testing.assert_close(run_model(model, **batch), expected(**batch).logits.squeeze(-1), atol=1e-5, rtol=1e-5)


def test_override_config_reaches_fields_and_refuses_unknown_ones(tmp_path: Path) -> None:
    save_tiny_model("qwen2_5_vl", tmp_path)
    config = load_config(tmp_path, {"text_config": {"rms_norm_eps": 0.5}})
    assert config.text_config.rms_norm_eps == 0.5
    with pytest.raises(ValueError, match=r"override_config\.text_config\.bogus"):
        load_config(tmp_path, {"text_config": {"bogus": 1}})
    with pytest.raises(ValueError, match=r"override_config\.text_config\.rms_norm_esp=1 is .* mean rms_norm_eps\?"):
        load_config(tmp_path, {"text_config": {"rms_norm_esp": 1}})
    with pytest.raises(FileNotFoundError, match=r"no config\.json"):
        load_config(tmp_path / "absent")


def test_dropout_is_off_in_training_unless_it_is_asked_for(tmp_path: Path) -> None:
    config = GPT2Config(vocab_size=61, n_embd=32, n_layer=1, n_head=2, bos_token_id=1, eos_token_id=2)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    assert config.resid_pdrop == 0.1
    batch = ragged_batch([5, 9])
    batch["input_ids"] %= 61
    policy, noisy = _policy(tmp_path), _policy(tmp_path, {"resid_pdrop": 0.5})
    expected = run_model(policy, **batch).log_probs
    torch.testing.assert_close(run_model(noisy, **batch).log_probs, expected, atol=0, rtol=0)
    torch.testing.assert_close(run_model(policy.train(), **batch).log_probs, expected, atol=0, rtol=0)
    assert (run_model(noisy.train(), **batch).log_probs - expected).abs().max() > 0.01


def test_a_dropout_that_the_network_has_not_may_be_turned_off_but_not_on(tmp_path: Path) -> None:
    save_tiny_model("qwen2", tmp_path)
    config = load_config(tmp_path, {"attention_dropout": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0})
    assert config.attention_dropout == 0.0
    assert not hasattr(config, "embd_pdrop")
    with pytest.raises(ValueError, match=r"embd_pdrop=0\.1 is not a field of Qwen2Config"):
        load_config(tmp_path, {"embd_pdrop": 0.1})


def test_a_text_model_has_no_processor_and_pads_with_its_own_token(tmp_path: Path) -> None:
    save_tiny_model("llama", tmp_path)
    assert load_processor(tmp_path) is None
    assert load_tokenizer(tmp_path).pad_token_id == 0


def test_weights_of_another_model_are_refused_by_name(tmp_path: Path) -> None:
    save_tiny_model("llama", tmp_path / "small")
    save_tiny_model("llama", tmp_path / "deep", num_hidden_layers=3)
    policy = PolicyModel(build_meta_model(tmp_path / "deep"))
    materialize(policy, "cpu")
    with pytest.raises(ValueError, match=r"holds no weights for hf_model\.model\.layers\.2"):
        load_weights(policy, tmp_path / "small")


def test_a_published_folder_can_be_read_by_others(tmp_path: Path) -> None:
    """safetensors makes private files, mkdtemp private folders."""
    work = Path(tempfile.mkdtemp(dir=tmp_path))
    save_file({"a": torch.zeros(2)}, work / "model.safetensors")
    (work / "additional_chat_templates").mkdir(mode=0o755)
    publish_folder(work, tmp_path / "out")
    modes = {path.name: oct(path.stat().st_mode & 0o777) for path in (tmp_path / "out", *(tmp_path / "out").iterdir())}
    assert modes == {"out": "0o755", "model.safetensors": "0o644", "additional_chat_templates": "0o755"}


def test_a_template_that_the_processor_alone_has_is_the_tokenizers(tmp_path: Path) -> None:
    """Workers and exports read no processor, and ask the template where a response ends."""
    folder = save_tiny_vision_model(tmp_path)
    template = load_tokenizer(folder).chat_template
    (folder / "chat_template.jinja").unlink()
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": template}))
    assert template is not None
    assert load_tokenizer(folder).chat_template == template
    assert load_tokenizer(folder, chat_template="{{ messages }}").chat_template == "{{ messages }}"


def test_a_tokenizer_without_an_end_and_without_padding_is_refused(tmp_path: Path) -> None:
    folder = save_tiny_model("qwen2", tmp_path)
    tokenizer = load_tokenizer(folder)
    tokenizer.eos_token = tokenizer.pad_token = None
    tokenizer.save_pretrained(folder)
    with pytest.raises(ModelError, match=r"neither a padding token nor an end of text; set eos_token"):
        load_tokenizer(folder)
