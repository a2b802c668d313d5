"""What is a published figure, and when do we meet it?

A figure is printed with some digits. It stands for every number that would be printed so: half a unit of the last
digit to both sides, one whole unit above where digits may be cut off. Ours is a number, or a range where it depends
on a printed input such as seconds. Three rules:

    exact       ours equals theirs                                  counts
    printed     ours and what is printed overlap                    results of a formula
    tolerance   ours is within a fraction of theirs, with a reason  what a machine measured

Rows come from the CSV files beside this module. A file's rows of the same kind may be added to: nothing else has to
change.
"""

import csv
import dataclasses
from collections.abc import Iterator
from decimal import Decimal, InvalidOperation
from fractions import Fraction
from pathlib import Path

from results.validation.conventions import Convention

FOLDER = Path(__file__).parent


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One row of a table of published figures."""

    table: str
    line: int
    cells: dict[str, str]

    @property
    def place(self) -> str:
        return f"{self.table}.csv, line {self.line}"

    def has(self, column: str) -> bool:
        return bool(self.cells.get(column))

    def text(self, column: str) -> str:
        """A cell. Raises ValueError when it is empty or missing."""
        if not self.has(column):
            raise ValueError(f"{self.place}: {column} is empty")
        return self.cells[column]

    def whole(self, column: str, default: int | None = None) -> int:
        """A whole number of at least 1; `default` stands for an empty cell."""
        if default is not None and not self.has(column):
            return default
        text = self.text(column)
        if not text.isdecimal() or int(text) < 1:
            raise ValueError(f"{self.place}: {column} = {text!r}; it must be a whole number of at least 1")
        return int(text)

    def printed(self, column: str) -> "Printed":
        """A figure as it is printed."""
        return Printed.of(self.text(column), f"{self.place}: {column}")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Printed:
    """A number with the digits that it is printed with."""

    value: Fraction
    unit: Fraction
    """Worth of one in the last printed digit."""

    @classmethod
    def of(cls, text: str, place: str = "figure") -> "Printed":
        """Reads a decimal number, `1.4e17` too. Raises ValueError for anything else."""
        try:
            number = Decimal(text.strip())
        except InvalidOperation:
            raise ValueError(f"{place} = {text!r}; it must be a number") from None
        if not number.is_finite():
            raise ValueError(f"{place} = {text!r}; it must be a number")
        return cls(value=Fraction(number), unit=Fraction(10) ** int(number.as_tuple().exponent))

    @property
    def low(self) -> Fraction:
        return self.value - self.unit / 2

    @property
    def high(self) -> Fraction:
        return self.value + self.unit / 2


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """One published figure beside ours.

    Attributes:
        table, row, quantity: what the figure is of.
        ours, theirs: in the printed unit.
        rule: exact, printed or tolerance, with what it allows.
        convention: how the source counts.
        passed: whether the rule holds.
        source: who published it.
    """

    table: str
    row: str
    quantity: str
    ours: Fraction
    theirs: Fraction
    rule: str
    convention: str
    passed: bool
    source: str

    @property
    def difference(self) -> Fraction:
        """Ours minus theirs."""
        return self.ours - self.theirs

    @property
    def relative(self) -> float:
        """The difference as a fraction of theirs; infinite when that is 0 and ours is not."""
        if not self.theirs:
            return float("inf") if self.ours else 0.0
        return float(self.difference / self.theirs)


def exact(row: Row, column: str, ours: int, *, name: str, quantity: str, convention: Convention) -> Check:
    """Whether a count is met exactly."""
    theirs = row.printed(column).value
    return _check(row, name, quantity, Fraction(ours), theirs, "exact", convention, passed=ours == theirs)


def as_printed(
    row: Row,
    column: str,
    ours: Fraction | int | tuple[Fraction, Fraction],
    *,
    name: str,
    quantity: str,
    convention: Convention,
) -> Check:
    """Whether a number, or a range of them, would be printed as the figure is."""
    theirs = row.printed(column)
    low, high = ours if isinstance(ours, tuple) else (Fraction(ours), Fraction(ours))
    is_cut_off = convention.rounding == "rounded_or_cut_off"
    top = theirs.value + theirs.unit if is_cut_off else theirs.high
    middle = (low + high) / 2
    is_met = high >= theirs.low and (low < top if is_cut_off else low <= top)
    rule = f"as printed, to {_decimal(theirs.unit)}" + (", or cut off" if is_cut_off else "")
    return _check(row, name, quantity, middle, theirs.value, rule, convention, passed=is_met)


def within(
    row: Row,
    column: str,
    ours: Fraction,
    tolerance: Fraction,
    reason: str,
    *,
    name: str,
    quantity: str,
    convention: Convention,
) -> Check:
    """Whether a number is within a fraction of what was measured."""
    theirs = row.printed(column).value
    rule = f"within {float(tolerance):.2%}: {reason}"
    is_met = abs(ours - theirs) <= tolerance * abs(theirs)
    return _check(row, name, quantity, ours, theirs, rule, convention, passed=is_met)


def over(numerator: int | Fraction, divisor: Printed) -> tuple[Fraction, Fraction]:
    """The range of a quotient whose divisor is known to some digits.

    Raises ValueError for a divisor that may be 0.
    """
    if divisor.low <= 0:
        raise ValueError(f"{_decimal(divisor.value)} must be greater than 0 to the digits printed")
    return numerator / divisor.high, numerator / divisor.low


def read(table: str, folder: Path = FOLDER) -> Iterator[Row]:
    """The rows of a table.

    Raises:
        ValueError: no such file, or a line with another number of cells than the header.
    """
    path = folder / f"{table}.csv"
    if not path.is_file():
        raise ValueError(f"{path}: no such file; it holds the published figures of {table}")
    with path.open(encoding="utf-8", newline="") as file:
        reader = csv.reader(file)
        header = next(reader, [])
        for cells in reader:
            if len(cells) != len(header):
                raise ValueError(f"{table}.csv, line {reader.line_num}: {len(cells)} cells, expected {len(header)}")
            yield Row(table=table, line=reader.line_num, cells=dict(zip(header, map(str.strip, cells), strict=True)))


def _check(
    row: Row,
    name: str,
    quantity: str,
    ours: Fraction,
    theirs: Fraction,
    rule: str,
    convention: Convention,
    *,
    passed: bool,
) -> Check:
    return Check(
        table=row.table,
        row=name,
        quantity=quantity,
        ours=ours,
        theirs=theirs,
        rule=rule,
        convention=convention.told,
        passed=passed,
        source=row.cells.get("source", ""),
    )


def _decimal(number: Fraction) -> str:
    return f"{float(number):g}"
