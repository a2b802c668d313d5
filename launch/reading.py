"""How does a table of an experiment file become a frozen dataclass? Every key checked, none ignored.

    unknown key      error with the nearest known one           missing key     error with its name
    wrong type       error with the type that it wants          broken rule     the dataclass's own error

Every error begins with where the table stands in the file. Left out: what the keys mean.
"""

import dataclasses
import difflib
import types
import typing
from collections.abc import Collection, Mapping
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

Made = TypeVar("Made")
Table = Mapping[str, Any]


def read(cls: type[Made], table: Table, where: str) -> Made:
    """Makes a dataclass from a table whose keys are its fields.

    Raises:
        ValueError: unknown or missing keys, a value of another type, or whatever rule the class itself has.
    """
    hints = typing.get_type_hints(cls)
    fields = {field.name: field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    check_keys(table, fields, where)
    required = [name for name, field in fields.items() if _is_required(field)]
    missing = [name for name in required if name not in table]
    if missing:
        raise ValueError(f"{where} lacks {', '.join(missing)}")
    for key, value in table.items():
        check_type(value, hints[key], f"{where}: {key}")
    with_tuples = {key: tuple(value) if isinstance(value, list) else value for key, value in table.items()}
    try:
        return cls(**with_tuples)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


def check_keys(table: Table, known: Collection[str], where: str) -> None:
    """Raises ValueError naming every key of `table` that is not known, and the nearest known one."""
    unknown = [key for key in table if key not in known]
    if unknown:
        near = [match for key in unknown for match in difflib.get_close_matches(key, known, n=1)]
        hint = f"did you mean {', '.join(near)}?" if near else f"known are {', '.join(known)}"
        raise ValueError(f"{where}: unknown key {', '.join(unknown)}; {hint}")


def check_name(name: str, where: str) -> None:
    """Raises ValueError unless a name may stand in the name of a file: letters, digits, - and _."""
    if not name or not all(letter.isascii() and (letter.isalnum() or letter in "-_") for letter in name):
        raise ValueError(f"{where}: {name!r} is no name; use letters, digits, - and _")


def check_type(value: Any, wanted: Any, where: str) -> None:
    """Raises ValueError unless `value` has a wanted type; whole numbers pass for floats, booleans for nothing else."""
    if not _fits(value, wanted):
        raise ValueError(f"{where} = {value!r}; it must be {_told(wanted)}")


def choices(wanted: Any) -> tuple[str, ...]:
    """Values of a Literal among the alternatives of a type."""
    if get_origin(wanted) is Literal:
        return get_args(wanted)
    return tuple(choice for part in _alternatives(wanted) if part is not wanted for choice in choices(part))


def _is_required(field: Any) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _alternatives(wanted: Any) -> tuple[Any, ...]:
    return get_args(wanted) if get_origin(wanted) in (Union, types.UnionType) else (wanted,)


def _fits(value: Any, wanted: Any) -> bool:
    if len(_alternatives(wanted)) > 1:
        return any(_fits(value, part) for part in _alternatives(wanted))
    if get_origin(wanted) is Literal:
        return value in get_args(wanted)
    if get_origin(wanted) is tuple:
        return isinstance(value, list | tuple) and all(_fits(item, get_args(wanted)[0]) for item in value)
    if isinstance(value, bool):
        return wanted is bool
    if wanted is float:
        return isinstance(value, int | float)
    return isinstance(value, wanted)


def _told(wanted: Any) -> str:
    if get_origin(wanted) is Literal:
        return "one of " + ", ".join(map(str, get_args(wanted)))
    if get_origin(wanted) is tuple:
        return f"a list of {_told(get_args(wanted)[0]).removeprefix('a ').removeprefix('an ')}s"
    if len(_alternatives(wanted)) > 1:
        return " or ".join(_told(part) for part in _alternatives(wanted))
    return {int: "a whole number", float: "a number", str: "text", bool: "true or false"}.get(wanted, str(wanted))
