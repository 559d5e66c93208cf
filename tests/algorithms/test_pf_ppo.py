"""PF-PPO's draw: chances by hand, repeatable, never a row that keeps no token."""

from __future__ import annotations

import pytest
import torch

from dovetail.algorithms.pf_ppo import draw_pf_ppo_rows, pf_ppo_weights

pytestmark = pytest.mark.unit

SCORES = torch.tensor([1.0, -2.0, 0.0, 3.0])


@pytest.mark.parametrize(
    ("method", "expected"),
    [("pow", [1.0, 4.0, 0.0, 9.0]), ("max_min", [0.0, 1.0, 0.0, 1.0]), ("max_random", [0.1, 0.1, 0.1, 0.4])],
)
def test_chances_by_hand(method: str, expected: list[float]) -> None:
    torch.testing.assert_close(pf_ppo_weights(SCORES, method), torch.tensor(expected), atol=1e-6, rtol=0)


def test_the_power_is_a_setting_and_an_unknown_method_an_error() -> None:
    torch.testing.assert_close(pf_ppo_weights(SCORES, "pow", 1.0), SCORES.abs(), atol=1e-6, rtol=0)
    with pytest.raises(ValueError, match="reweight_method='best' is not one of pow, max_min, max_random"):
        pf_ppo_weights(SCORES, "best")


def draw(scores: torch.Tensor, drawable: torch.Tensor, seed: int, method: str = "pow") -> list[int]:
    return draw_pf_ppo_rows(scores, drawable, reweight_method=method, weight_pow=2.0, seed=seed).tolist()


def test_a_draw_depends_on_its_seed_alone() -> None:
    scores = torch.rand(64, generator=torch.Generator().manual_seed(0))
    every = torch.ones(64, dtype=torch.bool)
    first = draw(scores, every, 5)
    torch.manual_seed(99)
    torch.rand(3)
    assert draw(scores, every, 5) == first
    assert draw(scores, every, 6) != first


def test_rows_come_as_often_as_their_chances_say() -> None:
    scores = torch.tensor([1.0, 2.0]).repeat(4000)
    rows = torch.tensor(draw(scores, torch.ones(8000, dtype=torch.bool), 1))
    assert float((scores[rows] == 2.0).float().mean()) == pytest.approx(0.8, abs=0.02)


def test_masked_rows_are_never_drawn_even_when_nothing_else_scores() -> None:
    drawable = torch.tensor([False, True, True, False])
    rows = draw(torch.tensor([9.0, 0.0, 0.0, 9.0]), drawable, 3)
    assert set(rows) <= {1, 2}
    assert len(rows) == 4
    assert set(draw(SCORES, drawable, 3, "max_min")) <= {1, 2}
