"""When the driver has too little left beside what torch holds."""

from __future__ import annotations

import pytest
import torch

from dovetail.backends.device_memory import driver_is_short

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(("free", "is_short"), [(9, True), (11, False)])
def test_a_tenth_of_the_device_is_left_to_the_driver(
    monkeypatch: pytest.MonkeyPatch, free: int, is_short: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free << 30, 100 << 30))
    assert driver_is_short(torch.device("cuda")) is is_short
    assert not driver_is_short(torch.device("cpu"))
