"""Layouts of single weights: cut over any number of ranks and put together again, against the layouts written out."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dovetail.backends.megatron.families.base import MegatronFamily
from dovetail.backends.megatron.families.registry import family_for, register_family
from dovetail.backends.megatron.families.rotary import Rotary
from dovetail.backends.megatron.families.shards import (
    Columns,
    GateUp,
    GroupedQkv,
    Rows,
    ShardLayout,
    Vocabulary,
    Whole,
    merge_shards,
    read_shard,
)

pytestmark = pytest.mark.distributed


class Stored:
    """Tensors as a file would give them, with a record of what was read."""

    def __init__(self, **tensors: Tensor) -> None:
        self.tensors = tensors
        self.numbers_read = 0

    def read(self, name: str, dim: int | None, start: int, stop: int) -> Tensor:
        tensor = self.tensors[name]
        part = tensor if dim is None else tensor.narrow(dim, start, stop - start)
        self.numbers_read += part.numel()
        return part


def cut(layout: ShardLayout, stored: Stored, shape: tuple[int, ...], parts: int) -> list[Tensor]:
    shards = [torch.full(shape, float("nan")) for _ in range(parts)]
    for part, shard in enumerate(shards):
        read_shard(layout, shard, stored.read, part=part, parts=parts)
    return shards


@pytest.mark.parametrize("parts", [1, 2, 4])
@pytest.mark.parametrize("kind", ["rows", "columns", "gate_up", "qkv", "qkv_bias", "whole"])
def test_cutting_and_merging_gives_the_same_bits_and_reads_each_number_once(kind: str, parts: int) -> None:
    q, k, v = torch.randn(16, 6), torch.randn(8, 6), torch.randn(8, 6)
    gate, up = torch.randn(12, 6), torch.randn(12, 6)
    a = torch.randn(8, 8)
    cases: dict[str, tuple[ShardLayout, dict[str, Tensor], tuple[int, ...]]] = {
        "rows": (Rows(("a",)), {"a": a}, (8 // parts, 8)),
        "columns": (Columns(("a",)), {"a": a}, (8, 8 // parts)),
        "gate_up": (GateUp(("g", "u")), {"g": gate, "u": up}, (24 // parts, 6)),
        # Two groups of two heads of four: on four ranks the cuts fall inside the groups.
        "qkv": (GroupedQkv(("q", "k", "v"), 2, 8, 4), {"q": q, "k": k, "v": v}, (32 // parts, 6)),
        "qkv_bias": (
            GroupedQkv(("q", "k", "v"), 2, 8, 4),
            {"q": q[:, 0], "k": k[:, 0], "v": v[:, 0]},
            (32 // parts,),
        ),
        "whole": (Whole(("a",)), {"a": a}, (8, 8)),
    }
    layout, tensors, shape = cases[kind]
    stored = Stored(**tensors)
    shards = cut(layout, stored, shape, parts)
    merged = dict(merge_shards(layout, shards))
    assert merged.keys() == tensors.keys()
    assert all(torch.equal(merged[name], tensor) for name, tensor in tensors.items())
    total = sum(tensor.numel() for tensor in tensors.values())
    assert stored.numbers_read == total * (parts if kind == "whole" else 1)


def test_groups_lie_as_megatron_reads_them() -> None:
    q, k, v = torch.arange(8.0), torch.arange(10.0, 14), torch.arange(20.0, 24)
    layout = GroupedQkv(("q", "k", "v"), groups=2, query_rows=4, key_rows=2)
    [whole] = cut(layout, Stored(q=q, k=k, v=v), (16,), 1)
    assert whole.tolist() == [0, 1, 2, 3, 10, 11, 20, 21, 4, 5, 6, 7, 12, 13, 22, 23]


def test_each_rank_has_its_own_share_of_gate_and_up() -> None:
    shards = cut(GateUp(("g", "u")), Stored(g=torch.arange(4.0), u=torch.arange(10.0, 14)), (4,), 2)
    assert [shard.tolist() for shard in shards] == [[0, 1, 10, 11], [2, 3, 12, 13]]


def test_padding_of_the_vocabulary_is_zero_and_is_cut_off_again() -> None:
    table = torch.randn(5, 3)
    layout = Vocabulary(("e",), size=5)
    shards = cut(layout, Stored(e=table), (2, 3), 4)
    assert shards[2][1].tolist() == [0, 0, 0]
    assert shards[3].abs().sum() == 0
    [(name, merged)] = merge_shards(layout, shards)
    assert name == "e"
    assert torch.equal(merged, table)


def test_weights_of_another_size_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="gate"):
        cut(GateUp(("gate", "up")), Stored(gate=torch.randn(4, 3), up=torch.randn(4, 3)), (8, 2), 1)


def test_an_unknown_family_is_refused_with_the_known_ones_and_a_new_one_is_found() -> None:
    from transformers import GPT2Config, LlavaConfig

    with pytest.raises(ValueError, match=r"model_type=llava holds a llama beside"):
        family_for(LlavaConfig())
    with pytest.raises(ValueError, match=r"model_type=gpt2 .* deepseek_v3, llama, qwen2, qwen3, qwen3_moe"):
        family_for(GPT2Config())

    from dovetail.backends.megatron.families.llama import LlamaFamily

    class Gpt2(LlamaFamily):
        model_types = ("gpt2-like",)

    class Gpt2LikeConfig(GPT2Config):
        model_type = "gpt2-like"

    family: MegatronFamily = register_family(Gpt2())
    assert family_for(Gpt2LikeConfig()) is family


@pytest.mark.parametrize(
    ("rope", "words"),
    [
        ({"rope_type": "dynamic", "factor": 2.0}, "rope_type=dynamic"),
        ({"rope_type": "yarn", "factor": 4.0, "attention_factor": 3.0}, "attention_factor=3.0"),
        ({"rope_type": "default", "partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
    ],
)
def test_rotary_embeddings_that_megatron_would_compute_wrongly_are_refused(rope: dict, words: str) -> None:
    from transformers import LlamaConfig

    config = LlamaConfig(max_position_embeddings=64)
    config.rope_parameters = {"rope_theta": 1e4, "original_max_position_embeddings": 32, **rope}
    with pytest.raises(ValueError, match=words):
        Rotary.of(config)
