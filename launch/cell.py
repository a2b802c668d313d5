"""What is one cell? A model on a layout and a batch, the engine that runs it, and how it is run.

Left out: which cells an experiment has (`launch/experiment.py`), and tokens (`launch/data.py`).
"""

import dataclasses
import hashlib
import json

from launch.model_tables import Member
from launch.settings import DataSpec, Settings
from launch.step_options import DTYPE_BYTES
from models.config import ModelConfig
from parallel.engines.choice import NATIVE, EngineChoice
from parallel.figures import StepShape
from parallel.layouts import Layout
from parallel.profile import Profile


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """One model on one layout and one batch, run by one engine."""

    experiment: str
    member: Member
    data_name: str
    data: DataSpec
    layout: Layout
    settings: Settings
    engine: EngineChoice = NATIVE
    is_control: bool = False
    refusal: str = ""
    """Why this cell cannot be run; empty when it can."""
    measured_profile: Profile | None = None
    """Of the profiles that the experiment names, the one of this step."""

    @property
    def model(self) -> ModelConfig:
        return self.member.config

    @property
    def world_size(self) -> int:
        return self.layout.world_size

    @property
    def shape(self) -> StepShape:
        """Of a data-parallel rank's step."""
        source_length, target_length = self.data.stream_lengths(self.model)
        return StepShape(
            num_sequences=max(1, self.data.sequences // self.layout.dp),
            source_length=source_length,
            target_length=target_length,
            dtype_bytes=DTYPE_BYTES[self.settings.dtype],
        )

    @property
    def reads_seconds(self) -> bool:
        """Whether its stages or its schedule depend on measured costs, where there are some."""
        return self.layout.pp > 1 and (self.layout.cut == "times" or self.layout.schedule == "list")

    @property
    def profile(self) -> Profile | None:
        """What blocks cost where the layout asks: measured, or counted in FLOPs; None where it does not."""
        if self.reads_seconds and self.measured_profile is not None:
            return self.measured_profile
        return Profile.counted_for(self.model, self.layout, self.shape)

    @property
    def name(self) -> str:
        """Readable, unique within the experiment, fit for the name of a file: `pair.text.tp2-sp-pp1_even-dp1-...`.

        The native engine has no name of its own in it, any other does: `pair.text.tp2-....torch`, with the method
        where it cuts by its own: `....deepspeed-uniform`. Compiled blocks are told behind it: `....compiled`.
        """
        label = self.layout.label.replace(")", "").translate(str.maketrans(" (,=", "-___"))
        control = ".control" if self.is_control else ""
        return f"{self.model.name}.{self.data_name}.{label}{self.engine.suffix}{control}"

    def fingerprint(self, batch_digest: str) -> str:
        """Hash of everything that defines the cell; `batch_digest` stands for the tokens themselves."""
        defining = {
            "engine": self.engine.text,
            "model": self.model.to_dict(),
            "family": [self.member.family, self.member.match, self.member.mismatch],
            "layout": self.layout.to_dict(),
            "data": dataclasses.asdict(self.data),
            "batch": batch_digest,
            "settings": dataclasses.asdict(self.settings),
            "is_control": self.is_control,
            "refusal": self.refusal,
        }
        if self.engine.compiled:
            # Only then: a cell from before there was a choice is the same cell.
            defining["compiled"] = True
        if self.reads_seconds and self.measured_profile is not None:
            costs = dataclasses.asdict(self.measured_profile)
            defining["profile"] = {name: cost for name, cost in costs.items() if name not in ("config", "machine")}
        return hashlib.sha256(json.dumps(defining, sort_keys=True).encode()).hexdigest()[:32]
