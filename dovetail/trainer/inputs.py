"""Check the files that a run will read before anything is started, for `dovetail check` and `dovetail train`.

Checks names, extensions, columns and definitions; runs no user code and imports neither torch nor ray.
"""

from __future__ import annotations

import ast
import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dovetail.config.adapter import adapter_problems
from dovetail.config.errors import ConfigError, Problem
from dovetail.config.hub import is_hub_name
from dovetail.config.installed import missing_libraries
from dovetail.config.model import ModelConfig
from dovetail.config.plan.model_shape import ModelShapeError, read_config_json
from dovetail.config.root import DovetailConfig
from dovetail.config.user_code import PACKAGE_PREFIX, PICKLED, split_address
from dovetail.config.wording import name_some
from dovetail.data.errors import DataError
from dovetail.models.errors import ModelError
from dovetail.observability.disk import why_not_writable

_ROLLOUT = "actor_rollout_ref.rollout"


def missing_inputs(config: DovetailConfig) -> list[Problem]:
    """Everything that the run needs and this machine lacks, or has of the wrong kind: libraries, files, columns, rows,
    definitions."""
    return [
        *missing_libraries(config),
        *_data_files(config),
        *_folders(config),
        *_adapters(config),
        *_user_code(config),
        *_other_files(config),
    ]


def named_models(config: DovetailConfig) -> dict[str, Any]:
    """The sections of the networks that the run uses, by their key."""
    models: dict[str, Any] = {"actor_rollout_ref.model": config.actor_rollout_ref.model}
    if config.uses_critic:
        models["critic.model"] = config.critic.model
    if config.reward_model.enable and config.reward_model.model.path:
        models["reward_model.model"] = config.reward_model.model
    if config.distills and any(config.distill.teacher_paths.values()):
        for name, path in config.distill.teacher_paths.items():
            key = f"distill.teachers.{name}" if name else "distill.teacher"
            models[key] = config.distill.teacher.model_copy(update={"path": path})
    return models


def path_key(section: str) -> str:
    """The key of the folder of one of `named_models`."""
    return section if section.startswith("distill.teachers.") else f"{section}.path"


def no_gpu() -> ConfigError:
    """For `trainer.device=cuda` on a machine without one."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "not set")
    why = (
        f"trainer.device=cuda, but this machine shows no GPU (CUDA_VISIBLE_DEVICES: {visible}). Check nvidia-smi and "
        "that torch is built for CUDA, join a cluster that has GPUs with ray_init.address, or set trainer.device=cpu. "
        "`dovetail check --no-files` plans a run for another machine."
    )
    return ConfigError([Problem("trainer.device", why)])


def _data_files(config: DovetailConfig) -> Iterator[Problem]:
    data = config.data
    if data.custom_cls.path is not None:  # a user's class reads whatever it likes
        return
    files = {"data.train_files": data.train_paths, "data.val_files": data.val_paths}
    here = {key: [path for path in paths if "://" not in path] for key, paths in files.items()}
    if not any(here.values()):
        return
    # Brings numpy, which `--help` can do without.
    from dovetail.data.files import count_rows, needed_columns, needs_ground_truth, read_columns

    # Rows of conversations and preferences have several forms: reading them says what is missing.
    needed = needed_columns(data, scored_by_rules=needs_ground_truth(config)) if config.generates else {}
    for key, paths in here.items():
        for path in paths:
            try:
                columns = read_columns(path)
            except DataError as problem:
                yield Problem(key, f"{key}: {problem}")
                here[key] = []  # its rows cannot be counted
                continue
            for name, way_out in needed.items():
                if columns and name not in columns:
                    yield Problem(key, f"{key}: {path} has no column {name!r}, only {name_some(columns)}{way_out}.")
    try:
        rows = sum(count_rows(path) for path in here["data.train_files"])
    except DataError:
        return  # said above
    if rows == 0 and here["data.train_files"]:
        yield Problem("data.train_files", f"data.train_files: no rows in {name_some(here['data.train_files'])}.")
    most = data.train_max_samples
    rows = rows if most < 0 else min(rows, most)
    batch = config.generation_batch_size
    # Weights repeat the rows of a file; what is on the hub is not counted here.
    all_here = len(here["data.train_files"]) == len(data.train_paths)
    if 0 < rows < batch and all_here and not data.train_weights and not config.trainer.val_only:
        yield Problem(
            "data.train_batch_size",
            f"data.train_files has {rows} row{'s' * (rows > 1)}, fewer than one batch of {batch}; lower "
            "data.train_batch_size (or data.gen_batch_size), or add data.",
        )


def _folders(config: DovetailConfig) -> Iterator[Problem]:
    model = config.actor_rollout_ref.model
    models = named_models(config)
    folders = {path_key(section): named.path for section, named in models.items()}
    # Whoever brings a module for the network may bring its own way to read weights.
    read_here = {path_key(section) for section, named in models.items() if named.external_lib is None}
    if config.data.tokenizer:
        folders["data.tokenizer"] = config.data.tokenizer
    elif model.tokenizer_path:
        folders["actor_rollout_ref.model.tokenizer_path"] = model.tokenizer_path
    seen: set[str] = set()
    for key, folder in folders.items():
        if not folder or folder in seen or is_hub_name(folder):
            continue
        seen.add(folder)
        if (Path(folder) / "config.yaml").is_file() and any(Path(folder).glob("global_step_*")):
            exported = f"{folder.rstrip('/')}-model"
            yield Problem(
                key,
                f"{key}={folder} is a run folder; export its model with `dovetail export {folder} {exported}`, "
                f"and give {exported}.",
            )
        elif not (Path(folder) / "config.json").is_file():
            yield Problem(
                key,
                f"{key}={folder} has no config.json (looked at {Path(folder).absolute()}); give a folder of Hugging "
                "Face's layout, or a name on the hub (org/name).",
            )
        elif (why := _why_not_read(folder, is_model=key in read_here)) is not None:
            yield Problem(key, f"{key}: {why}")


def _adapters(config: DovetailConfig) -> Iterator[Problem]:
    for section, model in named_models(config).items():
        if isinstance(model, ModelConfig):
            yield from adapter_problems(section, model)


def _why_not_read(folder: str, *, is_model: bool) -> str | None:
    from dovetail.models.files import check_weight_files  # brings safetensors, which `--help` can do without

    try:
        read_config_json(folder)
        if is_model:
            check_weight_files(folder)
    except (ModelShapeError, ModelError, FileNotFoundError) as error:
        return str(error)
    return None


def _user_code(config: DovetailConfig) -> Iterator[Problem]:
    reward, manager = config.custom_reward_function, config.reward_model.reward_manager_module
    data = config.data
    wanted: list[tuple[str, str | None, str | None]] = [
        ("custom_reward_function.path", reward.path, reward.name),
        ("reward_model.reward_manager_module.path", manager.path, manager.name or config.reward_model.reward_manager),
        ("data.custom_cls.path", data.custom_cls.path, data.custom_cls.name or "Dataset"),
        ("data.sampler.class_path", data.sampler.class_path, data.sampler.class_name or "Sampler"),
    ]
    for number, entry in enumerate(config.reward_model.reward_kwargs.get("rewards") or []):
        if isinstance(entry, dict) and "path" in entry:
            key = f"reward_model.reward_kwargs.rewards[{number}].path"
            wanted.append((key, str(entry["path"]), str(entry.get("name", "compute_score"))))
    if config.trainer.on_step is not None:
        wanted.append(("trainer.on_step", *split_address(config.trainer.on_step)))
    rollout = config.actor_rollout_ref.rollout
    if rollout.uses_agents:
        wanted.append((f"{_ROLLOUT}.multi_turn.function_tool_path", rollout.multi_turn.function_tool_path, None))
        if (environment := rollout.agent.environment) is not None:
            path, _, name = environment.rpartition(":" if ":" in environment else ".")
            path = path if path.endswith(".py") else PACKAGE_PREFIX + path
            wanted.append((f"{_ROLLOUT}.agent.environment", path, name))
    for module in config.trainer.import_modules:
        if (why := _why_not_there(f"{PACKAGE_PREFIX}{module}", "")) is not None:
            yield Problem("trainer.import_modules", f"trainer.import_modules={module}: {why}")
    for key, path, name in wanted:
        if path is not None and (why := _why_not_there(path, name)) is not None:
            if key == "custom_reward_function.path" and "it defines" in why:
                why += f" Say which function scores a response: reward={path}:NAME."
            yield Problem(key, f"{key}={path}: {why}")


def _why_not_there(path: str, name: str | None) -> str | None:
    """`name` None: any definition will do."""
    if path.startswith(PACKAGE_PREFIX):
        module = path.removeprefix(PACKAGE_PREFIX)
        try:
            spec = importlib.util.find_spec(module.partition(".")[0])
        except (ImportError, ValueError):
            spec = None
        return None if spec else f"there is no module {module} here; install it, or put its folder on PYTHONPATH."
    file = Path(path).expanduser()
    if not file.is_file():
        return f"there is no file {file.absolute()}; give a Python file or {PACKAGE_PREFIX}module."
    if file.suffix == PICKLED:
        return None
    try:
        defined = _defined(ast.parse(file.read_bytes(), str(file)).body)
    except (SyntaxError, ValueError) as problem:
        return f"it is not Python: {problem}."
    if name is None or name in defined or "*" in defined:
        return None
    public = sorted(entry for entry in defined if not entry.startswith("_"))
    return f"it has no {name!r}; it defines {', '.join(public) or 'nothing'}."


def _defined(body: list[ast.stmt]) -> set[str]:
    """The names that a module's statements bind, those inside `if`, `try` and `with` included."""
    names: set[str] = set()
    for statement in body:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(statement.name)
        elif isinstance(statement, ast.Import | ast.ImportFrom):
            names |= {(alias.asname or alias.name).partition(".")[0] for alias in statement.names}
        else:
            targets = [node for node in ast.walk(statement) if isinstance(node, ast.Name)]
            names |= {node.id for node in targets if isinstance(node.ctx, ast.Store)}
            for field in ("body", "orelse", "finalbody"):
                inner = getattr(statement, field, [])
                names |= _defined([part for part in inner if isinstance(part, ast.stmt)])
            for handler in getattr(statement, "handlers", []):
                names |= _defined(handler.body)
    return names


def _other_files(config: DovetailConfig) -> Iterator[Problem]:
    trainer = config.trainer
    rollout = config.actor_rollout_ref.rollout
    files = {"data.tool_config_path": config.data.tool_config_path}
    if rollout.uses_agents:
        files |= {
            f"{_ROLLOUT}.multi_turn.tool_config_path": rollout.multi_turn.tool_config_path,
            f"{_ROLLOUT}.multi_turn.interaction_config_path": rollout.multi_turn.interaction_config_path,
            f"{_ROLLOUT}.agent.agent_loop_config_path": rollout.agent.agent_loop_config_path,
        }
    for key, path in files.items():
        if path and not Path(path).is_file():
            yield Problem(key, f"{key}={path}: there is no such file.")
    written = {
        "trainer.default_local_dir": trainer.run_dir,
        "trainer.rollout_data_dir": trainer.rollout_data_dir,
        "trainer.validation_data_dir": trainer.validation_data_dir,
    }
    for key, folder in written.items():
        if folder is not None and (why := why_not_writable(Path(folder), is_folder=True)) is not None:
            yield Problem(key, f"{key}={folder} cannot be written: {why}; give a folder that you may write to.")
    resumed = trainer.resume_from_path
    if trainer.resume_mode != "resume_path" or not resumed:
        return
    if not Path(resumed).is_dir():
        yield Problem(
            "trainer.resume_from_path",
            f"trainer.resume_from_path={resumed} is no folder; give a global_step_N folder, or set "
            "trainer.resume_mode=auto.",
        )
    elif not (Path(resumed) / "manifest.json").exists():
        inside = sorted(Path(resumed).glob("global_step_*"), key=lambda step: (len(step.name), step.name))
        is_run = f"is the folder of a run; give one of its checkpoints, such as {inside[-1]}" if inside else None
        no_checkpoint = "has no manifest.json, so it is no complete checkpoint; give another global_step_N folder"
        yield Problem("trainer.resume_from_path", f"trainer.resume_from_path={resumed} {is_run or no_checkpoint}.")
