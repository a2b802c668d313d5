"""Which token id does a piece of text have?

The vocabulary is bytes: nothing is trained and nothing is fetched, any language is covered, and two languages differ in
length as their encodings do. After the 256 bytes come five specials, then rows that no text uses, so that 2, 4 and 8
divide the number of rows:

    0 .. 255   the bytes of the text in UTF-8
    256        PAD         fills a row behind its last valid position
    257        BEGIN       first position of a decoder that has a memory
    258        END         last label of a text
    259        SEPARATOR   between source and target where both are one sequence
    260        MASK        stands for a byte that an encoder-only model has to guess
    261 .. 263 unused

Source: byte-level models such as ByT5 (arXiv 2105.13626), whose ids are laid out differently. Left out: any
vocabulary that has to be learnt or loaded.
"""

from collections.abc import Iterable

NUM_BYTES = 256
PAD = 256
BEGIN = 257
END = 258
SEPARATOR = 259
MASK = 260
VOCABULARY = 264
"""Rows that a model needs to read text; a larger vocabulary leaves its last rows unused."""


def encode(text: str) -> list[int]:
    """Return the ids of a text, one per byte, without specials."""
    return list(text.encode("utf-8"))


def decode(ids: Iterable[int]) -> str:
    """Return the text of some ids: specials are dropped, bytes that are not UTF-8 become U+FFFD."""
    return bytes(id_ for id_ in ids if 0 <= id_ < NUM_BYTES).decode("utf-8", errors="replace")
