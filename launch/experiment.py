"""What is to be measured? One TOML file becomes a list of cells; a mistake in it is an error before anything starts.

    name, seed, repeats, ...      how each cell is run (`Settings`)
    [models.<name>]               fields of a ModelConfig; `like = "<other or published model>"` changes a few of them,
                                  `twin_of = "<other>"` with `architecture` and `match` takes a matched model
    [data.<name>]                 the batch of a step (`DataSpec`)
    [[layouts]]                   fields of a Layout; a list is an axis, a table stands for the product of its axes;
                                  `models`, `data`, `ranks` narrow it (default: all), `illegal = "skip"` drops
                                  what a model forbids instead of recording it
    engine = ["native", ...]      who runs every cell (default: native); each is a cell of its own, and so is one with a
                                  partition method of its own: "deepspeed:uniform", "fairscale:time"
    compile = [false, true]       whether blocks are compiled (default: false); each is a cell of its own
    controls = ["<cell>", ...]    cells that are run twice, as a measure of noise
    profile = "<file>"            measured costs that cuts and schedules read (`launch/profiles.py`)

A cell is one model on one layout and one batch, run by one engine. Two rules keep cells few and honest: in a product,
a combination that contradicts itself (sp with tp = 1) is no layout; and an option that cannot matter to a model is
written as its default, so that equal cells are one (a model without memory gathers none). What a model, a batch or an
engine forbids becomes a cell with a `refusal`, which is recorded and never run. Left out: tokens (`launch/data.py`) and
processes (`launch/sweep.py`).
"""

import dataclasses
import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from launch.cell import Cell
from launch.layout_tables import LayoutTable
from launch.model_tables import Member, members
from launch.profiles import ProfileFiles
from launch.reading import Table, check_keys, check_name, check_type, read
from launch.settings import DataSpec, Settings
from models.config import ModelConfig
from parallel.engines.choice import EngineChoice
from parallel.engines.engine import unsupported
from parallel.layouts import Layout
from parallel.plans import plan
from parallel.toml_text import read as read_toml

COMPILED_TOO, AS_THE_FILE_SAYS = "compiled-too", "as-the-file-says"
"""How one process tells another which cells it reads from a file."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Experiment:
    """A file, read and resolved."""

    name: str
    settings: Settings
    members: tuple[Member, ...]
    data: dict[str, DataSpec]
    profiles: ProfileFiles
    cells: tuple[Cell, ...]
    """In the order of the file, all models of one layout next to each other: what is compared is timed in turns."""

    @property
    def world_sizes(self) -> tuple[int, ...]:
        """World sizes of the cells that can be run, smallest first."""
        return tuple(sorted({cell.world_size for cell in self.cells if not cell.refusal}))


def load(path: Path, *, compiled_too: bool = False, reads_profiles: bool = True) -> Experiment:
    """Read an experiment.

    Args:
        path: of the file.
        compiled_too: adds each cell with compiled blocks to what the file says.
        reads_profiles: without, no cell has a measured profile or is planned: for who is about to measure them.

    Raises:
        ValueError: no such file, no TOML, or any mistake in it, told in one line with the place in the file.
    """
    return read_toml(
        path, lambda table: resolve(table, path.parent, compiled_too=compiled_too, reads_profiles=reads_profiles)
    )


def resolve(
    table: Table, folder: Path = Path(), *, compiled_too: bool = False, reads_profiles: bool = True
) -> Experiment:
    """The experiment of a table as TOML gives it; profiles stand in a folder. Raises ValueError for any mistake."""
    setting_names = [field.name for field in dataclasses.fields(Settings)]
    keys = ["name", "engine", "compile", *setting_names, "models", "data", "layouts", "controls", "profile"]
    check_keys(table, keys, "experiment")
    missing = [key for key in ("name", "models", "data", "layouts") if key not in table]
    if missing:
        raise ValueError(f"experiment lacks {', '.join(missing)}")
    kinds = (("name", str), ("models", dict), ("data", dict), ("layouts", list), ("controls", list), ("profile", str))
    for key, wanted in kinds:
        check_type(table.get(key, wanted()), wanted, f"experiment: {key}")
    check_name(table["name"], "experiment: name")
    ways = _compiled(table, too=compiled_too)
    engines = _engines(table.get("engine", "native"), ways)
    settings = read(Settings, {key: table[key] for key in setting_names if key in table}, "experiment")
    data = {name: _data_spec(name, fields) for name, fields in table["data"].items()}
    if not data:
        raise ValueError("experiment: no [data.<name>] table")
    known = members(
        table["models"],
        source_length=max(spec.source_length for spec in data.values()),
        target_length=max(spec.target_length for spec in data.values()),
    )
    tables = [LayoutTable.read(fields, f"layouts {index}") for index, fields in enumerate(table["layouts"], start=1)]
    _check_uses(tables, known, data)
    profiles = ProfileFiles(table.get("profile", ""), folder)
    cells = _cells(table["name"], tables, known, data, settings, engines, profiles if reads_profiles else None)
    return Experiment(
        name=table["name"],
        settings=settings,
        members=tuple(known.values()),
        data=data,
        profiles=profiles,
        cells=_with_controls(cells, table.get("controls", [])),
    )


def _engines(value: Any, ways: Sequence[bool]) -> tuple[EngineChoice, ...]:
    """One text or a list of them, each once with blocks as written or compiled: engines with partition methods."""
    names = value if isinstance(value, list) else [value]
    for name in names:
        check_type(name, str, "experiment: engine")
    if not names:
        raise ValueError("experiment: engine is an empty list")
    try:
        return tuple(dict.fromkeys(EngineChoice.parse(name, compiled=way) for name in names for way in ways))
    except ValueError as error:
        raise ValueError(f"experiment: {error}") from error


def _compiled(table: Table, *, too: bool) -> tuple[bool, ...]:
    """Whether blocks are compiled: one choice or a list of them, each once."""
    value = table.get("compile", False)
    choices = value if isinstance(value, list) else [value]
    for choice in choices:
        check_type(choice, bool, "experiment: compile")
    if not choices:
        raise ValueError("experiment: compile is an empty list")
    return tuple(dict.fromkeys((*choices, True) if too else choices))


def _data_spec(name: str, fields: Any) -> DataSpec:
    where = f"data.{name}"
    check_name(name, where)
    check_type(fields, dict, where)
    return read(DataSpec, fields, where)


def _check_uses(tables: Sequence[LayoutTable], known: dict[str, Member], data: dict[str, DataSpec]) -> None:
    """Raises ValueError for a name that nothing defines, and for a definition that nothing names."""
    for what, defined in (("models", known), ("data", data)):
        used: set[str] = set()
        for table in tables:
            chosen = getattr(table, what) or tuple(defined)
            used.update(chosen)
            for name in chosen:
                if name not in defined:
                    raise ValueError(f"{table.where}: {what} names {name!r}, which is none of {', '.join(defined)}")
        bases = {member.base for member in known.values()} if what == "models" else set()
        unread = [name for name in defined if name not in used | bases]
        if unread:
            raise ValueError(f"{what}.{unread[0]} is used by no layout: name it in a [[layouts]] table or remove it")


def _cells(
    experiment: str,
    tables: Sequence[LayoutTable],
    known: dict[str, Member],
    data: dict[str, DataSpec],
    settings: Settings,
    engines: Sequence[EngineChoice],
    profiles: ProfileFiles | None,
) -> list[Cell]:
    found: dict[str, Cell] = {}
    for table in tables:
        for layout in table.layouts():
            for data_name in table.data or tuple(data):
                for model_name in table.models or tuple(known):
                    member = known[model_name]
                    cell = Cell(
                        experiment=experiment,
                        member=member,
                        data_name=data_name,
                        data=data[data_name],
                        layout=effective(layout, member.config),
                        settings=settings,
                    )
                    cell = _resolved(cell, profiles)
                    if not (cell.refusal and table.illegal == "skip"):
                        for engine in engines:
                            told = _run_by(engine, cell)
                            found.setdefault(told.name, told)
    if not found:
        raise ValueError("experiment: no [[layouts]] table leaves a cell")
    return list(found.values())


def effective(layout: Layout, config: ModelConfig) -> Layout:
    """The layout with every option that cannot matter to a model written as its default."""
    changes: dict[str, Any] = {}
    if layout.tp == 1 or not config.has_cross_attention:
        changes["memory_gather"] = "per_stage"
    if not layout.sp:
        changes["saved_input"] = "shard"
    if layout.tp == 1:
        changes["vocabulary"] = "sharded"
    if layout.pp == 1 or (layout.cut == "aligned" and not config.has_cross_attention):
        changes["cut"] = "even"
    if layout.pp == 1 or not config.has_cross_attention:
        changes["transport"] = "relay"
    return layout.replace(**changes)


def _resolved(cell: Cell, profiles: ProfileFiles | None) -> Cell:
    """The cell with its profile, or with why no engine can run it; without profiles it is not planned.

    Raises ValueError for a profile that is another's.
    """
    refusal = _forbidden(cell)
    if profiles is not None and not refusal:
        profile = profiles.fitting(cell.model, cell.data_name, cell.layout, cell.shape, needed=cell.reads_seconds)
        cell = dataclasses.replace(cell, measured_profile=profile)
        try:
            plan(cell.model, cell.layout, cell.profile)
        except ValueError as error:
            refusal = str(error)
    return dataclasses.replace(cell, refusal=refusal)


def _run_by(engine: EngineChoice, cell: Cell) -> Cell:
    """The cell as an engine runs it, or refuses it."""
    refusal = cell.refusal or unsupported(engine, cell.model, cell.layout) or ""
    return dataclasses.replace(cell, engine=engine, refusal=refusal)


def _forbidden(cell: Cell) -> str:
    """Why no engine can run a cell, whatever it costs; empty when nothing forbids it."""
    try:
        cell.layout.check_model(cell.model)
        cell.layout.check_sequences(cell.data.sequences)
        cell.data.check_model(cell.model)
    except ValueError as error:
        return str(error)
    return ""


def _with_controls(cells: Sequence[Cell], names: Sequence[Any]) -> tuple[Cell, ...]:
    """The cells, each control right behind the cell that it repeats."""
    known = {cell.name: cell for cell in cells}
    for name in names:
        check_type(name, str, "controls")
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
            raise ValueError(f"controls names {name!r}, which is no cell; the nearest is {near[0]!r}")
        if known[name].refusal:
            raise ValueError(f"controls names {name!r}, which cannot be run: {known[name].refusal}")
    repeated = [dataclasses.replace(cell, is_control=True) for cell in cells if cell.name in names]
    controls = {cell.name.removesuffix(".control"): cell for cell in repeated}
    return tuple(one for cell in cells for one in ((cell, controls[cell.name]) if cell.name in controls else (cell,)))
