"""The fused head against the plain one: values and gradients, and what it holds in memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dovetail.models import fused_head
from dovetail.models.head import (
    EntropyMemory,
    Float32Head,
    add_product,
    adds_in_product,
    chunk_rows,
    float32_logits,
    fused_linear_log_prob,
    kept_log_probs,
    plain_log_prob_entropy,
)

pytestmark = pytest.mark.unit


def _inputs(n: int = 37, h: int = 24, v: int = 211, *, bias: bool = False, dtype: torch.dtype = torch.float32) -> tuple:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(n, h, generator=generator).to(dtype).requires_grad_()
    weight = (torch.randn(v, h, generator=generator) * 0.7).to(dtype).requires_grad_()
    b = torch.randn(v, generator=generator).to(dtype).requires_grad_() if bias else None
    return hidden, weight, b, torch.randint(0, v, (n,), generator=generator)


def _loss(log_probs: torch.Tensor, entropy: torch.Tensor | None) -> torch.Tensor:
    weights = torch.linspace(-1, 2, log_probs.numel(), device=log_probs.device)
    loss = (log_probs * weights).sum()
    return loss if entropy is None else loss + (entropy * weights.flip(0)).sum()


@pytest.mark.parametrize("chunk_size", [1, 8, 37, 1000])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("need_entropy", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_fused_head_equals_plain_head_in_values_and_gradients(
    chunk_size: int, temperature: float, need_entropy: bool, bias: bool
) -> None:
    hidden, weight, b, labels = _inputs(bias=bias)
    logits = torch.nn.functional.linear(hidden, weight, b)
    plain = plain_log_prob_entropy(logits, labels, temperature=temperature, need_entropy=need_entropy)
    inputs = [t for t in (hidden, weight, b) if t is not None]
    expected = torch.autograd.grad(_loss(*plain[:2]), inputs)
    fused = fused_linear_log_prob(
        hidden, weight, labels, bias=b, temperature=temperature, need_entropy=need_entropy, chunk_size=chunk_size
    )
    torch.testing.assert_close(fused.log_probs, plain.log_probs, atol=1e-5, rtol=1e-5)
    if need_entropy:
        torch.testing.assert_close(fused.entropy, plain.entropy, atol=1e-5, rtol=1e-5)
    for got, want in zip(torch.autograd.grad(_loss(*fused[:2]), inputs), expected, strict=True):
        # Gradients sum over 211 words or 37 rows of size about 2: relative to that size.
        torch.testing.assert_close(got, want, atol=1e-5 * want.abs().max().item(), rtol=1e-5)


@pytest.mark.parametrize("chunk_size", [8, 1000])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("bias", [False, True])
def test_a_gradient_that_is_kept_is_that_of_the_plain_head(chunk_size: int, temperature: float, bias: bool) -> None:
    hidden, weight, b, labels = _inputs(bias=bias)
    logits = torch.nn.functional.linear(hidden, weight, b)
    plain = plain_log_prob_entropy(logits, labels, temperature=temperature, need_entropy=False)
    inputs = [t for t in (hidden, weight, b) if t is not None]
    expected = torch.autograd.grad(_loss(plain.log_probs, None), inputs)
    options = {"bias": b, "temperature": temperature, "chunk_size": chunk_size, "keep_gradient": True}
    kept = fused_linear_log_prob(hidden, weight, labels, **options)
    torch.testing.assert_close(kept.log_probs, plain.log_probs, atol=1e-5, rtol=1e-5)
    for got, want in zip(torch.autograd.grad(_loss(kept.log_probs, None), inputs), expected, strict=True):
        torch.testing.assert_close(got, want, atol=1e-5 * want.abs().max().item(), rtol=1e-5)
    with torch.no_grad():
        assert torch.equal(fused_linear_log_prob(hidden, weight, labels, **options).log_probs, kept.log_probs)


def test_the_head_keeps_a_gradient_only_of_log_probs_alone_and_where_it_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rule, with rows of PyTorch in the place of Triton's."""
    hidden, weight, _, labels = _inputs()
    fits = True

    def kept(**options: Any) -> bool:
        saved: list[tuple[int, ...]] = []

        def note(tensor: torch.Tensor) -> torch.Tensor:
            saved.append(tuple(tensor.shape))
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            fused_linear_log_prob(hidden, weight, labels, **options)
        return (37, 211) in saved

    monkeypatch.setattr(fused_head, "_rows", lambda options: fused_head._TorchRows)
    monkeypatch.setattr(fused_head, "_free_bytes", lambda device: 1 << 30 if fits else 0)
    assert kept(use_triton=True)
    assert not kept(use_triton=True, need_entropy=True)
    assert not kept(use_triton=True, keep_gradient=False)
    assert not kept(), "on a CPU"
    torch.use_deterministic_algorithms(True)
    try:
        assert not kept(use_triton=True), "free memory differs from run to run"
    finally:
        torch.use_deterministic_algorithms(False)
    fits = False
    assert not kept(use_triton=True)


def test_a_kept_gradient_in_bfloat16_is_as_near_to_float32_as_one_computed_again() -> None:
    hidden, weight, _, labels = _inputs(300, 64, 900, dtype=torch.bfloat16)
    with torch.no_grad():
        weight[labels[:150]] += hidden[:150]  # half of the labels are nearly certain, where 1 - p has few digits
    exact = [t.detach().float().requires_grad_() for t in (hidden, weight)]
    wanted = torch.autograd.grad(_loss(fused_linear_log_prob(*exact, labels).log_probs, None), exact)
    errors = []
    for keep in (False, True):
        found = fused_linear_log_prob(hidden, weight, labels, keep_gradient=keep)
        gradients = torch.autograd.grad(_loss(found.log_probs, None), (hidden, weight))
        errors.append([(got.float() - want).norm() / want.norm() for got, want in zip(gradients, wanted, strict=True)])
    assert all(kept < 1.1 * again for again, kept in zip(*errors, strict=True)), errors


def test_every_chunk_begins_where_kernels_expect_it() -> None:
    device = torch.device("cuda")
    rows = chunk_rows(151_936, device)
    assert rows % 16 == 0
    assert 2**30 - 16 * 4 * 151_936 < rows * 4 * 151_936 <= 2**30
    assert [chunk_rows(2**size, device) for size in (26, 28, 30)] == [4, 1, 1]


def test_plain_head_equals_log_softmax_and_categorical_entropy() -> None:
    logits, labels = torch.randn(5, 13), torch.randint(0, 13, (5,))
    found = plain_log_prob_entropy(logits, labels, temperature=0.5)
    distribution = torch.distributions.Categorical(logits=logits / 0.5)
    torch.testing.assert_close(found.log_probs, distribution.log_prob(labels))
    torch.testing.assert_close(found.entropy, distribution.entropy())


@pytest.mark.parametrize(
    "memory", [EntropyMemory(1), EntropyMemory(8, True), EntropyMemory(1000), EntropyMemory(None, True)]
)
@pytest.mark.parametrize("rows", [37, 0])
def test_saving_memory_on_the_entropy_changes_neither_values_nor_gradients(memory: EntropyMemory, rows: int) -> None:
    hidden, weight, _, labels = _inputs()
    logits, labels = hidden[:rows] @ weight.t(), labels[:rows]
    plain = plain_log_prob_entropy(logits, labels, temperature=0.7)
    saving = plain_log_prob_entropy(logits, labels, temperature=0.7, entropy_memory=memory)
    torch.testing.assert_close(saving[:2], plain[:2], atol=1e-6, rtol=1e-6)
    want, got = (
        torch.autograd.grad(_loss(*found[:2]), (hidden, weight), retain_graph=True) for found in (plain, saving)
    )
    torch.testing.assert_close(got, want, atol=1e-6, rtol=1e-6)


def _held(memory: EntropyMemory) -> tuple[int, int]:
    """Tensors of tokens times vocabulary that are made without gradients; numbers that are kept for backward."""
    hidden, weight, _, labels = _inputs(64, 8, 512)
    logits = hidden @ weight.t()
    with torch.no_grad(), _Tensors() as seen:
        plain_log_prob_entropy(logits, labels, entropy_memory=memory)
    kept: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.numel()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        found = plain_log_prob_entropy(logits, labels, entropy_memory=memory)
    assert found.entropy is not None
    return seen.sizes.count(64 * 512), sum(kept.values())


def test_chunks_hold_less_at_once_and_recomputing_keeps_less() -> None:
    (made, kept), (chunked_made, _), (_, again_kept) = map(
        _held, (EntropyMemory(), EntropyMemory(8), EntropyMemory(8, recompute=True))
    )
    assert chunked_made <= made - 2, "the probabilities and their product with the log-probabilities"
    assert again_kept <= kept - 64 * 512, "the probabilities"


def test_a_frozen_weight_gets_no_gradient_and_hidden_still_does() -> None:
    hidden, weight, _, labels = _inputs()
    fused_linear_log_prob(hidden, weight.detach(), labels).log_probs.sum().backward()
    assert hidden.grad is not None
    assert weight.grad is None


def test_no_rows_give_empty_results_and_zero_gradients() -> None:
    hidden, weight, _, labels = _inputs()
    found = fused_linear_log_prob(hidden[:0], weight, labels[:0], need_entropy=True)
    (found.log_probs.sum() + found.entropy.sum()).backward()
    assert found.log_probs.shape == (0,)
    assert weight.grad.abs().max() == 0


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_logits_of_a_float32_head_are_not_rounded_and_its_gradient_is_the_plain_heads(
    autocast: bool, bias: bool
) -> None:
    """As the fused head's: the products of bfloat16 numbers are added up and kept in float32."""
    dtype = torch.float32 if autocast else torch.bfloat16
    plain = torch.nn.Linear(64, 503, bias=bias, dtype=dtype)
    head, hidden = Float32Head(plain), torch.randn(2, 32, 64).to(dtype).requires_grad_()
    assert head.weight is plain.weight
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        found, rounded = head(hidden), plain(hidden)
        fused = fused_linear_log_prob(hidden.flatten(0, 1), plain.weight, torch.arange(64), bias=plain.bias)
    products = [tensor.detach().bfloat16().float() for tensor in (hidden, plain.weight)]
    expected = torch.nn.functional.linear(*products, plain.bias.detach().float() if bias else None)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert (rounded.float() - expected).abs().max() > 1e-3
    log_probs = plain_log_prob_entropy(found.flatten(0, 1), torch.arange(64)).log_probs
    torch.testing.assert_close(log_probs, fused.log_probs, rtol=1e-5, atol=1e-5)
    got, want = (torch.autograd.grad(logits.float().sin().sum(), (hidden, plain.weight)) for logits in (found, rounded))
    for a, b in zip(got, want, strict=True):
        assert torch.nn.functional.cosine_similarity(a.flatten().float(), b.flatten().float(), dim=0) > 0.999


def test_a_float32_head_in_place_of_anything_else_is_refused() -> None:
    with pytest.raises(ValueError, match=r"fp32_lm_head needs a plain linear output layer, this model has Embedding"):
        Float32Head(torch.nn.Embedding(3, 4))


@pytest.mark.parametrize("autocast", [False, True])
def test_half_precision_is_as_close_to_float32_as_plain_half_precision(autocast: bool) -> None:
    hidden, weight, _, labels = _inputs(64, 64, 503)
    exact = plain_log_prob_entropy(hidden @ weight.t(), labels)
    dtype = torch.float32 if autocast else torch.bfloat16
    h, w = (t.detach().to(dtype).requires_grad_() for t in (hidden, weight))
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        fused = fused_linear_log_prob(h, w, labels, need_entropy=True, chunk_size=16)
        plain = plain_log_prob_entropy(torch.nn.functional.linear(h, w), labels)
    assert fused.log_probs.dtype == torch.float32
    error = (fused.log_probs - exact.log_probs).abs().mean()
    assert error <= 1.05 * (plain.log_probs - exact.log_probs).abs().mean() + 1e-6
    got, want = (torch.autograd.grad(_loss(*found[:2]), (h, w)) for found in (fused, plain))
    for a, b in zip(got, want, strict=True):
        assert torch.nn.functional.cosine_similarity(a.flatten().float(), b.flatten().float(), dim=0) > 0.999


class _Tensors(torch.utils._python_dispatch.TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self.sizes.append(tensor.numel())
        return out


def test_no_tensor_of_tokens_times_vocabulary_is_ever_made() -> None:
    hidden, weight, _, labels = _inputs(512, 8, 1024)
    with _Tensors() as seen:
        found = fused_linear_log_prob(hidden, weight, labels, need_entropy=True, chunk_size=32)
        _loss(*found[:2]).backward()
    assert max(seen.sizes) <= 32 * 1024


def test_shapes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match=r"hidden must be \[N, H\]"):
        fused_linear_log_prob(torch.zeros(2, 3, 4), torch.zeros(5, 4), torch.zeros(2, 3, dtype=torch.long))


@pytest.mark.parametrize("need_entropy", [False, True])
def test_a_large_vocabulary_is_added_up_to_the_last_digits(need_entropy: bool) -> None:
    """Qwen's 152 k tokens: thousands of small probabilities are lost where each is added to a sum near 1."""
    torch.manual_seed(0)
    logits = torch.randn(8, 151_936) * 2.5
    logits[:, 7] += 16
    labels = torch.full((8,), 7)
    true = logits.double().log_softmax(-1)[:, 7]
    plain = plain_log_prob_entropy(logits, labels, need_entropy=need_entropy)
    fused = fused_linear_log_prob(torch.eye(8), logits.t().contiguous(), labels, need_entropy=need_entropy)
    for head in (plain, fused):
        torch.testing.assert_close(head.log_probs.double(), true, atol=5e-6, rtol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_logits_have_a_gradient(dtype: torch.dtype) -> None:
    check_half_precision_logits(dtype, "cpu")


def check_half_precision_logits(dtype: torch.dtype, device: str) -> None:
    """Values at least as close to float64 as those of a linear layer, and its gradients; one side frozen or neither."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(33, 64, device=device, dtype=dtype), torch.randn(129, 64, device=device, dtype=dtype)
    upstream = torch.randn(33, 129, device=device)
    for frozen in ((), (0,), (1,)):
        inputs = [x.clone().requires_grad_(place not in frozen) for place, x in enumerate((hidden, weight))]
        wanted = [x for x in inputs if x.requires_grad]
        found, rounded = float32_logits(*inputs), torch.nn.functional.linear(*inputs)
        exact = inputs[0].detach().double() @ inputs[1].detach().double().t()
        assert found.dtype == torch.float32
        assert (found.detach() - exact).abs().max() <= (rounded.detach() - exact).abs().max()
        mine = torch.autograd.grad(found, wanted, upstream)
        theirs = torch.autograd.grad(rounded, wanted, upstream.to(dtype))
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_product_is_added_also_where_no_single_call_does_both(dtype: torch.dtype) -> None:
    assert not adds_in_product(torch.device("cpu"), dtype)
    left, right = (torch.arange(24).view(4, 6) % 5).to(dtype), (torch.arange(12).view(4, 3) % 7).to(dtype)
    total = torch.full((6, 3), 0.25)
    add_product(total, left, right)
    assert total.equal(0.25 + left.float().t() @ right.float())


def _kept_sets(n: int, v: int, labels: torch.Tensor) -> torch.Tensor:
    """`[n, 6]`: 1 to 6 labels of each row, its own among them at any place, -1 after the last; none in row 2."""
    generator = torch.Generator().manual_seed(1)
    kept = torch.full((n, 6), -1)
    for row in range(n):
        others = torch.randperm(v, generator=generator)
        size = row % 6 + 1
        ids = torch.cat([labels[row : row + 1], others[others != labels[row]][: size - 1]])
        kept[row, :size] = ids[torch.randperm(size, generator=generator)]
    kept[2] = -1
    return kept


@pytest.mark.parametrize("chunk_size", [1, 8, None])
@pytest.mark.parametrize(("softcap", "bias"), [(None, False), (3.0, True)])
def test_kept_log_probs_equal_a_softmax_over_masked_logits(
    chunk_size: int | None, softcap: float | None, bias: bool
) -> None:
    hidden, weight, b, labels = _inputs(bias=bias)
    kept = _kept_sets(37, 211, labels)
    logits = torch.nn.functional.linear(hidden, weight, b)
    logits = torch.tanh(logits / softcap) * softcap if softcap else logits
    outside = torch.ones_like(logits, dtype=torch.bool)
    for row, ids in enumerate(kept):
        outside[row, ids[ids >= 0]] = False
    outside[2, labels[2]] = False  # without a set: its own label alone
    log_p = (logits / 0.6).masked_fill(outside, -1e9).log_softmax(-1)
    expected = log_p.gather(-1, labels[:, None]).squeeze(-1), -(log_p.exp() * log_p).sum(-1)

    found = kept_log_probs(hidden, weight, b, labels, kept, temperature=0.6, softcap=softcap, chunk_size=chunk_size)
    torch.testing.assert_close((found.log_probs, found.entropy), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found.best, log_p.amax(-1), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found.sum_squares, log_p.exp().square().sum(-1), atol=1e-5, rtol=1e-5)
    assert found.log_probs[2] == 0
    inputs = [t for t in (hidden, weight, b) if t is not None]
    wanted = torch.autograd.grad(_loss(*expected), inputs)
    for got, want in zip(torch.autograd.grad(_loss(*found[:2]), inputs), wanted, strict=True):
        torch.testing.assert_close(got, want, atol=1e-5 * want.abs().max().item(), rtol=1e-5)


def test_the_mean_gradient_over_cut_samples_is_that_of_the_expected_reward() -> None:
    """Five tokens, of which top-k keeps two. Over the whole vocabulary the mean is another, in every component."""
    hidden = torch.tensor([[0.3, -0.8]])
    weight = torch.randn(5, 2, generator=torch.Generator().manual_seed(3)).requires_grad_()
    rewards = torch.tensor([1.0, -0.5, 2.0, 0.3, -1.0])
    kept = (hidden @ weight.T).topk(2).indices
    p = (hidden @ weight.T)[0, kept[0]].softmax(-1)
    expected = torch.autograd.grad((p * rewards[kept[0]]).sum(), weight)[0]

    def mean_gradient(log_probs: torch.Tensor) -> torch.Tensor:
        """Of REINFORCE, over the two samples that there are, weighed by how often they are drawn."""
        return torch.autograd.grad((p.detach() * rewards[kept[0]] * log_probs).sum(), weight)[0]

    pair = hidden.expand(2, -1)
    masked = kept_log_probs(pair, weight, None, kept[0], kept.expand(2, -1), temperature=1.0).log_probs
    torch.testing.assert_close(masked.exp(), p, atol=1e-6, rtol=0)
    torch.testing.assert_close(mean_gradient(masked), expected, atol=1e-6, rtol=0)
    whole = plain_log_prob_entropy(pair @ weight.T, kept[0]).log_probs
    assert (mean_gradient(whole) - expected).abs().min() > 0.01
