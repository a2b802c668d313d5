"""Which measured profile does a cell of an experiment read, and does it fit?

    profile = "costs.toml"                       one file for all, where the experiment has one model and one batch
    profile = "profiles/{model}.{data}.toml"     a file for each model and batch; paths start at the experiment's folder

`twinshard profile EXPERIMENT` writes these files. A cell that is cut by `times` or ordered by `list` needs its profile:
one that is missing, or another model's, is an error before any process starts. Other pipelines take theirs where it is
there and fits, and run without: for them it is a prediction that the report holds against what was measured.
"""

import functools
import string
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

from models.config import ModelConfig
from parallel.figures import StepShape
from parallel.layouts import Layout
from parallel.profile import Profile
from parallel.profile_file import load

_PLACES = ("model", "data")


class ProfileFiles:
    """The profiles that an experiment names.

    Args:
        pattern: of their paths; empty where the experiment names none.
        folder: where paths start.

    Raises:
        ValueError: a place in braces that nothing fills.
    """

    def __init__(self, pattern: str, folder: Path) -> None:
        self._pattern, self._folder = pattern, folder
        try:
            unknown = [name for _, name, _, _ in string.Formatter().parse(pattern) if name not in (None, *_PLACES)]
        except ValueError as error:
            raise ValueError(f"profile = {pattern!r}: {error}") from error
        if unknown:
            raise ValueError(
                f"profile = {pattern!r}: {{{unknown[0]}}} is filled by nothing; known are {{model}}, {{data}}"
            )

    def path(self, model: str, data: str) -> Path | None:
        """The file of a model's profile on a batch, whether it is there or not."""
        return self._folder / self._pattern.format(model=model, data=data) if self._pattern else None

    def fitting(
        self, config: ModelConfig, data: str, layout: Layout, shape: StepShape, *, needed: bool
    ) -> Profile | None:
        """The profile of a step; None where the experiment names none, or where none fits and none is needed.

        Raises:
            ValueError: a file that is no profile, or, of one that is needed, that is missing or another's.
        """
        path = self.path(config.name, data)
        if path is None or layout.pp == 1 or not (needed or path.exists()):
            return None
        if not path.exists():
            raise ValueError(
                f"{layout.label} reads {path}, which is not there: write it with twinshard profile EXPERIMENT"
            )
        profile = _read(path)
        wrong = _misfit(profile, config, layout, shape)
        if wrong and needed:
            raise ValueError(f"{path}: {wrong}")
        return None if wrong else profile


def _misfit(profile: Profile, config: ModelConfig, layout: Layout, shape: StepShape) -> str:
    """Why a profile is not that of a step; empty where it is."""
    if profile.unit != "seconds":
        return "it counts FLOPs, and seconds are wanted: measure them with twinshard profile EXPERIMENT"
    try:
        profile.check(config, layout, shape)
    except ValueError as error:
        return str(error)
    return ""


@functools.cache
def _read(path: Path) -> Profile:
    return load(path)


class Wanting(Protocol):
    """What is read of a cell (`launch/experiment.py`)."""

    @property
    def name(self) -> str: ...
    @property
    def data_name(self) -> str: ...
    @property
    def model(self) -> ModelConfig: ...
    @property
    def layout(self) -> Layout: ...
    @property
    def shape(self) -> StepShape: ...
    @property
    def refusal(self) -> str: ...


def wanted(cells: Iterable[Wanting], files: ProfileFiles) -> dict[Path, Profile]:
    """Every profile that pipelines of an experiment name, counted in FLOPs, by its file.

    Raises:
        ValueError: no profile is named, or one file is to be two cells' that differ in what a rank computes.
    """
    found: dict[Path, tuple[str, Profile]] = {}
    for cell in cells:
        path = files.path(cell.model.name, cell.data_name)
        if path is None:
            raise ValueError('the experiment names no profile: profile = "profiles/{model}.{data}.toml" would')
        if cell.layout.pp == 1 or cell.refusal:
            continue
        counted = Profile.of_flops(cell.model, cell.layout.replace(transport="relay"), cell.shape)
        first, other = found.setdefault(path, (cell.name, counted))
        if other != counted:
            raise ValueError(
                f"{path} would be the profile of {first} and of {cell.name}, which compute different things: "
                f"put {{model}} and {{data}} into its name, or make them alike in tp, sp and microbatches"
            )
    if not found:
        raise ValueError("the experiment has no pipeline that could read a profile")
    return {path: counted for path, (_, counted) in found.items()}
