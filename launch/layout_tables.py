"""Which layouts does one table of an experiment stand for? The product of its lists.

    [[layouts]]
    tp = [1, 2, 4]                     three degrees
    pp = [1, 2]                        times two
    cut = ["even", "aligned"]          times two cuts; [2, 5] is one explicit cut, [[2, 5], "even"] are two
    ranks = [1, 2, 4]                  of these, only those on 1, 2 or 4 ranks

A combination that contradicts itself, whatever the model, is no layout and is left out; a table that leaves none is an
error. Left out: what a model forbids.
"""

import dataclasses
import itertools
import typing
from typing import Any, Literal

from launch.reading import Table, check_keys, check_type
from parallel.layouts import Cut, Layout


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LayoutTable:
    """One [[layouts]] table."""

    where: str
    axes: dict[str, tuple[Any, ...]]
    """Values of each key of a Layout that the table gives."""
    models: tuple[str, ...] = ()
    """Names of models; none means all."""
    data: tuple[str, ...] = ()
    """Names of data; none means all."""
    ranks: tuple[int, ...] = ()
    """World sizes that are kept; none means all."""
    illegal: Literal["record", "skip"] = "record"
    """Whether a layout that a model or a batch forbids becomes a record that says why."""

    @classmethod
    def read(cls, table: Any, where: str) -> "LayoutTable":
        """The table as TOML gives it. Raises ValueError for unknown keys and wrong types."""
        check_type(table, dict, where)
        hints = typing.get_type_hints(Layout)
        own = typing.get_type_hints(cls)
        names = [field.name for field in dataclasses.fields(Layout)]
        check_keys(table, [*names, "models", "data", "ranks", "illegal"], where)
        axes = {key: _values(key, table[key], hints[key], where) for key in names if key in table}
        for key in ("models", "data", "ranks", "illegal"):
            if key in table:
                check_type(table[key], own[key], f"{where}: {key}")
        made = cls(
            where=where,
            axes=axes,
            models=tuple(table.get("models", ())),
            data=tuple(table.get("data", ())),
            ranks=tuple(table.get("ranks", ())),
            illegal=table.get("illegal", "record"),
        )
        made.layouts()
        return made

    def layouts(self) -> list[Layout]:
        """Every combination that is a layout. Raises ValueError when none is, with what is wrong with the last."""
        found, wrong = [], ""
        for values in itertools.product(*self.axes.values()):
            try:
                layout = Layout(**dict(zip(self.axes, values, strict=True)))
            except ValueError as error:
                wrong = str(error)
                continue
            if self.ranks and layout.world_size not in self.ranks:
                wrong = wrong or f"no combination has {' or '.join(map(str, self.ranks))} ranks"
                continue
            found.append(layout)
        if not found:
            raise ValueError(f"{self.where}: {wrong}")
        return found


def _values(key: str, value: Table | Any, wanted: Any, where: str) -> tuple[Any, ...]:
    if key == "cut" and isinstance(value, list) and all(isinstance(first, int) for first in value):
        values: list[Any] = [value]
    else:
        values = value if isinstance(value, list) else [value]
    if not values:
        raise ValueError(f"{where}: {key} is an empty list")
    for one in values:
        check_type(one, Cut if key == "cut" else wanted, f"{where}: {key}")
    return tuple(tuple(one) if isinstance(one, list) else one for one in values)
