"""How is a file written so that nobody ever reads half of it?

The text, table or picture goes into a file of another name in the same folder, which then takes the place of the old
one in a single step. A writer that dies leaves the old file as it was. Left out: reading.
"""

import contextlib
import uuid
from collections.abc import Iterator
from pathlib import Path

import pandas as pd


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give a path to write to, and put what was written in the place of `path` when the block ends without an error.

    Folders above `path` are made. The name given keeps the suffix of `path`, from which writers tell the format.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.stem}-{uuid.uuid4().hex}.partial{path.suffix}")
    try:
        yield unfinished
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write a text file, UTF-8 with plain newlines."""
    with replacing(path) as unfinished:
        unfinished.write_text(text, encoding="utf-8", newline="\n")


def write_table(path: Path, table: pd.DataFrame) -> None:
    """Write a CSV file; floats in full precision, so that reading it back gives the same numbers."""
    with replacing(path) as unfinished:
        table.to_csv(unfinished, index=False, lineterminator="\n")
