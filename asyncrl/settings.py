"""Reads a `Config` from TOML files and command-line flags, and explains what is wrong with them.

`argparse` does the parsing (one flag per setting, made from the models of `asyncrl.config`), `tomllib` reads
files, pydantic validates. Precedence: defaults, then files from left to right, then flags. Every mistake
becomes one `UsageError` that names the flag or key, its value, what is allowed and the nearest name; the
command line turns it into exit code 2. Called by `asyncrl.cli` only.
"""

from __future__ import annotations

import argparse
import difflib
import json
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from asyncrl.config import Config, Section

SUGAR = {
    "--algo": "--algo.name",
    "--env": "--env.name",
    "--engine": "--generator.engine",
    "--model": "--model.path",
    "--steps": "--train.steps",
    "--name": "--run.name",
}
"""Short spellings of the flags that are typed most."""
SWITCHES = {"--deterministic": "--run.deterministic"}
"""Flags without a value, which set theirs to true."""


class UsageError(Exception):
    """The user's input cannot be used; the text says why and what to do."""


def leaves() -> Iterator[tuple[str, FieldInfo]]:
    """Every setting: its dotted key and pydantic's description of it."""
    for section, info in Config.model_fields.items():
        model = info.annotation
        assert isinstance(model, type)
        assert issubclass(model, Section)
        for name, field in model.model_fields.items():
            yield f"{section}.{name}", field


def add_files(parser: argparse.ArgumentParser) -> None:
    """Adds `@file.toml` to a command's parser."""
    parser.add_argument("files", nargs="*", metavar="@FILE.toml", help="settings files, left to right")


def add_flags(parser: argparse.ArgumentParser, only: tuple[str, ...] = ("",)) -> None:
    """Adds one flag per setting to a command's parser; `only` those whose keys begin so."""
    groups: dict[str, Any] = {}
    for key, field in leaves():
        if not key.startswith(only):
            continue
        section = key.split(".")[0]
        if section not in groups:
            model = Config.model_fields[section].annotation
            groups[section] = parser.add_argument_group(section, (model.__doc__ or "").split("\n")[0])
        shorts = [short for short, long in SUGAR.items() if long == f"--{key}"]
        default = json.dumps(field.default) if field.default is not None else "none"
        text = f"{field.description or ''} [{default}]".replace("%", "%%")
        groups[section].add_argument(*shorts, f"--{key}", dest=key, metavar=_metavar(field), help=text)
        for switch in [switch for switch, long in SWITCHES.items() if long == f"--{key}"]:
            help_ = f"the same as --{key} true"
            groups[section].add_argument(switch, dest=key, action="store_const", const="true", help=help_)


def _metavar(field: FieldInfo) -> str:
    allowed = _choices(field.annotation)
    if allowed:
        return "|".join(allowed)
    for kind in (list, tuple, dict, bool, int, float, str):
        if kind.__name__ in str(field.annotation):
            return {"dict": "JSON", "list": "JSON", "tuple": "JSON"}.get(kind.__name__, kind.__name__.upper())
    return "VALUE"


def _choices(annotation: Any) -> list[str]:
    arguments = getattr(annotation, "__args__", ())
    if "Literal" in str(annotation) and arguments:
        flat: list[str] = []
        for argument in arguments:
            flat += [argument] if isinstance(argument, str) else _choices(argument)
        return flat
    return []


def split_entries(arguments: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Takes flags of single entries of tables, like `--algo.loss_args.clip_high 0.3`, out of a command line.

    Returns:
        The other arguments, and dotted key to text for `read`.

    Raises:
        UsageError: such a flag has no value.
    """
    tables = [f"--{key}." for key, field in leaves() if "dict" in str(field.annotation)]
    rest, entries, waiting = [], {}, iter(arguments)
    for argument in waiting:
        flag, equals, value = argument.partition("=")
        if not flag.startswith(tuple(tables)):
            rest.append(argument)
            continue
        given = value if equals else next(waiting, None)
        if given is None:
            raise UsageError(f"{flag} needs a value, for example {flag} 0.5")
        if not equals and given.startswith("--"):
            raise UsageError(f"{flag} needs a value, and {given} follows; a value that starts so: {flag}={given}")
        entries[flag.removeprefix("--")] = given
    return rest, entries


def read(
    files: Sequence[str], flags: dict[str, str | None], base: dict[str, dict[str, Any]] | None = None
) -> Config:
    """Merges files and flags over the defaults and validates the result.

    Args:
        files: paths of TOML files, each with or without a leading `@`.
        flags: dotted key to the text that was typed, or None where it was not. A key of an entry of a table
            (`algo.loss_args.clip_high`) changes this entry only; the table's own flag comes before it.
        base: what takes the defaults' place: section to values by name. It is changed.

    Raises:
        UsageError: a file cannot be read, a key is unknown or a value is not allowed.
    """
    merged: dict[str, dict[str, Any]] = base or {}
    origin: dict[str, str] = {}
    for file in files:
        for section, values in _read_toml(file.removeprefix("@")).items():
            if not isinstance(values, dict):
                raise UsageError(f"{_unknown_key(section, file)} ({section} = {values!r} is in no [section])")
            for name, value in values.items():
                merged.setdefault(section, {})[name] = value
                origin[f"{section}.{name}"] = f"{file.removeprefix('@')}, [{section}] {name}"
    for key, typed in flags.items():
        if typed is not None:
            section, name, *entry = key.split(".")
            origin[key] = f"--{key}"
            if entry:
                _put(merged, [section, name, *entry], typed)
            else:
                merged.setdefault(section, {})[name] = _parse(typed, key)
    try:
        return Config.model_validate(merged)
    except ValidationError as error:
        raise UsageError(_explain(error, origin)) from None


def from_json(text: str | bytes) -> Config:
    """The configuration that a run stored."""
    return Config.model_validate_json(text)


def unknown_flag(flag: str) -> str:
    """The error text for a flag that does not exist."""
    name = flag.split("=")[0]
    return f"unknown setting {name}.{_nearest(name.lstrip('-').replace('-', '_'), '--')}"


def _read_toml(path: str) -> dict[str, Any]:
    try:
        return tomllib.loads(Path(path).read_text())
    except FileNotFoundError:
        raise UsageError(f"settings file {path} does not exist; write it as @path/to/file.toml") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"settings file {path} cannot be read: {error}") from None
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"settings file {path} is not valid TOML: {error}") from None


def _parse(typed: str, key: str) -> Any:
    """Flags are text; lists, tables and null are written as JSON, everything else is pydantic's to read."""
    if typed[:1] in "[{":
        try:
            return json.loads(typed)
        except json.JSONDecodeError as error:
            text = f"--{key} {typed}: not valid JSON ({error}); write lists as [1,2] and tables as {{}}"
            raise UsageError(text) from None
    return None if typed == "null" else typed


def _put(values: dict[str, Any], path: Sequence[str], typed: str) -> None:
    """Sets an entry of nested tables, given its section, setting and names: a JSON value, or else text.

    Raises:
        UsageError: something on the way is no table.
    """
    for depth, name in enumerate(path[:-1], 1):
        values = values.setdefault(name, {})
        if not isinstance(values, dict):
            table = ".".join(path[:depth])
            raise UsageError(f"--{'.'.join(path)} {typed} cannot be set: {table} = {values!r} is no table")
    try:
        values[path[-1]] = json.loads(typed)
    except json.JSONDecodeError:
        values[path[-1]] = typed


def _explain(error: ValidationError, origin: dict[str, str]) -> str:
    lines = []
    for item in error.errors():
        key = ".".join(str(part) for part in item["loc"][:2])
        if item["type"] == "extra_forbidden":
            lines.append(_unknown_key(key, origin.get(key, "")))
        elif not key:
            lines.append(item["msg"].removeprefix("Value error, "))
        else:
            field = dict(leaves()).get(key)
            allowed = _choices(field.annotation) if field else []
            hint = f" Allowed: {', '.join(allowed)}." if allowed else ""
            near = difflib.get_close_matches(str(item["input"]), allowed, 1)
            guess = f" Did you mean {near[0]}?" if near else ""
            about = f" ({field.description})" if field and not allowed else ""
            what = "not one of the allowed values" if allowed else item["msg"]
            lines.append(f"{_place(item['loc'], origin)} = {item['input']!r}: {what}.{hint}{guess}{about}")
    return "\n".join(lines)


def _place(loc: Sequence[int | str], origin: dict[str, str]) -> str:
    """Where a value was given, an entry of a table by its own name; its dotted key if that is not known."""
    names = [str(part) for part in loc]
    entry, setting = ".".join(names), ".".join(names[:2])
    return origin.get(entry) or ".".join([origin.get(setting, setting), *names[2:]])


def _unknown_key(key: str, where: str) -> str:
    return f"unknown setting {key}" + (f" ({where})" if where else "") + "." + _nearest(key, "")


def _nearest(key: str, prefix: str) -> str:
    keys = [name for name, _ in leaves()]
    near = difflib.get_close_matches(key, keys, 1, 0.5)
    if not near:
        last = key.split(".")[-1]
        near = [name for name in keys if name.split(".")[-1] == last][:1]
    text = f" Did you mean {prefix}{near[0]}?" if near else ""
    section = key.split(".")[0]
    if section in Config.model_fields:
        names = ", ".join(name for name in keys if name.startswith(section + "."))
        return f"{text} Settings of [{section}]: {names}."
    return f"{text} Sections: {', '.join(Config.model_fields)}."
