"""Which model does a published config.json describe?

    config.json or its content -> fields of `ModelConfig`, which `ModelConfig.from_hf` builds

Files of Llama, Mistral, Qwen2, GPT-2, BERT, T5, BART and mBART are read as transformers reads them, in the old style
(`rope_theta`, `torch_dtype`) and the new one (`rope_parameters`, `dtype`), with its defaults for what is absent. Every
field is accounted for: it has a meaning in the family's table, or it is known to change no mathematics, or it is an
error. Whoever only counts may pass over what changes the mathematics alone (a stretched rope, a sliding window), and is
told so in notes. Nothing is fetched, and transformers is not needed. Left out: weights, tokenizers.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from models.families import FAMILIES, Family
from models.meanings import IGNORED, Fields, SameCounts

Source = str | Path | Mapping[str, Any]


def model_fields(source: Source, *, max_length: int | None = None) -> Fields:
    """Return the fields of `ModelConfig` that a config.json stands for.

    Args:
        source: the file, the folder that holds it, or its content.
        max_length: the longest sequence in use where it is shorter than the published one. It brings a sliding window
            out of reach; learned positions, which are rows of the checkpoint, refuse it.

    Raises:
        ValueError: no such file, no JSON object, an unknown `model_type` or field, or a value that changes the
            mathematics in a way that is not modelled; the message names field and value.
    """
    return _from(source, max_length, None)


def counted_fields(source: Source) -> tuple[Fields, tuple[str, ...]]:
    """Return fields of `ModelConfig` that hold and compute as much as the model, and a note on whatever they pass over.

    Raises ValueError as `model_fields` does, but for values that change the mathematics and no count.
    """
    notes: list[str] = []
    return _from(source, None, notes), tuple(notes)


def _from(source: Source, max_length: int | None, notes: list[str] | None) -> Fields:
    raw, origin = (source, "config") if isinstance(source, Mapping) else _load(Path(source))
    try:
        return _read(raw, max_length, notes)
    except ValueError as error:
        raise ValueError(f"{origin}: {error}") from None


def _read(raw: Mapping[str, Any], max_length: int | None, notes: list[str] | None) -> Fields:
    model_type = raw.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise ValueError(f"model_type = {model_type!r} is not modelled; {', '.join(FAMILIES)} are")
    family = FAMILIES[model_type]
    values = _values(raw, model_type, family)
    if max_length is not None:
        values |= _shorter(values, family, max_length)
    # The last part of a published name; a path of somebody's machine is nobody's business.
    fields: Fields = {"name": Path(raw.get("_name_or_path") or model_type).name} | family.constant
    for name, (_, reader) in family.meanings.items():
        try:
            fields |= reader(name, values)
        except SameCounts as passed:
            if notes is None:
                raise
            notes.append(passed.note)
            fields |= passed.fields
    return fields


def _load(path: Path) -> tuple[Mapping[str, Any], str]:
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise ValueError(f"{file}: no such file; give a config.json, the folder that holds it, or its content")
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{file}: not JSON, {error}") from None
    match raw:
        case dict():
            return raw, str(file)
        case _:
            raise ValueError(f"{file}: expected a JSON object, found {type(raw).__name__}")


def _values(raw: Mapping[str, Any], model_type: str, family: Family) -> dict[str, Any]:
    """Return the value of every field of the family: the file's, under whichever of its names, or the default."""
    values = {name: default for name, (default, _) in family.meanings.items()}
    for name, value in raw.items():
        if name in family.meanings:
            values[name] = value
        elif name in family.aliases:
            canonical = family.aliases[name]
            if raw.get(canonical, value) != value:
                raise ValueError(f"{name} = {value!r} contradicts {canonical} = {raw[canonical]!r}")
            values[canonical] = value
        elif name not in IGNORED:
            raise ValueError(f"{name} = {value!r} is a field that {model_type} is not known to have")
    return values


def _shorter(values: Mapping[str, Any], family: Family, max_length: int) -> dict[str, Any]:
    published = values[family.length_field]
    if family.has_fixed_length and max_length != published:
        raise ValueError(f"max_length = {max_length}, but {family.length_field} = {published!r} positions are learned")
    if not 1 <= max_length <= published:
        raise ValueError(f"max_length = {max_length}; it must lie between 1 and {family.length_field} = {published!r}")
    return {family.length_field: max_length}
