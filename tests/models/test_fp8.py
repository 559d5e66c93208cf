"""fp8 projections: hand-computed products, the error that e4m3 predicts, and training close to the plain model's."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

from dovetail.backends.build import build_backend
from dovetail.models.activations import enable_gradient_checkpointing
from dovetail.models.fp8 import (
    Fp8Linear,
    Recipe,
    multiply,
    quantize_rows,
    quantize_transposed,
    use_fp8_projections,
)
from dovetail.rollout.native.model import share_model
from tests.backends.tiny import FP32, OPTIM, cut, tiny_batch, tiny_policy, total_weight, weighted_nll
from tests.models.tiny import tiny_model

pytestmark = pytest.mark.unit

CPU = torch.device("cpu")
RECIPES: tuple[Recipe, ...] = ("rowwise", "rowwise_with_gw_hp")
# e4m3 keeps 3 bits after the leading one: an rms error of 2.6 % a number, so of 3.7 % a product of two.
PREDICTED = 0.037


def relative_error(found: Tensor, exact: Tensor) -> float:
    return float((found - exact).norm() / exact.norm())


def gradients_of(layer: nn.Linear, x: Tensor, grad: Tensor) -> list[Tensor]:
    """Output, and the gradients of input, weight and bias."""
    x = x.clone().requires_grad_()
    out = layer(x)
    return [out.detach(), *torch.autograd.grad(out, (x, *layer.parameters()), grad)]


def test_rows_are_scaled_by_powers_of_two_and_rounded_to_e4m3() -> None:
    rows = torch.tensor([[448.0, 17, 1, 0.3], [450, 17, 1, 0], [0, 0, 0, 0], [3e-5, -2e-5, 0, 0]])
    found = quantize_rows(rows)
    assert found.scale[:2].flatten().tolist() == [1, 2]
    # 17 lies between 16 and 18, a tie; as 8.5 between 8 and 9, again one: both go to the even mantissa.
    assert (found.data.float() * found.scale)[:3].tolist() == [[448, 16, 1, 0.3125], [448, 16, 1, 0], [0, 0, 0, 0]]
    tiny = (found.data.float() * found.scale)[3]
    assert tiny[0] == pytest.approx(3e-5, rel=2**-4)
    assert tiny[1] == pytest.approx(-2e-5, rel=2**-4)


def test_a_product_is_that_of_the_rounded_rows() -> None:
    a, b = torch.tensor([[448.0, 17, 1, 0]]), torch.tensor([[1.0, 1, 1, 1], [0, 4, 0, 0]])
    assert multiply(quantize_rows(a), quantize_rows(b), torch.float32).tolist() == [[465, 64]]  # plain: 466 and 68


def test_numbers_that_e4m3_holds_give_the_plain_result_to_the_bit() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(32, 48)
    with torch.no_grad():
        layer.weight.copy_(torch.randint(-4, 5, (48, 32)) / 8)
    x, grad = torch.randint(-8, 9, (5, 32)).float(), torch.randint(-2, 3, (5, 48)).float()
    for recipe in RECIPES:
        for found, expected in zip(
            gradients_of(Fp8Linear(layer, recipe), x, grad), gradients_of(layer, x, grad), strict=True
        ):
            assert torch.equal(found, expected)


@pytest.mark.parametrize("recipe", RECIPES)
def test_output_and_gradients_are_off_by_what_e4m3_predicts(recipe: Recipe) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(256, 192)
    x, grad = torch.randn(2, 150, 256), torch.randn(2, 150, 192) * 1e-6
    # Rows of very different size: one scale for all of them would lose the small ones.
    x *= torch.logspace(-3, 3, 150)[None, :, None]
    found, exact = (gradients_of(kind, x, grad) for kind in (Fp8Linear(layer, recipe), layer))
    assert relative_error(found[0], exact[0]) == pytest.approx(PREDICTED, rel=0.15)
    assert relative_error(found[0][:, :5], exact[0][:, :5]) < 0.05
    assert relative_error(found[1], exact[1]) == pytest.approx(PREDICTED, rel=0.15)
    expected = PREDICTED if recipe == "rowwise" else 0.0
    assert relative_error(found[2], exact[2]) == pytest.approx(expected, rel=0.25, abs=1e-6)
    assert torch.allclose(found[3], exact[3])


def test_any_number_of_tokens_is_filled_up_with_zeros() -> None:
    torch.manual_seed(0)
    layer = Fp8Linear(nn.Linear(32, 48), "rowwise")
    with torch.no_grad():  # numbers whose sums round nothing, in whatever order a machine adds them up
        layer.weight.copy_(torch.randint(-4, 5, (48, 32)) / 8)
        layer.bias.zero_()
    x, grad = torch.randint(-8, 9, (7, 32)).float(), torch.randint(-2, 3, (7, 48)).float()
    data = quantize_transposed(x, quantize_rows(x).scale, x).data
    assert data.shape == (32, 16)
    assert not data[:, 7:].float().any()
    padded = gradients_of(layer, F.pad(x, (0, 0, 0, 9)), F.pad(grad, (0, 0, 0, 9)))
    for found, expected in zip(gradients_of(layer, x, grad), padded, strict=True):
        assert torch.equal(found, expected[: len(found)])


def test_a_transpose_has_the_largest_scale_of_the_rows() -> None:
    x = torch.tensor([[1.0, -3, 17, 448], [0.25, 0, 4, 900]])
    found = quantize_transposed(x, quantize_rows(x).scale, x)
    assert found.scale.tolist() == [[4]]  # 900 / 448 lies above 2
    assert (found.data[:, :2].float() * found.scale).t().tolist() == [[1, -3, 16, 448], [0.25, 0, 4, 896]]


def test_a_number_that_is_not_finite_stays_visible() -> None:
    layer = Fp8Linear(nn.Linear(32, 48), "rowwise")
    for bad in (float("nan"), float("inf")):
        x = torch.randn(4, 32)
        x[2, 5] = bad
        out = layer(x)
        assert not out[2].isfinite().any()
        assert out[[0, 1, 3]].isfinite().all()


def test_only_the_projections_of_decoder_layers_change_and_names_stay() -> None:
    for family, per_layer in (("qwen2", 7), ("qwen3_moe", 4), ("qwen2_5_vl", 7)):
        model = tiny_model(family)
        names = [name for name, _ in model.named_parameters()]
        assert use_fp8_projections(model, "rowwise", CPU) == 2 * per_layer
        assert [name for name, _ in model.named_parameters()] == names
        replaced = {name for name, module in model.named_modules() if isinstance(module, Fp8Linear)}
        assert all("visual" not in name and name.endswith("_proj") for name in replaced)
        assert type(model.get_output_embeddings()) is nn.Linear


def test_an_engine_that_shares_the_weights_has_plain_projections() -> None:
    model = tiny_model("qwen2")
    use_fp8_projections(model, "rowwise", CPU)
    replica = share_model(model, None)
    assert not any(isinstance(module, Fp8Linear) for module in replica.modules())
    assert replica.model.layers[1].mlp.up_proj.weight is model.model.layers[1].mlp.up_proj.weight


def test_what_cannot_be_multiplied_in_fp8_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="multiples of 16"):
        use_fp8_projections(tiny_model("qwen2", intermediate_size=40), "rowwise", CPU)
    model = tiny_model("qwen2")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A100")
    with pytest.raises(ValueError, match=r"A100 has 8\.0"):
        use_fp8_projections(model, "rowwise", torch.device("cuda"))
    model._no_split_modules = None
    with pytest.raises(ValueError, match="has no linear layers called"):
        use_fp8_projections(model, "rowwise", CPU)


def test_recomputation_and_compilation_change_nothing() -> None:
    """Traced as a compiler would, backward included, and run as it was traced: that needs no compiler."""
    programs = CompileCounterWithBackend("aot_eager")
    counts = []

    def gradients(recomputed: bool = False, traced: bool = False) -> list[Tensor]:
        model = tiny_model("qwen2", num_hidden_layers=1).train()
        use_fp8_projections(model, "rowwise", CPU)
        if recomputed:
            enable_gradient_checkpointing(model)
        if traced:
            torch._dynamo.reset()
            model.model.layers[0].compile(dynamic=True, backend=programs, fullgraph=True)
        for tokens in (19, 32, 45):
            ids = torch.arange(tokens)[None] % 50
            model(input_ids=ids, use_cache=False).logits.square().mean().backward()
            counts.append(programs.frame_count)
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    plain = gradients()
    for found in (gradients(recomputed=True), gradients(traced=True)):
        for mine, expected in zip(found, plain, strict=True):
            torch.testing.assert_close(mine, expected, rtol=1e-4, atol=1e-6)
    assert len(set(counts[-3:])) == 1  # no further program for another number of tokens


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_tiny_model_learns_along_the_plain_curve(recipe: Recipe) -> None:
    batch = tiny_batch()

    def losses(recipe: Recipe | None) -> list[float]:
        network = tiny_policy(remove_padding=True)
        if recipe is not None:
            use_fp8_projections(network.hf_model, recipe, CPU)
        backend = build_backend("single", network, fsdp=FP32, optim=OPTIM)
        curve = []
        for _ in range(15):
            metrics = backend.forward_backward(cut(batch, (3, 5)), weighted_nll(total_weight(batch)))
            curve.append(sum(float(metric["loss"]) for metric in metrics))
            backend.optim_step()
        return curve

    plain, found = losses(None), losses(recipe)
    assert plain[-1] < 0.2 * plain[0]
    # Weights are quantised anew after every step, or the curve would stay where it is.
    assert found == pytest.approx(plain, abs=0.01 * plain[0])
    assert found != pytest.approx(plain, rel=1e-5)
