"""`trainer.*`: how long, where, what is saved and what is logged."""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Literal

from pydantic import Field, field_validator

from dovetail.config.base import Section
from dovetail.config.home import HomePath


class TrainerConfig(Section):
    """The driver's loop."""

    project_name: str = Field("dovetail", description="Project, for the trackers and the run folder.")
    experiment_name: str = Field("run", description="Run, for the trackers and the run folder.")
    default_local_dir: HomePath | None = Field(
        None, description="Run folder. Null: `runs/<project_name>/<experiment_name>`."
    )
    total_epochs: int = Field(30, ge=1, description="Passes over the training prompts.")
    total_training_steps: int | None = Field(None, ge=1, description="Steps of the run. Null: from the epochs.")
    nnodes: int = Field(1, ge=1, description="Nodes.")
    n_gpus_per_node: int = Field(8, ge=1, description="Devices (or CPU ranks) per node.")
    device: Literal["auto", "cuda", "cpu", "npu"] = Field(
        "auto", description="Device; auto: CUDA when there is one, else CPU. npu resolves, but no backend runs on it."
    )
    seed: int = Field(42, ge=0, description="Seed of everything: data order, sampling, weights, dropout.")
    full_determinism: bool = Field(False, description="Deterministic kernels, slower.")
    float32_matmul_precision: Literal["highest", "high", "medium"] = Field(
        "highest",
        description="How float32 matrix products are computed: exactly, with TF32 (high), or with bfloat16 (medium). "
        "On a CPU with bfloat16 units medium doubles the speed of training and generation alike.",
    )
    device_peak_tflops: float | None = Field(
        None,
        gt=0,
        description="Peak of one device in tera-FLOP/s, for `perf/mfu/*`. Null: published for known GPUs, measured on "
        "a CPU, otherwise not reported.",
    )
    balance_batch: bool = Field(True, description="Give each data-parallel rank the same number of tokens.")
    critic_warmup: int = Field(0, ge=0, description="Steps that train the critic only.")
    val_before_train: bool = Field(True, description="Validate before the first step.")
    val_only: bool = Field(False, description="Validate (the checkpoint that `resume_mode` finds, if any) and stop.")
    test_freq: int = Field(-1, ge=-1, description="Steps between validations; -1: at the end only.")
    save_freq: int = Field(-1, ge=-1, description="Steps between checkpoints; -1: none.")
    resume_mode: Literal["auto", "disable", "resume_path"] = Field(
        "auto", description="Continue the newest checkpoint of the run folder, start anew, or take `resume_from_path`."
    )
    resume_from_path: HomePath | None = Field(None, description="Checkpoint folder for `resume_mode=resume_path`.")
    max_actor_ckpt_to_keep: int | None = Field(None, ge=1, description="Actor checkpoints kept. Null: all.")
    max_critic_ckpt_to_keep: int | None = Field(None, ge=1, description="Critic checkpoints kept. Null: all.")
    logger: list[str] | str = Field(
        ["console"], description="Trackers: console, file, wandb, tensorboard, mlflow, swanlab, clearml, ..."
    )
    log_val_generations: int = Field(
        0, ge=-1, description="Validation answers shown in the trackers, or without one in the console; -1: all."
    )
    rollout_data_dir: HomePath | None = Field(
        None, description="Folder that gets `<step>.jsonl` with all training answers, beside `rollouts/` of the run."
    )
    validation_data_dir: HomePath | None = Field(
        None,
        description="Folder that gets `<step>.jsonl` with all validation answers, beside `validation/` of the run.",
    )
    worker_timeout_s: float = Field(
        7200.0,
        gt=0,
        description="A call on the workers that runs longer ends the run and names the rank that hangs. A method "
        "that has run before has less time: ten times the longest call so far, at least ten minutes.",
    )
    import_modules: list[str] = Field(
        [], description="Python modules imported at start. They may register estimators, losses and reward managers."
    )

    @field_validator("project_name", "experiment_name")
    @classmethod
    def _stays_inside_runs(cls, name: str) -> str:
        parts = PurePosixPath(name).parts
        if not parts or parts[0] == "/" or ".." in parts or not name.isprintable():
            raise ValueError(
                "it names a folder below runs/: printable text, neither empty nor absolute, without `..`; "
                "set trainer.default_local_dir to put the run elsewhere."
            )
        return name

    @property
    def run_dir(self) -> str:
        """Folder of the run."""
        return self.default_local_dir or f"runs/{self.project_name}/{self.experiment_name}"

    @property
    def world_size(self) -> int:
        """Devices of the trainer."""
        return self.nnodes * self.n_gpus_per_node

    @property
    def loggers(self) -> tuple[str, ...]:
        """Trackers as a tuple."""
        return (self.logger,) if isinstance(self.logger, str) else tuple(self.logger)
