"""The model that a command is given (a checkpoint, a run folder, a Hugging Face folder) as a run that only generates.

Finds folders and builds configurations; loads no weights.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dovetail.config import load_config
from dovetail.config.adapter import ADAPTER_SETTINGS
from dovetail.config.hub import is_hub_name
from dovetail.config.load import LoadedConfig
from dovetail.config.plan import read_shapes
from dovetail.config.root import DovetailConfig
from dovetail.config.tree import leaves
from dovetail.models.errors import ModelError
from dovetail.observability.run_folder import CONFIG, RunFolder

_WITHOUT_TRAINING = (
    "trainer.method=rl",
    "data.train_files=[]",
    "critic.enable=False",
    "actor_rollout_ref.actor.use_kl_loss=False",
    "actor_rollout_ref.rollout.n=1",
    # Needs neither a critic nor groups.
    "algorithm.adv_estimator=reinforce_plus_plus",
    "algorithm.use_kl_in_reward=False",
    "algorithm.filter_groups.enable=False",
    "async_training.mode=off",
    "trainer.save_best=null",
    "trainer.rollout_data_dir=null",
    "trainer.validation_data_dir=null",
)
"""Roles and settings of a run that generation does without."""

WITH_OWN_ADAPTERS = ("actor_rollout_ref.model.lora_adapter_path=null", "critic.model.lora_adapter_path=null")
"""A checkpoint has its adapters, and the folder that they began with may be gone."""

_OF_A_FOLDER = (
    "data.train_batch_size=64",
    "actor_rollout_ref.actor.ppo_mini_batch_size=64",
    "actor_rollout_ref.actor.use_dynamic_bsz=True",
    "trainer.n_gpus_per_node=1",
)
"""What a configuration must say beside the model, with values that no generation reads."""

_FLOAT32 = (
    "actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype=float32",
    "actor_rollout_ref.rollout.dtype=float32",
)


@dataclass(frozen=True)
class SavedModel:
    """A checkpoint of a run (`folder` is its `global_step_N`), or the folder or hub name of a model."""

    folder: str
    is_checkpoint: bool

    @property
    def name(self) -> str:
        path = Path(self.folder)
        return f"{path.parent.name}-{path.name}" if self.is_checkpoint else path.name

    def config(self, files: Sequence[Path] = (), overrides: Sequence[str] = ()) -> LoadedConfig:
        """The run's own configuration, or defaults for a folder; then what the user says; then: validate, no more."""
        forced = ["trainer.val_only=True", "trainer.resume_mode=disable"]
        if self.is_checkpoint:
            of_run = run_config_file(Path(self.folder))
            # Methods that train on a data set do not read the mini-batch, so it may not fit.
            settings = load_config([of_run]).config
            if settings.trainer.method == "reward":
                raise ModelError(
                    f"{self.folder} is a checkpoint of a reward model, which generates nothing; export it with "
                    "`dovetail export`, and score responses of another model with reward=FOLDER."
                )
            prompts = settings.data.train_batch_size
            files = [of_run, *files]
            own = [*_WITHOUT_TRAINING, *WITH_OWN_ADAPTERS, f"actor_rollout_ref.actor.ppo_mini_batch_size={prompts}"]
            forced = [forced[0], "trainer.resume_mode=resume_path", override("trainer.resume_from_path", self.folder)]
        else:
            own = [*_WITHOUT_TRAINING, *_OF_A_FOLDER, override("actor_rollout_ref.model.path", self.folder)]
            own += () if _has_gpu() else _FLOAT32
            own += _lengths_in_context(load_config(files, [*own, *overrides, *forced]))
        return load_config(files, [*own, *overrides, *forced])


def find_model(given: str, *, best: bool = False) -> SavedModel:
    """What `given` names, of a run folder its newest checkpoint or its best; FileNotFoundError when it is nothing of
    the kind."""
    is_folder = (Path(given).expanduser() / "config.json").is_file()
    parent = Path(given).parent
    # `runs/mine` could be a name on the hub, but not where there is a folder `runs`.
    if is_folder or (is_hub_name(given) and not (parent.name and parent.is_dir())):
        if best:
            raise FileNotFoundError(
                f"{given} is a model, and --best chooses a checkpoint of a run folder; leave it out."
            )
        return SavedModel(str(Path(given).expanduser().absolute()) if is_folder else given, is_checkpoint=False)
    if (Path(given).expanduser() / ADAPTER_SETTINGS).is_file():
        raise FileNotFoundError(
            f"{given} is an adapter; give the model under it, and {given} as actor_rollout_ref.model.lora_adapter_path "
            "(`dovetail eval MODEL KEY=VALUE`, `dovetail generate MODEL --set KEY=VALUE`)."
        )
    if not Path(given).expanduser().is_dir():
        raise FileNotFoundError(
            f"{given} is no folder; give a folder of a model (with its config.json), a name on the hub (org/name), a "
            "run folder, or a global_step_N folder in one."
        )
    folder = checkpoint_folder(Path(given).expanduser(), best=best)
    return SavedModel(str(folder.absolute()), is_checkpoint=True)


def checkpoint_folder(given: Path, *, best: bool = False) -> Path:
    """The checkpoint that `given` is, or the newest (or best) one of the run folder that it is."""
    from dovetail.checkpoint.manifest import MANIFEST_NAME, verify_folder
    from dovetail.checkpoint.store import CheckpointStore

    if not given.is_dir():
        raise FileNotFoundError(f"{given} is no folder; give a global_step_N folder or the run folder it is in.")
    if (given / MANIFEST_NAME).exists():
        if best:
            raise FileNotFoundError(f"{given} is one checkpoint, and --best chooses one of a run folder; leave it out.")
        verify_folder(given)
        return given
    store = CheckpointStore(given)
    if best and store.steps():
        folder = store.best()
        if folder is None:
            raise FileNotFoundError(
                f"{given} has no best checkpoint: none was validated with trainer.save_best. Leave --best out, or name "
                "a global_step_N folder."
            )
        verify_folder(folder)
        return folder
    newest = store.latest()
    if newest is None:
        raise FileNotFoundError(
            f"{given} is no checkpoint and holds none; give a global_step_N folder or the run folder it is in. A run "
            "saves checkpoints with trainer.save_freq."
        )
    return newest


def run_config_file(checkpoint: Path) -> Path:
    """The configuration of the run that wrote `checkpoint`."""
    folder = checkpoint.resolve()
    step = folder.name.rpartition("_")[2]
    file = RunFolder(folder.parent).config_of(int(step)) if step.isdecimal() else folder.parent / CONFIG
    if not file.is_file():
        raise FileNotFoundError(f"{file} is missing: it says which model {checkpoint} belongs to; keep it beside it.")
    return file


def sampling_overrides(
    config: DovetailConfig, *, n: int | None, temperature: float | None, max_tokens: int | None
) -> list[str]:
    """Options of a command as keys; None keeps what the configuration says.

    Several responses to a prompt are sampled, at temperature 1 unless said otherwise: greedy ones would be equal.
    """
    section, overrides = "actor_rollout_ref.rollout.val_kwargs", []
    sampled = config.actor_rollout_ref.rollout.val_kwargs
    if temperature is None and (n or sampled.n) > 1 and not (sampled.do_sample and sampled.temperature):
        temperature = 1.0
    if n is not None:
        overrides.append(f"{section}.n={n}")
    if temperature is not None:
        overrides += [f"{section}.do_sample={temperature > 0}", f"{section}.temperature={temperature}"]
    if max_tokens is not None:
        # A run's configuration is resolved: it has both.
        overrides += [
            f"data.max_response_length={max_tokens}",
            f"actor_rollout_ref.rollout.response_length={max_tokens}",
        ]
    return overrides


def override(key: str, value: str | Sequence[str]) -> str:
    """An override that is read back as `value`, whatever characters it has."""
    return f"{key}={json.dumps(value if isinstance(value, str) else list(value), ensure_ascii=False)}"


def _lengths_in_context(loaded: LoadedConfig) -> list[str]:
    """Lengths that nobody set, where their defaults exceed the model's context: they share what is left of it."""
    shape, rollout = read_shapes(loaded.config).policy, loaded.config.actor_rollout_ref.rollout
    lengths = {"prompt": rollout.prompt_length, "response": rollout.response_length}
    if shape is None or shape.context_length is None or sum(lengths.values()) <= shape.context_length:
        return []
    given = dict(leaves(loaded.tree))
    is_open = [
        name
        for name in lengths
        if given.get(f"data.max_{name}_length") is given.get(f"actor_rollout_ref.rollout.{name}_length") is None
    ]
    left = shape.context_length - sum(length for name, length in lengths.items() if name not in is_open)
    # With no room for a token the defaults stay, and the checks of the run say what does not fit.
    return [f"data.max_{name}_length={left // len(is_open)}" for name in is_open if left >= len(is_open)]


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()
