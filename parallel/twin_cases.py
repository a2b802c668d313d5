"""What do twins cost on pipelines of several lengths: the cases that `parallel/penalty.py` makes rows of.

    counted          FLOPs, with the head                    on_machine    seconds in closed form, messages too
    counted_blocks   FLOPs of the blocks alone: free ends    measured      seconds as in files of twinshard profile

An encoder-decoder reads source and target, its decoder-only twin of equal depth both as one sequence: pairs of equal
sums are one case of the twin. A microbatch is one pair.
"""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

from models.config import ModelConfig
from models.matching import long_enough, twins
from parallel.figures import StepShape
from parallel.layouts import Layout
from parallel.line import Grained
from parallel.machine import Machine
from parallel.machine_profile import machine_profile
from parallel.profile import Profile
from parallel.work import Work


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One model with one kind of costs on so many ranks.

    Attributes:
        costs: name of the costs.
        model: name of the encoder-decoder.
        profile: of it, or of its twin.
        pairs: lengths of source and target that it stands for; a twin reads them as one sequence.
        pp: ranks.
        grain: where it is cut.
    """

    costs: str
    model: str
    profile: Profile
    pairs: tuple[tuple[int, int], ...]
    pp: int
    grain: Grained = "block"

    @property
    def is_twin(self) -> bool:
        return not self.profile.config.has_cross_attention

    def finer(self) -> "Case":
        """The same, cut between sublayers."""
        return dataclasses.replace(self, grain="sublayer")


# ---- costs ----------------------------------------------------------------------------------------------------------

Costs: TypeAlias = Callable[[ModelConfig, StepShape, int], Profile]
"""From a model, one microbatch and the number of ranks."""


def counted(config: ModelConfig, shape: StepShape, _pp: int) -> Profile:
    """FLOPs, a backward twice as long as its forward."""
    return Profile.of_flops(config, Layout(attention="materialised"), shape)


def counted_blocks(config: ModelConfig, shape: StepShape, pp: int) -> Profile:
    """FLOPs of the blocks alone, as if ends cost nothing."""
    return dataclasses.replace(counted(config, shape, pp), encoder_embedding=Work(), head=Work())


def on_machine(machine: Machine) -> Costs:
    """Seconds on a machine in closed form, messages too."""

    def costs(config: ModelConfig, shape: StepShape, pp: int) -> Profile:
        return machine_profile(machine, config, Layout(pp=pp), shape)

    return costs


def measured(profiles: Sequence[Profile]) -> Costs:
    """Seconds as in profiles that were measured, one for each model and pair of lengths."""

    def costs(config: ModelConfig, shape: StepShape, _pp: int) -> Profile:
        for profile in profiles:
            lengths = (profile.source_length, profile.target_length)
            same = {field.name for field in dataclasses.fields(ModelConfig)} - {"name", "max_length"}
            alike = all(getattr(profile.config, name) == getattr(config, name) for name in same)
            if alike and lengths == (shape.source_length, shape.target_length):
                return profile
        wanted = f"{shape.source_length} source and {shape.target_length} target positions"
        raise ValueError(f"no profile of {config.name} at {wanted}: make one with twinshard profile")

    return costs


def cases(
    costs: str,
    profiles: Costs,
    config: ModelConfig,
    pairs: Iterable[tuple[int, int]],
    ranks: Iterable[int],
    dtype_bytes: int = 4,
) -> list[Case]:
    """Every case of a kind of costs; twins that read equally long sequences are one.

    Raises ValueError for a model without two sides, for lengths that it cannot read, and as the costs do.
    """
    if not config.has_cross_attention:
        raise ValueError(f"{config.name} is {config.architecture}: a penalty is an encoder-decoder's; try t5-large")
    found = []
    pairs = tuple(pairs)
    by_sum: dict[int, list[tuple[int, int]]] = {}
    for pair in pairs:
        by_sum.setdefault(sum(pair), []).append(pair)
    for pp in ranks:
        for source, target in pairs:
            shape = StepShape(num_sequences=1, source_length=source, target_length=target, dtype_bytes=dtype_bytes)
            profile = profiles(long_enough(config, max(source, target)), shape, pp)
            found.append(Case(costs=costs, model=config.name, profile=profile, pairs=((source, target),), pp=pp))
        for length, same in by_sum.items():
            twin = twins(config, "decoder_only", source_length=same[0][0], target_length=same[0][1]).config
            shape = StepShape(num_sequences=1, source_length=0, target_length=length, dtype_bytes=dtype_bytes)
            profile = profiles(twin, shape, pp)
            found.append(Case(costs=costs, model=config.name, profile=profile, pairs=tuple(same), pp=pp))
    return found
