"""Ledgers of small models: the sizes that expected events are written out with, and one step of one rank."""

from models.batch import synthetic_batch
from models.config import Architecture, ModelConfig
from parallel.layouts import Layout
from parallel.ledger import Ledger
from parallel.plans import plan
from parallel.recorder import Recorder
from tests.one_rank import rank_of, step_of
from tests.small_models import small_config

WIDTH, SOURCE, TARGET, SEQUENCES, FLOAT = 16, 6, 4, 2, 4
M_E = SOURCE * SEQUENCES * WIDTH * FLOAT
M_D = TARGET * SEQUENCES * WIDTH * FLOAT
M_L = TARGET * SEQUENCES * FLOAT


def config_of(architecture: Architecture = "encoder_decoder", blocks: int = 1, **changes: object) -> ModelConfig:
    """Each stack with as many blocks."""
    fields: dict[str, object] = {
        "num_encoder_blocks": 0 if architecture == "decoder_only" else blocks,
        "num_decoder_blocks": 0 if architecture == "encoder_only" else blocks,
    }
    return small_config(architecture, **(fields | changes))


def ledger_of(
    config: ModelConfig,
    layout: Layout,
    *,
    rank: int = 0,
    num_sequences: int = SEQUENCES,
    source_length: int = SOURCE,
    target_length: int = TARGET,
) -> Ledger:
    """What one rank sends in one step on full sequences."""
    batch = synthetic_batch(
        config, num_sequences=num_sequences, source_length=source_length, target_length=target_length, seed=3
    )
    planned = plan(config, layout)
    with rank_of(planned, rank) as comm, Recorder() as recorder:
        step_of(planned, comm, batch)
        difference = recorder.first_difference(comm.ledger.events)
    assert difference is None, difference
    return comm.ledger


def told(ledger: Ledger, site: str) -> list[str]:
    """The events at a site and inside it, as `operation site stream phase payload`."""
    events = [event for event in ledger if event.site == site or event.site.startswith(f"{site}.")]
    rest = len(site) + 1
    return [f"{e.operation} {e.site[rest:]} {e.stream} {e.phase} {e.payload_bytes}" for e in events]
