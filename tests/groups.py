"""Which tests pytest-xdist sends to the same process.

With pytest 9.2 the groups of pytest-xdist 3.8 have no effect: its workers put a test's group into `item._nodeid`, which
pytest no longer reads, and so every test goes its own way. Here a group is read from the module that names it.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from xdist.scheduler import LoadScopeScheduling

_GROUP = re.compile(r"""pytest\.mark\.xdist_group\("([\w-]+)"\)""")


class ByGroup(LoadScopeScheduling):
    """By `pytest.mark.xdist_group("name")` of the module, else by module."""

    def _split_scope(self, nodeid: str) -> str:
        return group_of(self.config.rootpath / nodeid.partition("::")[0])


@cache
def group_of(module: Path) -> str:
    named = _GROUP.search(module.read_text())
    return named[1] if named else str(module)
