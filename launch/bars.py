"""How does a command show how far it is? One bar on the error stream, and nothing where that is no terminal."""

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn


def counting_bar(unit: str, *, transient: bool = True, refresh_per_second: float = 10) -> Progress:
    """A bar of things that are counted, with the time they take.

    Args:
        unit: what is counted; may be empty.
        transient: whether it goes when all is done.
        refresh_per_second: seldom where who draws would take time from who is measured.
    """
    console = Console(stderr=True, markup=False)
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        *([TextColumn(unit)] if unit else []),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        console=console,
        transient=transient,
        refresh_per_second=refresh_per_second,
        disable=not console.is_terminal,
    )
