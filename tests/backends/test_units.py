"""Which modules `apply_fsdp2` shards on their own, and with what."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from dovetail.backends import fsdp2
from dovetail.backends.device_memory import driver_is_short
from dovetail.backends.fsdp2 import apply_fsdp2
from dovetail.backends.sharding import sharding_units
from dovetail.config.fsdp import FSDPConfig, WrapPolicyConfig
from tests.backends.tiny import tiny_policy

pytestmark = pytest.mark.unit


def names(model: nn.Module, **policy: Any) -> list[str]:
    by_module = {module: name.removeprefix("hf_model.") for name, module in model.named_modules()}
    return [by_module[unit] for unit in sharding_units(model, WrapPolicyConfig(**policy))]


def test_layers_and_an_embedding_of_its_own_are_units() -> None:
    assert set(names(tiny_policy(tied=False))) == {"model.layers.0", "model.layers.1", "model.embed_tokens"}


def test_an_embedding_that_is_also_the_head_stays_with_the_root() -> None:
    assert set(names(tiny_policy(tied=True))) == {"model.layers.0", "model.layers.1"}


def test_classes_may_be_named_and_come_from_the_inside_out() -> None:
    found = names(tiny_policy(tied=True), transformer_layer_cls_to_wrap=["LlamaMLP", "LlamaDecoderLayer"])
    assert set(found) == {f"model.layers.{i}{part}" for i in (0, 1) for part in ("", ".mlp")}
    assert all(found.index(f"model.layers.{i}.mlp") < found.index(f"model.layers.{i}") for i in (0, 1))


def test_a_class_that_the_model_does_not_have_is_refused_with_the_key() -> None:
    with pytest.raises(ValueError, match=r"no module of class Qwen2DecoderLayer.*transformer_layer_cls_to_wrap"):
        names(tiny_policy(), transformer_layer_cls_to_wrap=["Qwen2DecoderLayer"])


def test_modules_may_be_chosen_by_their_size() -> None:
    network = tiny_policy(tied=True)
    size = {
        name.removeprefix("hf_model."): sum(p.numel() for p in m.parameters()) for name, m in network.named_modules()
    }
    # Each MLP is large enough; what is left of a layer around it is not.
    assert set(names(network, min_num_params=size["model.layers.0.mlp"])) == {f"model.layers.{i}.mlp" for i in (0, 1)}
    assert names(network, min_num_params=10**9) == []


def test_one_unit_for_the_whole_model_on_request() -> None:
    assert names(tiny_policy(), disable=True) == []


def test_every_unit_is_sharded_before_the_root_with_the_arguments_given(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[nn.Module, dict[str, Any]]] = []
    monkeypatch.setattr(fsdp2, "fully_shard", lambda module, **options: calls.append((module, options)))
    network = tiny_policy(tied=False)
    assert apply_fsdp2(network, {"mesh": "m", "reshard_after_forward": False}, FSDPConfig()) is network
    modules = [module for module, _ in calls]
    assert modules == [*sharding_units(network, WrapPolicyConfig()), network]
    assert all(options == {"mesh": "m", "reshard_after_forward": False} for _, options in calls)


@pytest.mark.parametrize(("free", "is_short"), [(9, True), (11, False)])
def test_a_tenth_of_the_device_is_left_to_the_driver(
    monkeypatch: pytest.MonkeyPatch, free: int, is_short: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free << 30, 100 << 30))
    assert driver_is_short(torch.device("cuda")) is is_short
    assert not driver_is_short(torch.device("cpu"))
