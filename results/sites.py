"""Which part of the model does a communication belong to?

A site is a qualified module name, so its text tells the place:

    decoder.block.3.cross_attention.kv     side decoder, block 3, part cross_attention, place cross_attention.kv
    decoder.memory                         part memory: where the encoder's output enters a stage of the decoder
    encoder.embedding.token, head, loss    parts embedding, head, loss

Traffic between stages is part `edge`, and that after the last backward `gradients`, but for the sums of the loss.
"""

import dataclasses
import re

BLOCK_SITE = re.compile(r"(?P<side>encoder|decoder)\.block\.(?P<index>\d+)\.(?P<place>(?P<part>\w+)(?:\.\w+)*)")
STACK_SITE = re.compile(r"(?:encoder|decoder)\.(?P<part>\w+)(?:\.|$)")
ENDS = ("head", "loss")
PARTS = (
    "embedding",
    "self_attention",
    "cross_attention",
    "ffn",
    "memory",
    "relative_bias",
    "norm",
    "head",
    "loss",
    "edge",
    "gradients",
    "other",
)
"""In the order of a step, for tables and pictures."""

ATTENTION_PARTS = ("self_attention", "cross_attention", "memory")
"""The memory's own site belongs to attention: what enters there is the keys' and values' input, gathered once."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """What a site says; `side` is empty and `block_index` -1 outside the blocks."""

    part: str
    side: str = ""
    block_index: int = -1
    place: str = ""
    """The site within its block, or the whole site: equal for blocks that are treated alike."""


def place_of(site: str, axis: str, phase: str) -> Place:
    """Tell the place of one communication."""
    if phase == "step":
        return Place(part="loss" if site.startswith("loss") else "gradients", place=site)
    if axis == "pp":
        return Place(part="edge", place=site)
    block = BLOCK_SITE.fullmatch(site)
    if block is not None:
        part = block["part"] if block["part"] in PARTS else "other"
        return Place(part=part, side=block["side"], block_index=int(block["index"]), place=block["place"])
    stack = STACK_SITE.match(site)
    part = stack["part"] if stack is not None else site.partition(".")[0]
    return Place(part=part if part in PARTS else "other", place=site)
