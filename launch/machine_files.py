"""Which machines can be named? The TOML files in `launch/machines`, and any other file of their form.

    a100    h100    h200    b200        nodes of eight devices, from data sheets

Every key of a file is checked (`parallel/machine.py`). Left out: what the numbers are for.
"""

import difflib
from pathlib import Path

from parallel.machine import Machine
from parallel.toml_text import read

FOLDER = Path(__file__).parent / "machines"


def machine_names() -> tuple[str, ...]:
    """Machines that can be called by name."""
    return tuple(sorted(path.stem for path in FOLDER.glob("*.toml")))


def load_machine(name_or_path: str) -> Machine:
    """A machine by its name, or of a file.

    Raises:
        ValueError: no such name or file, no TOML, or any mistake in it, told in one line with its place.
    """
    names = machine_names()
    is_path = name_or_path.endswith(".toml") or "/" in name_or_path
    if not is_path and name_or_path not in names:
        near = difflib.get_close_matches(name_or_path.lower(), names, n=1)
        hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(names)}, or give the path of a .toml file"
        raise ValueError(f"no machine {name_or_path!r}; {hint}")
    path = Path(name_or_path) if is_path else FOLDER / f"{name_or_path}.toml"
    return read(path, Machine.from_dict)
