"""How is a profile kept in a file? As TOML with a format number, one table for each thing, units in the names of keys.

    format = 1
    unit = "seconds"
    [model]       every field of the model             [layout]     tp, sp, vocabulary, recompute, attention
    [microbatch]  lengths, sequences, element bytes    [machine]    where it was measured; any keys
    [encoder_block]  forward_seconds, backward_input_seconds, backward_weight_seconds; likewise the other pieces
    [message]     latency_seconds, seconds_per_byte

In a profile in FLOPs keys end in `_flops`, and there are no messages. Every key is checked when a file is read;
one without `vocabulary` has it sharded.
"""

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from models.config import ModelConfig
from parallel.profile import PIECES, Profile
from parallel.toml_text import read, table_lines, value_text
from parallel.work import Work

FORMAT = 1
_LAYOUT = ("tp", "sp", "recompute", "attention")
_LATER = ("vocabulary",)
"""Of a layout's keys, those that older files lack."""
_MICROBATCH = ("source_length", "target_length", "num_sequences", "dtype_bytes")
_PARTS = ("forward", "backward_input", "backward_weight")
_UNITS = ("flops", "seconds")
_MESSAGE = ("latency_seconds", "seconds_per_byte")


def save(profile: Profile, path: Path) -> None:
    """Writes a profile; a file that is there is replaced."""
    path.write_text("\n".join(_lines(profile)) + "\n", encoding="utf-8")


def load(path: Path) -> Profile:
    """Reads what `save` wrote.

    Raises:
        ValueError: no such file, no TOML, another format, or any mistake in it, told in one line with its place.
    """
    return read(path, _profile)


# ---- writing --------------------------------------------------------------------------------------------------------


def _lines(profile: Profile) -> Iterator[str]:
    unit = profile.unit
    yield f"format = {FORMAT}"
    yield f"unit = {value_text(unit)}"
    yield from table_lines("model", profile.config.to_dict())
    yield from table_lines("layout", {name: getattr(profile, name) for name in (*_LAYOUT, *_LATER)})
    yield from table_lines("microbatch", {name: getattr(profile, name) for name in _MICROBATCH})
    for piece in PIECES:
        work: Work = getattr(profile, piece)
        if work.total:
            yield from table_lines(piece, {f"{part}_{unit}": getattr(work, part) for part in _PARTS})
    if unit == "seconds":
        yield from table_lines("message", dict(zip(_MESSAGE, (profile.transfer_cost, profile.byte_cost), strict=True)))
    if profile.machine:
        yield from table_lines("machine", profile.machine)


# ---- reading --------------------------------------------------------------------------------------------------------


def _profile(table: Mapping[str, Any]) -> Profile:
    if table.get("format") != FORMAT:
        raise ValueError(f"format = {table.get('format')!r}; this version reads profiles of format {FORMAT}")
    unit = table.get("unit")
    if unit not in _UNITS:
        raise ValueError(f"unit = {unit!r}; choose one of {', '.join(_UNITS)}")
    message = ("message",) if unit == "seconds" else ()
    tables = ("model", "layout", "microbatch", *PIECES, *message, "machine")
    _check_keys(table, ("format", "unit", *tables), ("model", "layout", "microbatch", *message), "profile")
    wrong = [name for name in tables if not isinstance(table.get(name, {}), dict)]
    if wrong:
        raise ValueError(f"{wrong[0]} = {table[wrong[0]]!r}; it must be a table, [{wrong[0]}]")
    _check_keys(table["layout"], (*_LAYOUT, *_LATER), _LAYOUT, "layout")
    _check_keys(table["microbatch"], _MICROBATCH, _MICROBATCH, "microbatch")
    layout, numbers = table["layout"], {"tp": table["layout"]["tp"], **table["microbatch"]}
    wrong = [name for name, value in numbers.items() if type(value) is not int]
    if wrong:
        raise ValueError(f"{wrong[0]} = {numbers[wrong[0]]!r}; it must be a whole number")
    if type(layout["sp"]) is not bool:
        raise ValueError(f"sp = {layout['sp']!r}; it must be true or false")
    latency, per_byte = _costs(table["message"], _MESSAGE, "message") if message else (0.0, 0.0)
    works: dict[str, Any] = {piece: _work(table[piece], unit, piece) for piece in PIECES if piece in table}
    return Profile(
        unit=unit,
        config=_model(table["model"]),
        **layout,
        **table["microbatch"],
        **works,
        transfer_cost=latency,
        byte_cost=per_byte,
        machine=table.get("machine", {}),
    )


def _model(fields: Mapping[str, Any]) -> ModelConfig:
    try:
        return ModelConfig.from_dict(fields)
    except (TypeError, ValueError) as error:
        raise ValueError(f"model: {error}") from error


def _work(fields: Mapping[str, Any], unit: str, where: str) -> Work:
    return Work(*_costs(fields, [f"{part}_{unit}" for part in _PARTS], where))


def _costs(fields: Mapping[str, Any], keys: Collection[str], where: str) -> list[float]:
    """Values of all keys of a table of costs."""
    _check_keys(fields, keys, keys, where)
    for key in keys:
        value = fields[key]
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
            raise ValueError(f"{where}: {key} = {value!r}; a cost is a number, 0 or more")
    return [float(fields[key]) for key in keys]


def _check_keys(fields: Mapping[str, Any], known: Collection[str], needed: Collection[str], where: str) -> None:
    unknown = sorted(set(fields) - set(known))
    if unknown:
        raise ValueError(f"{where}: unknown key {', '.join(unknown)}; known are {', '.join(known)}")
    missing = [key for key in needed if key not in fields]
    if missing:
        raise ValueError(f"{where} lacks {', '.join(missing)}")
