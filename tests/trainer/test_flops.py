"""Counted FLOPs are those of the real model; utilisation is FLOPs over time over peak, and absent without a peak."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from dovetail.config import load_config
from dovetail.config.plan.model_shape import ModelShape, read_model_shape
from dovetail.controller import WorkerGroup
from dovetail.models.flops import StepUtilisation, forward_flops, generation_flops, pass_flops, utilisation
from dovetail.protocol import DataProto
from dovetail.workers.device_peak import PUBLISHED, device_peak, published_peak
from tests.models.tiny import save_tiny_model
from tests.trainer.toy_run import Toy, train

pytestmark = pytest.mark.unit


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("models")
    return lambda family: save_tiny_model(family, root / family)


def attention_flops(shape: ModelShape, length: int) -> float:
    """The half of the square that is counted."""
    return 2.0 * length * length * shape.num_heads * shape.head_dim * shape.num_layers


@pytest.mark.parametrize("family", ["qwen2", "llama"])
def test_a_forward_pass_is_counted_as_torch_counts_it(folders: Callable[[str], Path], family: str) -> None:
    folder, length = folders(family), 24
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(torch.arange(3, 3 + length)[None])
    shape = read_model_shape(folder)
    biases = 2.0 * sum(p.numel() for name, p in model.named_parameters() if name.endswith("bias")) * length
    # torch multiplies the whole square of scores, of which a causal model needs half.
    expected = counter.get_total_flops() - attention_flops(shape, length) + biases
    assert forward_flops(shape, [length], length) == pytest.approx(expected, rel=1e-9)
    # The head reads only the tokens it is asked for.
    head = 2.0 * shape.vocab_size * shape.hidden_size
    assert forward_flops(shape, [length], length) - forward_flops(shape, [length], 10) == pytest.approx(14 * head)


def batch_of(prompts: list[int], responses: list[int], uids: list[str]) -> DataProto:
    width, response_width = max(prompts), max(responses)
    attention = torch.zeros(len(prompts), width + response_width, dtype=torch.int64)
    for row, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        attention[row, width - prompt : width + response] = 1
    tensors = {"attention_mask": attention, "responses": attention[:, width:]}
    return DataProto.from_dict(tensors, {"uid": np.array(uids, dtype=object)})


def test_updates_are_three_passes_and_a_prompt_is_read_once_by_the_engine(folders: Callable[[str], Path]) -> None:
    shape = read_model_shape(folders("llama"))
    batch = batch_of([4, 4, 6], [5, 2, 3], ["a", "a", "b"])
    forward = forward_flops(shape, [9, 6, 9], 10)
    found = pass_flops(batch, policy=shape, critic=shape, actor_epochs=2, critic_epochs=1, adapters_only=False)
    assert found["old_log_prob"] == found["ref"] == forward
    assert found["update_actor"] == 6 * forward
    assert found["update_critic"] == 3 * found["values"] == 3 * forward_flops(shape, [9, 6, 9], 0)
    with_adapters = pass_flops(batch, policy=shape, critic=None, actor_epochs=1, critic_epochs=1, adapters_only=True)
    assert with_adapters["update_actor"] == 2 * forward
    assert "values" not in with_adapters
    both = pass_flops(
        batch, policy=shape, critic=shape, actor_epochs=1, critic_epochs=1, adapters_only=True,
        critic_adapters_only=True,
    )  # fmt: skip
    assert both["update_critic"] == 2 * both["values"]
    others = pass_flops(
        batch, policy=shape, critic=None, actor_epochs=1, critic_epochs=1, adapters_only=False, shares_prompts=True,
        unscored=torch.tensor([False, False, True]),
    )  # fmt: skip
    assert others["old_log_prob"] == forward_flops(shape, [9, 6], 7) - forward_flops(shape, [4], 0)
    assert others["ref"] == others["update_actor"] / 3 == forward - forward_flops(shape, [4], 0)
    assert generation_flops(shape, batch) == pytest.approx(forward - forward_flops(shape, [4], 0))


def test_utilisation_is_of_all_devices_together() -> None:
    flops = {"update_actor": 8e12, "old_log_prob": 1e12, "ref": 1e12}
    found = utilisation(flops, {"update_actor": 2.0, "old_log_prob": 1.0}, peak=10e12)
    assert found == {"perf/mfu/actor": pytest.approx(0.4), "perf/mfu/actor_infer": pytest.approx(0.1)}


@pytest.mark.parametrize("bypass", [True, False])
def test_log_probs_that_are_copied_from_the_engine_are_no_pass(folders: Callable[[str], Path], bypass: bool) -> None:
    keys = [
        f"actor_rollout_ref.model.path={folders('llama')}",
        "actor_rollout_ref.rollout.calculate_log_probs=True",
        f"algorithm.rollout_correction.bypass_mode={bypass}",
        "trainer.device_peak_tflops=1",
    ]
    step = StepUtilisation(load_config(overrides=keys).config)
    step.ask_peaks(cast(WorkerGroup, SimpleNamespace(world_size=1)))
    found = step.take(batch_of([4, 4], [5, 2], ["a", "a"]), {"old_log_prob": 1e-4, "update_actor": 1.0})
    assert ("perf/mfu/actor_infer" in found) is not bypass
    assert "perf/mfu/actor" in found


def test_peaks_are_looked_up_by_the_longest_name_and_never_invented() -> None:
    assert published_peak("NVIDIA H200", torch.bfloat16, "highest") == pytest.approx(989.4e12)
    assert published_peak("NVIDIA H100 PCIe", torch.bfloat16, "highest") == pytest.approx(756e12)
    assert published_peak("NVIDIA L40S", torch.float32, "high") == pytest.approx(183e12)
    assert published_peak("NVIDIA A100-SXM4-80GB", torch.float32, "highest") == pytest.approx(19.5e12)
    for other in ("NVIDIA GeForce GTX 480", "NVIDIA RTX A1000", "NVIDIA RTX A4000", "NVIDIA A10G"):
        assert published_peak(other, torch.bfloat16, "highest") is None
    assert published_peak("NVIDIA H200", torch.float64, "highest") is None
    names = list(PUBLISHED)
    for place, name in enumerate(names):
        assert not any(earlier in name for earlier in names[:place]), f"{name} would never be found"


def test_the_peak_of_a_cpu_is_measured() -> None:
    peak = device_peak(torch.device("cpu"), torch.float32)
    assert peak is not None
    assert 1e8 < peak < 1e14


@pytest.mark.e2e
def test_a_run_reports_the_share_of_the_peak_it_reached(toy: Toy, tmp_path: Path) -> None:
    keys = {
        "algorithm.adv_estimator": "gae",
        "actor_rollout_ref.actor.use_kl_loss": True,
        "actor_rollout_ref.actor.shuffle": True,  # the pass for old log-probs runs on all rows
        "trainer.device_peak_tflops": 2.0,
        "trainer.total_training_steps": 2,
    }
    _, rows = train(toy.config(tmp_path, keys))
    names = {f"perf/mfu/{name}" for name in ("actor", "critic", "actor_infer", "critic_infer", "ref", "rollout")}
    for row in rows:
        assert names <= row.keys()
        assert all(0 < row[name] < 1 for name in names)
        assert row["perf/peak_tflops"] == 2.0
        # An update is three passes, the pass for old log-probs one: the same count, told by two clocks.
        actor = row["perf/mfu/actor"] * row["timing_s/update_actor"]
        assert actor == pytest.approx(3 * row["perf/mfu/actor_infer"] * row["timing_s/old_log_prob"])
