"""Which tests pytest-xdist sends to the same process.

With pytest 9.2 the groups of pytest-xdist 3.8 have no effect: its workers put a test's group into `item._nodeid`, which
pytest no longer reads, and so every test goes its own way. Here a group is read from the module that names it.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from xdist.scheduler import LoadScopeScheduling
from xdist.workermanage import WorkerController

_GROUP = re.compile(r"""pytest\.mark\.xdist_group\("([\w-]+)"\)""")


class ByGroup(LoadScopeScheduling):
    """By `pytest.mark.xdist_group("name")` of the module, else by module."""

    def _split_scope(self, nodeid: str) -> str:
        return group_of(self.config.rootpath / nodeid.partition("::")[0])

    def _assign_work_unit(self, node: WorkerController) -> None:
        """Modules of unit tests come last: they are short, so both processes end at about the same time."""
        for scope in [scope for scope in self.workqueue if is_unit(scope)]:
            self.workqueue.move_to_end(scope)
        super()._assign_work_unit(node)


@cache
def group_of(module: Path) -> str:
    named = _GROUP.search(module.read_text())
    return named[1] if named else str(module)


@cache
def is_unit(group: str) -> bool:
    """Whether it is a module that is marked as `unit` and nothing else."""
    module = Path(group)
    return module.suffix == ".py" and "\npytestmark = pytest.mark.unit\n" in module.read_text()
