"""How is a TOML file read so that a mistake tells its place, and how is one written?

    read(path, made)            made(the tables of the file); whatever ValueError it raises begins with the path
    table_lines(name, fields)   a table: a blank line, [name], and a line a field

Written are text, numbers, truth values and lists of them. Left out: which keys a file has.
"""

import json
import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

Made = TypeVar("Made")


def read(path: Path, made: Callable[[dict[str, Any]], Made]) -> Made:
    """What a file holds, as `made` makes it of its tables.

    Raises:
        ValueError: no such file, no UTF-8 text, no TOML, or what `made` raises, in one line with the path.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no UTF-8 text"
        raise ValueError(f"cannot read {path}: {reason}") from error
    try:
        return made(tomllib.loads(text))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def table_lines(name: str, fields: Mapping[str, Any]) -> Iterator[str]:
    """A table; fields that are None are left out, and a table without a name has no heading."""
    yield ""
    if name:
        yield f"[{name}]"
    yield from (f"{key} = {value_text(value)}" for key, value in fields.items() if value is not None)


def value_text(value: Any) -> str:
    """One value."""
    if isinstance(value, str):
        # What JSON escapes, TOML escapes alike, but for one character that JSON leaves as it is.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(value_text, value))}]"
    return repr(value)
