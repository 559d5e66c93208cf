"""Peaks of phases and of the run, on a device that is an account of bytes."""

from __future__ import annotations

import contextlib
import inspect
import sys
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch

from dovetail.controller.spans import SpanRecorder
from dovetail.observability.memory import CudaCounter, DevicePeaks, cuda_peaks

pytestmark = pytest.mark.unit

GIB = 1024**3


@dataclass
class FakeDevice:
    """A caching allocator beside a driver and other processes. Sizes in GiB."""

    held: float = 0.0
    kept: float = 0.0
    others: float = 0.0
    asleep: float = 0.0
    _peak: float = 0.0
    _peak_kept: float = 0.0

    def take(self, size: float) -> None:
        self.held += size
        self.kept = max(self.kept, self.held)
        self._peak, self._peak_kept = max(self._peak, self.held), max(self._peak_kept, self.kept)

    def give(self, size: float) -> None:
        self.held -= size

    def empty_cache(self) -> None:
        self.kept = self.held

    def allocated(self) -> int:
        return int(self.held * GIB)

    def reserved(self) -> int:
        return int(self.kept * GIB)

    def peak_allocated(self) -> int:
        return int(self._peak * GIB)

    def peak_reserved(self) -> int:
        return int(self._peak_kept * GIB)

    def reset_peaks(self) -> None:
        self._peak, self._peak_kept = self.held, self.kept

    def in_use(self) -> int:
        return int((self.kept + self.others - self.asleep) * GIB)


def test_a_phase_reports_what_it_held_at_its_fullest_not_what_is_left_at_its_end() -> None:
    device = FakeDevice()
    peaks = DevicePeaks(device)
    with peaks.phase() as phase:
        device.take(3)
        device.give(2)
        device.empty_cache()
    assert phase.peak_gib == 3.0


def test_a_phase_is_not_charged_for_the_peak_or_the_cache_of_the_one_before() -> None:
    device = FakeDevice()
    peaks = DevicePeaks(device)
    device.take(1)
    with peaks.phase() as large:
        device.take(8)
        device.give(8)
    with peaks.phase() as small:
        device.take(2)
        device.give(2)
    assert (large.peak_gib, small.peak_gib) == (9.0, 3.0)


def test_the_run_keeps_its_peak_over_phases_and_between_them() -> None:
    device = FakeDevice()
    device.take(5)
    device.give(5)
    device.empty_cache()
    peaks = DevicePeaks(device)
    assert peaks.of_run().allocated_gib == 5.0, "before the first phase"
    for size in (2, 7, 1):
        with peaks.phase():
            device.take(size)
            device.give(size)
        device.empty_cache()
    assert (peaks.of_run().allocated_gib, peaks.of_run().reserved_gib) == (7.0, 7.0)
    device.take(11)
    assert peaks.of_run().allocated_gib == 11.0, "outside of phases too"


def test_a_phase_inside_a_phase_takes_nothing_from_it() -> None:
    device = FakeDevice()
    peaks = DevicePeaks(device)
    with peaks.phase() as outer:
        device.take(6)
        device.give(6)
        with peaks.phase() as inner:
            device.take(2)
            device.give(2)
        device.take(1)
    assert (outer.peak_gib, inner.peak_gib) == (6.0, 2.0)


def test_other_processes_and_the_driver_are_counted() -> None:
    device = FakeDevice(others=10)
    peaks = DevicePeaks(device)
    with peaks.phase() as phase:
        device.take(4)
        device.give(4)
    assert phase.peak_gib == 14.0
    assert peaks.of_run().allocated_gib == 4.0, "the metric of the run is of this process"


def test_an_engine_that_sleeps_is_not_counted_though_the_allocator_still_counts_it() -> None:
    device = FakeDevice(others=1)
    device.take(40)
    device.asleep = 40
    peaks = DevicePeaks(device)
    with peaks.phase() as update:
        device.take(50)
        device.give(50)
    assert update.peak_gib == 51.0


def test_an_engine_that_wakes_and_sleeps_inside_a_phase_is_counted_when_its_edges_are_marked() -> None:
    device = FakeDevice(others=1)
    device.take(40)
    device.asleep = 40
    peaks = DevicePeaks(device)
    with peaks.phase() as generation:
        device.take(3)  # gathered weights on their way
        device.asleep = 0
        device.give(3)
        peaks.mark()
        device.take(5)
        device.give(5)
        peaks.mark()
        device.asleep = 40
    assert generation.peak_gib == 46.0


def test_a_phase_that_raises_has_no_peak_and_leaves_the_next_one_alone() -> None:
    device = FakeDevice()
    peaks = DevicePeaks(device)
    with contextlib.suppress(MemoryError), peaks.phase() as lost:
        device.take(9)
        device.give(9)
        raise MemoryError
    assert lost.peak_gib is None
    with peaks.phase() as next_one:
        device.take(1)
    assert next_one.peak_gib == 1.0
    assert peaks.of_run().allocated_gib == 9.0


class FakeCuda:
    """As much of `torch.cuda` as is read, for device 3."""

    def __init__(self, device: FakeDevice) -> None:
        self._device = device
        self.has_started = True

    def is_initialized(self) -> bool:
        return self.has_started

    def current_device(self) -> int:
        return 3

    def memory_allocated(self, device: int) -> int:
        assert device == 3
        return self._device.allocated()

    def memory_reserved(self, device: int) -> int:
        assert device == 3
        return self._device.reserved()

    def max_memory_allocated(self, device: int) -> int:
        assert device == 3
        return self._device.peak_allocated()

    def max_memory_reserved(self, device: int) -> int:
        assert device == 3
        return self._device.peak_reserved()

    def reset_peak_memory_stats(self, device: int) -> None:
        assert device == 3
        self._device.reset_peaks()

    def mem_get_info(self, device: int) -> tuple[int, int]:
        assert device == 3
        return 80 * GIB - self._device.in_use(), 80 * GIB


def test_spans_and_metrics_of_a_process_share_one_account_per_device() -> None:
    device = FakeDevice(others=2)
    cuda = FakeCuda(device)
    with cuda_peaks(cuda, 3).phase() as phase:
        device.take(4)
        device.give(4)
    assert phase.peak_gib == 6.0
    assert cuda_peaks(cuda, 3).of_run().allocated_gib == 4.0


def test_a_recorded_call_carries_its_peak_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    device = FakeDevice(others=2)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=FakeCuda(device)))
    recorder = SpanRecorder()
    with recorder.recording("actor", "update_actor"):
        device.take(30)
        device.give(30)
    with recorder.recording("actor", "compute_log_prob"):
        device.take(7)
        device.give(7)
    assert [(span.method, span.memory_gib) for span in recorder.take()] == [
        ("update_actor", 32.0),
        ("compute_log_prob", 9.0),
    ]


def test_the_call_that_starts_the_device_does_not_pass_the_hosts_memory_off_as_the_devices(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cuda = FakeCuda(FakeDevice())
    cuda.has_started = False
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    recorder = SpanRecorder()
    with recorder.recording("actor", "register_in_mesh"):
        pass
    with recorder.recording("actor", "init_model"):
        cuda.has_started = True
    before, starts = recorder.take()
    assert before.memory_gib is not None
    assert before.memory_gib > 0
    assert starts.memory_gib is None


def test_the_counter_asks_for_names_that_torch_has() -> None:
    methods = [member for member in vars(CudaCounter).values() if inspect.isfunction(member)]
    asked = {name for method in methods for name in method.__code__.co_names if "mem" in name}
    assert asked == {name for name in vars(FakeCuda) if "mem" in name}
    assert all(hasattr(torch.cuda, name) for name in asked)
