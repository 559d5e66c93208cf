"""What only a GPU can show: the Triton head, the varlen kernel, fp8 products, offloaded activations."""

from __future__ import annotations

import pytest
import torch

from dovetail.models import fused_head
from dovetail.models.activations import activation_offload, enable_gradient_checkpointing
from dovetail.models.attention import _Options, _sdpa_by_sequence, _torch_varlen
from dovetail.models.compile import compile_layers
from dovetail.models.fp8 import Recipe, multiply, quantize_rows, quantize_transposed, use_fp8_projections
from dovetail.models.head import add_product, adds_in_product, fused_linear_log_prob, plain_log_prob_entropy
from dovetail.models.packing import PackedSegments, pack_batch
from dovetail.models.policy import PolicyModel
from dovetail.models.transfer import to_device
from tests.models.test_head import check_half_precision_logits
from tests.models.tiny import image_batch, ragged_batch, run_model, tiny_model

pytestmark = pytest.mark.gpu


def _loss(log_probs: torch.Tensor, entropy: torch.Tensor) -> torch.Tensor:
    weights = torch.linspace(-1, 2, log_probs.numel(), device=log_probs.device)
    return (log_probs * weights).sum() + (entropy * weights.flip(0)).sum()


def test_triton_head_equals_plain_head_in_float32() -> None:
    torch.manual_seed(0)
    for temperature in (1.0, 0.6):
        hidden = torch.randn(301, 96, device="cuda", requires_grad=True)
        weight = (torch.randn(9001, 96, device="cuda") * 0.4).requires_grad_()
        bias = torch.randn(9001, device="cuda", requires_grad=True)
        labels = torch.randint(0, 9001, (301,), device="cuda")
        plain = plain_log_prob_entropy(hidden @ weight.t() + bias, labels, temperature=temperature)
        want = torch.autograd.grad(_loss(*plain[:2]), (hidden, weight, bias))
        for use_triton in (True, False):
            found = fused_linear_log_prob(
                hidden,
                weight,
                labels,
                bias=bias,
                temperature=temperature,
                need_entropy=True,
                chunk_size=64,
                use_triton=use_triton,
            )
            torch.testing.assert_close(found.log_probs, plain.log_probs, atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(found.entropy, plain.entropy, atol=1e-5, rtol=1e-5)
            for got, expected in zip(torch.autograd.grad(_loss(*found[:2]), (hidden, weight, bias)), want, strict=True):
                torch.testing.assert_close(got, expected, atol=1e-5 * expected.abs().max().item(), rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_logits_have_a_gradient(dtype: torch.dtype) -> None:
    check_half_precision_logits(dtype, "cuda")


def test_triton_head_without_entropy_and_with_masked_logits_stays_finite() -> None:
    hidden = torch.randn(7, 32, device="cuda", requires_grad=True)
    weight = torch.randn(5000, 32, device="cuda", requires_grad=True)
    bias = torch.zeros(5000, device="cuda")
    bias[4097:] = -float("inf")  # a whole tail of impossible words, as padded vocabularies have
    labels = torch.randint(0, 4000, (7,), device="cuda")
    for need_entropy in (False, True):
        found = fused_linear_log_prob(hidden, weight, labels, bias=bias, need_entropy=need_entropy, use_triton=True)
        total = found.log_probs.sum() if found.entropy is None else found.log_probs.sum() + found.entropy.sum()
        assert all(g.isfinite().all() for g in torch.autograd.grad(total, (hidden, weight)))


def test_half_precision_heads_agree_and_are_closer_to_exact_than_the_plain_one() -> None:
    torch.manual_seed(0)
    hidden = torch.randn(512, 256, device="cuda", dtype=torch.bfloat16)
    weight = (torch.randn(20000, 256, device="cuda") * 0.3).bfloat16()
    labels = torch.randint(0, 20000, (512,), device="cuda")
    exact = plain_log_prob_entropy(hidden.double() @ weight.double().t(), labels)
    plain = plain_log_prob_entropy(hidden @ weight.t(), labels)
    for use_triton in (True, False):
        found = fused_linear_log_prob(hidden, weight, labels, need_entropy=True, use_triton=use_triton)
        error = (found.log_probs - exact.log_probs).abs().mean()
        assert error < 0.1 * (plain.log_probs - exact.log_probs).abs().mean()


def test_varlen_kernel_equals_sdpa_by_sequence_with_grouped_heads_and_windows() -> None:
    lengths = (5, 130, 1, 64)
    cu = torch.tensor([0, *lengths], device="cuda").cumsum(0).to(torch.int32)
    segments = PackedSegments(lengths, cu)
    torch.manual_seed(0)
    shapes = [(1, 8, sum(lengths), 64), (1, 2, sum(lengths), 64), (1, 2, sum(lengths), 64)]
    inputs = [torch.randn(*s, device="cuda", dtype=torch.bfloat16).requires_grad_() for s in shapes]
    for window in (None, 40):
        results = []
        for kernel in (_torch_varlen, _sdpa_by_sequence):
            out = kernel(*inputs, segments, _Options(scale=0.125, dropout=0.0, window=window))
            out_grad = torch.linspace(-1, 1, out.numel(), device="cuda").view_as(out).bfloat16()
            results.append((out, *torch.autograd.grad(out, inputs, out_grad)))
        for got, want in zip(*results, strict=True):  # bfloat16 keeps 8 bits: relative to the tensor's size
            torch.testing.assert_close(got, want, atol=1e-2 * want.abs().max().item(), rtol=2e-2)


def test_varlen_kernel_equals_sdpa_by_sequence_where_prefixes_are_shared() -> None:
    prompts = torch.randint(5, 90, (2, 40)).repeat_interleave(4, 0)
    input_ids = torch.cat([prompts, torch.randint(100, 900, (8, 70))], 1)
    attention_mask = torch.ones_like(input_ids)
    for row in range(8):
        attention_mask[row, 50 + 7 * row :] = 0
    segments = to_device(pack_batch(input_ids, attention_mask, share_prefixes=True).segments, torch.device("cuda"))
    assert segments.shared is not None
    total = sum(segments.lengths)
    assert total == int(attention_mask.sum()) - 6 * 40
    inputs = [
        torch.randn(1, heads, total, 64, device="cuda", dtype=torch.bfloat16).requires_grad_() for heads in (8, 2, 2)
    ]
    for window in (None, 40):
        results = []
        for kernel in (_torch_varlen, _sdpa_by_sequence):
            out = kernel(*inputs, segments, _Options(scale=0.125, dropout=0.0, window=window))
            out_grad = torch.linspace(-1, 1, out.numel(), device="cuda").view_as(out).bfloat16()
            results.append((out, *torch.autograd.grad(out, inputs, out_grad)))
        for got, want in zip(*results, strict=True):
            torch.testing.assert_close(got, want, atol=1e-2 * want.abs().max().item(), rtol=2e-2)


def test_a_kept_gradient_of_the_triton_head_is_as_near_to_float32_as_one_computed_again() -> None:
    torch.manual_seed(0)
    hidden = torch.randn(600, 256, device="cuda").bfloat16().requires_grad_()
    weight = (torch.randn(9001, 256, device="cuda") * 0.1).bfloat16().requires_grad_()
    labels = torch.randint(0, 9001, (600,), device="cuda")
    inputs = (hidden, weight)
    factors = torch.linspace(-1, 2, 600, device="cuda")
    exact = [t.detach().float().requires_grad_() for t in inputs]
    plain = plain_log_prob_entropy(exact[0] @ exact[1].t(), labels, temperature=0.7)
    wanted = torch.autograd.grad((plain.log_probs * factors).sum(), exact)
    errors = []
    for keep in (False, True):
        found = fused_linear_log_prob(hidden, weight, labels, temperature=0.7, chunk_size=128, keep_gradient=keep)
        torch.testing.assert_close(found.log_probs, plain.log_probs, atol=1e-3, rtol=1e-3)
        gradients = torch.autograd.grad((found.log_probs * factors).sum(), inputs)
        errors.append([(got.float() - want).norm() / want.norm() for got, want in zip(gradients, wanted, strict=True)])
    assert all(kept < 1.1 * again for again, kept in zip(*errors, strict=True)), errors


def test_a_gradient_is_kept_only_where_it_fits_into_half_of_the_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden = torch.randn(512, 64, device="cuda").bfloat16().requires_grad_()
    weight = torch.randn(8192, 64, device="cuda").bfloat16().requires_grad_()
    labels, held, gradients = torch.randint(0, 8192, (512,), device="cuda"), [], []
    for _ in range(2):
        before = torch.cuda.memory_allocated()
        found = fused_linear_log_prob(hidden, weight, labels)
        held.append(torch.cuda.memory_allocated() - before)
        gradients.append(torch.autograd.grad(found.log_probs.mean(), (hidden, weight)))
        del found
        monkeypatch.setattr(fused_head, "_free_bytes", lambda device: 0)
    assert held[0] - held[1] == pytest.approx(2 * 512 * 8192, rel=0.01)
    for kept, again in zip(*gradients, strict=True):
        torch.testing.assert_close(kept, again, atol=1e-2 * again.abs().max().item(), rtol=2e-2)


def test_packed_equals_padded_under_autocast_with_recomputation() -> None:
    for family in ("llama", "qwen3_moe", "qwen2_5_vl"):
        batch = image_batch() if family == "qwen2_5_vl" else ragged_batch([33, 100, 7], total=128, side="both")
        exact = run_model(PolicyModel(tiny_model(family).cuda(), use_remove_padding=False), **batch).log_probs
        errors = []
        for packed in (False, True):
            policy = PolicyModel(tiny_model(family).cuda(), use_remove_padding=packed, use_fused_kernels=packed)
            enable_gradient_checkpointing(policy.hf_model)
            with torch.autocast("cuda", torch.bfloat16):
                out = run_model(policy, **batch).log_probs
            out.sum().backward()
            assert all(p.grad.isfinite().all() for p in policy.parameters() if p.grad is not None)
            errors.append((out - exact).abs().mean().item())
        assert errors[1] < 1.2 * errors[0], (family, errors)


def test_offload_saves_device_memory_and_keeps_gradients() -> None:
    batch = ragged_batch([500, 400, 511])
    results = []
    for offload in (False, True):
        torch.cuda.empty_cache()
        policy = PolicyModel(tiny_model("llama", num_hidden_layers=8).cuda(), use_fused_kernels=True)
        before = torch.cuda.memory_allocated()
        if offload:
            with activation_offload():
                loss = run_model(policy, **batch).log_probs.sum()
        else:
            loss = run_model(policy, **batch).log_probs.sum()
        held = torch.cuda.memory_allocated() - before
        loss.backward()
        results.append((held, [p.grad for p in policy.parameters()]))
    assert results[1][0] < 0.3 * results[0][0]
    for a, b in zip(results[0][1], results[1][1], strict=True):
        torch.testing.assert_close(a, b)


def test_fp8_products_on_the_tensor_cores_equal_the_emulation() -> None:
    torch.manual_seed(0)
    for tokens, k, n in ((301, 256, 512), (4096, 1536, 256)):
        x, w, g = (torch.randn(*size, device="cuda").bfloat16() for size in ((tokens, k), (n, k), (tokens, n)))
        rows = {name: quantize_rows(each) for name, each in (("x", x), ("w", w), ("g", g))}
        columns = {}
        for name, each in (("x", x), ("w", w), ("g", g)):
            columns[name] = found = quantize_transposed(each, rows[name].scale, g)
            on_cpu = quantize_transposed(each.cpu(), quantize_rows(each.cpu()).scale, each.cpu())
            assert torch.equal(found.data.cpu().view(torch.uint8), on_cpu.data.view(torch.uint8))
            assert torch.equal(found.scale.cpu(), on_cpu.scale)
        by_row = columns["w"]._replace(scale=columns["w"].scale.expand(k, 1).contiguous())
        for a, b in ((rows["x"], rows["w"]), (rows["g"], by_row), (columns["g"], columns["x"])):
            exact = (a.data.double() * a.scale) @ (b.data.double() * b.scale).t()
            for fast_accum, tolerance in ((False, 0.003), (True, 0.01)):
                found = multiply(a, b, torch.bfloat16, fast_accum=fast_accum).double()
                assert (found - exact).norm() / exact.norm() < tolerance


@pytest.mark.parametrize("recipe", ["rowwise", "rowwise_with_gw_hp"])
def test_compiled_fp8_layers_equal_eager_ones_and_are_near_plain_ones(recipe: Recipe) -> None:
    """The error against plain layers may be that of the emulation, whose rounding is exact, and a fifth more."""

    def gradients(fp8: bool, compiled: bool, device: str = "cuda") -> torch.Tensor:
        # In bfloat16 a compiler rounds elsewhere, which turns over one number in sixteen of those rounded to e4m3.
        model = tiny_model("qwen2").to(device).train()
        if fp8:
            use_fp8_projections(model, recipe, torch.device(device))
        if compiled:
            compile_layers(model)
        for tokens in (19, 32, 47):  # token counts that are no multiple of 16
            ids = torch.arange(2 * tokens, device=device).view(2, tokens) % 50
            model(input_ids=ids, use_cache=False).logits.square().mean().backward()
        return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])

    emulated = (gradients(True, False, "cpu") - gradients(False, False, "cpu")).norm()
    plain, eager, compiled = gradients(False, False), gradients(True, False), gradients(True, True)
    assert (eager - plain).norm() < 1.2 * emulated.cuda()
    assert (compiled - eager).norm() / eager.norm() < 0.05


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocabulary", [9000, 9001])
def test_a_product_added_in_one_call_is_the_sum_of_products_in_float32(dtype: torch.dtype, vocabulary: int) -> None:
    """Four chunks of 301 rows, one of them a single row, against float64 and against a product that is added by itself.
    Both sum 904 float32 products, so they differ from float64 by up to 904 units in the last place of the largest
    partial sum, and less as errors cancel: 1e-5 of the largest entry."""
    torch.manual_seed(0)
    device = torch.device("cuda", torch.cuda.current_device())
    once, apart = torch.zeros(2, vocabulary, 96, device=device)
    exact = torch.zeros(vocabulary, 96, dtype=torch.float64, device=device)
    for rows in (301, 301, 1, 301):
        left, right = torch.randn(rows, vocabulary, device=device), torch.randn(rows, 96, device=device)
        left, right = left.to(dtype), right.to(dtype)
        add_product(once, left, right)
        apart.add_(torch.mm(left.t(), right, out_dtype=torch.float32))
        exact.add_(left.double().t() @ right.double())
    scale = exact.abs().max().item()
    for total in (once, apart):
        torch.testing.assert_close(total.double(), exact, atol=1e-5 * scale, rtol=0)
    if not adds_in_product(device, dtype):
        assert once.equal(apart), "this PyTorch adds a product by itself"
