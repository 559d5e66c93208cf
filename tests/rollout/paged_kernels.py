"""Triton kernels of the paged engine against plain PyTorch; on CPU through Triton's interpreter.

Run by `test_paged_kernels.py`, which sets what Triton reads at its import.
"""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from dovetail.models import exact as exact_modules
from dovetail.models.kernels import exact as exact_kernels
from dovetail.models.kernels.paged_attention import prefill_attention
from dovetail.models.policy import PolicyModel
from dovetail.rollout import GenerationRequest
from dovetail.rollout.base import SamplingParams
from dovetail.rollout.native.cuda.decoder import FusedDecoder
from dovetail.rollout.native.cuda.kernels import attention, small_batch
from dovetail.rollout.native.cuda.kernels import linear as linear_kernels
from dovetail.rollout.native.cuda.kernels.attention import decode_attention
from dovetail.rollout.native.cuda.kernels.device import Device
from dovetail.rollout.native.cuda.kernels.filtering import keep
from dovetail.rollout.native.cuda.kernels.layer import add_rms_norm, rms_norm, rotate_and_store, silu_mul
from dovetail.rollout.native.cuda.kernels.ops import Ops, triton_ops
from dovetail.rollout.native.cuda.kernels.rows import begin_rows, end_rows
from dovetail.rollout.native.cuda.kernels.sampling import draw
from dovetail.rollout.native.cuda.paged_step import PagedDecode
from dovetail.rollout.native.cuda.pages import KVShape, PagePool
from dovetail.rollout.native.cuda.slots import SlotState
from dovetail.rollout.native.engine import NativeEngine
from dovetail.rollout.native.noise import stream_key
from dovetail.rollout.native.sampler import Filters, SamplingRows, cut_to_masks, filter_weights, sample
from tests.models.tiny import run_model, tiny_model
from tests.rollout import plain_ops as plain

pytestmark = pytest.mark.unit

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
PAGE, NUM_KV, HEAD = 16, 2, 24  # a head size that is no power of two


def randn(*size: int) -> torch.Tensor:
    return torch.randn(*size, device=DEVICE)


def pages_for(lengths: list[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A pool with NaN in every entry that no sequence holds, and a table of pages in scrambled order."""
    counts = [-(-length // PAGE) for length in lengths]
    order = torch.randperm(sum(counts) + 3).tolist()
    keys, values = (torch.full((len(order), NUM_KV, PAGE, HEAD), float("nan"), device=DEVICE) for _ in range(2))
    table = torch.zeros(len(lengths), max(*counts, 1), dtype=torch.int32, device=DEVICE)
    for row, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        for column in range(count):
            page = order.pop()
            table[row, column] = page
            inside = min(PAGE, length - column * PAGE)
            keys[page, :, :inside] = randn(NUM_KV, inside, HEAD)
            values[page, :, :inside] = randn(NUM_KV, inside, HEAD)
    return keys, values, table


def gathered(pool: torch.Tensor, table: torch.Tensor, row: int, length: int) -> torch.Tensor:
    """(kv heads, length, head size) of one sequence."""
    return pool[table[row].long()].transpose(0, 1).flatten(1, 2)[:, :length]


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, atol=2e-6, rtol=2e-5)


def hide_before(pools: tuple[torch.Tensor, torch.Tensor], table: torch.Tensor, firsts: list[int]) -> None:
    """NaN in every entry before the first that each sequence may read."""
    for row, first in enumerate(firsts):
        for place in range(first):
            for pool in pools:
                pool[table[row, place // PAGE], :, place % PAGE] = float("nan")


# The longest has five pages.
@pytest.mark.parametrize(("num_splits", "window"), [(1, None), (4, None), (8, None), (1, 16), (4, 23), (8, 1)])
def test_decode_attention_reads_each_sequence_to_its_own_length(num_splits: int, window: int | None) -> None:
    torch.manual_seed(0)
    lengths = [1, 16, 17, 70, 0, 33]
    keys, values, table = pages_for(lengths)
    firsts = [0 if window is None else max(0, length - window) for length in lengths]
    hide_before((keys, values), table, firsts)
    order = [3, 0, 5, 4, 2, 1]
    slots = torch.tensor(order, dtype=torch.int32, device=DEVICE)
    query = randn(len(order), 3 * NUM_KV * HEAD)
    found = decode_attention(
        query,
        keys,
        values,
        table,
        slots,
        torch.tensor([lengths[slot] for slot in order], dtype=torch.int32, device=DEVICE),
        0.3,
        num_splits=num_splits,
        window=window,
    )
    for row, slot in enumerate(order):
        if lengths[slot] == 0:
            assert found[row].abs().max() == 0
            continue
        expected = F.scaled_dot_product_attention(
            query[row].view(NUM_KV, 3, HEAD),
            gathered(keys, table, slot, lengths[slot])[:, firsts[slot] :],
            gathered(values, table, slot, lengths[slot])[:, firsts[slot] :],
            scale=0.3,
        )
        close(found[row], expected.flatten())


@pytest.mark.parametrize(
    ("pairs", "num_splits", "page_kib", "large", "expected"),
    [
        (128, 1, 32, True, (4, 9, True)),  # one program for each multiprocessor: four pages on their way to it
        (2, 32, 32, True, (4, 5, True)),
        (256, 1, 32, True, (4, 5, True)),  # two of them
        (128, 1, 64, True, (4, 5, True)),  # float32: as many pages as there is room for
        (128, 1, 256, True, (4, 3, True)),
        (1024, 1, 32, True, (2, 3, False)),
        (128, 1, 32, False, (2, 3, False)),  # a card with little shared memory
    ],
)
def test_few_programs_have_many_pages_on_their_way_within_the_shared_memory(
    pairs: int,
    num_splits: int,
    page_kib: int,
    large: bool,
    expected: tuple[int, int, bool],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(attention, "described", lambda _: Device(132, large))
    monkeypatch.setattr(attention, "overlaps", lambda _: True)
    assert attention._launch(torch.device("cuda"), pairs, num_splits, page_kib << 10) == expected


@pytest.mark.parametrize("window", [None, 1, 16, 23])
def test_prefill_attention_is_causal_within_and_full_before_a_segment(window: int | None) -> None:
    torch.manual_seed(1)
    before, counts = [0, 20, 5], [37, 9, 1]
    lengths = [b + c for b, c in zip(before, counts, strict=True)]
    keys, values, table = pages_for(lengths)
    query = randn(sum(counts), 3 * NUM_KV * HEAD)
    starts = [0, 37, 46]
    found = prefill_attention(
        query,
        keys,
        values,
        table,
        torch.tensor([[0, 0], [0, 16], [0, 32], [1, 0], [2, 0]], dtype=torch.int32, device=DEVICE),
        torch.tensor(list(zip(starts, counts, before, strict=True)), dtype=torch.int32, device=DEVICE),
        0.3,
        block_size=16,
        window=window,
    )
    for i, (start, count, length) in enumerate(zip(starts, counts, lengths, strict=True)):
        places = torch.arange(length - count, length, device=DEVICE)[:, None]
        mask = torch.arange(length, device=DEVICE) <= places
        if window is not None:
            mask &= torch.arange(length, device=DEVICE) > places - window
        expected = F.scaled_dot_product_attention(
            query[start : start + count].view(count, NUM_KV * 3, HEAD).transpose(0, 1),
            gathered(keys, table, i, length).repeat_interleave(3, 0),
            gathered(values, table, i, length).repeat_interleave(3, 0),
            attn_mask=mask,
            scale=0.3,
        )
        close(found[start : start + count], expected.transpose(0, 1).flatten(1))


def test_a_window_skips_pages_and_leaves_every_token_the_bits_it_has_alone() -> None:
    torch.manual_seed(1)
    keys, values, table = pages_for([70])
    query = randn(20, 3 * NUM_KV * HEAD)

    def attend(first: int, count: int) -> torch.Tensor:
        blocks, segments = ([[0, start] for start in range(0, count, 16)], [[0, count, 50 + first]])
        inputs = [torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in (blocks, segments)]
        tokens = query[first : first + count]
        return prefill_attention(tokens, keys, values, table, *inputs, 0.3, block_size=16, window=10)

    together = attend(0, 20)
    assert torch.equal(together, torch.cat([attend(token, 1) for token in range(20)]))
    hide_before((keys, values), table, [32])  # the first query, 50, sees from 41 on, in the page that begins at 32
    assert torch.equal(together, attend(0, 20))
    assert torch.isfinite(together).all()


@pytest.mark.parametrize("window", [None, 23])
def test_heads_of_a_token_in_one_block_have_the_bits_of_a_block_each(window: int | None) -> None:
    torch.manual_seed(1)
    lengths = [37, 1, 20]
    keys, values, table = pages_for(lengths)
    query = randn(3, 3 * NUM_KV * HEAD)
    blocks = torch.tensor([[2, 0], [0, 0], [1, 0]], dtype=torch.int32, device=DEVICE)
    segments = [(row, 1, length - 1) for row, length in enumerate(lengths)]
    inputs = query, keys, values, table, blocks, torch.tensor(segments, dtype=torch.int32, device=DEVICE), 0.3
    together = prefill_attention(*inputs, block_size=16, heads_together=True, window=window)
    assert torch.equal(together, prefill_attention(*inputs, block_size=16, window=window))


def test_rms_norm_adds_and_normalises() -> None:
    x, residual, weight = randn(5, 40), randn(5, 40), randn(40)
    close(rms_norm(x, weight, 1e-5), F.rms_norm(x, (40,), weight, 1e-5))
    total = x + residual
    close(add_rms_norm(x, residual, weight, 1e-5), F.rms_norm(total, (40,), weight, 1e-5))
    close(residual, total)


def some_rows(count: int) -> list[slice]:
    """The same rows in batches of other sizes, at other places."""
    return [slice(0, 1), slice(count - 1, count), slice(2, 9), slice(count // 2, count)]


@pytest.mark.parametrize("inputs", [40, 200])
def test_a_row_of_an_exact_product_does_not_depend_on_the_other_rows(inputs: int) -> None:
    torch.manual_seed(2)
    x, weight, bias = half(150, inputs), half(70, inputs), half(70)
    whole = exact_kernels.linear(x, weight, bias, torch.float32)
    near(whole, F.linear(x.float(), weight.float(), bias.float()))
    for rows in some_rows(150):
        assert torch.equal(exact_kernels.linear(x[rows], weight, bias, torch.float32), whole[rows])
    assert torch.equal(exact_kernels.linear(x, weight, None, x.dtype), exact_kernels.linear(x, weight, None, x.dtype))


def test_rows_of_exact_norms_and_log_probs_do_not_depend_on_the_other_rows() -> None:
    torch.manual_seed(3)
    x, weight = randn(30, 40), randn(40)
    normed = exact_kernels.rms_norm(x, weight, 1e-5)
    close(normed, F.rms_norm(x, (40,), weight, 1e-5))
    logits, labels = 3 * randn(30, 5000), torch.randint(5000, (30,), device=DEVICE)
    temperatures = torch.rand(30, device=DEVICE) + 0.5
    log_probs = exact_kernels.label_log_probs(logits, labels, temperatures)
    close(log_probs, (logits / temperatures[:, None]).log_softmax(-1).gather(-1, labels[:, None])[:, 0])
    for rows in some_rows(30):
        assert torch.equal(exact_kernels.rms_norm(x[rows], weight, 1e-5), normed[rows])
        found = exact_kernels.label_log_probs(logits[rows], labels[rows], temperatures[rows])
        assert torch.equal(found, log_probs[rows])


@pytest.mark.slow  # `test_exact.py` has the same on a CPU's own operations, and the kernels are tested above
@pytest.mark.parametrize("family", ["qwen3", "mistral_window"])
def test_an_exact_engine_writes_the_log_probs_of_an_exact_trainer(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefill in parts, decoding and training, all through the kernels."""
    monkeypatch.setattr(exact_modules, "_has_kernels", lambda x: True)
    model = tiny_model(family, num_hidden_layers=1).to(DEVICE)
    exact_modules.use_exact_modules(model)
    generator = torch.Generator().manual_seed(0)
    asked = [
        GenerationRequest(
            str(number),
            torch.randint(3, 300, (length,), generator=generator).tolist(),
            SamplingParams(max_new_tokens=2 + number, temperature=0.8, seed=number, ignore_eos=True),
        )
        for number, length in enumerate((3, 70))
    ]
    engine = NativeEngine(model, exact=True, ops=triton_ops(), max_num_seqs=2, max_prefill_tokens=40)
    results = engine.generate(asked)
    ids, mask = (torch.zeros(2, 80, dtype=torch.long) for _ in range(2))
    for row, (request, result) in enumerate(zip(asked, results, strict=True)):
        sequence = [*request.prompt_token_ids, *result.token_ids]
        ids[row, : len(sequence)], mask[row, : len(sequence)] = torch.tensor(sequence), 1
    log_probs = run_model(PolicyModel(model), ids, mask, temperature=0.8).log_probs.detach().cpu()
    for row, result in enumerate(results):
        first = len(asked[row].prompt_token_ids)
        assert torch.equal(torch.tensor(result.log_probs), log_probs[row, first : first + len(result.log_probs)])


def test_silu_mul() -> None:
    gate, up = randn(3, 1000), randn(3, 1000)
    expected = F.silu(gate) * up
    close(silu_mul(gate, up), expected)


def half(*size: int) -> torch.Tensor:
    """bfloat16 on CUDA; the interpreter knows float16 better."""
    return (randn(*size) * 0.1).to(torch.bfloat16 if DEVICE.type == "cuda" else torch.float16)


def near(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Within the rounding of half precision."""
    assert distance(found, expected) < 6e-3


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.float() - expected.float()).norm() / expected.float().norm())


@pytest.mark.parametrize("rows", [1, 5, 33, 60])
@pytest.mark.parametrize("bias", [True, False])
def test_norm_projections_rotary_and_storing_in_one_launch(rows: int, bias: bool) -> None:
    torch.manual_seed(6)
    width, head, heads, page = 128, 32, 4, 16
    table, norm = half(40, width), 1 + half(width)
    tokens = torch.randint(0, 40, (rows,), device=DEVICE)
    residual, scaled = small_batch.embed(tokens, table, norm)
    assert torch.equal(residual, table[tokens])
    near(scaled.x, residual * norm)
    close(scaled.squares.sum(0), residual.float().pow(2).sum(1))
    weights = [half(heads * head, width), half(NUM_KV * head, width), half(NUM_KV * head, width)]
    biases = [half(weight.shape[0]) if bias else None for weight in weights]
    rotation = (half(80, head) * 10, half(80, head) * 10)
    positions = torch.randint(0, 80, (rows,), device=DEVICE)
    targets = torch.randperm(4 * page, device=DEVICE)[:rows]
    targets[rows // 2] = -1
    pools = [[torch.full((4, NUM_KV, page, head), 7.0).to(norm) for _ in range(2)] for _ in range(2)]
    query = small_batch.norm_qkv(scaled, 1e-5, weights, biases, rotation, positions, *pools[0], targets)
    expected, key, value = plain.project_qkv(plain.rms_norm(residual, norm, 1e-5), weights, biases)
    plain.rotate_and_store(expected, key, value, *pools[1], targets, (rotation[0][positions], rotation[1][positions]))
    near(query, expected)
    for found, wanted in zip(*pools, strict=True):
        assert torch.equal(found == 7, wanted == 7), "the same entries are written"
        if rows > 1:
            near(found, wanted)


@pytest.mark.parametrize("rows", [1, 5, 33, 60])
def test_norm_and_gated_feed_forward_in_one_launch(rows: int) -> None:
    torch.manual_seed(7)
    norm, gate, up = 1 + half(128), half(96, 128), half(96, 128)
    residual, scaled = small_batch.embed(torch.arange(rows, device=DEVICE), half(rows, 128), norm)
    found = small_batch.norm_gated(scaled, 1e-5, gate, up)

    def layer(*inputs: torch.Tensor) -> torch.Tensor:
        x, scale, *weights = inputs
        return plain.gated(plain.rms_norm(x, scale, 1e-5), *weights)

    # The plain layer rounds six times where the kernel rounds twice, so it is no measure of the kernel: float32 is.
    inputs = (residual, norm, gate, up)
    exact = layer(*(tensor.float() for tensor in inputs))
    assert distance(found, exact) < distance(layer(*inputs), exact)


@pytest.mark.parametrize(("rows", "width"), [(1, 256), (5, 1024), (33, 1536), (60, 512)])
def test_a_long_sum_is_added_up_by_the_program_that_ends_last(rows: int, width: int) -> None:
    torch.manual_seed(8)
    x, weight, residual, norm = half(rows, width), half(64, width), half(rows, 64), 1 + half(64)
    locks = torch.zeros(8, dtype=torch.int32, device=DEVICE)
    expected = residual + F.linear(x, weight)
    for _ in range(2):
        again = residual.clone()
        scaled = small_batch.linear_add(x, weight, again, norm, locks)
        near(again, expected)
        near(scaled.x, again * norm)
        close(scaled.squares.sum(0), again.float().pow(2).sum(1))
        assert not locks.any(), "as the next kernel needs them"


@pytest.mark.parametrize(
    ("family", "num_splits"),
    [
        pytest.param("llama", 1, marks=pytest.mark.slow),
        ("qwen2", 4),  # with biases
        pytest.param("llama", 4, marks=pytest.mark.slow),
        pytest.param("qwen2", 1, marks=pytest.mark.slow),
    ],
)
@torch.inference_mode()
def test_a_step_of_a_small_batch_is_as_near_to_float32_as_one_of_the_plain_layers(
    family: str, num_splits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(9)
    model = tiny_model(family, intermediate_size=256).to(DEVICE, half(1).dtype)
    lengths = [1, 16, 17, 70, 33]
    _, _, table = pages_for(lengths)
    where = torch.tensor(lengths, device=DEVICE) - 1
    rows = torch.arange(len(lengths), device=DEVICE)
    targets = table[rows, where // PAGE].long() * PAGE + where % PAGE
    locks = torch.zeros(64, dtype=torch.int32, device=DEVICE)

    def step(network: Any, ops: Ops) -> tuple[torch.Tensor, torch.Tensor]:
        text, head_dim = network.config, network.model.layers[0].self_attn.head_dim
        pool = PagePool(
            KVShape(text.num_hidden_layers, text.num_key_value_heads, head_dim, PAGE, network.dtype), DEVICE
        )
        pool.resize(int(table.max()) + 4)
        torch.manual_seed(10)
        for side in (*pool.keys, *pool.values):
            side.copy_(half(*side.shape))
        decode = PagedDecode(
            pool,
            table,
            rows.int(),
            torch.tensor(lengths, dtype=torch.int32, device=DEVICE),
            targets,
            num_splits,
            locks,
            ops,
        )
        [(_, logits)] = FusedDecoder(network, ops).logits(rows + 5, where, decode)
        assert not locks.any()
        return logits, torch.stack([*pool.keys, *pool.values])

    plain_layers = SimpleNamespace(**{**vars(triton_ops()), "small_batch": None})
    monkeypatch.setattr(small_batch, "DTYPES", {model.dtype})
    few = step(model, triton_ops())
    layers = step(model, plain_layers)
    exact = step(copy.deepcopy(model).float(), plain_layers)
    for found, usual, wanted in zip(few, layers, exact, strict=True):
        assert distance(found, wanted) < 1.2 * distance(usual, wanted)
    assert not torch.equal(few[0], layers[0]), "two ways to compute, or this compares nothing"


@pytest.mark.parametrize("rows", [3, 70])
@pytest.mark.parametrize("bias", [True, False])
def test_three_projections_in_one_launch(rows: int, bias: bool) -> None:
    torch.manual_seed(4)
    x, weights = half(rows, 128), [half(128, 128), half(64, 128), half(64, 128)]
    biases = [half(w.shape[0]) if bias else None for w in weights]
    expected = plain.project_qkv(x, weights, biases)
    for a, b in zip(linear_kernels.project_qkv(x, weights, biases), expected, strict=True):
        near(a, b)


@pytest.mark.parametrize("rows", [1, 20])
def test_a_small_batch_through_the_gated_feed_forward(rows: int) -> None:
    torch.manual_seed(5)
    x, gate, up = half(rows, 256), half(96, 256), half(96, 256)
    near(linear_kernels.gated(x, gate, up), plain.gated(x, gate, up))


@pytest.mark.parametrize("width", [128, 1408])
def test_a_sum_cut_in_parts_is_added_up_in_the_norm(width: int) -> None:
    torch.manual_seed(6)
    x, weight, residual, norm = half(5, width), half(96, width), half(5, 96), half(96)
    expected_residual = residual.clone()
    expected = plain.linear_add_norm(x, weight, expected_residual, norm, 1e-6)
    near(linear_kernels.linear_add_norm(x, weight, residual, norm, 1e-6), expected)
    near(residual, expected_residual)


@pytest.mark.parametrize("norm", [False, True])
def test_heads_are_normed_rotated_and_stored_where_the_targets_say(norm: bool) -> None:
    torch.manual_seed(2)
    tokens, num_heads = 4, 6
    query, key, value = randn(tokens, num_heads * HEAD), randn(tokens, NUM_KV * HEAD), randn(tokens, NUM_KV * HEAD)
    angles = randn(tokens, HEAD // 2).repeat(1, 2)
    cosine, sine = angles.cos(), angles.sin()
    weights = (randn(HEAD), randn(HEAD)) if norm else (None, None)
    keys = torch.full((3, NUM_KV, PAGE, HEAD), 7.0, device=DEVICE)
    values = keys.clone()
    targets = torch.tensor([0, 2 * PAGE + 5, -1, PAGE + 15], device=DEVICE)

    def expected(heads: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        heads = heads.view(tokens, -1, HEAD)
        heads = heads if weight is None else F.rms_norm(heads, (HEAD,), weight, 1e-6)
        low, high = heads.chunk(2, -1)
        return heads * cosine[:, None] + torch.cat((-high, low), -1) * sine[:, None]

    expected_query, expected_key = expected(query, weights[0]), expected(key, weights[1])
    rotate_and_store(
        query, key, value, keys, values, targets, (cosine, sine), query_norm=weights[0], key_norm=weights[1], eps=1e-6
    )
    close(query.view(tokens, num_heads, HEAD), expected_query)
    stored = [(0, 0, 0), (1, 2, 5), (3, 1, 15)]
    for token, page, offset in stored:
        close(keys[page, :, offset], expected_key[token])
        close(values[page, :, offset], value[token].view(NUM_KV, HEAD))
        keys[page, :, offset] = values[page, :, offset] = 7.0
    assert (keys == 7).all()
    assert (values == 7).all()


def test_heads_that_are_rotated_already_are_only_stored() -> None:
    query, key, value = randn(2, 6 * HEAD), randn(2, NUM_KV * HEAD), randn(2, NUM_KV * HEAD)
    keys, values = torch.zeros(2, NUM_KV, PAGE, HEAD, device=DEVICE), torch.zeros(2, NUM_KV, PAGE, HEAD, device=DEVICE)
    before = query.clone()
    rotate_and_store(query, key, value, keys, values, torch.tensor([3, PAGE], device=DEVICE), None)
    assert torch.equal(query, before)
    assert torch.equal(keys[0, :, 3].flatten(), key[0])
    assert torch.equal(values[1, :, 0].flatten(), value[1])


def state_of(slots: torch.Tensor, params: list[SamplingParams]) -> SlotState:
    """Rows of seed 9 in these slots."""
    state = SlotState(len(params) + 3, 1, DEVICE)
    for row, slot in enumerate(slots.tolist()):
        state.keys[slot] = stream_key(9, row)
        state.temperatures[slot] = params[row].temperature or 1.0
        state.greedy[slot] = params[row].greedy
    state._set_filters(slots.long(), params)
    return state


@pytest.mark.parametrize("vocabulary", [100, 128, 5000])
def test_draws_are_those_of_the_plain_sampler(vocabulary: int) -> None:
    torch.manual_seed(3)
    rows = 12
    logits = randn(rows, vocabulary) * 3
    slots = torch.randperm(rows + 4)[:rows].int().to(DEVICE)
    params = [SamplingParams(temperature=[0.0, 0.5, 1.0, 1.7][row % 4]) for row in range(rows)]
    plain = SamplingRows.build(params, [9] * rows, list(range(rows)), DEVICE)
    positions = torch.randint(0, 500, (rows,), device=DEVICE)
    expected_tokens, expected_log_probs = sample(logits.clone(), plain, positions + 1)
    state = state_of(slots, params)
    tokens = torch.full((rows,), -5, dtype=torch.int64, device=DEVICE)
    log_probs = torch.full((rows,), float("nan"), device=DEVICE)
    draw(logits, positions, slots, state, tokens, log_probs)
    assert tokens.tolist() == expected_tokens.tolist()
    torch.testing.assert_close(log_probs, expected_log_probs, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_draws_from_what_cuts_leave_are_those_of_the_plain_sampler(dtype: torch.dtype) -> None:
    torch.manual_seed(11)
    vocabulary = 700
    asked = [
        {"top_k": 1},
        {"top_k": 40},
        {"top_p": 0.9},
        {"top_p": 0.3, "temperature": 1.7},
        {"top_k": 50, "top_p": 0.8, "temperature": 0.6},
        {"min_p": 0.05},
        {"min_p": 0.02, "top_p": 0.95, "logprobs": "processed"},
        {"top_k": 7, "logprobs": "processed"},
        {"temperature": 0.7},
        {"temperature": 0.0},
        {"top_k": vocabulary},
        {"top_p": 0.999},
    ]
    params = [SamplingParams(**settings) for settings in asked]
    rows = len(params)
    logits = (randn(rows, vocabulary) * 3).to(dtype)
    logits[0, 5:9] = logits[0].max()  # ties at the edge all stay
    slots = torch.randperm(rows + 4)[:rows].int().to(DEVICE)
    plain_rows = SamplingRows.build(params, [9] * rows, list(range(rows)), DEVICE)
    positions = torch.randint(0, 500, (rows,), device=DEVICE)
    expected_tokens, expected_log_probs = sample(logits.float().clone(), plain_rows, positions + 1)
    state = state_of(slots, params)
    found = []
    for way in (draw, plain.draw):
        tokens = torch.full((rows,), -5, dtype=torch.int64, device=DEVICE)
        log_probs = torch.full((rows,), float("nan"), device=DEVICE)
        way(logits, positions, slots, state, tokens, log_probs, filtered=True)
        assert tokens.tolist() == expected_tokens.tolist()
        torch.testing.assert_close(log_probs, expected_log_probs, atol=2e-6, rtol=1e-5)
        found.append(tokens)
    whole = torch.empty_like(found[0])
    draw(logits, positions, slots, state, whole, log_probs)
    assert not torch.equal(whole, found[0]), "the filters removed nothing"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_smallest_logit_that_stays_is_that_of_a_sorted_row(dtype: torch.dtype) -> None:
    torch.manual_seed(12)
    rows, vocabulary = (16, 1500) if DEVICE.type == "cuda" else (6, 700)  # the interpreter takes a second for a row
    logits = (randn(rows, vocabulary) * torch.linspace(0.5, 6, rows, device=DEVICE)[:, None]).to(dtype)
    filters = Filters(
        torch.randint(1, 2 * vocabulary, (rows,), dtype=torch.int32, device=DEVICE),
        torch.rand(rows, dtype=torch.float64, device=DEVICE) * 1.3,
        torch.zeros(rows, device=DEVICE),
        torch.zeros(rows, dtype=torch.int32, device=DEVICE),
    )
    slots = torch.arange(rows, dtype=torch.int32, device=DEVICE)
    weights = (logits.float() - logits.float().amax(1, keepdim=True)).exp()
    left = filter_weights(weights, filters.top_k.long(), filters.top_p.clamp(max=1), filters.min_p, vocabulary)
    padded = F.pad(logits.float(), (0, -vocabulary % 128), value=float("-inf")).view(rows, -1, 128)
    tops = padded.amax(-1)
    sums = (padded - tops[..., None]).exp().sum(-1)
    state = SlotState(rows, 1, DEVICE)
    state.filters = filters
    kept = keep(logits, slots, state, tops, sums, block=128, blocks_each=4)
    assert torch.equal(logits.float() >= kept.thresholds[:, None], left > 0)
    expected = F.pad(left, (0, -vocabulary % 128)).view(rows, -1, 128).sum(-1)
    close(kept.sums * (tops - tops.amax(1, keepdim=True)).exp(), expected)


@pytest.mark.gpu  # the interpreter would take minutes
def test_draws_follow_the_distribution() -> None:
    rows, vocabulary = 20_000, 140
    likely = [3, 50, 127, 128, 139]
    logits = torch.full((vocabulary,), -12.0, device=DEVICE)
    logits[likely] = torch.tensor([1.0, 0.0, 0.5, 0.2, 1.2], device=DEVICE)
    slots = torch.arange(rows, device=DEVICE, dtype=torch.int32)
    state = SlotState(rows, 1, DEVICE)
    state.keys[:rows] = torch.tensor([stream_key(1, i) for i in range(rows)], device=DEVICE)
    tokens = torch.zeros(rows, dtype=torch.int64, device=DEVICE)
    positions, log_probs = torch.full((rows,), 7, device=DEVICE), torch.zeros(rows, device=DEVICE)
    draw(logits.expand(rows, -1).contiguous(), positions, slots, state, tokens, log_probs)
    expected = rows * logits.softmax(0).double().cpu()[likely]
    counts = tokens.cpu().bincount(minlength=vocabulary).double()[likely]
    assert rows - counts.sum() < 0.005 * rows
    # Four degrees of freedom: the statistic is above 23.5 once in ten thousand seeds, and this seed is fixed.
    assert float(((counts - expected) ** 2 / expected).sum()) < 23.5


def test_rows_begin_at_their_slots_and_end_by_length_or_stop_token() -> None:
    def ints(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=DEVICE)

    state = SlotState(3, 2, DEVICE)
    state.last_tokens = torch.tensor([10, 11, 12, 13], device=DEVICE)
    state.cached, state.active, state.max_lengths = ints(5, 16, 3, 9), ints(1, 1, 0, 1), ints(100, 18, 50, 100)
    state.table = torch.arange(8, dtype=torch.int32, device=DEVICE).view(4, 2)
    slots = ints(3, 1, 2, 0)
    tokens, positions, lengths, targets = begin_rows(slots, state, PAGE)
    assert tokens.tolist() == [13, 11, 12, 10]
    assert positions.tolist() == [9, 16, 3, 5]
    assert lengths.tolist() == [10, 17, 0, 6]
    assert targets.tolist() == [6 * PAGE + 9, 3 * PAGE, -1, 5]

    state.stop_ids = torch.tensor([[-1, -1], [-1, -1], [-1, -1], [4, 23]], device=DEVICE)
    out_tokens = torch.full((3, 6), -9, device=DEVICE)
    out_log_probs = torch.zeros(3, 6, device=DEVICE)
    end_rows(
        slots,
        torch.tensor([23, 21, 22, 20], device=DEVICE),
        torch.tensor([0.1, 0.2, 0.3, 0.4], device=DEVICE),
        *(state, ints(1), out_tokens, out_log_probs),
    )
    assert out_tokens.tolist() == [[-9] * 6, [-25, -23, -1, 20, -9, -9], [-9] * 6]
    assert out_log_probs[1, [0, 1, 3]].tolist() == pytest.approx([0.1, 0.2, 0.4])
    assert state.last_tokens.tolist() == [20, 21, 12, 23]
    assert state.cached.tolist() == [6, 17, 3, 10]
    assert state.active.tolist() == [1, 0, 0, 0]


def test_draws_from_logits_cut_to_masks_are_those_of_the_plain_sampler() -> None:
    """Most blocks have no finite logit left."""
    torch.manual_seed(13)
    vocabulary = 700
    asked: list[dict[str, Any]] = [{"top_k": 1}, {"top_k": 6}, {"top_k": 50, "top_p": 0.8, "temperature": 0.6}]
    params = [SamplingParams(**settings, keep_mask=True, logprobs="processed") for settings in asked]
    params += [SamplingParams(temperature=0.7), SamplingParams(temperature=0.0)]
    rows = len(params)
    logits = (randn(rows, vocabulary) * 3).bfloat16()
    slots = torch.randperm(rows + 2)[:rows].int().to(DEVICE)
    plain_rows = SamplingRows.build(params, [9] * rows, list(range(rows)), DEVICE)
    assert plain_rows.masks is not None
    state = state_of(slots, params)
    expected_logits = logits.clone()
    expected_sets = cut_to_masks(expected_logits, plain_rows.masks, 50)
    assert torch.equal(cut_to_masks(logits, state.masks(slots), 50), expected_sets)
    assert torch.equal(logits, expected_logits)
    positions = torch.randint(0, 500, (rows,), device=DEVICE)
    expected_tokens, expected_log_probs = sample(expected_logits.float(), plain_rows, positions + 1)
    tokens = torch.full((rows,), -5, dtype=torch.int64, device=DEVICE)
    log_probs = torch.full((rows,), float("nan"), device=DEVICE)
    draw(logits, positions, slots, state, tokens, log_probs)
    assert tokens.tolist() == expected_tokens.tolist()
    torch.testing.assert_close(log_probs, expected_log_probs, atol=2e-6, rtol=1e-5)
