"""math-verify, for real: it says yes where the plain rule cannot, and no where it should."""

from __future__ import annotations

import pytest

from dovetail.rewards.rules import math

pytestmark = pytest.mark.engine  # not `unit`: the library comes with the extra `math`


def test_math_verify_sees_that_two_forms_of_a_number_are_equal() -> None:
    response, truth = r"so it is \boxed{\sqrt{8}}", r"2\sqrt{2}"
    assert math.compute_score(response, truth, use_math_verify=False)["score"] == 0.0, "the plain rule compares text"
    assert math.compute_score(response, truth, use_math_verify=True)["score"] == 1.0


def test_math_verify_says_no_to_another_number() -> None:
    assert math.compute_score(r"so it is \boxed{\sqrt{9}}", r"2\sqrt{2}", use_math_verify=True)["acc"] == 0.0
