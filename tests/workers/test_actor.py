"""One process: what the actor computes, in which order, and what it refuses."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dovetail.algorithms import (
    compute_offpolicy_metrics,
    compute_probs_diff_metrics,
    get_policy_loss_columns,
    get_policy_loss_fn,
    get_policy_loss_selector,
    policy_loss_names,
)
from dovetail.algorithms.distillation import listed_divergence
from dovetail.config.algorithm import RolloutCorrectionConfig
from dovetail.config.methods import DistillConfig
from dovetail.models.vocabulary_divergence import OutputLayer, Teacher
from dovetail.protocol import DataProto
from dovetail.workers.actor import DataParallelPPOActor
from dovetail.workers.build import build_policy
from dovetail.workers.micro_batches import MicroBatchLimit
from dovetail.workers.mini_batches import OWN_OLD_LOG_PROBS
from tests.backends.tiny import as_numpy, largest_difference
from tests.workers.tiny_run import (
    NUM_ROWS,
    RESPONSE,
    TOLERANCE,
    rollout_batch,
    run_config,
    small_model,
    with_old_log_probs,
)

pytestmark = pytest.mark.unit

ACTOR, MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.model"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_model(tmp_path_factory.mktemp("policy"))


def build(
    folder: Path,
    *,
    limit: MicroBatchLimit | None = None,
    mini_batch_rows: int = NUM_ROWS,
    trains: bool = True,
    correction: RolloutCorrectionConfig | None = None,
    teacher: Teacher | None = None,
    distill: DistillConfig | None = None,
    **changes: Any,
) -> DataParallelPPOActor:
    """`changes` are keys of `actor`, or of `model` when they start with `model_`."""
    sections = {
        f"{MODEL}.{key.removeprefix('model_')}" if key.startswith("model_") else f"{ACTOR}.{key}": value
        for key, value in changes.items()
    }
    policy = run_config(folder, sections).actor_rollout_ref
    backend = build_policy(
        policy.model,
        strategy="single",
        fsdp=policy.actor.fsdp_config,
        optim=policy.actor.optim if trains else None,
        device=torch.device("cpu"),
    )
    limit = limit or MicroBatchLimit(rows=4)
    return DataParallelPPOActor(
        policy.actor,
        backend,
        mini_batch_rows=mini_batch_rows,
        log_prob_limit=limit,
        correction=correction,
        distill=distill or DistillConfig(),
        teacher=teacher,
    )


def transformers_log_probs(folder: Path, batch: DataProto, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies row by row, without padding, from plain transformers."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    columns = batch.tensors
    width = columns["responses"].shape[1]
    log_probs, entropies = torch.zeros(len(batch), width), torch.zeros(len(batch), width)
    for row in range(len(batch)):
        kept = columns["attention_mask"][row].bool()
        ids = columns["input_ids"][row][kept]
        count = int(kept[-width:].sum())
        with torch.no_grad():
            log_p = (model(input_ids=ids[None]).logits[0, -count - 1 : -1] / temperature).log_softmax(-1)
        log_probs[row, :count] = log_p.gather(-1, ids[-count:, None]).squeeze(-1)
        entropies[row, :count] = -(log_p.exp() * log_p).sum(-1)
    return log_probs, entropies


@pytest.mark.parametrize("packed", [True, False])
def test_log_probs_are_transformers_own_in_the_order_of_the_rows(folder: Path, packed: bool) -> None:
    batch = rollout_batch()
    actor = build(folder, limit=MicroBatchLimit(tokens=20), model_use_remove_padding=packed)
    log_probs, entropies = actor.compute_log_prob(batch, calculate_entropy=True)
    expected, expected_entropies = transformers_log_probs(folder, batch, 0.9)
    assert entropies is not None
    torch.testing.assert_close(log_probs, expected, atol=TOLERANCE, rtol=0)
    torch.testing.assert_close(entropies, expected_entropies, atol=TOLERANCE, rtol=0)

    shuffled = torch.randperm(len(batch), generator=torch.Generator().manual_seed(0))
    again, none = actor.compute_log_prob(batch.select_idxs(shuffled))
    torch.testing.assert_close(again, expected[shuffled], atol=TOLERANCE, rtol=0)
    assert none is None


@pytest.mark.slow  # the tiny model above shows it for the actor, `tests/demo` for this model
def test_log_probs_of_a_real_model_equal_plain_transformers() -> None:
    """1e-4: thirty layers of float32 sums in another order, and log-probs down to -20."""
    from dovetail.demo.smollm2 import smollm2_folder
    from dovetail.models.load import load_tokenizer
    from dovetail.rollout.assemble import Response, assemble

    folder = smollm2_folder(torch.float32)
    tokenizer = load_tokenizer(folder)
    pairs = [
        ("What is 12 + 30?", "The answer is 42."),
        ("Name a colour.", "Blue"),
        ("Hi", "Hello! How can I help you?"),
    ]
    prompts, responses = [], []
    for question, answer in pairs:
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, tokenize=False
        )
        prompts.append(tokenizer.encode(text, add_special_tokens=False))
        ids = tuple(tokenizer.encode(answer, add_special_tokens=False))
        count = len(ids)
        responses.append(Response(ids, (True,) * count, (0.0,) * count, (0,) * count))
    batch = assemble(prompts, responses, pad_token_id=tokenizer.pad_token_id)
    batch.meta_info["temperature"] = 0.7
    actor = build(folder, limit=MicroBatchLimit(tokens=64), trains=False, model_use_fused_kernels=True)
    log_probs, entropies = actor.compute_log_prob(batch, calculate_entropy=True)
    assert entropies is not None
    expected, expected_entropies = transformers_log_probs(folder, batch, 0.7)
    torch.testing.assert_close(log_probs, expected, atol=1e-4, rtol=0)
    torch.testing.assert_close(entropies, expected_entropies, atol=1e-4, rtol=0)


@pytest.mark.parametrize("changes", [{}, {"use_dynamic_bsz": True, "ppo_max_token_len_per_gpu": 25}])
def test_an_update_without_old_log_probs_equals_one_with_the_policys_own(folder: Path, changes: dict) -> None:
    plain = rollout_batch()
    shortcut = build(folder, **changes)
    two_passes = build(folder, **changes)
    batch = with_old_log_probs(plain, torch.zeros(NUM_ROWS, RESPONSE))
    batch.tensors["old_log_probs"].copy_(two_passes.compute_log_prob(plain)[0])
    found, expected = shortcut.update_policy(plain), two_passes.update_policy(batch)
    assert found == pytest.approx(expected, abs=TOLERANCE)
    assert found["actor/ppo_kl"] == 0
    weights = [as_numpy(actor.backend.named_weights()) for actor in (shortcut, two_passes)]
    assert largest_difference(*weights) < TOLERANCE


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"])
def test_the_entropy_of_an_update_is_in_nats_per_token_however_the_loss_adds_up(folder: Path, mode: str) -> None:
    actor, batch = build(folder, entropy_coeff=0.01, loss_agg_mode=mode), rollout_batch()
    entropies = actor.compute_log_prob(batch, calculate_entropy=True)[1]
    assert entropies is not None
    expected = float(entropies[batch.tensors["response_mask"].bool()].mean())
    assert actor.update_policy(batch)["actor/entropy"] == pytest.approx(expected, rel=1e-4)


def test_the_entropy_of_an_update_counts_the_tokens_that_it_rejects(folder: Path) -> None:
    correction = RolloutCorrectionConfig(bypass_mode=True, rollout_rs="token_k1", rollout_rs_threshold=2.0)
    actor, batch = build(folder, entropy_coeff=0.01, correction=correction), rollout_batch()
    log_probs, entropies = actor.compute_log_prob(batch, calculate_entropy=True)
    assert entropies is not None
    far = 3.0 * (torch.arange(RESPONSE) % 2)  # every other token is beyond log 2 from the engine
    metrics = actor.update_policy(batch.union(DataProto.from_dict({"old_log_probs": log_probs - far})))
    assert 0.2 < metrics["rollout_corr/rollout_rs_masked_fraction"] < 0.8
    expected = float(entropies[batch.tensors["response_mask"].bool()].mean())
    assert metrics["actor/entropy"] == pytest.approx(expected, rel=1e-4)


def test_the_gap_to_the_engine_measured_in_an_update_is_the_one_of_a_pass_of_its_own(folder: Path) -> None:
    actor, batch = build(folder, ppo_micro_batch_size_per_gpu=3), rollout_batch()
    engine = actor.compute_log_prob(batch)[0] + 0.1 * torch.randn(NUM_ROWS, RESPONSE)
    mask = batch.tensors["response_mask"]
    expected = compute_offpolicy_metrics(actor.compute_log_prob(batch)[0], engine, mask)
    expected |= compute_probs_diff_metrics(actor.compute_log_prob(batch)[0], engine, mask)
    ratios = (actor.compute_log_prob(batch)[0] - engine).exp()[mask.bool()]
    expected_size = float(ratios.mean() ** 2 / ratios.square().mean())
    found = actor.update_policy(batch.union(DataProto.from_dict({"rollout_log_probs": engine})))
    for name in ("kl", "k3_kl", "probs_diff_mean"):
        assert found[f"rollout_corr/{name}"] == pytest.approx(expected[name], rel=1e-4)
    assert found["rollout_corr/eff_sample_size"] == pytest.approx(expected_size, rel=1e-4)
    assert 0 < expected_size < 1


def test_the_mismatch_of_an_update_that_keeps_no_token_is_0_under_its_usual_names(folder: Path) -> None:
    actor, batch = build(folder), rollout_batch()
    engine = actor.compute_log_prob(batch)[0]
    columns = {**batch.tensors, "response_mask": torch.zeros(NUM_ROWS, RESPONSE), "rollout_log_probs": engine}
    found = actor.update_policy(DataProto.from_dict(columns, meta_info=batch.meta_info))
    mismatch = {name: value for name, value in found.items() if name.startswith("rollout_corr/")}
    assert mismatch == {f"rollout_corr/{name}": 0.0 for name in ("kl", "k3_kl", "probs_diff_mean", "eff_sample_size")}


def _sampled_by_an_engine(policy: Tensor, shift: Tensor) -> DataProto:
    """An update of two optimizer steps, whose old log-probs are the policy's own; the engine's are `shift` higher."""
    batch = with_old_log_probs(rollout_batch(), policy)
    return batch.union(DataProto.from_dict({"rollout_log_probs": policy + shift}))


def test_negative_responses_that_are_far_from_the_engine_teach_nothing(folder: Path) -> None:
    """Compared with the engine, also where the old log-probs are the trainer's; the other rows' shares stay."""
    plain = build(folder)
    policy = plain.compute_log_prob(rollout_batch())[0]
    far = torch.arange(NUM_ROWS) % 2 == 0
    batch = _sampled_by_an_engine(policy, torch.where(far, 1.0, 0.1).unsqueeze(-1).expand_as(policy))
    mask = batch.tensors["response_mask"].bool()
    dropped = far.unsqueeze(-1) & (batch.tensors["advantages"] < 0) & mask
    masking = build(folder, policy_loss={"off_policy_mask_threshold": 0.5})
    metrics = masking.update_policy(batch)
    share = float(dropped.sum() / mask.sum())
    assert metrics.pop("actor/off_policy_masked_fraction") == pytest.approx(share)
    assert 0 < share < 1
    batch.tensors["advantages"].masked_fill_(dropped, 0.0)
    assert metrics == pytest.approx(plain.update_policy(batch), rel=1e-6)
    assert not any(name.startswith("rollout_corr/") for name in metrics), "the driver reports the mismatch"
    weights = [as_numpy(actor.backend.named_weights()) for actor in (plain, masking)]
    assert largest_difference(*weights) < TOLERANCE


@pytest.mark.parametrize("first_is_own", [False, True])
def test_the_weighted_kl_is_weighted_by_policy_over_engine(folder: Path, first_is_own: bool) -> None:
    settings = {"use_kl_loss": True, "mini_batch_rows": NUM_ROWS // 2, "optim": {"lr": 0.0}}
    actor = build(folder, kl_loss_type="k3_unbiased", **settings)
    policy = actor.compute_log_prob(rollout_batch())[0]
    batch = _sampled_by_an_engine(policy, torch.full_like(policy, 0.5))
    if first_is_own:
        batch.meta_info[OWN_OLD_LOG_PROBS] = True
        batch.tensors["old_log_probs"][: NUM_ROWS // 2] = math.nan
    found = actor.update_policy(batch)
    plain = build(folder, kl_loss_type="k3", **settings)
    expected = plain.update_policy(with_old_log_probs(rollout_batch(), policy))["actor/kl_loss"]
    assert found["actor/kl_loss"] == pytest.approx(math.exp(-0.5) * expected, rel=1e-4)
    assert not any(name.startswith("rollout_corr/") for name in found), "the driver reports the mismatch"


@pytest.mark.parametrize("use_kl_loss", [True, False])
def test_the_kl_of_the_loss_and_its_weight_are_reported_where_there_is_one(folder: Path, use_kl_loss: bool) -> None:
    actor = build(folder, use_kl_loss=use_kl_loss, kl_loss_coef=0.25)
    metrics = actor.update_policy(with_old_log_probs(rollout_batch(), actor.compute_log_prob(rollout_batch())[0]))
    assert metrics.get("actor/kl_coef") == (0.25 if use_kl_loss else None)
    assert (metrics.get("actor/kl_loss", 0.0) > 0) == use_kl_loss


@pytest.mark.parametrize("changes", [{"ppo_epochs": 2}, {"mini_batch_rows": NUM_ROWS // 2}])
def test_an_update_of_several_steps_needs_old_log_probs(folder: Path, changes: dict) -> None:
    with pytest.raises(ValueError, match=r"no column old_log_probs.*more than one optimizer step.*compute_log_prob"):
        build(folder, **changes).update_policy(rollout_batch())


def test_what_a_batch_lacks_is_named(folder: Path) -> None:
    actor = build(folder, mini_batch_rows=5)
    batch = with_old_log_probs(rollout_batch(), torch.zeros(NUM_ROWS, RESPONSE))
    with pytest.raises(ValueError, match="16 rows on this rank do not make whole mini-batches of 5"):
        actor.update_policy(batch)
    with pytest.raises(ValueError, match="no column advantages; it has attention_mask"):
        actor.update_policy(batch.select(batch_keys=[name for name in batch.tensors if name != "advantages"]))
    del batch.meta_info["temperature"]
    with pytest.raises(ValueError, match="meta_info has no 'temperature'"):
        actor.compute_log_prob(batch)


def test_shuffling_changes_the_order_with_every_update_and_again_the_same_way(folder: Path) -> None:
    batch = with_old_log_probs(rollout_batch(), build(folder).compute_log_prob(rollout_batch())[0])

    def norms(shuffle: bool) -> list[float]:
        actor = build(folder, mini_batch_rows=4, shuffle=shuffle)
        return [actor.update_policy(batch)["actor/grad_norm"] for _ in range(2)]

    assert norms(True) == norms(True)
    assert norms(True) != norms(False)


def test_importance_weights_scale_the_policy_gradient(folder: Path) -> None:
    plain = rollout_batch()
    weighted = DataProto.from_dict(
        {**plain.tensors, "rollout_is_weights": torch.full((NUM_ROWS, RESPONSE), 0.5)}, meta_info=plain.meta_info
    )
    half, whole = build(folder).update_policy(weighted), build(folder).update_policy(plain)
    assert half["actor/grad_norm"] == pytest.approx(0.5 * whole["actor/grad_norm"], rel=TOLERANCE)


@pytest.mark.parametrize(
    ("correction", "advantage", "loss"),
    [
        (RolloutCorrectionConfig(), 1.0, -1.2),  # ratio 2, clipped
        (RolloutCorrectionConfig(), -1.0, 2.0),
        (RolloutCorrectionConfig(rollout_is="token"), 1.0, -2.4),
        (RolloutCorrectionConfig(rollout_is="token", rollout_is_threshold=1.5), -1.0, 3.0),
        (RolloutCorrectionConfig(rollout_rs="token_k1", rollout_rs_threshold="0.6_1.5"), 1.0, 0.0),
    ],
)
def test_an_update_interpolates_the_old_log_probs_of_stale_tokens(
    folder: Path, correction: RolloutCorrectionConfig, advantage: float, loss: float
) -> None:
    """The policy is 4 times the engine; half the way of the logarithms between them, the old one is 2 times each."""
    actor, batch = build(folder, correction=correction), rollout_batch()
    columns = {
        **batch.tensors,
        "rollout_log_probs": actor.compute_log_prob(batch)[0] - math.log(4),
        "interpolation_weights": torch.full((NUM_ROWS, RESPONSE), 0.5),
        "advantages": torch.full((NUM_ROWS, RESPONSE), advantage),
    }
    metrics = actor.update_policy(DataProto.from_dict(columns, meta_info=batch.meta_info))
    assert metrics["actor/pg_loss"] == pytest.approx(loss, rel=1e-4, abs=1e-6)
    assert metrics["rollout_corr/kl"] == pytest.approx(-math.log(4), rel=1e-4)
    rejected = metrics.get("rollout_corr/rollout_rs_masked_fraction", 0.0)
    assert rejected == pytest.approx(1.0 if correction.rollout_rs else 0.0)


def test_an_update_that_interpolates_may_take_several_steps(folder: Path) -> None:
    actor, batch = build(folder, mini_batch_rows=NUM_ROWS // 2, ppo_epochs=2), rollout_batch()
    engine = actor.compute_log_prob(batch)[0]
    columns = {"rollout_log_probs": engine, "interpolation_weights": torch.full_like(engine, 0.5)}
    assert actor.update_policy(batch.union(DataProto.from_dict(columns)))["actor/grad_norm"] > 0


def test_a_step_that_is_not_finite_is_skipped_and_counted(folder: Path) -> None:
    actor = build(folder)
    before = as_numpy(actor.backend.named_weights())
    batch = rollout_batch()
    batch.tensors["advantages"][0, 0] = float("inf")
    metrics = actor.update_policy(batch)
    assert metrics["actor/skipped_steps"] == 1
    assert largest_difference(as_numpy(actor.backend.named_weights()), before) == 0


@pytest.mark.parametrize("name", policy_loss_names())
def test_a_policy_loss_has_no_gradient_at_a_ratio_of_1_without_advantages(name: str) -> None:
    batch = rollout_batch(4).tensors
    log_prob = (-batch["noise"].abs() - 1).requires_grad_()
    columns = {column: -batch["ref_noise"].abs() for column in get_policy_loss_columns(name)}
    if get_policy_loss_selector(name) is not None:
        columns["loss_selection"] = batch["response_mask"].bool()
    no_advantages = torch.zeros_like(log_prob)
    loss, _ = get_policy_loss_fn(name)(log_prob.detach(), log_prob, no_advantages, batch["response_mask"], **columns)
    (gradient,) = torch.autograd.grad(loss, log_prob)
    assert not gradient.any()


@pytest.mark.parametrize("kl", ["top_k", "full"])
@pytest.mark.parametrize("fused", [True, False])
def test_a_divergence_alone_needs_no_backward_of_the_sampled_tokens(folder: Path, kl: str, fused: bool) -> None:
    """The weights after it are the same to the bit."""
    generator = torch.Generator().manual_seed(0)
    columns: dict[str, Tensor] = {"advantages": torch.zeros(NUM_ROWS, RESPONSE)}
    if kl == "top_k":
        columns["teacher_top_ids"] = torch.randint(259, (NUM_ROWS, RESPONSE, 3), generator=generator)
        columns["teacher_top_log_probs"] = torch.full((NUM_ROWS, RESPONSE, 3), -2.0)
    else:
        columns["teacher_hidden"] = torch.randn(NUM_ROWS, RESPONSE, 64, generator=generator)
    batch = rollout_batch()
    batch = DataProto.from_dict({**batch.tensors, **columns}, meta_info=batch.meta_info)
    teacher = Teacher(OutputLayer(torch.randn(259, 64, generator=generator)))
    weights, num_backwards = [], []
    for needs_signal in (True, False):
        actor, seen = build(folder, teacher=teacher, model_use_fused_kernels=fused), list[Tensor]()
        call = actor.backend._call

        def watched(*args: Any, call: Any = call, seen: list[Tensor] = seen) -> Any:
            output = call(*args)
            output.log_probs.register_hook(seen.append)
            return output

        actor.backend._call, actor._needs_signal = watched, needs_signal
        assert actor.update_policy(batch)["actor/grad_norm"] > 0
        weights.append(as_numpy(actor.backend.named_weights()))
        num_backwards.append(len(seen))
    assert num_backwards == [0, 4]
    assert largest_difference(*weights) == 0


def test_a_divergence_beside_advantages_trains_the_sampled_tokens_too(folder: Path) -> None:
    batch = rollout_batch()
    columns = {"teacher_top_ids": torch.zeros(NUM_ROWS, RESPONSE, 1, dtype=torch.int64)}
    columns["teacher_top_log_probs"] = torch.full((NUM_ROWS, RESPONSE, 1), -2.0)
    without = {"advantages": torch.zeros_like(batch.tensors["advantages"])}
    weights = []
    for changes in ({}, without):
        actor = build(folder)
        actor.update_policy(DataProto.from_dict({**batch.tensors, **columns, **changes}, meta_info=batch.meta_info))
        weights.append(as_numpy(actor.backend.named_weights()))
    assert largest_difference(*weights) > 1e-4


TAUGHT = {
    "top_k forward": DistillConfig(kl="top_k", divergence="forward", other_tokens="ignored", log_prob_min_clamp=-6.0),
    "top_k jsd": DistillConfig(kl="top_k", divergence="jsd", loss_max_clamp=0.3),
    "full": DistillConfig(kl="full", loss_max_clamp=2.0),
    "k2": DistillConfig(kl="k2"),
    "k3": DistillConfig(kl="k3", kl_coef=0.5, loss_max_clamp=2.0),
}


def taught_batch(settings: DistillConfig) -> tuple[DataProto, Teacher | None]:
    """Without advantages, so that the teacher alone moves the weights. Its tokens are close to the student's."""
    generator = torch.Generator().manual_seed(0)
    batch = rollout_batch()
    columns = {"advantages": torch.zeros(NUM_ROWS, RESPONSE)}
    teacher = None
    if settings.kl == "top_k":
        columns["teacher_top_ids"] = torch.randint(259, (NUM_ROWS, RESPONSE, 3), generator=generator)
        columns["teacher_top_log_probs"] = torch.randn(NUM_ROWS, RESPONSE, 3, generator=generator) / 2 - 2.5
    elif settings.kl == "full":
        columns["teacher_hidden"] = torch.randn(NUM_ROWS, RESPONSE, 64, generator=generator) / 8
        layer = OutputLayer(torch.randn(259, 64, generator=generator) * 2)
        teacher = Teacher(layer, settings.divergence, log_prob_min=settings.log_prob_min_clamp)
    else:
        columns["ref_log_prob"] = batch.tensors["ref_noise"] - 5.5
    return DataProto.from_dict({**batch.tensors, **columns}, meta_info=batch.meta_info), teacher


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean"])
@pytest.mark.parametrize("name", TAUGHT)
def test_what_a_teacher_adds_to_the_loss_does_not_depend_on_micro_batches(folder: Path, name: str, mode: str) -> None:
    settings = TAUGHT[name]
    batch, teacher = taught_batch(settings)
    metrics, weights = [], []
    for rows in (NUM_ROWS, 3):
        actor = build(folder, distill=settings, teacher=teacher, ppo_micro_batch_size_per_gpu=rows, loss_agg_mode=mode)
        metrics.append(actor.update_policy(batch))
        weights.append(as_numpy(actor.backend.named_weights()))
    assert metrics[1] == pytest.approx(metrics[0], rel=1e-5, abs=1e-6)
    assert largest_difference(*weights) < TOLERANCE
    assert metrics[0]["actor/grad_norm"] > 1e-2


def test_an_update_reports_the_divergence_and_the_masses_of_the_listed_tokens_by_hand(folder: Path) -> None:
    """Means over the tokens that count; the divergence is that before the clamp."""
    settings = TAUGHT["top_k jsd"]
    batch, _ = taught_batch(settings)
    own = build(folder, distill=settings)
    columns, mask = batch.tensors, batch.tensors["response_mask"].bool()
    size = own.backend.hf_config.vocab_size
    _, likely, _ = own.top_tokens(batch, top_k=3, vocab_size=size)
    _, every, of_all = own.top_tokens(batch, top_k=size, vocab_size=size)
    log_probs = torch.empty_like(of_all).scatter_(-1, every.long(), of_all).gather(-1, columns["teacher_top_ids"])
    theirs = columns["teacher_top_log_probs"]
    shared = (columns["teacher_top_ids"].unsqueeze(-1) == likely.unsqueeze(-2)).any(-1).float().mean(-1)
    expected = {
        "distill/kl": listed_divergence(log_probs, theirs, "jsd"),
        "distill/student_mass": log_probs.exp().sum(-1),
        "distill/teacher_mass": theirs.exp().sum(-1),
        "distill/overlap_ratio": shared,
    }
    metrics = own.update_policy(batch)
    for name, values in expected.items():
        assert metrics[name] == pytest.approx(values[mask].mean().item(), rel=1e-5), name
    assert 0 < metrics["distill/overlap_ratio"] < 1
    assert expected["distill/kl"][mask].max() > 0.3, "the clamp acts"


@pytest.mark.parametrize("kl", ["k2", "k3"])
def test_an_estimate_is_a_loss_with_the_gradient_of_the_sampled_tokens(folder: Path, kl: str) -> None:
    """That of the KL term of PPO, which has its own tests: the same weights to the bit."""
    batch, _ = taught_batch(TAUGHT[kl])
    settings = DistillConfig(kl=kl, kl_coef=0.5)  # type: ignore[arg-type]
    taught = build(folder, distill=settings)
    metrics = taught.update_policy(batch)
    penalised = build(folder, use_kl_loss=True, kl_loss_coef=0.5, kl_loss_type=kl)
    expected = penalised.update_policy(batch)
    assert metrics["distill/kl"] == pytest.approx(expected["actor/kl_loss"])
    assert metrics["actor/grad_norm"] == expected["actor/grad_norm"] > 0
    assert largest_difference(*(as_numpy(each.backend.named_weights()) for each in (taught, penalised))) == 0
