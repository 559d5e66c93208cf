"""TensorBoard for real: its own reader finds what was logged. Apart from the unit tests, which need no tracker."""

from __future__ import annotations

from pathlib import Path

import pytest

from dovetail.observability.run_folder import RunFolder
from dovetail.observability.sinks import SINKS, RunFacts, markdown_table
from dovetail.observability.tracker import Tracker
from tests.observability.test_sinks import ANSWERS, CONFIG, log_steps, show_answers

pytestmark = pytest.mark.e2e


def test_tensorboard_files_hold_every_number_and_a_resumed_run_adds_to_them(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log_steps("tensorboard", tmp_path)
    facts = RunFacts("project", "experiment", CONFIG, tmp_path)
    resumed = SINKS["tensorboard"](facts)
    resumed.log(3, {"critic/score/mean": 0.625})
    resumed.close()
    found = EventAccumulator(str(tmp_path / "tensorboard"))
    found.Reload()
    scalars = {tag: [(event.step, event.value) for event in found.Scalars(tag)] for tag in found.Tags()["scalars"]}
    assert scalars == {
        "critic/score/mean": [(1, 0.25), (2, 0.5), (3, 0.625)],
        "actor/grad_norm": [(1, 1.5)],
        "val-core/openai/gsm8k/acc/mean@8": [(2, 0.75)],
    }


def test_tensorboard_has_the_answers_as_a_table_in_text(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    show_answers("tensorboard", tmp_path)
    found = EventAccumulator(str(tmp_path / "tensorboard"))
    found.Reload()
    (event,) = found.Tensors("val/generations")
    assert event.step == 2
    assert event.tensor_proto.string_val[0].decode() == markdown_table(ANSWERS)
    assert found.SummaryMetadata("val/generations").plugin_data.plugin_name == "text"


def test_steps_that_happen_again_are_drawn_once(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    def steps_after(first: int, *, resumed: bool) -> list[tuple[int, float]]:
        """Of what TensorBoard draws when a process has logged three steps from `first` on."""
        run = RunFolder(tmp_path)
        with Tracker(["tensorboard"], run, project="p", experiment="e", config={}) as tracker:
            if resumed:
                tracker.resume(first - 1)
            else:
                tracker.start()
            for step in range(first, first + 3):
                tracker.log(step, {"x": step + first / 10})
        found = EventAccumulator(str(tmp_path / "tensorboard"))
        found.Reload()
        return [(event.step, round(event.value, 1)) for event in found.Scalars("x")]

    assert steps_after(1, resumed=False) == [(1, 1.1), (2, 2.1), (3, 3.1)]
    assert steps_after(2, resumed=True) == [(1, 1.1), (2, 2.2), (3, 3.2), (4, 4.2)]
    assert steps_after(1, resumed=False) == [(1, 1.1), (2, 2.1), (3, 3.1)], "a new run in the same folder"
