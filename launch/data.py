"""Which tokens does a step read? The batch of a cell, the same on every rank, and what a record tells of it.

Real pairs come from `models/catalogue.py`, drawn with the experiment's seed. Synthetic pairs are S random source ids
and T target ids; a model with one stack reads them in a row, as it does with text. Left out: the share of a rank
(`parallel/sequence.py`).
"""

import dataclasses
import functools
import hashlib
from pathlib import Path

from torch import Tensor

from launch.cell import Cell
from launch.experiment import Experiment
from launch.settings import DataSpec
from models.batch import IGNORED, Batch, synthetic_batch
from models.catalogue import TextPair, read_pairs
from models.config import ModelConfig
from models.text import TextBatch, pair_batch
from parallel.plan import Plan
from results.schema import DataFacts


class Batches:
    """The batches of an experiment, each made once.

    Args:
        folder: where paths of text files start; that of the experiment's file.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._made: dict[tuple[str, str], Batch] = {}
        self._digests: dict[tuple[str, str], str] = {}

    def batch(self, cell: Cell) -> Batch:
        """The batch of a cell, all data-parallel ranks together. Raises ValueError as `make_batch` does."""
        key = (cell.data_name, cell.model.name)
        if key not in self._made:
            try:
                self._made[key] = make_batch(cell.data, cell.model, seed=cell.settings.seed, folder=self._folder)
            except ValueError as error:
                raise ValueError(f"data.{cell.data_name}: {error}") from error
        return self._made[key]

    def fingerprint(self, cell: Cell) -> str:
        """Hash of everything that defines a cell, its tokens included. A refused cell has none."""
        if cell.refusal:
            return cell.fingerprint("")
        key = (cell.data_name, cell.model.name)
        if key not in self._digests:
            self._digests[key] = digest(self.batch(cell))
        return cell.fingerprint(self._digests[key])

    def check(self, experiment: Experiment) -> None:
        """Makes every batch that will be read. Raises ValueError for the first that cannot be made."""
        for cell in experiment.cells:
            if not cell.refusal:
                self.batch(cell)


def make_batch(spec: DataSpec, config: ModelConfig, *, seed: int, folder: Path) -> Batch:
    """The batch of one step.

    Raises:
        ValueError: a text that is missing, broken or empty, or that the model cannot read.
    """
    if spec.text != "synthetic":
        return pair_batch(
            config,
            _pairs(spec.text, folder),
            num_sequences=spec.sequences,
            source_length=spec.source_length,
            target_length=spec.target_length,
            seed=seed,
            loss_on=spec.loss_on,
        )
    source_length, target_length = spec.stream_lengths(config)
    batch = synthetic_batch(
        config,
        num_sequences=spec.sequences,
        source_length=source_length,
        target_length=target_length,
        seed=seed,
        ragged=spec.ragged,
    )
    if config.architecture == "decoder_only" and spec.loss_on == "target":
        labels = batch.labels.clone()
        for row, length in enumerate(batch.target_lengths):
            # A ragged sequence may end within its source: it keeps the label of its last position.
            labels[row, : min(spec.source_length, length - 1)] = IGNORED
        batch = dataclasses.replace(batch, labels=labels)
    return batch


@functools.cache
def _pairs(text: str, folder: Path) -> list[TextPair]:
    return read_pairs(text if text.startswith("django:") else folder / text)


def digest(batch: Batch) -> str:
    """Hash of the tokens, labels and lengths of a batch."""
    hashed = hashlib.sha256()
    for field in dataclasses.fields(Batch):
        value = getattr(batch, field.name)
        told = value.contiguous().numpy().tobytes() if isinstance(value, Tensor) else repr(value).encode()
        hashed.update(field.name.encode() + told)
    return hashed.hexdigest()


def data_facts(cell: Cell, batch: Batch, partitioning: Plan) -> DataFacts:
    """What a record tells of the batch of its step."""
    lengths = {"source": 0, "target": 0}
    padding = {"source": 0, "target": 0}
    for stream, ids in (("source", batch.source), ("target", batch.target)):
        if ids is not None:
            lengths[stream] = ids.shape[1]
            padding[stream] = (partitioning.sharded_length(ids.shape[1]) - ids.shape[1]) * batch.num_sequences
    cut = batch.truncation if isinstance(batch, TextBatch) else None
    return DataFacts(
        source=cell.data.text,
        loss_on=cell.data.loss_on,
        num_sequences=batch.num_sequences,
        source_length=lengths["source"],
        target_length=lengths["target"],
        source_valid_tokens=sum(batch.source_lengths),
        target_valid_tokens=sum(batch.target_lengths),
        loss_tokens=batch.num_loss_tokens(),
        truncated_sequences=cut.num_sources + cut.num_targets if cut else 0,
        source_sharding_padding_tokens=padding["source"],
        target_sharding_padding_tokens=padding["target"],
    )
