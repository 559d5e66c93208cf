"""The base of every configuration section, and fields whose default is another field. Knows no key of its own."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

INHERITS = "inherits"
KEEPS_NULL = "keeps_null"


class Section(BaseModel):
    """A frozen group of keys. Unknown keys are refused; every field documents itself."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        # Sections are built once, from the root: building each one alone as well would double the import time.
        defer_build=True,
        # `trainer.experiment_name=42` is a name, not a mistake.
        coerce_numbers_to_str=True,
        allow_inf_nan=False,
        protected_namespaces=(),
    )


def inherits(
    source: str,
    section: type[Section],
    name: str,
    *,
    description: str,
    keeps_null: bool = False,
    **constraints: Any,
) -> Any:
    """A field that takes the value of the key `source` when it is unset or null; with `keeps_null` only when unset.

    `section` and `name` say where the default of that key is written, so that a section built alone has it too.
    The root resolves the real value (see `dovetail.config.inherit`).
    """
    return Field(
        default=section.model_fields[name].default,
        description=f"{description} {'Unset' if keeps_null else 'Null'}: same as `{source}`.",
        json_schema_extra={INHERITS: source, KEEPS_NULL: keeps_null},
        **constraints,
    )


def inherited_from(extra: object) -> str | None:
    """The key a field inherits from, given its `json_schema_extra`."""
    return extra.get(INHERITS) if isinstance(extra, dict) else None


def keeps_null(extra: object) -> bool:
    """Whether null is a value of its own for an inheriting field, given its `json_schema_extra`."""
    return isinstance(extra, dict) and bool(extra.get(KEEPS_NULL))
