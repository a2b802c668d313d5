"""Does a batch refuse what cannot be, and does a synthetic one hold what a model of its kind learns from?"""

import pytest
import torch

from models.batch import IGNORED, Batch, synthetic_batch
from models.config import Architecture, Stream
from tests.small_models import ARCHITECTURES, small_batch, small_config

IDS = torch.zeros(2, 3, dtype=torch.int64)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "a source, a target or both"),
        ({"source": IDS, "source_lengths": (3, 0)}, "between 1 and the padded length 3"),
        ({"source": IDS, "source_lengths": (3, 4)}, "between 1 and the padded length 3"),
        ({"source": IDS, "source_lengths": (3,)}, "1 source_lengths for 2 rows"),
        ({"target": IDS[:1], "target_lengths": (3, 3)}, "1 target sequences"),
        (
            {"target": IDS[:, :2], "target_lengths": (2, 2)},
            r"labels \(2, 3\) must have the shape of the target, \(2, 2\)",
        ),
        ({"target": IDS[0], "target_lengths": (3, 3)}, "token ids"),
        ({"target": IDS.float()[..., None], "target_lengths": (3, 3)}, "token ids"),
        ({"target": IDS, "target_lengths": (3, 3), "source_lengths": (1, 1)}, "source_lengths are given without"),
        ({"source": IDS, "source_lengths": (3, 3), "token_types": IDS[:, :2]}, "token_types"),
    ],
)
def test_a_contradictory_batch_is_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Batch(labels=IDS, **fields)  # type: ignore[arg-type]


def test_labels_belong_to_the_target_if_there_is_one() -> None:
    batch = Batch(
        labels=IDS, source=IDS[:, :2], source_lengths=(2, 1), target=IDS, target_lengths=(3, 3), token_types=IDS[:, :2]
    )
    assert batch.predicted_stream == "target"
    assert batch.stream_length("source") == 2
    assert batch.lengths("source") == (2, 1)
    with pytest.raises(ValueError, match="no target"):
        Batch(labels=IDS, source=IDS, source_lengths=(3, 3)).stream("target")


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_microbatches_make_up_the_batch(architecture: Architecture) -> None:
    config = small_config(architecture, num_token_types=2)
    batch = small_batch(config, num_sequences=4)
    parts = [batch.narrow(0, 1), batch.narrow(1, 3)]
    streams: tuple[Stream, ...] = ("source", "target")
    for stream in streams:
        if batch.lengths(stream):
            assert torch.equal(torch.cat([part.stream(stream) for part in parts]), batch.stream(stream))
    assert sum(part.num_loss_tokens() for part in parts) == batch.num_loss_tokens()
    assert sum((part.source_lengths for part in parts), ()) == batch.source_lengths
    assert sum((part.target_lengths for part in parts), ()) == batch.target_lengths
    assert parts[1].labels.data_ptr() == batch.labels[1].data_ptr()
    with pytest.raises(ValueError, match="not within the 4"):
        batch.narrow(2, 3)


def test_only_features_take_the_dtype() -> None:
    batch = small_batch(small_config("encoder_decoder", feature_width=6)).to("meta", torch.bfloat16)
    assert batch.source is not None
    assert batch.target is not None
    assert batch.source.shape[2] == 6
    assert (batch.source.dtype, batch.target.dtype, batch.labels.dtype) == (torch.bfloat16, torch.int64, torch.int64)
    assert batch.source.is_meta
    assert batch.labels.is_meta


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_synthetic_batch_repeats_with_its_seed(architecture: Architecture) -> None:
    config = small_config(architecture)
    assert torch.equal(small_batch(config, seed=3).labels, small_batch(config, seed=3).labels)
    assert not torch.equal(small_batch(config, seed=3).labels, small_batch(config, seed=4).labels)


@pytest.mark.parametrize("architecture", ["decoder_only", "encoder_decoder"])
def test_a_causal_label_is_the_next_token(architecture: Architecture) -> None:
    batch = small_batch(small_config(architecture), num_sequences=8)
    assert batch.target is not None
    assert len(set(batch.target_lengths)) > 1
    assert max(batch.target_lengths) == batch.stream_length("target")
    for row, length in enumerate(batch.target_lengths):
        assert torch.equal(batch.labels[row, : length - 1], batch.target[row, 1:length])
        assert batch.labels[row, length - 1] >= 0
        assert (batch.labels[row, length:] == IGNORED).all()
    assert batch.num_loss_tokens() == sum(batch.target_lengths)


def test_a_masked_label_is_on_a_valid_position_and_each_sequence_has_one() -> None:
    config = small_config("encoder_only")
    batch = synthetic_batch(config, num_sequences=64, source_length=50, target_length=0, seed=1, ragged=True)
    for row, length in enumerate(batch.source_lengths):
        assert (batch.labels[row, :length] != IGNORED).any()
        assert (batch.labels[row, length:] == IGNORED).all()
    assert 0.12 < batch.num_loss_tokens() / sum(batch.source_lengths) < 0.20


def test_an_empty_synthetic_batch_is_refused() -> None:
    config = small_config("decoder_only")
    with pytest.raises(ValueError, match="target_length = 0"):
        synthetic_batch(config, num_sequences=1, source_length=1, target_length=0, seed=1)
    with pytest.raises(ValueError, match="num_sequences = 0"):
        synthetic_batch(config, num_sequences=0, source_length=1, target_length=1, seed=1)
