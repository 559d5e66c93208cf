"""A worker class and the arguments to build it with, to be built elsewhere. Several of them can share a process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dovetail.controller.worker import Worker


class ClassWithInitArgs:
    """A worker class with its constructor's arguments. Calling it builds the worker in this process."""

    def __init__(self, cls: Any, *args: Any, **kwargs: Any) -> None:
        self.cls = _plain_class(cls)
        self.args = args
        self.kwargs = kwargs

    def __call__(self) -> Worker:
        return self.cls(*self.args, **self.kwargs)

    def roles(self, default_name: str | None = None) -> dict[str, ClassWithInitArgs]:
        """The roles that one process built from this will host."""
        return {default_name or self.cls.__name__: self}


class RayClassWithInitArgs(ClassWithInitArgs):
    """Also carries options for the Ray actor. Takes a plain class or one that ``ray.remote`` has wrapped."""

    def __init__(self, cls: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(cls, *args, **kwargs)
        self.options: dict[str, Any] = {}


class ColocatedClasses(RayClassWithInitArgs):
    """Several roles for one process. Made by `create_colocated_worker_cls`."""

    def __init__(self, classes: Mapping[str, ClassWithInitArgs]) -> None:
        super().__init__(Worker)
        self.classes = dict(classes)
        for spec in self.classes.values():
            self.options |= getattr(spec, "options", {})

    def __call__(self) -> Worker:
        raise TypeError(f"{sorted(self.classes)} share a process; give them to a worker group and spawn() the roles.")

    def roles(self, default_name: str | None = None) -> dict[str, ClassWithInitArgs]:
        return dict(self.classes)


def create_colocated_worker_cls(class_dict: Mapping[str, ClassWithInitArgs]) -> ColocatedClasses:
    """Put several roles into one process per rank; ``group.spawn(roles)`` then gives one group per role."""
    if not class_dict:
        raise ValueError("create_colocated_worker_cls got no classes; pass {role: RayClassWithInitArgs(...)}.")
    return ColocatedClasses(class_dict)


def _plain_class(cls: Any) -> type[Worker]:
    metadata = getattr(cls, "__ray_metadata__", None)  # what ray.remote leaves on the classes it wraps
    if metadata is not None:
        cls = metadata.modified_class
        cls = getattr(cls, "__ray_actor_class__", cls)
    if not (isinstance(cls, type) and issubclass(cls, Worker)):
        raise TypeError(f"{cls!r} is not a subclass of dovetail.controller.Worker; derive it from Worker.")
    return cls
