"""What plain transformers says (float32, no cache, no batching), and what vLLM tells its users."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch

from dovetail.rollout.base import (
    EngineError,
    GenerationRequest,
    GenerationResult,
    RolloutEngine,
    SamplingParams,
    WeightUpdateError,
)
from dovetail.rollout.vllm.requests import Sample


@torch.no_grad()
def greedy(model: Any, prompt: list[int], count: int, guess: Sequence[int] = ()) -> list[int]:
    """`count` greedy tokens, end-of-sequence ignored.

    `guess` changes nothing but the time: tokens that are right cost one forward pass together.
    """
    tokens = _right_tokens(model, prompt, guess[:count]) if guess else []
    output = model(torch.tensor([prompt + tokens]), use_cache=True) if len(tokens) < count else None
    while output is not None and len(tokens) < count:
        token = output.logits[:, -1:].argmax(-1)
        tokens.append(int(token))
        output = model(token, past_key_values=output.past_key_values, use_cache=True)
    return tokens


def _right_tokens(model: Any, prompt: list[int], guess: Sequence[int]) -> list[int]:
    """The beginning of `guess` that is greedy."""
    choices = model(torch.tensor([[*prompt, *guess]])).logits[0, len(prompt) - 1 :].argmax(-1).tolist()
    wrong = (at for at, (choice, token) in enumerate(zip(choices, guess, strict=False)) if choice != token)
    return list(guess[: next(wrong, len(guess))])


@torch.no_grad()
def log_probs(model: Any, prompt: list[int], response: list[int], temperature: float = 1.0) -> torch.Tensor:
    logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
    # In float32 even for a float64 model. vLLM calls the same log-softmax, whose result is 7e-6 too high over 49,152
    # tokens on a CPU: against float64 that would hide the error of the forward pass.
    scores = torch.log_softmax(logits.float() / temperature, -1)
    return scores.gather(1, torch.tensor(response)[:, None])[:, 0]


def top_k_top_p_log_probs(
    model: Any, prompt: list[int], response: list[int], *, temperature: float, top_k: int, top_p: float
) -> torch.Tensor:
    """After the cut, renormalised."""
    with torch.no_grad():
        logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1].float() / temperature
    kept = logits.masked_fill(logits < logits.topk(top_k, -1).values[:, -1:], float("-inf"))
    ordered, index = kept.softmax(-1).sort(-1, descending=True)
    beyond = ordered.cumsum(-1) - ordered >= top_p
    kept = kept.masked_fill(torch.zeros_like(beyond).scatter(1, index, beyond), float("-inf"))
    return torch.log_softmax(kept, -1).gather(1, torch.tensor(response)[:, None])[:, 0]


def round_sums_as_float32(model: Any) -> None:
    """Add to every linear layer of a float64 model a random error: what float32 allows, in whatever order it sums.

    The order that errs most adds all K products to one accumulator. That rounds K partial sums, each by at most 2**-24
    of its value. Their mean square is half the sum of the squared products (Higham and Mary, 2019, assume the same of
    rounding errors). The other operations sum fewer numbers and are left exact.
    """

    def add_error(layer: torch.nn.Linear, inputs: tuple[torch.Tensor], output: torch.Tensor) -> torch.Tensor:
        squares = inputs[0].float().square() @ layer.weight.float().square().T
        return output + 2**-24 * (squares * layer.in_features / 2).sqrt() * torch.randn_like(output)

    for layer in model.modules():
        if isinstance(layer, torch.nn.Linear):
            layer.register_forward_hook(add_error)


def mean_gap(left: torch.Tensor, right: list[float]) -> float:
    return (left - torch.tensor(right)).abs().mean().item()


def check_versions(
    models: Mapping[int, Any], prompt: list[int], result: GenerationResult, *, temperature: float, within: float = 1e-5
) -> None:
    """Every token has the log-prob that the model of its version gives it after all tokens before it."""
    assert result.weight_versions == sorted(result.weight_versions)
    for version in set(result.weight_versions):
        wanted = log_probs(models[version], prompt, result.token_ids, temperature)
        own = torch.tensor(result.weight_versions) == version
        assert (wanted - torch.tensor(result.log_probs))[own].abs().mean() <= within, version


def check_misfits(engine: RolloutEngine, model: Any, prompt: list[int]) -> None:
    """Missing, misshapen and unknown tensors are named, and the engine waits for a complete update."""
    weights = dict(model.named_parameters())
    request = GenerationRequest("a", prompt, SamplingParams(temperature=0, max_new_tokens=12, ignore_eos=True))
    short = {name: tensor for name, tensor in weights.items() if name != "model.layers.1.self_attn.k_proj.weight"}
    with pytest.raises(WeightUpdateError, match=r"no tensor was given for model\.layers\.1\.self_attn\.k_proj\.weight"):
        engine.update_weights(short.items(), 5)
    with pytest.raises(EngineError, match="version 5 did not finish"):
        engine.generate([request])
    assert not engine.health().ok
    bent = weights | {"model.norm.weight": weights["model.norm.weight"][:7]}
    with pytest.raises(WeightUpdateError, match=r"'model\.norm\.weight' has shape \(7,\).*\(128,\)"):
        engine.update_weights(bent.items(), 5)
    with pytest.raises(WeightUpdateError, match=r"no tensor 'model\.extra'"):
        engine.update_weights([*weights.items(), ("model.extra", weights["model.norm.weight"])], 5)
    engine.update_weights(weights.items(), 6)
    assert engine.generate([request])[0].token_ids == greedy(model, prompt, 12)


def take_user_output(sample: Sample, output: Any) -> None:
    """The new tokens of a `RequestOutput` (DELTA), the way a user of vLLM reads them."""
    completion = output.outputs[0]
    if output.prompt_token_ids:
        sample.num_prompt_tokens = len(output.prompt_token_ids)
    token_ids = list(completion.token_ids)
    scores = [entry[token].logprob for entry, token in zip(completion.logprobs, token_ids, strict=True)]
    sample.extend(token_ids, scores, 0)
    if completion.finish_reason is not None:
        sample.finish(completion.finish_reason)
