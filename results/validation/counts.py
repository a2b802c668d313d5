"""Do our parameter counts meet those of published checkpoints?

A row tells a model in the shorthand of its table, and a style is what its family has in common:

    V vocabulary   ctx or P positions (+ unused rows)   d width   dk head width   ff ffn width   h heads   kv KV heads
    L blocks, encoder + decoder if both                 types token types         tied, untied, gated

    "V32128 d768 dk64 ff2048 L12+12 h12 gated untied"         without ff: four times the width

So any checkpoint of a known family can be added. Where the model is also one that can be called by name, its count is
checked as well. Words in brackets behind a name tell what stands on the last block. Left out: what such models
compute.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from models.config import Activation, ModelConfig, Tying
from models.costs import block_parameters, head_parameters, parameter_counts, stack_parameters
from models.named import MODEL_NAMES, named_model
from results.validation.conventions import CHECKPOINT, Convention, Ends
from results.validation.rows import FOLDER, Check, Row, exact, read

STYLES = {
    "gpt2": "gpt2",
    "bert": "bert-base",
    "mbart": "mbart-large",
    "bart": "bart-base",
    "t5-v1_1": "t5-v1_1-base",
    "flan-t5": "t5-v1_1-base",
    "t5": "t5-base",
    "llama-3": "llama-3-8b",
    "llama": "llama-2-7b",
}
"""First letters of a name -> a named model of the same style; the longest that fits is taken."""

_SIZES = {
    "V": "vocabulary",
    "ctx": "max_length",
    "P": "max_length",
    "d": "width",
    "dk": "head_width",
    "ff": "ffn_width",
    "h": "num_heads",
    "kv": "num_kv_heads",
    "types": "num_token_types",
}
_GATED: dict[bool, Activation] = {True: "swiglu", False: "geglu"}

_ENDS: dict[str, Ends] = {
    "model with pooler": "pooler",
    "model": "none",
    "without head": "none",
    "masked-lm head": "head",
    "": "head",
}


def check_parameters(folder: Path = FOLDER) -> Iterator[Check]:
    """`parameters.csv`: every count of a checkpoint."""
    for row in read("parameters", folder):
        name, end = _name(row)
        convention = CHECKPOINT.replace(ends=end)
        told: dict[str, Any] = {"name": row.text("model"), "convention": convention}
        config = read_config(row)
        if row.has("architecture") and row.text("architecture") != config.architecture:
            raise ValueError(f"{row.place}: {name} is {config.architecture}, not {row.text('architecture')}")
        yield exact(row, "parameters", total(config, convention), quantity="parameters", **told)
        if name in MODEL_NAMES:
            count = total(named_model(name), convention)
            yield exact(row, "parameters", count, quantity="parameters, by name", **told)


def check_stacks(folder: Path = FOLDER) -> Iterator[Check]:
    """`stacks.csv`: the two stacks of a model, its cross-attentions, its embedding."""
    described = {row.text("model"): row for row in read("parameters", folder)}
    for row in read("stacks", folder):
        name = row.text("model")
        config = read_config(described[name]) if name in described else named_model(name)
        if not config.has_cross_attention:
            raise ValueError(f"{row.place}: {name} is {config.architecture}; stacks are told of an encoder_decoder")
        cross_attention = config.num_decoder_blocks * block_parameters(config, "decoder").cross_attention
        counts = {
            "encoder_stack": stack_parameters(config, "encoder"),
            "decoder_stack": stack_parameters(config, "decoder"),
            "of_which_cross_attention": cross_attention,
            "embedding": config.vocabulary * config.width,
        }
        for column, ours in counts.items():
            if row.has(column):
                yield exact(row, column, ours, name=name, quantity=column.replace("_", " "), convention=CHECKPOINT)


def published_counts(folder: Path = FOLDER) -> dict[str, int]:
    """Published counts by name, of whole models with the head that predicts tokens."""
    told = [(_name(row), row.whole("parameters")) for row in read("parameters", folder)]
    return {name: count for (name, end), count in told if end == "head"}


def total(config: ModelConfig, convention: Convention) -> int:
    """Parameters of a model, with what a convention puts on its last block."""
    count = parameter_counts(config).total
    if convention.ends == "head":
        return count
    without = count - head_parameters(config)
    return without + (config.width + 1) * config.width * (convention.ends == "pooler")


def read_config(row: Row) -> ModelConfig:
    """The model that a row describes.

    Raises:
        ValueError: an unknown family or word, or numbers that contradict each other.
    """
    name, _ = _name(row)
    style = named_model(row.text("style")) if row.has("style") else _style(row, name)
    # What follows from other sizes unless it is told is asked for anew.
    changes: dict[str, Any] = {"name": name, "num_kv_heads": 0, "head_width": 0, "source_vocabulary": 0}
    for word in row.text("configuration").split():
        changes |= _change(row, word, style)
    if missing := [field for field in ("vocabulary", "width", "num_heads") if field not in changes]:
        raise ValueError(f"{row.place}: configuration does not tell {', '.join(missing)}")
    # Four times the width where a family leaves it to that.
    changes.setdefault("ffn_width", 4 * changes["width"])
    try:
        return style.replace(**changes)
    except ValueError as error:
        raise ValueError(f"{row.place}: {error}") from None


def _change(row: Row, word: str, style: ModelConfig) -> dict[str, Any]:
    if word in ("tied", "untied"):
        return {"tying": _tying(style, is_tied=word == "tied")}
    if word == "gated":
        return {} if style.is_gated else {"activation": _GATED[style.norm == "rmsnorm" and not style.has_encoder]}
    if blocks := re.fullmatch(r"L(\d+)(?:\+(\d+))?", word):
        return _blocks(row, style, blocks[1], blocks[2])
    sizes = re.fullmatch(r"([A-Za-z]+)(\d+)(?:\(\+(\d+)\))?", word)
    if sizes is None or sizes[1] not in _SIZES:
        known = ", ".join((*_SIZES, "L", "tied", "untied", "gated"))
        raise ValueError(f"{row.place}: configuration has {word!r}; known are {known}")
    changes = {_SIZES[sizes[1]]: int(sizes[2])}
    return changes | ({"position_offset": int(sizes[3])} if sizes[3] else {})


def _blocks(row: Row, style: ModelConfig, first: str, second: str | None) -> dict[str, int]:
    if (second is not None) != style.has_cross_attention:
        raise ValueError(f"{row.place}: {style.architecture} has {'two stacks' if second is None else 'one stack'}")
    if second is not None:
        return {"num_encoder_blocks": int(first), "num_decoder_blocks": int(second)}
    return {"num_encoder_blocks" if style.has_encoder else "num_decoder_blocks": int(first)}


def _tying(style: ModelConfig, *, is_tied: bool) -> Tying:
    if style.has_cross_attention:
        return "all" if is_tied else "source_target"
    return "head" if is_tied else "none"


def _name(row: Row) -> tuple[str, Ends]:
    """The name without the words of a tokenizer, and what brackets tell: `bert-base-uncased (model with pooler)`."""
    name, _, words = row.text("model").partition("(")
    words = words.rstrip(") ").lower()
    if words not in _ENDS:
        raise ValueError(f"{row.place}: {words!r} behind a name; known are {', '.join(filter(None, _ENDS))}")
    return name.strip().removesuffix("-uncased").removesuffix("-cased"), _ENDS[words]


def _style(row: Row, name: str) -> ModelConfig:
    fitting = [prefix for prefix in STYLES if name.startswith(prefix)]
    if not fitting:
        raise ValueError(
            f"{row.place}: no style is known for {name!r}; known are {', '.join(STYLES)}; else a column `style` tells "
            "a model of its style"
        )
    return named_model(STYLES[max(fitting, key=len)])
