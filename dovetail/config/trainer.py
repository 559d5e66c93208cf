"""`trainer.*`: how long, where, what is saved and what is logged."""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Literal

from pydantic import field_validator

from dovetail.config.base import HomePath, Section, all_of, key, read_with, unsupported, unused, when_is
from dovetail.config.names import LOGGERS, listed

_TO_WANDB = "val_generations_to_log_to_wandb"
_NO_CHECKPOINT = all_of(when_is("save_freq", -1), when_is("save_best", None))


class TrainerConfig(Section):
    """The driver's loop."""

    rules = (
        unused("data.val_files names no file", when_is("data.val_paths", ()), only="test_freq log_val_* validation_*"),
        unused("{section}.save_freq=-1 writes none", _NO_CHECKPOINT, only="max_actor_ckpt_to_keep"),
        unsupported(
            "there is no validation without data.val_files", when=when_is("data.val_paths", ()), only="save_best"
        ),
        unused("{section}.save_best names no metric", when_is("save_best", None), only="save_best_mode"),
        unused("max_actor_ckpt_to_keep counts checkpoints, which hold both", only="max_critic_ckpt_to_keep"),
        read_with(".resume_mode", "resume_path", only="resume_from_path"),
        unsupported("no backend here runs on it; use cuda, cpu or auto", "npu", only="device"),
    )

    method: Literal["rl", "sft", "dpo", "reward", "distill"] = key(
        "rl",
        "What the run does: reinforcement learning, fine-tuning on conversations, preference pairs (a policy or a "
        "reward model), or distillation. Each command sets its own.",
    )
    project_name: str = key("dovetail", "Project, for the trackers and the run folder.")
    experiment_name: str = key("run", "Run, for the trackers and the run folder.")
    default_local_dir: HomePath | None = key(None, "Run folder. Null: `runs/<project_name>/<experiment_name>`.")
    total_epochs: int = key(30, "Passes over the training prompts.", ge=1)
    total_training_steps: int | None = key(None, "Steps of the run. Null: from the epochs.", ge=1)
    nnodes: int = key(1, "Nodes.", ge=1)
    n_gpus_per_node: int = key(8, "Devices (or CPU ranks) per node.", ge=1)
    device: Literal["auto", "cuda", "cpu", "npu"] = key(
        "auto", "Device; auto: CUDA when there is one, else CPU. npu resolves, but no backend runs on it."
    )
    seed: int = key(42, "Seed of everything: data order, sampling, weights, dropout.", ge=0)
    full_determinism: bool = key(False, "Deterministic kernels, slower.")
    float32_matmul_precision: Literal["highest", "high", "medium"] = key(
        "highest",
        "How float32 matrix products are computed: exactly, with TF32 (high), or with bfloat16 (medium). "
        "On a CPU with bfloat16 units medium doubles the speed of training and generation alike.",
    )
    device_peak_tflops: float | None = key(
        None,
        "Peak of one device in tera-FLOP/s, for `perf/mfu/*`. Null: published for known GPUs, measured on "
        "a CPU, otherwise not reported.",
        gt=0,
    )
    balance_batch: bool = key(True, "Give each data-parallel rank the same number of tokens.")
    critic_warmup: int = key(0, "Steps that train the critic only.", ge=0)
    val_before_train: bool = key(True, "Validate before the first step.", was="validate_before_train")
    val_only: bool = key(False, "Validate (the checkpoint that `resume_mode` finds, if any) and stop.")
    test_freq: int | Literal["after_each_epoch"] = key(
        -1, "Steps between validations; -1: at the end only.", reads={False: -1}
    )
    save_freq: int | Literal["after_each_epoch", "at_end"] = key(
        -1, "Steps between checkpoints, the last step's always among them; -1: none.", reads={False: -1}
    )
    save_best: str | None = key(
        None,
        "A metric of the validation. A checkpoint is also saved when a validation is better than those of all "
        "checkpoints, and the best one is never deleted. Null: off.",
    )
    save_best_mode: Literal["max", "min"] | None = key(
        None, "Whether the largest or the smallest is the best. Null: min for a metric whose name ends with loss."
    )
    resume_mode: Literal["auto", "disable", "resume_path"] = key(
        "auto", "Continue the newest checkpoint of the run folder, start anew, or take `resume_from_path`."
    )
    resume_from_path: HomePath | None = key(
        None, "Checkpoint folder of `resume_mode=resume_path`.", reads={False: None}
    )
    max_actor_ckpt_to_keep: int | None = key(
        None, "Newest checkpoints kept, beside the best one. Null: all.", was="max_ckpt_to_keep", ge=1
    )
    max_critic_ckpt_to_keep: int | None = key(None, "Critic checkpoints kept. Null: all.", ge=1)
    logger: list[str] | str = key(["console"], f"Trackers: {listed(LOGGERS)}")
    log_val_generations: int = key(
        0, "Validation responses that trackers or the console show; -1: all.", was=_TO_WANDB, ge=-1
    )
    rollout_data_dir: HomePath | None = key(
        None, "Folder that gets `<step>.jsonl` with all training responses, beside `rollouts/` of the run."
    )
    validation_data_dir: HomePath | None = key(
        None, "Folder that gets `<step>.jsonl` with all validation responses, beside `validation/` of the run."
    )
    worker_timeout_s: float = key(
        7200.0,
        "A call on the workers that runs longer ends the run and names the rank that hangs, once it has computed no "
        "token and no micro-batch for ten minutes. A method that has run before has less time: ten times the longest "
        "call so far, at least ten minutes, and with agents ten minutes more than a trajectory may take.",
        gt=0,
    )
    on_step: str | None = key(
        None,
        "`file.py:function` or `pkg://module:function`, called on the driver with `(step, metrics)` after every step. "
        'The run ends there, with a checkpoint, when it returns "stop" or True.',
    )
    import_modules: list[str] = key(
        [],
        "Python modules that the driver and all workers import, from installed packages or from the current folder. "
        "They may register estimators, losses, reward managers, engines and trackers.",
    )

    @field_validator("test_freq", "save_freq")
    @classmethod
    def _is_a_frequency(cls, freq: int | str) -> int | str:
        if isinstance(freq, int) and freq < -1:
            raise ValueError("give a number of steps, or -1.")
        return freq

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
    def best_mode(self) -> Literal["max", "min"]:
        """What is better for `save_best`."""
        by_name: Literal["max", "min"] = "min" if (self.save_best or "").endswith("loss") else "max"
        return self.save_best_mode or by_name

    @property
    def world_size(self) -> int:
        """Devices of the trainer."""
        return self.nnodes * self.n_gpus_per_node

    @property
    def loggers(self) -> tuple[str, ...]:
        """Trackers as a tuple."""
        return (self.logger,) if isinstance(self.logger, str) else tuple(self.logger)
