"""How long does each piece of a model take on this machine, forward and in both halves of its backward?

Every repetition passes all pieces (`launch/passage.py`), so that what disturbs the machine for a moment disturbs all of
them; medians count. A backward that is split runs other code than a whole one: products keep their inputs for later and
add to gradients in place. So a profile is of one of the two:

    split    forward, input's half and weights' half as they run
    whole    forward and whole backward as they run; the backward is dealt to its halves as the split one divides
"""

import dataclasses
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch

from launch.env import BackendChoice, world
from launch.passage import Part, Passage
from launch.provenance import provenance
from parallel.profile import PIECES, Profile
from parallel.work import Work

Samples: TypeAlias = dict[tuple[str, Part], list[float]]
"""Busy seconds of every repetition of a piece's part."""


def measured_profile(
    counted: Profile,
    *,
    is_split: bool,
    dtype: str,
    backend: BackendChoice,
    message: tuple[float, float],
    warmup: int,
    repeats: int,
    passed: Callable[[], None],
) -> tuple[Profile, dict[str, float]]:
    """A profile in seconds, and the spread of each piece: between quartiles, over the median.

    Args:
        counted: the same in FLOPs: the model, its step and the options.
        is_split: whether it is for schedules that split the backward.
        dtype: of parameters and activations, by torch's name.
        backend: nccl measures on a GPU, gloo on a CPU, auto on a GPU where there is one.
        message: latency and seconds per byte of a message, 0 where they are not known.
        warmup: repetitions that are thrown away.
        repeats: repetitions that count.
        passed: called after every repetition.

    Raises:
        ValueError: a backend without its device.
    """
    halves: Samples = defaultdict(list)
    wholes: Samples = defaultdict(list)
    with world(backend) as here:
        passages = [(Passage(counted, is_split=True, dtype=getattr(torch, dtype), device=here.device), halves)]
        if not is_split:
            passages.append((Passage(counted, is_split=False, dtype=getattr(torch, dtype), device=here.device), wholes))
        for repetition in range(warmup + repeats):
            for passage, samples in passages:
                for key, seconds in passage.run().items():
                    if repetition >= warmup:
                        samples[key].append(seconds)
            passed()
        device = here.device.type
    made = provenance()
    facts: dict[str, str | int | float] = {
        "created": made.created,
        "commit": made.commit,
        "device": device,
        "processor": made.processor,
        "accelerator": made.accelerator,
        "num_cores": made.num_cores,
        "torch": made.versions["torch"],
        "dtype": dtype,
        "backward": "split" if is_split else "whole",
        "warmup": warmup,
        "repeats": repeats,
    }
    works: dict[str, Any] = {
        piece: _split(halves, piece) if is_split else _whole(wholes, _split(halves, piece), piece) for piece in PIECES
    }
    transfer_cost, byte_cost = message
    measured = dataclasses.replace(
        counted, unit="seconds", transfer_cost=transfer_cost, byte_cost=byte_cost, machine=facts, **works
    )
    return measured, {piece: _spread(halves if is_split else wholes, piece) for piece in PIECES}


def _split(samples: Mapping[tuple[str, Part], Sequence[float]], piece: str) -> Work:
    return Work(*(_median(samples, piece, part) for part in ("forward", "backward_input", "backward_weight")))


def _whole(samples: Mapping[tuple[str, Part], Sequence[float]], split: Work, piece: str) -> Work:
    """A whole backward, dealt to its halves as a split one divides."""
    backward = _median(samples, piece, "backward")
    weight = backward * split.backward_weight / split.backward if split.backward else 0.0
    return Work(_median(samples, piece, "forward"), backward - weight, weight)


def _median(samples: Mapping[tuple[str, Part], Sequence[float]], piece: str, part: Part) -> float:
    """Of the repetitions; nothing for what never ran."""
    return statistics.median(samples.get((piece, part), [0.0]))


def _spread(samples: Samples, piece: str) -> float:
    runs = [seconds for (ran, _), seconds in samples.items() if ran == piece]
    if not runs:
        return 0.0
    totals = sorted(map(sum, zip(*runs, strict=True)))
    middle = statistics.median(totals)
    low, high = totals[len(totals) // 4], totals[(3 * len(totals)) // 4]
    return (high - low) / middle if middle else 0.0
