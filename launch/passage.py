"""A short model whose pieces run one by one, so that each can be timed.

One microbatch goes through embedding, blocks and ends in the order in which a stage runs them, then backward in the
reverse order. Each piece has a graph of its own, so that its time ends with it; the blocks of a side are one piece:

    forward     source embedding -> masks -> blocks -> memory -> target embedding -> masks -> blocks -> head
    backward    <- whole, or the input's half and then the weights' half of each (`parallel/deferral.py`)

Under tensor parallelism a rank's shard is run as if it were a model: fewer heads, ffn columns and, unless all are on
every rank, vocabulary rows. Busy time is that of `launch/clock.py`.

Left out: collectives of tp, an encoder's final norm, sequence parallelism.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import TypeAlias

import torch
from torch import Tensor

from launch.clock import BusyClock, Span
from models.architectures import build
from models.attention import AttentionMask, attention_mask, fused_attention, materialised_attention
from models.batch import Batch, synthetic_batch
from models.config import ModelConfig, Stream
from models.initial import initialise
from models.model import Model
from models.stack import Stack
from models.sublayers import Attention
from parallel.deferral import Deferral
from parallel.layouts import Layout, Vocabulary
from parallel.parallelize import split_backward
from parallel.profile import Profile
from parallel.recompute import apply_recompute

Part: TypeAlias = str
"""forward, and backward, or of a split one backward_input and backward_weight."""

NUM_BLOCKS = 3
"""Blocks of a side that are run: each finds its weights where another block has just run, and has its share in what a
backward costs to begin."""


def rank_config(config: ModelConfig, tp: int, vocabulary: Vocabulary = "sharded") -> ModelConfig:
    """A model as large as one tp rank's shard of another, with as few blocks as are measured.

    Raises ValueError where tp cannot divide the model.
    """
    layout = Layout(tp=tp, vocabulary=vocabulary)
    layout.check_model(config)
    num_dealt = tp if layout.shards_vocabulary else 1
    return config.replace(
        num_heads=config.num_heads // tp,
        num_kv_heads=max(1, config.num_kv_heads // tp),
        ffn_width=config.ffn_width // tp,
        vocabulary=-(-config.vocabulary // num_dealt),
        source_vocabulary=-(-config.source_vocabulary // num_dealt),
        num_encoder_blocks=min(NUM_BLOCKS, config.num_encoder_blocks),
        num_decoder_blocks=min(NUM_BLOCKS, config.num_decoder_blocks),
    )


@dataclasses.dataclass(frozen=True, slots=True)
class _Ran:
    """A piece whose forward has run: what it gave and which leaves it read."""

    piece: str
    given: Tensor
    read: tuple[Tensor, ...]


class Passage:
    """One microbatch and a short model to pass it through, again and again.

    Args:
        counted: the model, its step and the options, as a profile in FLOPs.
        is_split: whether backwards come in two halves.
        dtype: of parameters and activations.
        device: where it runs.
    """

    def __init__(self, counted: Profile, *, is_split: bool, dtype: torch.dtype, device: torch.device) -> None:
        config, shape = rank_config(counted.config, counted.tp, counted.vocabulary), counted.shape
        self._num_blocks = {"encoder": config.num_encoder_blocks, "decoder": config.num_decoder_blocks}
        self._model = _model(config, counted, dtype, device)
        self._deferral = Deferral() if is_split else None
        if self._deferral is not None:
            split_backward(self._model, self._deferral)
        for parameter in self._model.parameters():
            # What microbatches add to is there before the first one comes.
            parameter.grad = torch.zeros_like(parameter)
        batch = synthetic_batch(
            config,
            num_sequences=shape.num_sequences,
            source_length=shape.source_length,
            target_length=shape.target_length,
            seed=0,
        )
        self._batch: Batch = batch.to(device, dtype)
        self._clock = BusyClock(device)
        self._spans: dict[tuple[str, Part], Span] = {}
        self._ran: list[_Ran] = []

    def run(self) -> dict[tuple[str, Part], float]:
        """Forward and backward of every piece once; busy seconds of each part of them, of one block."""
        self._spans, self._ran = {}, []
        self._forward()
        self._backward()
        self._clock.finish()
        seconds = {}
        for (piece, part), span in self._spans.items():
            side, _, kind = piece.partition("_")
            seconds[piece, part] = self._clock.seconds(span) / (self._num_blocks[side] if kind == "block" else 1)
        return seconds

    # ---- forward ------------------------------------------------------------------------------------------------

    def _forward(self) -> None:
        model, batch = self._model, self._batch
        memory: tuple[Tensor, ...] = ()
        hidden = None
        if model.encoder is not None:
            hidden = self._stack(model.encoder, "encoder", "source", memory)
            if model.decoder is not None:
                assert model.encoder.norm is not None
                memory = (model.encoder.norm(hidden).detach(),)
        if model.decoder is not None:
            hidden = self._stack(model.decoder, "decoder", "target", memory)
        last = model.encoder if model.decoder is None else model.decoder
        norm, head, loss = None if last is None else last.norm, model.head, model.loss
        assert hidden is not None
        assert norm is not None
        assert head is not None
        assert loss is not None
        self._run("head", lambda states: loss(head(norm(states)), batch.labels), hidden)

    def _stack(self, stack: Stack, side: str, stream: Stream, memory: tuple[Tensor, ...]) -> Tensor:
        batch, embed = self._batch, stack.embedding
        assert embed is not None
        types = () if memory else (batch.token_types,)
        hidden = self._run(f"{side}_embedding", lambda: embed(batch.stream(stream), *types))
        with self._timed(f"{side}_stage", "forward"):
            mask = stack.self_mask(batch.lengths(stream), batch.stream_length(stream), hidden)
            reading = [self._memory_mask(hidden)] if memory else []
        added = mask.added_BNQK
        if added is not None and added.requires_grad:
            leaf = added.detach().requires_grad_()
            self._ran.append(_Ran(f"{side}_stage", added, (leaf,)))
            mask = dataclasses.replace(mask, bias_NQK=None, added_BNQK=leaf)
        blocks = list(stack.block.values())

        def run(states: Tensor, *read: Tensor) -> Tensor:
            for block in blocks:
                states = block(states, mask, *read, *reading)
            return states

        return self._run(f"{side}_block", run, hidden, *memory)

    def _memory_mask(self, like: Tensor) -> AttentionMask:
        lengths, length = self._batch.source_lengths, self._batch.stream_length("source")
        return attention_mask(is_causal=False, key_lengths=lengths, key_length=length, like=like)

    def _run(self, piece: str, call: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        """The forward of a piece, on leaves of its own."""
        leaves = tuple(tensor.detach().requires_grad_() for tensor in inputs)
        with self._timed(piece, "forward"):
            given = call(*leaves)
        self._ran.append(_Ran(piece, given, leaves))
        return given

    # ---- backward -----------------------------------------------------------------------------------------------

    def _backward(self) -> None:
        """From the loss on, each piece with the gradient of what was read of it."""
        gradient = memory_gradient = None
        for ran in reversed(self._ran):
            is_mask = ran.piece.endswith("_stage")
            self._backward_of(ran, ran.read[0].grad if is_mask else gradient)
            if len(ran.read) > 1:
                memory_gradient = ran.read[1].grad
            if not is_mask:
                # In front of the target's embedding stands the encoder: what it gets is the gradient of the memory.
                gradient = ran.read[0].grad if ran.read else memory_gradient

    def _backward_of(self, ran: _Ran, gradient: Tensor | None) -> None:
        if self._deferral is None:
            with self._timed(ran.piece, "backward"):
                torch.autograd.backward((ran.given,), (gradient,))
            return
        with self._timed(ran.piece, "backward_input"), self._deferral.collect(0, 0):
            torch.autograd.backward((ran.given,), (gradient,))
        with self._timed(ran.piece, "backward_weight"):
            self._deferral.run(0, 0)

    @contextlib.contextmanager
    def _timed(self, piece: str, part: Part) -> Iterator[None]:
        start = self._clock.now()
        yield
        self._spans[piece, part] = (start, self._clock.now())


def _model(config: ModelConfig, counted: Profile, dtype: torch.dtype, device: torch.device) -> Model:
    """A model with values, in training, with the attention and recomputation."""
    with torch.device("meta"):
        model = build(config)
    initialise(model, config, seed=0, dtype=dtype, device=device)
    kernel = fused_attention if counted.attention == "fused" else materialised_attention
    for module in model.modules():
        if isinstance(module, Attention):
            module.use(kernel)
    apply_recompute(model, counted.recompute)
    model.train()
    return model
