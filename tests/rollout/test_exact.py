"""`rollout.exact`: engine and trainer give a token the same bits, in whatever batch. Without it they do not."""

from __future__ import annotations

import copy

import pytest
import torch

from dovetail.models.exact import use_exact_modules
from dovetail.models.policy import PolicyModel
from dovetail.rollout import GenerationRequest, GenerationResult, SamplingParams
from dovetail.rollout.native.engine import NativeEngine
from tests.models.tiny import run_model, tiny_model

pytestmark = pytest.mark.unit

LENGTHS = (3, 17, 9, 30)


def requests(temperature: float = 0.7) -> list[GenerationRequest]:
    generator = torch.Generator().manual_seed(0)
    return [
        GenerationRequest(
            request_id=str(number),
            prompt_token_ids=torch.randint(3, 300, (length,), generator=generator).tolist(),
            sampling=SamplingParams(n=3, max_new_tokens=12 + 5 * number, temperature=temperature, seed=number),
        )
        for number, length in enumerate(LENGTHS)
    ]


def trained(model: torch.nn.Module, result: GenerationResult, prompt: list[int], temperature: float) -> torch.Tensor:
    """Log-probs of the response by a trainer that has this sequence alone."""
    return forward(model, [(prompt, result.token_ids)], temperature)[0]


def forward(
    model: torch.nn.Module, rows: list[tuple[list[int], list[int]]], temperature: float, *, share: bool = False
) -> list[torch.Tensor]:
    policy = PolicyModel(model, share_prefixes=share)
    longest = max(len(prompt) + len(response) for prompt, response in rows)
    ids = torch.zeros(len(rows), longest, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, (prompt, response) in enumerate(rows):
        length = len(prompt) + len(response)
        ids[row, :length] = torch.tensor([*prompt, *response])
        mask[row, :length] = 1
    log_probs = run_model(policy, ids, mask, temperature=temperature).log_probs
    return [log_probs[row, len(p) : len(p) + len(r)] for row, (p, r) in enumerate(rows)]


@pytest.mark.parametrize("family", ["llama_tied", "qwen2", "qwen3", "mistral_window"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_log_prob_of_the_engine_is_the_trainers_to_the_bit(family: str, dtype: torch.dtype) -> None:
    model = tiny_model(family).to(dtype)
    use_exact_modules(model)
    engine = NativeEngine(copy.deepcopy(model), exact=True, max_num_seqs=5)
    asked = {request.request_id: request for request in requests()}
    results = engine.generate(list(asked.values()))
    rows = [(asked[result.request_id].prompt_token_ids, result.token_ids) for result in results]
    packed = forward(model, rows, 0.7)
    shared = forward(model, rows, 0.7, share=True)
    for result, together, sharing, (prompt, _) in zip(results, packed, shared, rows, strict=True):
        wrote = torch.tensor(result.log_probs)
        assert torch.equal(wrote, together.detach())
        assert torch.equal(wrote, sharing.detach())
        assert torch.equal(wrote, trained(model, result, prompt, 0.7).detach())


def test_without_it_they_differ_by_rounding() -> None:
    """So the test above can fail."""
    model = tiny_model("qwen2")
    asked = {request.request_id: request for request in requests()}
    results = NativeEngine(copy.deepcopy(model), max_num_seqs=5).generate(list(asked.values()))
    rows = [(asked[result.request_id].prompt_token_ids, result.token_ids) for result in results]
    gaps = [
        (torch.tensor(result.log_probs) - found).abs().max()
        for result, found in zip(results, forward(model, rows, 0.7), strict=True)
    ]
    assert 0 < max(gaps) < 1e-4


def test_log_probs_and_gradients_are_those_of_the_plain_modules() -> None:
    plain = tiny_model("qwen2")
    exact = copy.deepcopy(plain)
    use_exact_modules(exact)
    rows = [([5, 6, 7], [8, 9, 10, 11]), ([12], [13, 14])]
    for model in (plain, exact):
        torch.cat(forward(model, rows, 0.9)).sum().backward()
    wanted, found = (torch.cat(forward(model, rows, 0.9)).detach() for model in (plain, exact))
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    for (name, one), other in zip(plain.named_parameters(), exact.parameters(), strict=True):
        assert one.grad is not None, name
        torch.testing.assert_close(other.grad, one.grad, rtol=1e-4, atol=1e-5, msg=name)


def test_a_model_with_other_layers_is_refused_by_their_name() -> None:
    with pytest.raises(ValueError, match=r"Qwen3MoeForCausalLM also has .*Qwen3Moe"):
        use_exact_modules(tiny_model("qwen3_moe"))
