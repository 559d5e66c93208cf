"""`Run`: a finished, or a running, run on disk, for a notebook. Reads the run folder; trains nothing."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pandas import DataFrame


class Run:
    """What a run has left in its folder. `train()` returns one; `Run("runs/mine")` opens an earlier one.

    Every property reads the folder anew, so it also shows a run that is still training.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        """The run folder: configuration, metrics, responses, checkpoints."""
        if not self.folder.is_dir():
            raise FileNotFoundError(f"{self.folder} is no folder; give the folder of a run.")

    def __repr__(self) -> str:
        return f"Run({str(self.folder)!r}, steps={self.steps})"

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """One dict for each step, with `step` and the numbers of that step."""
        return self._files.read_metrics()

    def frame(self) -> DataFrame:
        """The metrics as a `pandas.DataFrame`, indexed by step. Needs pandas."""
        try:
            import pandas
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                "frame() needs pandas: pip install pandas; `metrics` has the same rows"
            ) from error
        return pandas.DataFrame(self.metrics).set_index("step")

    @property
    def steps(self) -> int:
        """Steps that are done."""
        return max((row["step"] for row in self.metrics), default=0)

    @property
    def samples(self) -> list[dict[str, Any]]:
        """The responses of the newest step, with prompt, score and what the reward function returned."""
        return self.samples_of(self.steps)

    def samples_of(self, step: int) -> list[dict[str, Any]]:
        """The responses of one step."""
        from dovetail.observability.run_folder import read_json_lines

        return list(read_json_lines(self.folder / "rollouts" / f"step_{step}.jsonl"))

    @property
    def validation(self) -> dict[str, float]:
        """The metrics of the newest validation; empty without one."""
        events = [event for event in self._files.read_events() if event["kind"] == "validation"]
        left_out = ("time", "kind", "step")
        return {name: value for name, value in events[-1].items() if name not in left_out} if events else {}

    @property
    def checkpoint(self) -> Path | None:
        """The newest complete checkpoint; None without one."""
        from dovetail.checkpoint.store import CheckpointStore

        return CheckpointStore(self.folder).latest(checksums=False)

    @property
    def best_checkpoint(self) -> Path | None:
        """The complete checkpoint with the best `trainer.save_best`; None where no checkpoint has it."""
        from dovetail.checkpoint.store import CheckpointStore

        return CheckpointStore(self.folder).best()

    def report(self, path: str | os.PathLike[str] | None = None) -> Path:
        """Write one HTML file about the run, complete in itself; by default `report.html` in the run folder."""
        try:
            from dovetail.dashboard.report import write_report
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(f"reports need {error.name}: pip install 'dovetail[dashboard]'") from error
        out = self.folder / "report.html" if path is None else Path(path)
        write_report(self.folder, out)
        return out

    def export(
        self,
        path: str | os.PathLike[str],
        *,
        dtype: str | None = None,
        best: bool = False,
        push_to_hub: str | None = None,
    ) -> Path:
        """Write the newest checkpoint's policy as a folder that transformers and vLLM load. LoRA is merged in.

        `best`: of the best checkpoint instead, in a run with `trainer.save_best`. `push_to_hub` names a repository,
        `org/name`, that the folder is uploaded to; a new one is private.
        """
        from dovetail.cli.export import export_run

        export_run(self.folder, Path(path), dtype=dtype, best=best, push_to_hub=push_to_hub)
        return Path(path)

    def generate(
        self,
        prompts: str | Sequence[Any],
        *,
        n: int = 1,
        temperature: float | None = None,
        max_tokens: int | None = None,
    ) -> list[str]:
        """Responses of the newest checkpoint, `n` to each prompt (text or chat messages), side by side. One prompt
        need not be in a list.

        Greedy and as long as in the run's validation, unless `temperature` and `max_tokens` say otherwise.
        """
        from dovetail.cli.generate import generate
        from dovetail.data.errors import DataError

        if isinstance(prompts, Mapping):
            raise DataError("prompts is one message; give a text, a list of texts, or the message in a list.")
        given = prompts if isinstance(prompts, str) else list(prompts)
        is_one = isinstance(given, str) or (given and all(isinstance(entry, Mapping) for entry in given))
        asked = [given] if is_one else given
        if not asked:
            return []
        responses = generate(str(self.folder), asked, n=n, temperature=temperature, max_tokens=max_tokens)
        return [sample.text for samples in responses for sample in samples]

    @property
    def _files(self) -> Any:
        from dovetail.observability.run_folder import RunFolder

        return RunFolder(self.folder)
