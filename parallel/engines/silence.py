"""How does a library that prints, logs and warns stay out of what this project writes?

Inside `silence()` the two streams lead nowhere and warnings are not shown. A logger that is made inside keeps writing
to where the streams led: import a talkative library inside, and its own logger stays silent for good. Errors are
exceptions, and pass.
"""

import contextlib
import io
import warnings
from collections.abc import Iterator


@contextlib.contextmanager
def silence() -> Iterator[None]:
    """Drops what is written to stdout and stderr, and warnings, until the end."""
    with (
        _Nowhere() as nowhere,
        contextlib.redirect_stdout(nowhere),
        contextlib.redirect_stderr(nowhere),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        yield


class _Nowhere(io.TextIOBase):
    """Takes any text and keeps none; stays open for those who took hold of it."""

    def write(self, text: str) -> int:
        return len(text)

    def writable(self) -> bool:
        return True

    def close(self) -> None:
        return
