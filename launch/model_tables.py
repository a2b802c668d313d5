"""Which models does an experiment name? Own fields, a change of another model, or a twin of one.

    [models.pair]                       [models.pair-large]              [models.single]
    architecture = "encoder_decoder"    like = "pair"                    twin_of = "pair"
    width = 64                          vocabulary = 8192                architecture = "decoder_only"
    ...                                                                  match = "parameters"

`like` also takes a published model's name. A model and its twins are one family, named after the model. Left out: how
twins are matched (`models/matching.py`).
"""

import dataclasses
from typing import Any

from launch.reading import Table, check_keys, check_name, check_type, choices, read
from models.config import Architecture, ModelConfig
from models.matching import Match, twins
from models.named import MODEL_NAMES, named_model


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Member:
    """A model of an experiment and its place in a family of matched models."""

    config: ModelConfig
    """Its name is the one that the experiment gives it."""
    base: str = ""
    """Model of the experiment that this one was made from."""
    family: str = ""
    """Name of the family's first model; empty for a model without twins."""
    match: str = "none"
    """In what a twin is matched to the family's first model, which itself has `none`."""
    mismatch: float = 0.0
    """What the match left over in its own quantity, relative to the first model."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TwinTable:
    """The keys of a twin. Lengths are those of the pair that FLOPs are compared on; 0 takes the longest of the data."""

    twin_of: str
    architecture: Architecture
    match: Match = "depth"
    source_length: int = 0
    target_length: int = 0


def members(tables: Table, *, source_length: int, target_length: int) -> dict[str, Member]:
    """The models of an experiment by name, in the order of the file.

    Args:
        tables: the tables of [models.<name>].
        source_length: positions of the longest source of the experiment's data.
        target_length: likewise of the target.

    Raises:
        ValueError: any mistake in a table, a name that nothing defines, or models that are made from each other.
    """
    if not tables:
        raise ValueError("experiment: no [models.<name>] table")
    for name, table in tables.items():
        check_name(name, f"models.{name}")
        check_type(table, dict, f"models.{name}")
    made: dict[str, Member] = {}
    for name in tables:
        _make(name, tables, made, (source_length, target_length), ())
    families = {member.base for member in made.values() if member.match != "none"}
    return {
        name: dataclasses.replace(made[name], family=name if name in families else made[name].family) for name in tables
    }


def _make(
    name: str, tables: Table, made: dict[str, Member], lengths: tuple[int, int], under_way: tuple[str, ...]
) -> Member:
    if name in under_way:
        raise ValueError(f"models.{name} is made from itself: {' <- '.join((*under_way, name))}")
    if name not in made:
        table: dict[str, Any] = tables[name]

        def base(key: str) -> Member:
            wanted = table[key]
            check_type(wanted, str, f"models.{name}: {key}")
            if wanted not in tables:
                raise ValueError(f"models.{name}: {key} = {wanted!r} is no model of this experiment")
            return _make(wanted, tables, made, lengths, (*under_way, name))

        if "twin_of" in table:
            made[name] = _twin(name, table, base("twin_of"), lengths)
        elif "like" in table and (table["like"] in tables or table["like"] not in MODEL_NAMES):
            made[name] = _alike(name, table, base("like").config, base=str(table["like"]))
        elif "like" in table:
            made[name] = _alike(name, table, named_model(table["like"]), base="")
        else:
            made[name] = Member(config=read(ModelConfig, {**table, "name": name}, f"models.{name}"))
    return made[name]


def _alike(name: str, table: Table, config: ModelConfig, base: str) -> Member:
    """A model with some fields changed; what followed from a changed field follows again."""
    where = f"models.{name}"
    changes = {key: value for key, value in table.items() if key != "like"}
    check_keys(changes, [field.name for field in dataclasses.fields(ModelConfig)], where)
    followers = {
        "num_kv_heads": ("num_heads", config.num_kv_heads == config.num_heads),
        "head_width": ("num_heads", config.head_width * config.num_heads == config.width),
        "source_vocabulary": ("vocabulary", config.source_vocabulary == config.vocabulary),
    }
    following = {follower: 0 for follower, (_, follows) in followers.items() if follows}
    fields = {**config.to_dict(), **following, **changes, "name": name}
    return Member(config=read(ModelConfig, fields, where), base=base)


def _twin(name: str, table: Table, base: Member, lengths: tuple[int, int]) -> Member:
    where = f"models.{name}"
    if base.match != "none":
        raise ValueError(f"{where}: twin_of = {base.config.name!r} is a twin itself; name {base.family!r}")
    asked = read(TwinTable, table, where)
    try:
        twin = twins(
            base.config,
            asked.architecture,
            asked.match,
            source_length=asked.source_length or lengths[0],
            target_length=asked.target_length or lengths[1],
        )
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    if asked.architecture == base.config.architecture:
        others = [other for other in choices(Architecture) if other != asked.architecture]
        raise ValueError(f"{where}: a twin of {asked.twin_of} has another architecture: {' or '.join(others)}")
    return Member(
        config=twin.config.replace(name=name),
        base=asked.twin_of,
        family=asked.twin_of,
        match=asked.match,
        mismatch=twin.mismatch,
    )
