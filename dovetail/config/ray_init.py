"""`ray_init.*`: arguments of `ray.init`."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, ClassVar

from pydantic import ConfigDict, field_serializer, field_validator

from dovetail.config.base import Section, key, unused

_SECRET = re.compile(r"(^|_)(TOKEN|SECRET|PASSWORD|(API|ACCESS|SECRET)_?KEY)(_|$)")

RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""What a group tells each of its workers. A value for all of them would be wrong for all but one."""


def refuse_rank_variables(variables: Iterable[str]) -> None:
    """Raise ValueError if an environment for workers sets what their group sets."""
    if taken := [name for name in RANK_VARIABLES if name in variables]:
        raise ValueError(
            f"{', '.join(taken)} cannot be set: every worker gets its own from its group; take {taken[0]} out."
        )


def is_secret(name: str) -> bool:
    """Whether a variable of this name must not be logged or stored: `HF_TOKEN` is one, `TOKENIZERS_PARALLELISM` not."""
    return _SECRET.search(name.upper()) is not None


class RayInitConfig(Section):
    """Arguments of `ray.init`; its other arguments are passed on as they are, and so is what begins with `_`."""

    model_config = ConfigDict(extra="allow")
    passed_on: ClassVar[tuple[str, ...]] = (
        *("num_gpus", "resources", "labels", "object_store_memory", "local_mode", "ignore_reinit_error", "namespace"),
        *("include_dashboard", "dashboard_host", "dashboard_port", "job_config", "log_to_driver", "proxy_server_url"),
        *("configure_logging", "logging_level", "logging_format", "logging_config"),
        *("enable_resource_isolation", "cgroup_path", "system_reserved_cpu", "system_reserved_memory"),
    )
    rules = (unused("Ray's timeline is not written; phases are in metrics.jsonl", only="timeline_json_file"),)

    address: str | None = key(None, "Address of a running cluster. Null: RAY_ADDRESS, else a local Ray.")
    num_cpus: int | None = key(None, "CPUs of a local Ray. Null: all.", ge=1)
    timeline_json_file: str | None = key(None, "Write Ray's timeline here at the end. Null: no.")
    runtime_env: dict[str, Any] = key({}, "Ray's `runtime_env` (free-form). Merged with what the driver forwards.")

    @field_serializer("runtime_env", when_used="json")
    def _without_secrets(self, runtime_env: dict[str, Any]) -> dict[str, Any]:
        """As it is written into run folders and shown by trackers."""
        if "env_vars" not in runtime_env:
            return runtime_env
        public = {name: value for name, value in runtime_env["env_vars"].items() if not is_secret(name)}
        return {**runtime_env, "env_vars": public}

    @field_validator("runtime_env")
    @classmethod
    def _leaves_ranks_alone(cls, runtime_env: dict[str, Any]) -> dict[str, Any]:
        variables = runtime_env.get("env_vars") or {}
        if not isinstance(variables, dict):
            raise ValueError("env_vars must be a mapping of names to values.")
        refuse_rank_variables(variables)
        return runtime_env

    @property
    def init_arguments(self) -> dict[str, Any]:
        """What to pass to `ray.init`, without nulls."""
        values = {name: getattr(self, name) for name in ("address", "num_cpus") if getattr(self, name) is not None}
        if self.runtime_env:
            values["runtime_env"] = self.runtime_env
        return values | (self.model_extra or {})
