"""A function's schema from its type hints and Google docstring, and a call's arguments checked against it."""

from __future__ import annotations

import inspect
import re
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

_SUPPORTED = (
    "str, int, float, bool, list[...], dict[str, ...], Literal[...], an Enum, a dataclass, or any of them | None"
)
_SECTION = re.compile(r"^(Args|Arguments|Parameters|Returns?|Raises|Yields?|Examples?|Notes?)\s*:\s*$")
_PARAMETER = re.compile(r"^\*{0,2}(\w+)\s*(?:\([^)]*\))?\s*:\s*(.*)$")


class ToolError(ValueError):
    """A function cannot be a tool as it is written. The message says what to change."""


class ArgumentError(ValueError):
    """The arguments of a call do not fit. The message is meant for the model."""


@dataclass(frozen=True, slots=True)
class Signature:
    """What the model is shown of a function, and what checks its arguments."""

    schema: dict[str, Any]
    """In OpenAI's form: {"type": "function", "function": {"name", "description", "parameters"}}."""
    model: Any
    """A pydantic model with one field for each parameter; None: arguments are not checked."""

    @property
    def name(self) -> str:
        return self.schema["function"]["name"]

    def bind(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments as the function takes them: checked and converted, without those that were not given."""
        from pydantic import ValidationError

        if self.model is None:
            return dict(arguments)
        try:
            values = self.model.model_validate(dict(arguments))
        except ValidationError as error:
            raise ArgumentError("; ".join(_describe(problem, self.model) for problem in error.errors())) from None
        fields = type(values).model_fields
        return {
            field.alias or name: getattr(values, name)
            for name, field in fields.items()
            if name in values.model_fields_set
        }


def read_signature(
    function: Callable[..., Any], *, name: str | None = None, description: str | None = None
) -> Signature:
    """Raises `ToolError` where a type hint or the docstring is missing or cannot be shown to a model."""
    from pydantic import BaseModel, ConfigDict, Field, create_model
    from pydantic.errors import PydanticUserError

    name = name or function.__name__
    summary, documented = read_docstring(inspect.getdoc(function) or "")
    description = description or summary
    if not description:
        raise ToolError(f"The tool {name} has no docstring; write one that tells the model what it does.")
    fields: dict[str, Any] = {}
    hints = _read_hints(function, name)
    for parameter in inspect.signature(function).parameters.values():
        _check_parameter(parameter, hints, name)
        default = ... if parameter.default is parameter.empty else parameter.default
        # An alias, because pydantic reserves names such as `model_config`, `json` and those with a leading underscore.
        fields[f"argument_{parameter.name}"] = (
            hints[parameter.name],
            Field(default, alias=parameter.name, description=documented.pop(parameter.name, None)),
        )
    if documented:
        raise ToolError(f"The docstring of {name} describes {', '.join(documented)}, which it does not take.")
    try:
        model = create_model(name, __config__=ConfigDict(extra="forbid"), __base__=None, **fields)
        parameters = _simplify(model.model_json_schema())
    except (PydanticUserError, RecursionError) as error:
        raise ToolError(f"The type hints of {name} cannot be shown to a model ({error}). Use {_SUPPORTED}.") from error
    assert issubclass(model, BaseModel)
    schema = {"name": name, "description": description, "parameters": parameters}
    return Signature({"type": "function", "function": schema}, model)


def read_docstring(text: str) -> tuple[str, dict[str, str]]:
    """What stands before the first section, and the descriptions under `Args:`."""
    summary: list[str] = []
    arguments: dict[str, str] = {}
    section, indent, current = "", None, ""
    for line in text.splitlines():
        if match := _SECTION.match(line):
            section, indent = match[1], None
        elif not section:
            summary.append(line.strip())
        elif section in ("Args", "Arguments", "Parameters") and line.strip():
            depth = len(line) - len(line.lstrip())
            indent = depth if indent is None else indent
            if depth <= indent and (match := _PARAMETER.match(line.strip())):
                current = match[1]
                arguments[current] = match[2].strip()
            elif current:
                arguments[current] = f"{arguments[current]} {line.strip()}".strip()
    paragraphs = "\n".join(summary).strip().split("\n\n")
    return "\n".join(" ".join(part.split()) for part in paragraphs if part.strip()), arguments


def _read_hints(function: Callable[..., Any], name: str) -> dict[str, Any]:
    try:
        return typing.get_type_hints(function, include_extras=True)
    except NameError as error:
        raise ToolError(f"A type hint of {name} names something that is not imported: {error}.") from error


def _check_parameter(parameter: inspect.Parameter, hints: Mapping[str, Any], name: str) -> None:
    if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
        raise ToolError(f"The tool {name} takes {parameter}; a model gives arguments by name, so name each of them.")
    if parameter.name not in hints:
        raise ToolError(
            f"The parameter {parameter.name} of {name} has no type hint; write `{parameter.name}: str`, for example."
        )


def _simplify(schema: dict[str, Any]) -> dict[str, Any]:
    """Without titles and references, which chat templates do not follow; `X | None` is X with "nullable"."""
    definitions = schema.get("$defs", {})

    def visit(node: Any, *, names: bool = False) -> Any:
        if isinstance(node, list):
            return [visit(entry) for entry in node]
        if not isinstance(node, dict):
            return node
        if names:  # of properties: a parameter may be called `title`
            return {key: visit(value) for key, value in node.items()}
        if "$ref" in node:
            target = definitions[node["$ref"].rsplit("/", 1)[1]]
            return visit({**target, **{key: value for key, value in node.items() if key != "$ref"}})
        if "anyOf" in node:
            options = [option for option in node["anyOf"] if option != {"type": "null"}]
            if len(options) == 1:
                node = {**options[0], **{key: value for key, value in node.items() if key != "anyOf"}, "nullable": True}
                return visit(node)
        kept = {key: value for key, value in node.items() if key not in ("title", "$defs")}
        if kept.get("default", ...) is None:
            del kept["default"]
        if kept.get("additionalProperties") is False:  # said by the checks; the prompt is shorter without
            del kept["additionalProperties"]
        return {key: visit(value, names=key == "properties") for key, value in kept.items()}

    simple = visit(schema)
    simple.pop("description", None)
    simple.setdefault("properties", {})
    return simple


def _describe(problem: Any, model: Any) -> str:
    known = [field.alias for field in model.model_fields.values()]
    where = ".".join(str(part) for part in problem["loc"])
    if problem["type"] == "extra_forbidden":
        return f"there is no argument {where!r}; the arguments are {', '.join(known) or 'none'}"
    if problem["type"] == "missing":
        return f"the argument {where!r} is missing"
    return f"argument {where!r}: {problem['msg'][:1].lower()}{problem['msg'][1:]}, got {problem['input']!r}"
