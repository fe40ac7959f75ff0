"""The JSON schema of a plain function, from its type hints and its docstring, and the check of its arguments.

    def weather(city: str, unit: Literal["c", "f"] = "c") -> str:
        '''The weather of a city.

        Args:
            city: its name, in English.
            unit: of the temperature.
        '''

becomes `{"type": "function", "function": {"name": "weather", "description": "The weather of a city.", ...}}`, in
the dialect that chat templates are written for (that of transformers' `get_json_schema`): an optional value is
`nullable`, a choice has the type of its values. msgspec makes the schemas of the types and converts arguments;
what it does not know is refused when the tool is made. This module calls no tool; `asyncrl.envs.tools` does.
"""

from __future__ import annotations

import inspect
import itertools
import re
import typing
from collections.abc import Callable
from typing import Any

import msgspec

Convert = Callable[[Any], dict[str, Any]]
"""From the arguments of a call to those of the function; raises msgspec.ValidationError with what is wrong."""


def describe(function: Callable[..., Any]) -> tuple[dict[str, Any], Convert]:
    """The schema of a function or bound method, and the conversion of the arguments that a model gives.

    Raises:
        ValueError: it cannot be a tool: function, parameter, and what to write instead.
    """
    name = getattr(function, "__name__", "")
    if not name.isidentifier():
        raise ValueError(f"tool {function!r} has no name that a model can call; write it with `def`")
    parameters = _parameters(function, name)
    description, texts = _docstring(function, name)
    unknown = sorted(texts.keys() - {p.name for p in parameters})
    if unknown:
        raise ValueError(f"tool {name!r}: its docstring describes {unknown[0]!r}, which it does not take")
    properties: dict[str, Any] = {}
    fields: list[Any] = []
    for parameter in parameters:
        schema = _schema(parameter, name)
        text = {"description": texts[parameter.name]} if parameter.name in texts else {}
        optional = parameter.default is not parameter.empty
        properties[parameter.name] = schema | text | (_default(parameter.default) if optional else {})
        fields.append((parameter.name, parameter.annotation) + ((msgspec.UNSET,) if optional else ()))
    required = [p.name for p in parameters if p.default is p.empty]
    shape = {"type": "object", "properties": properties} | ({"required": required} if required else {})
    told = {"name": name, "description": description, "parameters": shape}
    arguments = msgspec.defstruct(name, fields, kw_only=True, forbid_unknown_fields=True)
    return {"type": "function", "function": told}, lambda given: _convert(given, arguments)


# ---- machinery -----------------------------------------------------------------------------------


def _convert(given: Any, arguments: type[msgspec.Struct]) -> dict[str, Any]:
    """Those that were given: a default is the function's own business."""
    read = msgspec.convert(given, arguments, strict=False)
    return {name: getattr(read, name) for name in given}


def _parameters(function: Callable[..., Any], name: str) -> list[inspect.Parameter]:
    """The parameters with evaluated type hints."""
    try:
        hints = typing.get_type_hints(function, include_extras=True)
    except Exception as error:  # A hint is an expression of the user's, and may raise anything.
        raise ValueError(f"tool {name!r}: its type hints cannot be evaluated: {error}") from error
    found = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ValueError(
                f"tool {name!r}: parameter '{parameter}' cannot be given by name, as a model gives all arguments"
            )
        if parameter.name not in hints:
            raise ValueError(
                f"tool {name!r}: parameter {parameter.name!r} has no type hint; write for example "
                f"`{parameter.name}: str`"
            )
        found.append(parameter.replace(annotation=hints[parameter.name]))
    return found


def _schema(parameter: inspect.Parameter, name: str) -> dict[str, Any]:
    try:
        (schema,), components = msgspec.json.schema_components([parameter.annotation])
    except (TypeError, ValueError) as error:
        reason = str(error).splitlines()[-1]
    else:
        if not components:
            return _dialect(schema)
        reason = f"{', '.join(components)} is a class"
    raise ValueError(
        f"tool {name!r}: parameter {parameter.name!r} has the type hint {parameter.annotation!r}, which has no "
        f"schema ({reason}); use int, float, str, bool, list, dict, Literal, or a union of them"
    )


_TYPES = {bool: "boolean", int: "integer", float: "number", str: "string"}


def _dialect(schema: dict[str, Any]) -> dict[str, Any]:
    """msgspec's schema as chat templates read it, inner schemas included."""
    schema = dict(schema)
    for key in ("items", "additionalProperties"):
        if isinstance(schema.get(key), dict):
            schema[key] = _dialect(schema[key])
    if "enum" in schema:
        kinds = {_TYPES[type(value)] for value in schema["enum"]}
        return schema | ({"type": kinds.pop()} if len(kinds) == 1 else {})
    choices = [_dialect(choice) for choice in schema.pop("anyOf", [])]
    nullable = {"nullable": True} if {"type": "null"} in choices else {}
    choices = [choice for choice in choices if choice != {"type": "null"}]
    if len(choices) == 1:
        return schema | choices[0] | nullable
    if choices and all(choice.keys() == {"type"} for choice in choices):
        return schema | {"type": [choice["type"] for choice in choices]} | nullable
    return schema | ({"anyOf": choices} if choices else {}) | nullable


def _default(value: Any) -> dict[str, Any]:
    """The default, if there is a way to say it in JSON; None goes without saying."""
    try:
        return {} if value is None else {"default": msgspec.to_builtins(value)}
    except TypeError:
        return {}


_SECTION = re.compile(r"[A-Z][A-Za-z ]*:$")
_ENTRY = re.compile(r"\*{0,2}(\w+)(?: \(.*?\))?: *(.*)")


def _docstring(function: Callable[..., Any], name: str) -> tuple[str, dict[str, str]]:
    """What stands before the first section, and the text of each parameter under `Args:`."""
    lines = (inspect.getdoc(function) or "").splitlines()
    sections = [i for i, line in enumerate(lines) if _SECTION.match(line)] + [len(lines)]
    description = "\n".join(lines[: sections[0]]).strip()
    if not description:
        raise ValueError(f"tool {name!r} has no docstring; its first lines tell the model what it is for")
    texts: dict[str, str] = {}
    for start, end in itertools.pairwise(sections):
        if lines[start] in ("Args:", "Arguments:"):
            texts |= _entries(lines[start + 1 : end])
    return description, texts


def _entries(lines: list[str]) -> dict[str, str]:
    """`name (type): text`, each with its further, deeper lines."""
    texts: dict[str, str] = {}
    last = ""
    margin = min((len(line) - len(line.lstrip()) for line in lines if line.strip()), default=0)
    for line in lines:
        entry = _ENTRY.fullmatch(line.strip()) if len(line) - len(line.lstrip()) == margin else None
        if entry:
            last = entry[1]
            texts[last] = entry[2]
        elif last and line.strip():
            texts[last] = f"{texts[last]} {line.strip()}".strip()
    return texts
