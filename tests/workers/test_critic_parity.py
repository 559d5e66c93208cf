"""The same batch gives the same metrics, gradient norm and weights of the critic, however the update is laid out.

Built like `test_actor_parity`: one process with micro-batches of 4 is the reference, tolerance 1e-5.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dovetail.config.root import DovetailConfig
from dovetail.protocol import DataProto
from dovetail.workers.build import build_value
from dovetail.workers.critic import DataParallelPPOCritic
from tests.backends.tiny import as_numpy
from tests.workers.layouts import PADDED, ByLayout, BySetting, Layout, assert_same_updates, slow_on_four, train_layouts
from tests.workers.tiny_run import MINI_BATCH, TOLERANCE, Updated, my_rows, rollout_batch, run_config, small_model

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(900)]

SETTINGS: dict[str, dict[str, Any]] = {
    "token-mean, two epochs": {"loss_agg_mode": "token-mean", "ppo_epochs": 2},
    "seq-mean-token-sum": {"loss_agg_mode": "seq-mean-token-sum", "cliprange_value": 0.1},
    "seq-mean-token-mean": {"loss_agg_mode": "seq-mean-token-mean"},
    "seq-mean-token-sum-norm": {"loss_agg_mode": "seq-mean-token-sum-norm"},
}


LORA = {"lora_rank": 4, "lora_alpha": 8}

LAYOUTS = {
    "reference": Layout(1),
    "micro-batches of 1": Layout(1, micro_batch=1),
    "dynamic micro-batches": Layout(1, tokens=25),
    "padded": Layout(1, model=PADDED),
    "gradient checkpointing": Layout(1, model={"enable_gradient_checkpointing": True}),
    "lora": Layout(1, model=LORA),
    "lora, fsdp2 x2": Layout(2, model=LORA, like="lora"),
    "lora, fsdp x2": Layout(2, "fsdp", model=LORA, like="lora"),
    "fsdp2 x2": Layout(2),
    "fsdp2 x2, padded, dynamic": Layout(2, tokens=20, model=PADDED),
    "fsdp x2": Layout(2, "fsdp", micro_batch=1),
    "ulysses 2": Layout(2, sp_size=2),
    "fsdp2 x4": Layout(4, micro_batch=1),
    "fsdp2 hybrid 2x2, dynamic": Layout(4, tokens=16, fsdp={"fsdp_size": 2}),
    "ulysses 4 over 2 key-value heads": Layout(4, sp_size=4),
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> ByLayout:
    folder = tmp_path_factory.mktemp("trained")
    return train_layouts(LAYOUTS, train, prepare, folder)


def prepare(rank: int, world_size: int, folder: Path) -> tuple[Path, DataProto]:
    return small_model(folder / "model", "llama"), rollout_batch()


@pytest.mark.parametrize("name", slow_on_four(LAYOUTS, [n for n in LAYOUTS if n not in ("reference", "lora")]))
def test_an_update_does_not_depend_on_its_layout(name: str, trained: ByLayout) -> None:
    assert_same_updates(trained[name], trained[LAYOUTS[name].like][0])


def test_the_updates_that_are_compared_clip_values_and_train_the_head(trained: ByLayout) -> None:
    first, second, *_ = trained["reference"][0].values()
    assert 0.01 < first.metrics["critic/vf_clipfrac"] < 0.95
    assert first.metrics["critic/grad_norm"] > 0.1
    head, layer = "score.weight", "model.layers.1.mlp.up_proj.weight"
    for name, moved in (("reference", head), ("lora", head), ("lora", layer)):
        first, second, *_ = trained[name][0].values()
        assert abs(first.weights[moved] - second.weights[moved]).max() > 100 * TOLERANCE, (name, moved)


def test_values_are_of_the_state_before_each_token_in_the_order_given(tmp_path: Path) -> None:
    folder = small_model(tmp_path, "llama")
    batch = rollout_batch()
    plain = build_critic(folder, LAYOUTS["reference"], {})
    values = plain.compute_values(batch)
    dynamic = build_critic(folder, Layout(1, tokens=16), {})
    torch.testing.assert_close(dynamic.compute_values(batch), values, atol=TOLERANCE, rtol=0)
    assert not values[batch.tensors["response_mask"] == 0].any()

    reversed_rows = batch.select_idxs(torch.arange(len(batch)).flip(0))
    torch.testing.assert_close(dynamic.compute_values(reversed_rows).flip(0), values, atol=TOLERANCE, rtol=0)

    # By hand: transformers' hidden state before the token, times the head.
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    head = dict(plain.backend.named_weights())["score.weight"][0]
    row, columns = 0, batch.tensors
    kept = columns["attention_mask"][row].bool()
    with torch.no_grad():
        hidden = model.model(input_ids=columns["input_ids"][row][kept][None]).last_hidden_state[0]
    count = int(columns["response_mask"][row].sum())
    torch.testing.assert_close(values[row, :count], (hidden @ head)[-count - 1 : -1], atol=TOLERANCE, rtol=0)


def test_a_critic_starts_from_a_trl_value_head(tmp_path: Path) -> None:
    folder = small_model(tmp_path, "llama")
    weights = load_file(folder / "model.safetensors")
    weights["v_head.summary.weight"] = torch.linspace(-1, 1, weights["model.norm.weight"].numel())[None]
    weights["v_head.summary.bias"] = torch.tensor([0.25])
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    critic = build_critic(folder, LAYOUTS["reference"], {})
    found = dict(critic.backend.named_weights())
    torch.testing.assert_close(found["score.weight"], weights["v_head.summary.weight"], atol=0, rtol=0)
    torch.testing.assert_close(found["score.bias"], weights["v_head.summary.bias"], atol=0, rtol=0)


def train(folder: Path, layout: Layout, batch: DataProto) -> BySetting:
    critic = build_critic(folder, layout, {})
    mine = my_rows(batch, critic.backend.rank_info)
    found: BySetting = {}
    for name, setting in SETTINGS.items():
        critic = build_critic(folder, layout, setting, like=critic)
        metrics = critic.update_critic(with_values(mine, critic.compute_values(mine)))
        found[name] = Updated(metrics, as_numpy(critic.backend.named_weights()))
    return found


def with_values(batch: DataProto, values: torch.Tensor) -> DataProto:
    """Old values near the critic's own, so that clipping bites on some tokens."""
    columns = batch.tensors
    near = (values + columns["noise"]) * columns["response_mask"]
    return DataProto.from_dict({**columns, "values": near}, meta_info=batch.meta_info)


def critic_config(folder: Path, layout: Layout, setting: dict[str, Any]) -> DovetailConfig:
    return run_config(
        folder,
        {
            **layout.keys("critic", "critic.model"),
            **{f"critic.{key}": value for key, value in setting.items()},
        },
    )


def build_critic(
    folder: Path, layout: Layout, setting: dict[str, Any], *, like: DataParallelPPOCritic | None = None
) -> DataParallelPPOCritic:
    """A new critic, or one with other settings on the backend of `like`."""
    config = critic_config(folder, layout, setting)
    critic = config.critic
    backend = like.backend if like is not None else build_value(
        critic.model, strategy=layout.strategy, fsdp=critic.fsdp_config, optim=critic.optim, grad_clip=critic.grad_clip,
        sp_size=layout.sp_size, world_size=layout.world_size, device=torch.device("cpu"),
    )  # fmt: skip
    return DataParallelPPOCritic(
        critic,
        backend,
        mini_batch_rows=MINI_BATCH // backend.rank_info.dp_size,
        loss_scale_factor=config.loss_scale_factor,
    )
