"""The one-process backend: steps, skips, schedules, weights out, what it refuses."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from dovetail.backends.base import ForwardOptions, TokenOutput
from dovetail.backends.build import build_backend
from dovetail.backends.export import export_hf_folder
from dovetail.backends.optimizer import build_optimizer, decayed_names
from dovetail.backends.torch_backend import TorchBackend
from dovetail.checkpoint.manifest import BrokenCheckpoint
from dovetail.config.fsdp import FSDPConfig, MixedPrecisionConfig
from dovetail.config.optim import OptimConfig
from dovetail.models.load import build_meta_model
from dovetail.models.policy import PolicyModel
from dovetail.models.value import RewardModel, ValueModel
from dovetail.protocol import DataProto
from tests.backends.tiny import (
    FP32,
    OPTIM,
    as_numpy,
    cut,
    largest_difference,
    tiny_batch,
    tiny_policy,
    total_weight,
    weighted_nll,
)

pytestmark = pytest.mark.unit


def build(optim: OptimConfig | None = OPTIM, fsdp: FSDPConfig = FP32, **network: bool) -> TorchBackend:
    return build_backend("single", tiny_policy(**network), fsdp=fsdp, optim=optim)


def step(backend: TorchBackend, batch: DataProto) -> None:
    backend.forward_backward(cut(batch, (4, 4)), weighted_nll(total_weight(batch)))
    assert not backend.optim_step().skipped


def broken_loss(output: TokenOutput, micro_batch: DataProto) -> tuple[Tensor, dict[str, Tensor]]:
    assert output.log_probs is not None
    return output.log_probs.sum() * float("inf"), {}


def test_a_gradient_that_is_not_finite_changes_nothing_but_the_count() -> None:
    batch = tiny_batch()
    disturbed, plain = (
        build(OPTIM.model_copy(update={"lr_warmup_steps": 3})),
        build(OPTIM.model_copy(update={"lr_warmup_steps": 3})),
    )
    for backend in (disturbed, plain):
        step(backend, batch)
    disturbed.forward_backward([batch], broken_loss)
    result = disturbed.optim_step()
    assert result.skipped
    assert not np.isfinite(result.grad_norm)
    assert result.num_skipped == 1
    for backend in (disturbed, plain):
        step(backend, batch)
    assert largest_difference(as_numpy(disturbed.named_weights()), as_numpy(plain.named_weights())) == 0.0


def test_the_schedule_advances_only_when_told() -> None:
    backend = build(OPTIM.model_copy(update={"lr_warmup_steps": 10}))
    batch = tiny_batch()
    rates = []
    for advance in (False, True, True):
        backend.forward_backward([batch], weighted_nll(1.0))
        rates.append(backend.optim_step(advance_schedule=advance).lr)
    assert rates == pytest.approx([0, 0, OPTIM.lr / 10])


def test_forward_gives_padded_log_probs_without_gradients_and_in_order() -> None:
    backend = build(remove_padding=True)
    batch = tiny_batch()
    outputs = backend.forward(cut(batch, (3, 5)), ForwardOptions(entropy=True))
    whole = backend.forward([batch], ForwardOptions(entropy=True))[0]
    for name in ("log_probs", "entropy"):
        pieces = torch.cat([getattr(output, name) for output in outputs])
        assert not pieces.requires_grad
        torch.testing.assert_close(pieces, getattr(whole, name), atol=1e-5, rtol=0)
        assert pieces.shape == batch.tensors["input_ids"].shape
        assert (pieces[batch.tensors["attention_mask"] == 0] == 0).all()
        assert (pieces[:, 0] == 0).all()


def test_last_tokens_asks_for_no_more_than_these() -> None:
    backend = build()
    batch = tiny_batch()
    whole = backend.forward([batch])[0].log_probs
    last = backend.forward([batch], ForwardOptions(last_tokens=5))[0].log_probs
    assert whole is not None
    assert last is not None
    assert (last[:, :-5] == 0).all()
    torch.testing.assert_close(last[:, -5:], whole[:, -5:])


def test_temperature_divides_the_logits() -> None:
    backend = build()
    batch = tiny_batch()
    logits = backend.module.hf_model(
        input_ids=batch.tensors["input_ids"], attention_mask=batch.tensors["attention_mask"]
    ).logits
    expected = (logits[0, :3] / 0.5).log_softmax(-1).gather(-1, batch.tensors["input_ids"][0, 1:4, None]).squeeze(-1)
    found = backend.forward([batch], ForwardOptions(temperature=0.5))[0].log_probs
    assert found is not None
    torch.testing.assert_close(found[0, 1:4], expected.detach(), atol=1e-5, rtol=0)


def test_bfloat16_computes_in_bfloat16_and_keeps_float32_weights() -> None:
    batch = tiny_batch()
    mixed = build(fsdp=FSDPConfig(mixed_precision=MixedPrecisionConfig(param_dtype="bfloat16")))
    exact = build()
    expected, found = (backend.forward([batch])[0].log_probs for backend in (exact, mixed))
    assert expected is not None
    assert found is not None
    # 8 bits of mantissa on values around 4: rounding of 2e-2 is expected, none at all would mean float32 was used.
    assert 1e-5 < float((expected - found).abs().max()) < 0.2
    step(mixed, batch)
    assert {tensor.dtype for _, tensor in mixed.named_weights()} == {torch.float32}


MIXED = FSDPConfig(mixed_precision=MixedPrecisionConfig(param_dtype="bfloat16"))


def test_the_engine_reads_the_weights_that_compute_and_sees_them_change() -> None:
    backend = build(fsdp=MIXED)
    shared = backend.unsharded_model(torch.bfloat16)
    assert shared is not None
    assert backend.unsharded_model(torch.float32) is None
    before = {name: parameter.data_ptr() for name, parameter in shared.named_parameters()}
    step(backend, tiny_batch())
    for name, master in backend.named_weights():
        parameter = shared.get_parameter(name)
        assert parameter.data_ptr() == before[name]
        assert torch.equal(parameter, master.bfloat16()), name


def test_gradients_of_micro_batches_add_up_in_the_masters_dtype() -> None:
    batch = tiny_batch()
    loss_fn = weighted_nll(total_weight(batch))
    together, alone = build(fsdp=MIXED), build(fsdp=MIXED)
    together.forward_backward(cut(batch, (4, 4)), loss_fn)
    added: dict[str, Tensor] = {}
    for piece in cut(batch, (4, 4)):
        alone.forward_backward([piece], loss_fn)
        for name, gradient in alone.named_gradients():
            assert gradient.dtype == torch.float32
            assert torch.equal(gradient, gradient.bfloat16().float()), "one backward pass is in bfloat16"
            added[name] = added[name] + gradient if name in added else gradient.clone()
    for name, gradient in together.named_gradients():
        assert torch.equal(gradient, added[name]), name


def test_masters_learn_from_steps_too_small_for_bfloat16_and_survive_a_checkpoint(tmp_path: Path) -> None:
    small = OPTIM.model_copy(update={"lr": 1e-6})
    straight, saved, resumed = (build(small, MIXED) for _ in range(3))
    for backend in (straight, saved):
        step(backend, tiny_batch())
    saved.save_state(tmp_path)
    resumed.load_state(tmp_path)
    for backend in (straight, resumed):
        step(backend, tiny_batch())
    start = as_numpy(build(small, MIXED).named_weights())
    end = as_numpy(straight.named_weights())
    moved = np.mean([np.mean(end[name] != start[name]) for name in start])
    assert moved > 0.9
    assert largest_difference(as_numpy(resumed.named_weights()), end) == 0.0


def test_a_network_that_only_infers_is_kept_in_the_dtype_it_computes_in() -> None:
    backend = build(None, MIXED)
    assert {tensor.dtype for _, tensor in backend.named_weights()} == {torch.bfloat16}
    trained = build(fsdp=MIXED)
    (reference,), (policy,) = (each.forward([tiny_batch()]) for each in (backend, trained))
    assert reference.log_probs is not None
    assert policy.log_probs is not None
    assert torch.equal(reference.log_probs, policy.log_probs)


def test_weights_come_once_under_the_names_transformers_saves() -> None:
    names = [name for name, _ in build(tied=True).named_weights()]
    assert len(names) == len(set(names))
    assert "lm_head.weight" not in names
    assert "model.embed_tokens.weight" in names
    assert "lm_head.weight" in [name for name, _ in build(tied=False).named_weights()]


def test_the_bias_of_a_sigmoid_router_is_sent_and_saved_though_nothing_trains_it(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, DeepseekV3Config

    config = DeepseekV3Config(
        vocab_size=64, hidden_size=32, intermediate_size=48, moe_intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, n_routed_experts=4, num_experts_per_tok=2, n_group=1,
        topk_group=1, first_k_dense_replace=1, kv_lora_rank=8, q_lora_rank=8, qk_rope_head_dim=8,
        qk_nope_head_dim=8, v_head_dim=8,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    name, bias = "model.layers.1.mlp.gate.e_score_correction_bias", torch.tensor([0.1, 0.2, 0.3, 0.4])
    model.get_buffer(name).copy_(bias)
    backend = build_backend("single", PolicyModel(model), fsdp=FP32, optim=OPTIM)
    biases = {name: tensor for name, tensor in backend.named_weights() if name.endswith("e_score_correction_bias")}
    assert list(biases) == [name]
    assert torch.equal(biases[name], bias)

    export_hf_folder(backend, tmp_path / "hf")
    network = PolicyModel(build_meta_model(tmp_path / "hf"))
    # With masters apart: the network that computes has the bias of the folder, and that of a checkpoint.
    mixed = build_backend("single", network, weights=tmp_path / "hf", fsdp=MIXED, optim=OPTIM)
    assert torch.equal(network.hf_model.get_buffer(name), bias)
    mixed.save_state(tmp_path / "state")
    network.hf_model.get_buffer(name).zero_()
    mixed.load_state(tmp_path / "state")
    assert torch.equal(network.hf_model.get_buffer(name), bias)


def test_export_loads_in_plain_transformers_with_equal_logits(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    backend = build()
    step(backend, tiny_batch())
    export_hf_folder(backend, tmp_path / "out")
    ids = tiny_batch().tensors["input_ids"]
    with torch.no_grad():
        expected = backend.module.hf_model(input_ids=ids).logits
        found = AutoModelForCausalLM.from_pretrained(tmp_path / "out")(input_ids=ids).logits
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)


def test_a_meta_network_is_filled_from_its_folder(tmp_path: Path) -> None:
    source = build()
    export_hf_folder(source, tmp_path)
    network = PolicyModel(build_meta_model(tmp_path), use_remove_padding=False)
    loaded = build_backend("single", network, weights=tmp_path, fsdp=FP32)
    assert largest_difference(as_numpy(source.named_weights()), as_numpy(loaded.named_weights())) == 0.0
    batch = tiny_batch()
    for expected, found in zip(source.forward([batch]), loaded.forward([batch]), strict=True):
        torch.testing.assert_close(found.log_probs, expected.log_probs, atol=1e-6, rtol=0)


def test_a_meta_network_without_weights_is_refused(tmp_path: Path) -> None:
    config = tiny_policy().hf_model.config
    with pytest.raises(ValueError, match="pass weights"):
        build_backend("single", PolicyModel(build_meta_model(config)), fsdp=FP32)


def test_value_and_reward_networks_fill_their_own_output() -> None:
    config = tiny_policy().hf_model.config
    from transformers import LlamaForSequenceClassification, LlamaForTokenClassification

    config.num_labels = 1
    batch = tiny_batch()
    values = build_backend("single", ValueModel(LlamaForTokenClassification(config)), fsdp=FP32).forward([batch])[0]
    assert values.values is not None
    assert values.values.shape == (8, 12)
    scores = build_backend("single", RewardModel(LlamaForSequenceClassification(config)), fsdp=FP32).forward([batch])[0]
    assert scores.scores is not None
    assert scores.scores.shape == (8,)


def test_weight_decay_reaches_matrices_only() -> None:
    network = tiny_policy()
    optimizer = build_optimizer(network.named_parameters(), OPTIM, decayed=decayed_names(network))
    decays = {group["weight_decay"]: {p.dim() for p in group["params"]} for group in optimizer.param_groups}
    assert decays == {OPTIM.weight_decay: {2}, 0.0: {1}}


@pytest.mark.parametrize("name", ["AdamW", "Adam", "SGD"])
def test_every_optimizer_steps(name: str) -> None:
    backend = build(OptimConfig.model_validate({"optimizer": name, "lr": 1e-2}))
    before = as_numpy(backend.named_weights())
    step(backend, tiny_batch())
    assert largest_difference(before, as_numpy(backend.named_weights())) > 0


def test_more_arguments_reach_the_optimizer() -> None:
    network = tiny_policy()
    config = OPTIM.model_copy(update={"override_optimizer_config": {"amsgrad": True, "eps": 0.5}})
    optimizer = build_optimizer(network.named_parameters(), config, decayed=decayed_names(network))
    assert {(group["amsgrad"], group["eps"]) for group in optimizer.param_groups} == {(True, 0.5)}


def test_a_backend_without_optimizer_infers_but_does_not_train() -> None:
    backend = build(None)
    assert backend.forward([tiny_batch()])[0].log_probs is not None
    with pytest.raises(RuntimeError, match="without an optimizer"):
        backend.forward_backward([tiny_batch()], weighted_nll(1.0))


def test_float16_training_is_refused() -> None:
    with pytest.raises(ValueError, match="loss scaling"):
        build(fsdp=FSDPConfig(mixed_precision=MixedPrecisionConfig(param_dtype="float16")))


def test_an_unknown_strategy_names_the_known_ones() -> None:
    with pytest.raises(ValueError, match="single, fsdp, fsdp2"):
        build_backend("ddp", tiny_policy(), fsdp=FP32)


def test_offloaded_state_is_asked_for_back_by_name() -> None:
    backend = build()
    backend.offload(optimizer=False)
    with pytest.raises(RuntimeError, match="params are offloaded; call onload"):
        backend.forward([tiny_batch()])
    backend.onload()
    step(backend, tiny_batch())


def test_onload_and_offload_move_parameters_and_moments_each_when_asked() -> None:
    """The device is `meta`: the one that is not the host, wherever this runs. It holds no numbers, so a copy from it is
    an error: the sign that something was on its way to the host."""
    backend = build()
    step(backend, tiny_batch())
    backend.device = torch.device("meta")
    backend.offload()
    assert _where(backend) == ({"cpu"}, {"cpu"})
    backend.onload(optimizer=False)
    assert _where(backend) == ({"meta"}, {"cpu"})
    backend.onload(params=False)
    assert _where(backend) == ({"meta"}, {"meta"})
    for kept in ({"params": False}, {"optimizer": False}):
        with pytest.raises(NotImplementedError, match="meta"):
            backend.offload(**kept)


def _where(backend: TorchBackend) -> tuple[set[str], set[str]]:
    """The devices of the parameters, and of the optimizer's moments."""
    optimizer = backend._optimizer
    assert optimizer is not None
    moments = [value for state in optimizer.state.values() for value in state.values() if value.dim() > 0]
    return {p.device.type for p in backend.module.parameters()}, {m.device.type for m in moments}


def test_an_offloaded_backend_saves_and_stays_offloaded(tmp_path: Path) -> None:
    backend = build()
    step(backend, tiny_batch())
    backend.offload()
    backend.save_state(tmp_path)
    with pytest.raises(RuntimeError, match="offloaded"):
        backend.forward([tiny_batch()])


def test_weights_alone_can_be_saved_and_loaded(tmp_path: Path) -> None:
    trained, fresh = build(), build()
    step(trained, tiny_batch())
    trained.save_state(tmp_path, contents=["model"])
    assert fresh.load_state(tmp_path, contents=["model"]) == {}
    assert largest_difference(as_numpy(fresh.named_weights()), as_numpy(trained.named_weights())) == 0.0
    with pytest.raises(BrokenCheckpoint, match="saved without optimizer, extra; leave that out"):
        fresh.load_state(tmp_path)


def test_memory_reports_the_host() -> None:
    assert build(None).memory()["memory/host_peak_gib"] > 0
