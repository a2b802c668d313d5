"""Who may write the records of an experiment? One run at a time.

The lock is the kernel's on an open file, so that it goes when its holder does, however that ends. Two runs into
different folders or of different experiments do not meet.
"""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

FILE_NAME = ".lock"


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder, which is made if it is missing.

    Raises:
        ValueError: another run holds it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / FILE_NAME).open("a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.seek(0)
            holder = file.read().strip() or "unknown"
            raise ValueError(
                f"another run writes to {folder} (process {holder}): wait for it, or give another --output"
            ) from error
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
        yield
