"""Router replay: recorded experts are used again, whatever the routers would choose, and nothing else changes."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from transformers import AutoModelForCausalLM

from dovetail.models.activations import enable_gradient_checkpointing
from dovetail.models.errors import ModelError
from dovetail.models.policy import PolicyModel
from dovetail.models.router_replay import RouterReplay, refuse_unknown_routers
from dovetail.protocol.routed_experts import at_places, by_row, expert_dtype, not_recorded
from tests.models.tiny import ragged_batch, run_model, tiny_model

pytestmark = pytest.mark.unit

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_moe": ("qwen3_moe", {}),
    "qwen3_moe_raw": ("qwen3_moe", {"norm_topk_prob": False}),
    "qwen2_moe": ("qwen2_moe", {}),
    "mixtral": ("mixtral", {}),
    "olmoe": ("olmoe", {}),
    "deepseek_v3": ("deepseek_v3", {}),
}
ROWS = ragged_batch([9, 5, 12], side="both")


def policy(name: str = "qwen3_moe", *, checkpointing: bool = False, **settings: Any) -> PolicyModel:
    family, fields = FAMILIES[name]
    model = tiny_model(family, **fields)
    for part_name, buffer in model.named_buffers():
        if part_name.endswith("e_score_correction_bias"):
            buffer.copy_(torch.linspace(-0.2, 0.2, len(buffer)))
    replay = RouterReplay(model)
    if checkpointing:
        enable_gradient_checkpointing(model)
    return PolicyModel(model, router_replay=replay, **settings)


def recorded(model: PolicyModel, rows: dict[str, Any] = ROWS) -> np.ndarray:
    with torch.no_grad():
        out = run_model(model, **rows, record_experts=True)
    return by_row(out.routed_experts, rows["attention_mask"])


def shake_routers(model: PolicyModel) -> PolicyModel:
    """As after an update: other experts are the best for many tokens."""
    torch.manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(".gate.weight"):
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def gradients(model: PolicyModel, **options: Any) -> tuple[Tensor, dict[str, Tensor]]:
    model.train()
    log_probs = run_model(model, **ROWS, **options).log_probs
    (log_probs * torch.linspace(0.5, 1.5, log_probs.numel()).view_as(log_probs)).sum().backward()
    return log_probs.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@contextmanager
def experts_used(model: PolicyModel) -> Iterator[list[Tensor]]:
    """What each layer's experts are called with, `[n, k]`, in the order of layers."""
    used: list[Tensor] = []
    parts = [part for name, part in model.named_modules() if name.endswith(".experts")]
    handles = [part.register_forward_pre_hook(lambda _, args: used.append(args[1])) for part in parts]
    yield used
    for handle in handles:
        handle.remove()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_router_that_replays_its_own_choice_changes_no_bit(family: str) -> None:
    model = policy(family)
    experts = recorded(model)
    plain, expected = gradients(model)
    model.zero_grad()
    replayed, found = gradients(model, routed_experts=experts)
    assert torch.equal(plain, replayed)
    assert any(name.endswith("gate.weight") and bool(gradient.any()) for name, gradient in found.items())
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_recorded_experts_are_used_when_the_routers_would_choose_others(family: str) -> None:
    model = policy(family)
    experts = recorded(model)
    shake_routers(model)
    flat = torch.from_numpy(np.concatenate(list(experts))).long()
    with experts_used(model) as used:
        out = run_model(model, **ROWS, routed_experts=experts)
    assert torch.equal(torch.stack(used, dim=1), flat)
    assert float(out.routing_changed.sum()) > 0, "the metric says that routers would choose others"
    with experts_used(model) as used:
        plain = run_model(model, **ROWS)
    same = torch.stack(used, dim=1).sort().values == flat.sort().values
    assert float((~same).float().mean()) > 0.1
    assert plain.routing_changed is None
    assert (plain.log_probs - out.log_probs).abs().max() > 1e-3


def test_the_weights_are_those_of_todays_router_over_the_recorded_experts() -> None:
    model = policy("deepseek_v3")
    experts = torch.from_numpy(np.concatenate(list(recorded(model)))).long()
    shake_routers(model)
    seen: dict[str, Tensor] = {}
    gate = model.hf_model.model.layers[1].mlp.gate
    gate.register_forward_hook(lambda _, args, output: seen.update(hidden=args[0], weights=output[1]))
    run_model(model, **ROWS, routed_experts=list(recorded(policy("deepseek_v3"))))
    scores = torch.sigmoid(seen["hidden"].flatten(0, 1).float() @ gate.weight.float().T)
    chosen = scores.gather(1, experts[:, 0])
    expected = 2.5 * chosen / chosen.sum(-1, keepdim=True)
    torch.testing.assert_close(seen["weights"], expected)


def test_recomputed_layers_replay_too() -> None:
    experts = recorded(policy())
    kept = gradients(shake_routers(policy()), routed_experts=experts)
    recomputed = gradients(shake_routers(policy(checkpointing=True)), routed_experts=experts)
    assert torch.equal(kept[0], recomputed[0])
    assert all(torch.equal(kept[1][name], recomputed[1][name]) for name in kept[1])


def test_packed_padded_and_shared_prefixes_replay_alike() -> None:
    rows = ragged_batch([12, 12, 10], side="right")
    rows["input_ids"][1, :5] = rows["input_ids"][0, :5]
    rows["input_ids"][2, :5] = rows["input_ids"][0, :5]
    experts = recorded(policy(), rows)
    layouts: dict[str, dict[str, Any]] = {
        "packed": {}, "padded": {"use_remove_padding": False}, "shared": {"share_prefixes": True},
    }  # fmt: skip
    found, tokens = {}, {}
    for name, settings in layouts.items():
        model = shake_routers(policy(**settings))
        with experts_used(model) as used:
            found[name] = run_model(model, **rows, routed_experts=experts).log_probs
        tokens[name] = len(used[0])
        again = recorded(policy(**settings), rows)
        assert all(np.array_equal(a, b) for a, b in zip(again, experts, strict=True)), name
    assert tokens == {"packed": 34, "padded": 36, "shared": 24}
    torch.testing.assert_close(found["padded"], found["packed"], atol=1e-5, rtol=0)
    torch.testing.assert_close(found["shared"], found["packed"], atol=1e-5, rtol=0)


@pytest.mark.parametrize("num_experts", [4, 300])
def test_tokens_without_a_record_are_routed_as_the_router_says(num_experts: int) -> None:
    dtype = expert_dtype(num_experts)
    assert not_recorded(dtype) >= num_experts
    model = policy()
    experts = list(recorded(model))
    shake_routers(model)
    plain = run_model(model, **ROWS).log_probs
    unknown = [np.full_like(row, not_recorded(torch.uint8)) for row in experts]
    assert torch.equal(run_model(model, **ROWS, routed_experts=unknown).log_probs, plain)
    last = [row[:-1] for row in experts]  # engines do not run their last token
    replayed = run_model(model, **ROWS, routed_experts=experts).log_probs
    torch.testing.assert_close(run_model(model, **ROWS, routed_experts=last).log_probs, replayed, atol=1e-6, rtol=0)


def test_compiled_layers_replay_what_each_call_brings() -> None:
    torch._dynamo.reset()
    experts = recorded(policy())
    others = [row[:, :, ::-1].copy() for row in recorded(shake_routers(policy()))]
    plain, compiled = policy(), policy()
    programs = CompileCounter()
    for layer in compiled.hf_model.model.layers:
        layer.compile(dynamic=True, backend=programs)
    run_model(compiled, **ROWS)
    before = programs.frame_count  # layers may be compiled ahead, where nothing is replayed
    for routed in (experts, others, None, experts):
        out = run_model(compiled, **ROWS, routed_experts=routed, record_experts=True)
        expected = run_model(plain, **ROWS, routed_experts=routed, record_experts=True)
        assert torch.equal(out.routed_experts, expected.routed_experts)
        torch.testing.assert_close(out.log_probs, expected.log_probs, atol=1e-6, rtol=0)
    assert programs.frame_count == before > 0


def test_rows_that_share_a_token_send_it_to_the_experts_of_the_first() -> None:
    first, second = np.full((3, 1, 2), 1, np.uint8), np.full((2, 1, 2), 2, np.uint8)
    places = torch.tensor([[-1, 0, 1, 2], [0, 1, 3, -1]])  # the second row has no record of its last token
    row = at_places([first, second], places, 4)
    assert row[:, 0, 0].tolist() == [1, 1, 1, not_recorded(torch.uint8)]
    alone = at_places([first[:1], second], places, 4)
    assert alone[:, 0, 0].tolist() == [1, 2, 255, 255]


SAME_CODE = {
    "Glm4MoeConfig": "deepseek_v3", "FlexOlmoConfig": "olmoe", "Qwen3NextConfig": "olmoe",
}  # fmt: skip


@pytest.mark.parametrize("config", SAME_CODE)
def test_routers_of_other_families_are_the_code_of_one_that_is_tested(config: str) -> None:
    fields = {"num_hidden_layers": 2, "first_k_dense_replace": 1}
    with torch.device("meta"):
        other = AutoModelForCausalLM.from_config(getattr(transformers, config)(**fields))
    refuse_unknown_routers(other)
    mine = tiny_model(SAME_CODE[config])

    def code(model: Any) -> set[str]:
        routers = [part for part in model.modules() if type(part).__name__.lower().endswith("topkrouter")]
        return {inspect.getsource(type(router).forward) for router in routers}

    assert code(other) == code(mine)
    assert len(code(mine)) == 1


@pytest.mark.parametrize("family", ["qwen3", "falcon_h1"])
def test_a_model_without_known_routers_is_refused(family: str) -> None:
    with pytest.raises(ModelError, match=r"no experts.*router_replay.mode=disabled"):
        refuse_unknown_routers(tiny_model(family))


def test_layers_whose_router_is_unknown_are_refused() -> None:
    model = tiny_model("mixtral")
    gate = model.model.layers[1].mlp.gate
    gate.__class__ = type("OtherRouter", (type(gate),), {})
    with pytest.raises(ModelError, match="2 layers with experts, 1 of them with such a router"):
        RouterReplay(model)
