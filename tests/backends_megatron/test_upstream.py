"""Fails loudly when megatron-core changes under us: the version, and the text of every part that this backend replaces,
works around or calls behind its public interface.

After a change: read the part, adapt the module named beside it, run `tests/backends_megatron`, then write the new
digest here and the new range into `dovetail/backends/megatron/versions.py`. Nothing of Megatron is imported.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.version import Version

from dovetail.backends.megatron import versions

pytestmark = pytest.mark.distributed

# File, name in it: digest of its text, and what rests on it.
PARTS: dict[tuple[str, str], tuple[str, str]] = {
    ("tensor_parallel/random.py", "_get_cuda_rng_state"): ("0c2b8f05b864", "shim: replaced"),
    ("tensor_parallel/random.py", "_set_cuda_rng_state"): ("dea947ca0b7d", "shim: replaced"),
    ("tensor_parallel/mappings.py", "_gather_along_first_dim"): ("abaaf454b5e0", "shim: uneven parts over gloo"),
    ("tensor_parallel/mappings.py", "_reduce_scatter_along_first_dim"): (
        "09ac89672936",
        "shim: uneven parts over gloo",
    ),
    ("transformer/moe/moe_utils.py", "maybe_move_tensor_to_cpu"): (
        "47a1092f05ba",
        "shim: replaced in token_dispatcher",
    ),
    ("optimizer/clip_grads.py", "clip_grad_by_total_norm_fp32"): (
        "d2d28092dcb2",
        "shim: Tensor.type(); optimizer: called",
    ),
    ("tensor_parallel/layers.py", "_initialize_affine_weight_cpu"): (
        "a5a12c75888a",
        "model: marks split weights itself",
    ),
    ("models/gpt/gpt_model.py", "GPTModel.forward"): ("d8110320c09f", "model: RoleModel gets its HeadCall as labels"),
    ("models/gpt/gpt_model.py", "GPTModel._postprocess"): ("bf6e15ce83d2", "model: overridden"),
    ("models/gpt/gpt_model.py", "GPTModel._preprocess"): ("c107f8e8f17c", "model: rotary_pos_emb of dense layers"),
    ("transformer/transformer_layer.py", "TransformerLayer._forward_attention"): (
        "8d34a6cb3a93",
        "dense_layer: the same in a form that compiles",
    ),
    ("transformer/attention.py", "SelfAttention.get_query_key_value_tensors"): (
        "b8459eb216b6",
        "dense_layer: the same in a form that compiles",
    ),
    ("transformer/mlp.py", "MLP.forward"): ("914db4cfc0dd", "dense_layer: the same in a form that compiles"),
    ("models/common/embeddings/yarn_rotary_pos_embedding.py", "_yarn_get_concentration_factor_from_config"): (
        "cd066651ec0b",
        "dense_layer: called",
    ),
    ("pipeline_parallel/schedules.py", "forward_step_calc_loss"): (
        "30b0a6fbae0c",
        "schedule: losses are sums, not means",
    ),
    ("pipeline_parallel/p2p_communication.py", "P2PCommunicator._communicate_shapes"): (
        "02c505710bc2",
        "settings: overlap_p2p_comm",
    ),
    ("distributed/finalize_model_grads.py", "finalize_model_grads"): (
        "6e707bbdff75",
        "backend: called without num_tokens",
    ),
    ("optimizer/optimizer.py", "ChainedOptimizer.step"): ("564cf7bc15fe", "optimizer: taken apart"),
    ("optimizer/__init__.py", "_get_param_groups"): ("a0af2730f413", "optimizer: wd_mult"),
    ("distributed/param_and_grad_buffer.py", "_ParamAndGradBucketGroup.start_grad_sync"): (
        "66adbe07814a",
        "gradients: gathered",
    ),
    ("models/gpt/gpt_layer_specs.py", "get_gpt_layer_with_transformer_engine_spec"): (
        "15eb8848f25b",
        "spec: the same in torch",
    ),
    ("transformer/moe/experts.py", "TEGroupedMLP"): ("f54d8d83ee96", "torch_layers: its linear layers"),
    ("transformer/multi_latent_attention.py", "MLASelfAttention.__init__"): ("62c9ac1258c6", "no_te: TELinear"),
}


@pytest.mark.parametrize("part", PARTS, ids=lambda part: f"{part[0]}:{part[1]}")
def test_a_part_of_megatron_that_we_rest_on_is_as_it_was(part: tuple[str, str]) -> None:
    digest, use = PARTS[part]
    assert digest_of(*part) == digest, (
        f"{part[1]} in megatron/core/{part[0]} has changed ({use}); see the top of this file"
    )


def test_the_router_still_needs_a_name_that_is_undefined_without_transformer_engine() -> None:
    """When this fails upstream has repaired it: take the line out of `no_te`."""
    source = (core_folder() / "transformer/moe/moe_utils.py").read_text()
    bound = [
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Assign)
        and any(isinstance(target, ast.Name) and target.id == "te_general_gemm" for target in node.targets)
    ]
    assert "if te_general_gemm is not None" in source
    assert bound == []


def test_the_fallback_optimizer_still_counts_steps_for_each_parameter() -> None:
    """When this fails the distributed optimizer may checkpoint torch's AdamW: see `GroupStepAdam` in `no_te`."""
    source = (core_folder() / "optimizer/__init__.py").read_text()
    assert "from torch.optim import AdamW as Adam" in source
    assert "USING_PYTORCH_OPTIMIZER = True" in source


def test_the_installed_version_is_in_the_range() -> None:
    assert versions.OLDEST <= versions.check_version() <= versions.NEWEST


@pytest.mark.parametrize("version", ["0.15.9", "0.17.0", "0.19.2"])
def test_another_version_is_refused_with_the_fix(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions.metadata, "version", lambda name: version)
    with pytest.raises(ImportError, match=r"0\.16\.0 to 0\.16\.99.*Install megatron-core==0\.16\.1.*strategy=fsdp2"):
        versions.check_version()


def test_without_megatron_a_role_says_what_to_install() -> None:
    program = (
        "import sys; sys.modules['megatron'] = None\n"
        "from dovetail.backends.megatron import versions\n"
        "def absent(name): raise versions.metadata.PackageNotFoundError(name)\n"
        "versions.metadata.version = absent\n"
        "try:\n    versions.check_version()\nexcept ImportError as error:\n    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert "install megatron-core==0.16.1" in done.stdout
    assert "psutil" in done.stdout


def test_the_range_holds_the_version_the_digests_are_of() -> None:
    assert versions.OLDEST <= Version("0.16.1") <= versions.NEWEST


def digest_of(file: str, name: str) -> str:
    source = (core_folder() / file).read_text()
    scope: list[ast.stmt] = ast.parse(source).body
    found: ast.stmt | None = None
    for part in name.split("."):
        found = next(node for node in scope if getattr(node, "name", None) == part)
        scope = getattr(found, "body", [])
    assert found is not None
    text = ast.get_source_segment(source, found)
    assert text is not None
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def core_folder() -> Path:
    """Of the installed package, found without importing it (that takes seconds)."""
    spec = importlib.util.find_spec("megatron")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    return Path(next(iter(spec.submodule_search_locations))) / "core"
