"""Find an object in a user's code by `path` and `name`. Runs that code; call it only where a run is about to start."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

from dovetail.config.wording import did_you_mean

PACKAGE_PREFIX = "pkg://"
PICKLED = ".pkl"
"""A function that was given to the Python API and that no module has by name, such as one of a notebook."""


class UserCodeError(ValueError):
    """A user's file, module or name is not there, or fails while it is imported."""


def load_user_object(path: str, name: str, *, key: str) -> Any:
    """The object `name` of a Python file, or of a module given as `pkg://package.module`; a `.pkl` file is one object.

    `key` is the configuration key that holds the path, for the messages: `custom_reward_function.path`.
    """
    if path.endswith(PICKLED):
        return _unpickle(path, key)
    module = (_import_module if path.startswith(PACKAGE_PREFIX) else _import_file)(path, key)
    if not hasattr(module, name):
        public = sorted(entry for entry in vars(module) if not entry.startswith("_"))
        hint = did_you_mean(name, public)
        raise UserCodeError(f"{key}={path} has no {name!r}.{hint} It defines {', '.join(public) or 'nothing'}.")
    return getattr(module, name)


def split_address(text: str) -> tuple[str, str]:
    """Path and name of `file.py:function` or `pkg://module:function`; a text without a name has an empty one."""
    path, _, name = text.rpartition(":")
    return (path, name) if path and "/" not in name else (text, "")


def import_user_modules(names: Sequence[str]) -> None:
    """Import `trainer.import_modules`, from installed packages or from the current folder."""
    if names and not {"", os.getcwd()} & set(sys.path):
        # Absolute: Ray hands the driver's path on to its workers, whose current folder may be another one.
        sys.path.append(os.getcwd())
    for name in names:
        try:
            importlib.import_module(name)
        except ImportError as error:
            fix = f"install it, or start the run in the folder that holds it (now {os.getcwd()})"
            if (error.name or "").partition(".")[0] == "verl":
                fix = "an agent loop for verl belongs in rollout.agent.agent_loop_config_path (docs/agents.md)"
            raise UserCodeError(f"trainer.import_modules: {name} cannot be imported ({error}); {fix}.") from error


def _import_module(path: str, key: str) -> ModuleType:
    try:
        return importlib.import_module(path.removeprefix(PACKAGE_PREFIX))
    except ImportError as error:
        raise UserCodeError(f"{key}={path} cannot be imported: {error}") from error


def _unpickle(path: str, key: str) -> Any:
    """Runs code, as importing a file does: it is the user's own, and named in the configuration."""
    import cloudpickle

    try:
        return cloudpickle.loads(Path(path).expanduser().read_bytes())
    except Exception as error:  # unpickling imports what the function uses, and that may raise anything
        raise UserCodeError(f"{key}={path} cannot be read: {type(error).__name__}: {error}") from error


def _import_file(path: str, key: str) -> ModuleType:
    file = Path(path).expanduser().resolve()
    if not file.is_file():
        raise UserCodeError(f"{key}={path}: there is no file {file}; give a Python file or {PACKAGE_PREFIX}module.")
    # The name is made of the whole path: two files called reward.py are two modules, and one file is imported once.
    name = f"dovetail_user_{file.stem}_{hashlib.blake2b(str(file).encode(), digest_size=6).hexdigest()}"
    _NEIGHBOURS.prefer(str(file.parent))
    if name in sys.modules:
        return sys.modules[name]
    for module in list(sys.modules.values()):  # `trainer.import_modules` may name the file too: it registers once
        if getattr(module, "__file__", None) == str(file):
            return module
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise UserCodeError(f"{key}={path} is not a Python file; its name must end in .py.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[name]
        if isinstance(error, KeyboardInterrupt):
            raise
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(file)]
        where = f" in its line {lines[-1]}" if lines else ""
        raise UserCodeError(
            f"{key}={path} fails while it is imported{where}: {type(error).__name__}: {str(error).rstrip('.')}. "
            f"`python {path}` shows its traceback."
        ) from error
    return module


class _Neighbours:
    """Finds what lies beside a user's file for the code of that file, at its top and in functions that run later.

    Asked after every other finder, so that it hides no package. A folder on `sys.path` would be searched for everybody:
    it would hide modules of another run's folder.
    """

    def __init__(self) -> None:
        self.folders: set[str] = set()
        self.imported_from: dict[str, str] = {}

    def find_spec(self, name: str, path: Sequence[str] | None = None, _target: object = None) -> ModuleSpec | None:
        folder = self._folder_of_the_caller() if path is None else None
        spec = PathFinder.find_spec(name, [folder]) if folder else None
        if folder and spec:
            self.imported_from[name] = folder
        return spec

    def prefer(self, folder: str) -> None:
        """Let names that another folder has, too, mean the modules of this one from now on."""
        if self not in sys.meta_path:
            sys.meta_path.append(self)
        self.folders.add(folder)
        for name, other in list(self.imported_from.items()):
            if other != folder and PathFinder.find_spec(name, [folder]) is not None:
                del self.imported_from[name]
                for module in [entry for entry in sys.modules if entry.split(".")[0] == name]:
                    del sys.modules[module]

    def _folder_of_the_caller(self) -> str | None:
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            folder = os.path.dirname(frame.f_code.co_filename)
            if folder in self.folders:
                return folder
            frame = frame.f_back
        return None


_NEIGHBOURS = _Neighbours()
