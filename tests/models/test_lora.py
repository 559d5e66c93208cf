"""LoRA: nothing changes at the start, off is the base model, merged weights are the adapted model."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    JambaConfig,
    LongcatFlashConfig,
    PhimoeConfig,
)

from dovetail.models.backbone import HF_PREFIX
from dovetail.models.errors import ModelError
from dovetail.models.load import build_meta_model, materialize
from dovetail.models.lora import adapter_disabled, add_lora, has_lora, is_lora_name, merged_weights
from dovetail.models.policy import PolicyModel
from dovetail.models.value import RewardModel
from dovetail.models.weights import load_weights
from dovetail.weight_sync import LoraAdapter, write_peft_folder
from tests.models.tiny import ragged_batch, run_model, save_tiny_model, tiny_model

pytestmark = pytest.mark.unit


def _adapted(folder: Path, family: str = "qwen2", target_modules: str | list[str] = "all-linear") -> PolicyModel:
    save_tiny_model(family, folder)
    hf_model = add_lora(build_meta_model(folder), rank=4, alpha=8, target_modules=target_modules)
    policy = PolicyModel(hf_model, use_fused_kernels=True)
    materialize(policy, "cpu")
    load_weights(policy, folder)
    return policy


def _randomize(policy: PolicyModel) -> None:
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0.0, 0.05)


def test_only_adapters_train_and_a_new_adapter_changes_nothing(tmp_path: Path) -> None:
    policy = _adapted(tmp_path)
    batch = ragged_batch([5, 8])
    assert has_lora(policy)
    assert {n for n, p in policy.named_parameters() if p.requires_grad} == {
        n for n, _ in policy.named_parameters() if is_lora_name(n)
    }
    plain = PolicyModel(tiny_model("qwen2"))
    torch.testing.assert_close(
        run_model(policy, **batch).log_probs, run_model(plain, **batch).log_probs, atol=1e-6, rtol=1e-6
    )


def test_with_the_adapter_off_it_is_the_base_model_and_training_goes_on_after(tmp_path: Path) -> None:
    policy = _adapted(tmp_path)
    _randomize(policy)
    batch = ragged_batch([5, 8])
    base = run_model(PolicyModel(tiny_model("qwen2")), **batch).log_probs
    assert (run_model(policy, **batch).log_probs - base).abs().max() > 1e-3
    with adapter_disabled(policy):
        torch.testing.assert_close(run_model(policy, **batch).log_probs, base, atol=1e-6, rtol=1e-6)
    run_model(policy, **batch).log_probs.sum().backward()
    assert all((p.grad is not None) == is_lora_name(n) for n, p in policy.named_parameters())


@pytest.mark.parametrize("family", ["qwen2", "llama"])
def test_merged_weights_in_a_plain_model_give_the_adapted_log_probs(family: str, tmp_path: Path) -> None:
    policy = _adapted(tmp_path, family)
    _randomize(policy)
    weights = ((n.removeprefix(HF_PREFIX), p.detach()) for n, p in policy.named_parameters())
    plain = tiny_model(family, seed=5)
    plain.load_state_dict(dict(merged_weights(policy.hf_model, weights)), strict=False)
    names = {n for n, _ in plain.named_parameters()}
    weights = ((n.removeprefix(HF_PREFIX), p.detach()) for n, p in policy.named_parameters())
    assert {n for n, _ in merged_weights(policy.hf_model, weights)} == names
    batch = ragged_batch([5, 8])
    torch.testing.assert_close(
        run_model(PolicyModel(plain), **batch).log_probs, run_model(policy, **batch).log_probs, atol=1e-5, rtol=1e-5
    )


@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False")  # peft goes on with True
def test_adapters_of_matrices_that_are_kept_the_other_way_round_are_merged_so() -> None:
    config = GPT2Config(vocab_size=320, n_embd=32, n_layer=1, n_head=2, n_positions=32)
    torch.manual_seed(0)
    model = GPT2LMHeadModel(config).eval()
    policy = PolicyModel(add_lora(copy.deepcopy(model), rank=4, alpha=8))
    _randomize(policy)
    weights = ((n.removeprefix(HF_PREFIX), p.detach()) for n, p in policy.named_parameters())
    model.load_state_dict(dict(merged_weights(policy.hf_model, weights)), strict=False)
    batch = ragged_batch([5, 8])
    found = run_model(PolicyModel(model), **batch).log_probs
    torch.testing.assert_close(found, run_model(policy.eval(), **batch).log_probs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("family", "targets", "says"),
    [
        ("qwen3_moe", ["q_proj", "gate_proj", "up_proj", "down_proj"], r"holds all experts.*all-linear.*q_proj"),
        ("mixtral", ["w1", "w2", "w3"], r"holds all experts"),
        ("qwen2", ["q_proj", "lm_head"], r"lm_head.*cannot be merged"),
        ("llama", ["embed_tokens"], r"embed_tokens.*cannot be merged"),
        ("llama", ["nose_proj"], r"target_modules=\['nose_proj'\] .*LlamaForCausalLM: .*not found.*all-linear adapts"),
    ],
)
def test_adapters_that_cannot_be_merged_are_refused(family: str, targets: str | list[str], says: str) -> None:
    with pytest.raises(ModelError, match=says):
        add_lora(tiny_model(family), rank=4, alpha=8, target_modules=targets)


@pytest.mark.filterwarnings("error:Found missing adapter keys")
@pytest.mark.parametrize(
    "target_modules", ["all-linear", ["model.layers.1.self_attn.o_proj"], r".*\.0\..*(q_proj|down_proj)"]
)
def test_peft_adapts_the_modules_that_an_exported_adapter_has_and_no_others(
    target_modules: str | list[str], tmp_path: Path
) -> None:
    policy = _adapted(tmp_path / "model", target_modules=target_modules)
    _randomize(policy)
    lora = {n.removeprefix(HF_PREFIX): p for n, p in policy.named_parameters() if is_lora_name(n)}
    named = ((name.replace(".default.", "."), tensor) for name, tensor in lora.items())
    write_peft_folder(LoraAdapter(4, 8, named), tmp_path / "adapter")
    adapted = PeftModel.from_pretrained(tiny_model("qwen2"), tmp_path / "adapter")
    names = {n.removeprefix("base_model.model.") for n, _ in adapted.named_parameters() if is_lora_name(n)}
    assert names == set(lora)
    batch = ragged_batch([5, 8])
    torch.testing.assert_close(
        run_model(PolicyModel(adapted.get_base_model()), **batch).log_probs,
        run_model(policy, **batch).log_probs,
        atol=1e-6,
        rtol=1e-6,
    )


def _continued(model: Path, adapter: Path, *, head: bool = False, **targets: Any) -> PolicyModel | RewardModel:
    """A network on the meta device with the adapters that a run would put in, filled from both folders."""
    hf_model = build_meta_model(model, "reward" if head else "policy")
    add_lora(hf_model, **{"rank": 4, "alpha": 8, "target_modules": ["q_proj", "down_proj"]} | targets)
    network = RewardModel(hf_model) if head else PolicyModel(hf_model)
    materialize(network, "cpu")
    load_weights(network, model, adapter=adapter)
    return network


def _save_with_peft(model: Any, folder: Path, **settings: Any) -> PeftModel:
    """A trained adapter: B is not zero."""
    torch.manual_seed(3)
    config = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"], **settings)
    adapted = get_peft_model(model, config).eval()
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if parameter.requires_grad:
                parameter.normal_(0.0, 0.1 if "lora_" in name else 1.0)
    adapted.save_pretrained(str(folder))
    return adapted


def test_an_adapter_that_peft_has_written_is_continued(tmp_path: Path) -> None:
    """Loaded, it gives peft's own log-probs and those of peft's merged model; it trains, and exports what was read."""
    save_tiny_model("qwen2", tmp_path / "model")
    theirs = _save_with_peft(tiny_model("qwen2"), tmp_path / "adapter")
    batch = ragged_batch([5, 8])
    policy = _continued(tmp_path / "model", tmp_path / "adapter")
    ours = run_model(policy, **batch).log_probs
    close = {"atol": 1e-5, "rtol": 1e-5}
    torch.testing.assert_close(ours, run_model(PolicyModel(theirs.get_base_model()), **batch).log_probs, **close)
    with adapter_disabled(policy):
        base = run_model(policy, **batch).log_probs
    torch.testing.assert_close(base, run_model(PolicyModel(tiny_model("qwen2")), **batch).log_probs, **close)
    assert (ours - base).abs().max() > 1e-2
    assert {n for n, p in policy.named_parameters() if p.requires_grad} == {
        n for n, _ in policy.named_parameters() if is_lora_name(n)
    }
    lora = {n.removeprefix(HF_PREFIX): p for n, p in policy.named_parameters() if is_lora_name(n)}
    named = ((name.replace(".default.", "."), tensor) for name, tensor in lora.items())
    write_peft_folder(LoraAdapter(4, 8, named), tmp_path / "again")
    first, again = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("adapter", "again"))
    assert first.keys() == again.keys()
    assert all(torch.equal(first[name], again[name]) for name in first)
    merged: Any = theirs.merge_and_unload()
    torch.testing.assert_close(ours, run_model(PolicyModel(merged), **batch).log_probs, **close)


def test_a_scalar_head_that_peft_trained_beside_the_adapter_is_read_with_it(tmp_path: Path) -> None:
    save_tiny_model("qwen2", tmp_path / "model")
    classifier = AutoModelForSequenceClassification.from_pretrained(tmp_path / "model", num_labels=1)
    theirs = _save_with_peft(classifier, tmp_path / "adapter", task_type="SEQ_CLS")
    network = _continued(tmp_path / "model", tmp_path / "adapter", head=True)
    stored = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert torch.equal(network.hf_model.score.weight, stored["base_model.model.score.weight"])
    ids = torch.arange(3, 12)[None]
    with torch.no_grad():
        torch.testing.assert_close(network.hf_model(ids).logits, theirs(ids).logits, atol=1e-5, rtol=1e-5)
    with pytest.raises(ModelError, match=r"score.weight has no place in this model"):
        _continued(tmp_path / "model", tmp_path / "adapter")


@pytest.mark.parametrize(
    ("targets", "sizes", "says"),
    [
        ({"target_modules": ["q_proj"]}, {}, r"mlp\.down_proj\.lora_A\.weight has no place.*adapter of another model"),
        ({"target_modules": ["q_proj", "o_proj", "down_proj"]}, {}, r"no weights for .*o_proj.*take target_modules"),
        ({}, {"intermediate_size": 96}, r"down_proj.lora_A.* has shape \(4, \d+\) on disk and \(4, "),
        ({}, {"num_hidden_layers": 1}, r"layers\.1\..* has no place"),
        ({"rank": 8}, {}, r"has shape \(4, 160\) on disk and \(8, 160\)"),
    ],
    ids=["too few modules", "too many", "a wider model", "fewer layers", "another rank"],
)
def test_an_adapter_that_does_not_fit_is_refused(targets: dict, sizes: dict, says: str, tmp_path: Path) -> None:
    save_tiny_model("qwen2", tmp_path / "model", **sizes)
    _save_with_peft(tiny_model("qwen2"), tmp_path / "adapter")
    with pytest.raises(ModelError, match=says):
        _continued(tmp_path / "model", tmp_path / "adapter", **targets)


_DENSE_AND_SPARSE = {"mlp_only_layers": [0], "num_hidden_layers": 2}


@pytest.mark.parametrize(("family", "sizes"), [("qwen3_moe", _DENSE_AND_SPARSE), ("mixtral", {})])
def test_all_linear_leaves_out_experts_and_routers_of_a_mixture(
    family: str, sizes: dict, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_tiny_model(family, tmp_path, **sizes)
    policy = PolicyModel(add_lora(build_meta_model(tmp_path), rank=4, alpha=8))
    materialize(policy, "cpu")
    load_weights(policy, tmp_path)
    assert "experts of " in caplog.text
    assert "get no adapter" in caplog.text
    adapted = {
        name.split(".lora_")[0].split(".layers.")[1] for name, _ in policy.named_parameters() if is_lora_name(name)
    }
    attention = {f"{layer}.self_attn.{part}_proj" for layer in range(2) for part in "qkvo"}
    dense = {f"0.mlp.{part}_proj" for part in ("gate", "up", "down")}
    assert adapted == attention | (dense if sizes else set())
    _randomize(policy)
    weights = ((n.removeprefix(HF_PREFIX), p.detach()) for n, p in policy.named_parameters())
    plain = tiny_model(family, seed=5, **sizes)
    plain.load_state_dict(dict(merged_weights(policy.hf_model, weights)), strict=True)
    batch = ragged_batch([5, 8])
    torch.testing.assert_close(
        run_model(PolicyModel(plain), **batch).log_probs, run_model(policy, **batch).log_probs, atol=1e-5, rtol=1e-5
    )


def test_all_linear_leaves_out_a_router_that_is_a_kind_of_linear_layer() -> None:
    sizes = {"vocab_size": 320, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_local_experts": 4}
    model = add_lora(AutoModelForCausalLM.from_config(PhimoeConfig(**sizes, **heads)), rank=4, alpha=8)
    adapted = {name.split(".")[4] for name, _ in model.named_parameters() if is_lora_name(name)}
    assert adapted == {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert (
        run_model(PolicyModel(model), **ragged_batch([5, 8])).log_probs.isfinite().all()
    )  # its router returned a pair


SMALL = {"vocab_size": 320, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2}
HYBRID = {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_dt_rank": 4, "mamba_d_state": 8}
LATENT = {f"{name}_dim": 16 for name in ("qk_rope_head", "qk_nope_head", "v_head", "head")}
READ = {
    "dt_proj": JambaConfig(
        **SMALL, **HYBRID, num_hidden_layers=2, num_key_value_heads=1, num_experts=1, use_mamba_kernels=False
    ),
    "classifier": LongcatFlashConfig(
        **SMALL, **LATENT, num_layers=1, ffn_hidden_size=48, expert_ffn_hidden_size=16, kv_lora_rank=16, q_lora_rank=16,
        n_routed_experts=4, zero_expert_num=2, moe_topk=2,
    ),
}  # fmt: skip


@pytest.mark.parametrize("layer", READ)
def test_layers_that_are_read_and_never_called_get_no_adapter(layer: str) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(READ[layer]).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(0, 0.12)
    policy = PolicyModel(add_lora(copy.deepcopy(model), rank=4, alpha=8), use_remove_padding=False)
    _randomize(policy)
    weights = ((n.removeprefix(HF_PREFIX), p.detach()) for n, p in policy.named_parameters())
    plain = copy.deepcopy(model)
    plain.load_state_dict(dict(merged_weights(policy.hf_model, weights)), strict=False)
    batch = ragged_batch([5, 8])
    found = run_model(PolicyModel(plain, use_remove_padding=False), **batch).log_probs
    torch.testing.assert_close(found, run_model(policy.eval(), **batch).log_probs, atol=2e-5, rtol=1e-5)
    with pytest.raises(ModelError, match=f"reads the weight of .*{layer} and never calls it"):
        add_lora(model, rank=4, alpha=8, target_modules=[layer])


def test_all_linear_leaves_out_what_is_excluded_by_the_names_of_the_model() -> None:
    model = add_lora(tiny_model("qwen3_moe"), rank=4, alpha=8, exclude_modules=r"model\.layers\.0\..*")
    assert {name.split(".")[2] for name, _ in model.named_parameters() if is_lora_name(name)} == {"1"}


def test_a_model_without_adapter_has_none_to_switch_off() -> None:
    with pytest.raises(ValueError, match="no LoRA adapter"), adapter_disabled(tiny_model("llama")):
        pass
