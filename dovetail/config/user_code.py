"""Find an object in a user's code by `path` and `name`. Runs that code; call it only where a run is about to start."""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

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
        close = difflib.get_close_matches(name, public, n=1)
        hint = f"did you mean {close[0]}? " if close else ""
        raise UserCodeError(f"{key}={path} has no {name!r}; {hint}It defines {', '.join(public) or 'nothing'}.")
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
            raise UserCodeError(
                f"trainer.import_modules: {name} cannot be imported ({error}); install it, or start the run in the "
                f"folder that holds it (now {os.getcwd()})."
            ) from error


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
    # As where Python runs the file, it may import what lies beside it. Last, so that this hides no package, and only
    # while it is imported, so that it hides no module of another run; spelled as the file's own code would not.
    beside = f"{file.parent}{os.sep}"
    sys.path.append(beside)
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[name]
        if isinstance(error, (KeyboardInterrupt, SystemExit)):
            raise
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(file)]
        where = f" in its line {lines[-1]}" if lines else ""
        raise UserCodeError(
            f"{key}={path} fails while it is imported{where}: {type(error).__name__}: {str(error).rstrip('.')}. "
            f"`python {path}` shows its traceback."
        ) from error
    finally:
        if beside in sys.path:
            sys.path.remove(beside)
    return module
