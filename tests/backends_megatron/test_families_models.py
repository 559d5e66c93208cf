"""Every family: Hugging Face files to Megatron and back is bitwise on all layouts; logits are those of transformers."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.backends_megatron.family_models import CONFIGS, VOCAB_SIZE, hf_model, megatron_model, save_folder
from tests.ranks import run_alone, run_ranks

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(900)]

UNEVEN = {"num_layers_in_first_pipeline_stage": 1, "num_layers_in_last_pipeline_stage": 3}
DENSE = ({"tp": 2, "pp": 2}, {"tp": 4}, {"pp": 2, "vpp": 2})
EXPERTS = ({"tp": 2, "ep": 2, "etp": 2}, {"tp": 2, "pp": 2, "ep": 2, "etp": 1}, {"pp": 2, "vpp": 2, "ep": 2})
LAYOUTS: dict[str, tuple[dict[str, Any], ...]] = {
    "llama": (*DENSE, {"pp": 2, "override": UNEVEN}),
    "qwen2": DENSE,  # tied: the head on the last stage is a copy
    "qwen3": DENSE,
    "qwen3_moe": EXPERTS,
    "deepseek_v3": (*EXPERTS, {"ep": 4}, {"pp": 2, "ep": 2, "override": UNEVEN}),
    "deepseek_v3_yarn": ({"tp": 2, "pp": 2, "ep": 2, "etp": 1},),
}
LOGIT_LAYOUTS: dict[str, tuple[dict[str, Any], ...]] = {
    "llama": ({"tp": 4},),  # more ranks than key-value heads
    "llama3": ({"tp": 2},),
    "llama_linear": ({"tp": 2},),
    "qwen2": ({"tp": 2},),
    "qwen3": ({"tp": 2},),
    "qwen3_yarn": ({"tp": 2},),
    "qwen3_moe": ({"tp": 2, "ep": 2, "etp": 1}, {"ep": 4}),
    "qwen3_moe_plain": ({"ep": 2},),
    "deepseek_v3": ({"tp": 2, "ep": 2, "etp": 1},),
    "deepseek_v3_yarn": ({"tp": 2, "ep": 2, "etp": 2},),
}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """All cases in one launch: importing Megatron costs more than they do. Rank 0's findings; it sees all tensors."""
    folder = tmp_path_factory.mktemp("results")
    run_alone(_save_models, folder)
    return run_ranks(_all_cases, 4, folder, timeout=280)[0]


def _save_models(rank: int, world_size: int, root: Path) -> None:
    for name in CONFIGS:
        save_folder(name, root / name)
    _save_classifier(root / "qwen2", root / "scores")


@pytest.mark.parametrize("name", LAYOUTS)
def test_files_to_megatron_to_files_is_bitwise_on_every_layout(results: dict[str, Any], name: str) -> None:
    differences = results["round_trip"][name]
    assert len(differences) == len(LAYOUTS[name])
    assert all(found == [] for found in differences.values()), differences


@pytest.mark.parametrize("name", CONFIGS)
def test_megatron_logits_are_those_of_transformers(results: dict[str, Any], name: str) -> None:
    assert results["logits"][name] < 1e-5


def test_every_rank_gets_every_tensor(results: dict[str, Any]) -> None:
    assert results["names_differ"] == 0


def test_buckets_of_any_size_carry_the_same_tensors(results: dict[str, Any]) -> None:
    assert results["small_buckets"] == []


def test_half_precision_weights_come_back_as_they_were_rounded(results: dict[str, Any]) -> None:
    assert results["bfloat16"] == []


def test_a_scalar_head_starts_like_that_of_the_other_backends_or_is_read(results: dict[str, Any]) -> None:
    assert results["value_head"] == {"fresh": True, "read": True, "backbone": []}


def test_a_missing_tensor_and_a_quantised_one_are_named(results: dict[str, Any]) -> None:
    assert "holds no weights for model.layers.2.mlp.up_proj.weight" in results["missing"]
    assert "lm_head.weight_scale_inv" in results["quantised"]


def test_prediction_layers_are_left_out_with_a_notice(results: dict[str, Any]) -> None:
    assert results["extra_layers"]["differences"] == []
    assert "multi-token-prediction" in results["extra_layers"]["notice"]


def _all_cases(rank: int, world_size: int, root: Path) -> dict[str, Any]:
    import torch.distributed as dist

    found: dict[str, Any] = {"round_trip": {}, "logits": {}}
    names: list[list[str]] = []
    for name in CONFIGS:
        found["round_trip"][name] = {}
        for layout in LAYOUTS.get(name, ()):
            model = megatron_model(root / name, **layout)
            sent = dict(_sent(model))
            names.append(list(sent))
            found["round_trip"][name][str(layout)] = _differences(root / name, sent)
        reference = _reference_logits(root / name)
        found["logits"][name] = max(_logit_gap(root / name, reference, case) for case in LOGIT_LAYOUTS[name])
    everywhere: list[Any] = [None] * world_size
    dist.all_gather_object(everywhere, names)
    found["names_differ"] = sum(other != names for other in everywhere)
    found["small_buckets"] = _small_buckets(root / "deepseek_v3")
    found["bfloat16"] = _half_precision(root / "qwen3_moe")
    found["value_head"] = _value_head(root / "qwen2", root / "scores")
    found |= _broken_folders(root, rank)
    return found


def _sent(model: Any, **options: Any) -> Iterator[tuple[str, torch.Tensor]]:
    from dovetail.backends.megatron.families.registry import family_for

    weights = family_for(model.hf_config).named_weights(model, lambda parameter: parameter.detach(), **options)
    return ((name, tensor.clone()) for name, tensor in weights)


def _differences(folder: Path, sent: dict[str, torch.Tensor], dtype: torch.dtype = torch.float32) -> list[str]:
    from dovetail.models.weights import iter_checkpoint_tensors

    stored = {name: tensor.load() for name, tensor in iter_checkpoint_tensors(folder)}
    problems = sorted(stored.keys() ^ sent.keys())
    for name in stored.keys() & sent.keys():
        wanted = stored[name] if "correction_bias" in name else stored[name].to(dtype)
        if sent[name].dtype != wanted.dtype or not torch.equal(sent[name], wanted):
            problems.append(f"{name} differs")
    return problems


def _reference_logits(folder: Path) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        return model(_tokens()).logits


def _tokens() -> torch.Tensor:
    return torch.randint(0, VOCAB_SIZE, (2, 24), generator=torch.Generator().manual_seed(5))


def _logit_gap(folder: Path, reference: torch.Tensor, layout: dict[str, Any]) -> float:
    from megatron.core.models.gpt import GPTModel

    from dovetail.backends.megatron.shim import cuda_to_cpu

    model = megatron_model(folder, **layout)
    chunk = model.chunks[0]
    chunk._postprocess = partial(GPTModel._postprocess, chunk)  # all logits instead of the role's log-probs
    tokens = _tokens()
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    with cuda_to_cpu(), torch.no_grad():
        logits = chunk.eval()(tokens, positions, None)
    size, rank = logits.shape[-1], model.layout.tp_rank
    own = reference[..., rank * size : (rank + 1) * size]
    assert reference.abs().max() > 0.5, "logits this small show nothing"
    return float((logits[..., : own.shape[-1]] - own).abs().max())


def _small_buckets(folder: Path) -> list[str]:
    from dovetail.backends.megatron.families.gather import gather_weights
    from dovetail.backends.megatron.families.registry import family_for

    model = megatron_model(folder, tp=2, pp=2, ep=2, etp=1)
    family: Any = family_for(model.hf_config)
    sent = gather_weights(family, model, lambda parameter: parameter.detach(), bucket_bytes=2000)
    return _differences(folder, {name: tensor.clone() for name, tensor in sent})


def _half_precision(folder: Path) -> list[str]:
    model = megatron_model(folder, tp=2, ep=2, etp=1, dtype="bfloat16")
    return _differences(folder, dict(_sent(model)), torch.bfloat16)


def _save_classifier(folder: Path, out: Path) -> None:
    from transformers import AutoModelForTokenClassification

    classifier = AutoModelForTokenClassification.from_pretrained(folder, num_labels=1, dtype=torch.float32)
    torch.nn.init.normal_(classifier.score.weight)
    classifier.save_pretrained(out)


def _value_head(folder: Path, scores: Path) -> dict[str, Any]:
    from safetensors import safe_open

    from dovetail.models.load import build_meta_model, materialize
    from dovetail.models.value import ValueModel
    from dovetail.models.weights import load_weights

    other = ValueModel(build_meta_model(folder, "value"))
    materialize(other, "cpu")
    load_weights(other, folder)
    head = other.hf_model.score
    sent = dict(_sent(megatron_model(folder, role="value", tp=2, pp=2)))
    fresh = torch.equal(sent["score.weight"], head.weight) and torch.equal(sent["score.bias"], head.bias)
    backbone = [name for name in sent if name not in ("score.weight", "score.bias")]
    expected = {f"model.{name}" for name, _ in other.hf_model.model.named_parameters()}
    with safe_open(scores / "model.safetensors", framework="pt") as file:
        stored = file.get_tensor("score.weight")
    read = dict(_sent(megatron_model(scores, role="value", pp=2)))
    return {
        "fresh": fresh,
        "read": torch.equal(read["score.weight"], stored),
        "backbone": sorted(expected ^ set(backbone)),
    }


def _broken_folders(root: Path, rank: int) -> dict[str, Any]:
    import logging

    from safetensors.torch import load_file, save_file

    from dovetail.backends.megatron.families import load

    model = hf_model("llama")
    tensors = {name: tensor.contiguous().clone() for name, tensor in model.state_dict().items()}
    found: dict[str, Any] = {}
    cases: dict[str, dict[str, torch.Tensor]] = {
        "missing": {name: t for name, t in tensors.items() if name != "model.layers.2.mlp.up_proj.weight"},
        "quantised": tensors | {"lm_head.weight_scale_inv": torch.ones(1)},
    }
    for case, content in cases.items():
        folder = root / f"{case}-{rank}"
        model.config.save_pretrained(folder)
        save_file(content, folder / "model.safetensors")
        with pytest.raises(ValueError, match=r".*") as caught:
            megatron_model(folder)
        found[case] = str(caught.value)
    folder = root / f"extra-{rank}"
    small = load_file(root / "deepseek_v3" / "model.safetensors")
    CONFIGS["deepseek_v3"]().save_pretrained(folder)
    more = {name.replace("layers.3.", "layers.4."): t.clone() for name, t in small.items() if "layers.3." in name}
    save_file(small | more, folder / "model.safetensors")
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # pyrefly: ignore[bad-assignment]
    load.logger.addHandler(handler)
    sent = dict(_sent(megatron_model(folder, pp=2)))
    load.logger.removeHandler(handler)
    found["extra_layers"] = {"differences": _differences(root / "deepseek_v3", sent), "notice": " ".join(records)}
    return found
