"""Launch lists of verl's on-policy distillation: what is read as what, and what is refused with its reason."""

from __future__ import annotations

from typing import Any

import pytest

from dovetail.config import ConfigError, LoadedConfig, load_config
from dovetail.config.checks import check_config

pytestmark = pytest.mark.unit

LOSS, TEACHERS = "distillation.distillation_loss", "distillation.teacher_models"
ACTOR = "actor_rollout_ref.actor"
ONE = ("distillation.enabled=True", "distillation.nnodes=1", f"{TEACHERS}.teacher_model.model_path=org/large")


def load(*overrides: str) -> LoadedConfig:
    return load_config(overrides=overrides)


def loss(**settings: object) -> tuple[str, ...]:
    return tuple(f"{LOSS}.{name}={value}" for name, value in settings.items())


def distill(*overrides: str) -> dict[str, Any]:
    loaded = load(*ONE, *overrides)
    assert loaded.config.trainer.method == "distill"
    return loaded.config.distill.model_dump(exclude={"teacher", "teachers", "teacher_key"})


def problems(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(*overrides)
    return str(caught.value)


def test_a_section_that_is_not_enabled_has_no_effect() -> None:
    loaded = load("distillation.enabled=False", f"{LOSS}.topk=8")
    assert loaded.config.trainer.method == "rl"
    assert "distillation.enabled=True` reads it" in str(loaded.notices[0])
    assert "use true or false" in problems("distillation.enabled=maybe")


def test_what_cannot_be_read_is_named_as_it_was_written() -> None:
    assert "loss_mode=['k1'] is not known; use one of k1" in problems(*ONE, f"{LOSS}.loss_mode=[k1]")
    both = problems(*ONE, "trainer.method=sft")
    assert "trainer.method=sft and distillation.enabled=True, that is trainer.method=distill set the same" in both
    (unread,) = [str(each) for each in load(*ONE, "distillation.teacher_key=level").notices if "no effect" in str(each)]
    assert "distill.teacher_key=level: no effect in this run: one teacher scores all rows" in unread


def test_one_teacher_gets_its_folder_and_devices_of_its_own() -> None:
    loaded = load(
        *ONE,
        "distillation.n_gpus_per_node=4",
        f"{TEACHERS}.teacher_model.inference.tensor_model_parallel_size=2",
        f"{TEACHERS}.teacher_model.num_replicas=2",
    )
    teacher = loaded.config.distill.teacher
    assert (teacher.path, teacher.nnodes, teacher.n_gpus_per_node) == ("org/large", 1, 4)
    assert not [finding for finding in check_config(loaded.config) if "teacher" in str(finding)]
    (unread,) = [notice for notice in loaded.notices if "num_replicas=2" in str(notice)]
    assert "inference.tensor_model_parallel_size=2" in str(unread)
    assert "`actor_rollout_ref.ref` says" in str(unread)
    # The only entry is the teacher of all rows, whatever its name is.
    named = load(
        ONE[0],
        f"+{TEACHERS}.math.key=gsm8k",
        f"+{TEACHERS}.math.model_path=org/math",
        f"{TEACHERS}.teacher_model.key=null",
    )
    assert (named.config.distill.teacher.path, named.config.distill.teachers) == ("org/math", {})


def test_without_a_word_about_the_loss_it_is_verls_default() -> None:
    found = distill()
    assert (found["kl"], found["kl_coef"], found["reward_coef"]) == ("k3", 1.0, 1.0)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"loss_mode": "k1", "use_policy_gradient": True, "use_task_rewards": False}, {"kl": "sampled"}),
        ({"loss_mode": "kl", "use_policy_gradient": True, "use_task_rewards": False}, {"kl": "sampled"}),
        ({"loss_mode": "mse", "use_task_rewards": False}, {"kl": "k2"}),
        (
            {"loss_mode": "low_var_kl", "use_task_rewards": False, "loss_max_clamp": 5},
            {"kl": "k3", "loss_max_clamp": 5.0},
        ),
        (
            {"loss_mode": "forward_kl_topk", "log_prob_min_clamp": -10, "distillation_loss_coef": 1.5},
            {
                "kl": "top_k",
                "divergence": "forward",
                "other_tokens": "ignored",
                "top_k": 32,
                "log_prob_min_clamp": -10.0,
                "kl_coef": 1.5,
                "reward_coef": 1.0,
            },
        ),
        (
            {"loss_mode": "forward_kl_topk", "topk": 128, "use_task_rewards": False, "distillation_loss_coef": 1.5},
            {"kl": "top_k", "divergence": "forward", "other_tokens": "ignored", "top_k": 128},
        ),
    ],
)
def test_a_loss_is_read_as_its_equal(settings: dict[str, object], expected: dict[str, Any]) -> None:
    assert (
        distill(*loss(**settings)) == distill(*loss(loss_mode="k2", use_task_rewards=False)) | {"kl": "k2"} | expected
    )


def test_the_clip_of_a_policy_gradient_is_the_actors() -> None:
    by_gradient = loss(loss_mode="k1", use_policy_gradient=True, clip_ratio_low=0.1, clip_ratio_high=0.3)
    actor = load(*ONE, *by_gradient).config.actor_rollout_ref.actor
    assert (actor.clip_low, actor.clip_high) == (0.1, 0.3)
    assert "different values" in problems(*ONE, *by_gradient, f"{ACTOR}.clip_ratio_high=0.28")
    assert "different values" in problems(*ONE, *by_gradient, f"{ACTOR}.policy_loss.loss_mode=gspo")
    unread = load(*ONE, *loss(loss_mode="k3", clip_ratio_high=0.3))
    assert any("clip_ratio_high=0.3: no effect here" in str(notice) for notice in unread.notices)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"loss_mode": "k1"}, "its gradient does not depend on the teacher; set use_policy_gradient=True"),
        ({"loss_mode": "k3", "use_policy_gradient": True}, "does not give the gradient of a divergence"),
        ({"loss_mode": "forward_kl_topk", "use_policy_gradient": True}, "does not give the gradient of a divergence"),
        ({"loss_mode": "abs"}, "loss_mode=abs is not supported"),
        ({"loss_mode": "jsd"}, "loss_mode=jsd is not known; use one of k1"),
        ({"policy_loss_mode": "gspo"}, "policy_loss_mode=gspo: verl has vanilla only"),
        ({"top_k": 8}, "top_k=8: there is no such key"),
    ],
)
def test_what_has_no_equal_is_refused_with_the_reason(settings: dict[str, object], says: str) -> None:
    assert says in problems(*ONE, *loss(**settings))


def test_several_teachers_are_chosen_by_a_column() -> None:
    several = (
        f"+{TEACHERS}.a.key=openai/gsm8k",
        f"+{TEACHERS}.a.model_path=org/math",
        f"+{TEACHERS}.b.key=geo.3k",
        f"+{TEACHERS}.b.model_path=org/geometry",
    )
    config = load("distillation.enabled=True", "distillation.teacher_key=task", *several).config.distill
    assert config.teachers == {"openai/gsm8k": "org/math", "geo.3k": "org/geometry"}
    assert (config.teacher.path, config.teacher_key) == (None, "task")
    assert "give this entry another name" in problems(*ONE, *several)
    assert "b.key must be set" in problems("distillation.enabled=True", *several, f"{TEACHERS}.b.key=null")
    assert "two teachers have the same" in problems(
        "distillation.enabled=True", *several, f"{TEACHERS}.b.key=openai/gsm8k"
    )
    assert "teacher_models.a.size=3: a teacher has" in problems("distillation.enabled=True", f"{TEACHERS}.a.size=3")
    assert "distillation.mode=x: neither dovetail nor" in problems(*ONE, "distillation.mode=x")
