"""`ray_init.*`: arguments of `ray.init`."""

from __future__ import annotations

from typing import Any

from pydantic import ConfigDict, Field

from dovetail.config.base import Section


class RayInitConfig(Section):
    """Arguments of `ray.init`; any other argument is passed on as it is (free-form)."""

    model_config = ConfigDict(extra="allow")

    address: str | None = Field(None, description="Address of a running cluster. Null: RAY_ADDRESS, else a local Ray.")
    num_cpus: int | None = Field(None, ge=1, description="CPUs of a local Ray. Null: all.")
    timeline_json_file: str | None = Field(None, description="Write Ray's timeline here at the end. Null: no.")
    runtime_env: dict[str, Any] = Field({}, description="Ray's `runtime_env` (free-form).")

    @property
    def init_arguments(self) -> dict[str, Any]:
        """What to pass to `ray.init`, without nulls."""
        values = {name: getattr(self, name) for name in ("address", "num_cpus") if getattr(self, name) is not None}
        if self.runtime_env:
            values["runtime_env"] = self.runtime_env
        return values | (self.model_extra or {})
