"""Who runs the schedule: one executor over a table of actions, for one stage as for many, on one rank as on many.

An edge carries named tensors (`source`, `memory`, `target`, `kv.3`), forward the states and backward their gradients.
Token ids and masks never travel: every stage cuts its own microbatch from the batch. Shape, dtype and requires_grad of
each tensor are checked here before data moves, because gloo accepts a message that is too short and dies of one that is
too long. Between two stages of one rank tensors are handed over.

A stage that only hands the memory on sends the very tensor it received; its gradient is what came from the next stage
plus what its own blocks add. A tensor that leaves over several edges gets the sum of what comes back.

Receives are posted one action ahead (`parallel/transfers.py`) and waited for when they are used: data moves while the
rank computes. A send is waited for when its receiver is known to have used it, and lets its tensor go then.
"""

from collections import defaultdict
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch
from torch import Tensor

from models.batch import Batch
from models.model import Model
from models.slicing import part_of
from parallel.comm import Comm, Message, Pending, Site
from parallel.deferral import Deferral
from parallel.edges import Edge, carried_size
from parallel.held import Held
from parallel.partition import Carried
from parallel.plan import Plan
from parallel.schedule import Action, Direction
from parallel.transfers import Step, Transfer, acknowledged, with_transfers


class Observer(Protocol):
    """Watches the executor; what it enters around an action must not change what the action does."""

    def action(self, action: Step) -> AbstractContextManager[None]:
        """Around one forward, backward or transfer."""

    def synchronise(self) -> AbstractContextManager[None]:
        """Around gradient synchronisation and update."""


class Unobserved:
    """Watches nothing."""

    def action(self, action: Step) -> AbstractContextManager[None]:
        return nullcontext()

    def synchronise(self) -> AbstractContextManager[None]:
        return nullcontext()


class Pipeline:
    """Runs this rank's row of the schedule.

    Args:
        model: this rank's stages, all in one.
        plan: tells stages, edges and schedule.
        comm: sends and receives.
        deferral: what a split backward leaves for later.
        dtype: of hidden states on the edges.

    Attributes:
        parts: the stages by number, each a model of its own.
    """

    def __init__(self, *, model: Model, plan: Plan, comm: Comm, deferral: Deferral, dtype: torch.dtype) -> None:
        self._model, self._plan, self._comm, self._deferral, self._dtype = model, plan, comm, deferral, dtype
        mine = plan.stages_of(comm.coordinate.pp)
        ships = plan.layout.transport == "kv"
        self.parts = {
            stage.index: part_of(model, plan.config, stage.first, stage.last, ships_keys_values=ships) for stage in mine
        }
        self._steps = with_transfers(plan.table, plan.edges)[comm.coordinate.pp]
        self._entering: dict[int, list[Edge]] = defaultdict(list)
        self._leaving: dict[int, list[Edge]] = defaultdict(list)
        for edge in plan.edges:
            self._entering[edge.last].append(edge)
            self._leaving[edge.first].append(edge)
        self._acknowledged = acknowledged(plan.table)

    def run(self, microbatches: Sequence[Batch], loss_tokens: int, observer: Observer) -> Tensor:
        """Forward and backward of every microbatch; gradients add up in the parameters.

        Args:
            microbatches: this data-parallel rank's share of the step, streams padded to their sharded length.
            loss_tokens: labels of the whole step, all ranks together: the loss is divided by it.
            observer: entered around every action.

        Returns:
            This rank's share of the loss, already divided; zero unless this rank has the last stage.
        """
        held = Held(loss_tokens=loss_tokens, loss=self._no_loss(microbatches[0]))
        under_way = _UnderWay()
        for step in self._steps:
            batch = microbatches[step.microbatch]
            if isinstance(step, Action):
                self._arrive(step, held, under_way)
                with observer.action(step):
                    self._compute(step, batch, held)
                    self._hand_over(step, held)
            else:
                with observer.action(step):
                    (self._send if step.operation == "send" else self._receive)(step, batch, held, under_way)
        under_way.finish()
        return held.loss

    def _no_loss(self, batch: Batch) -> Tensor:
        dtype = torch.promote_types(self._dtype, torch.float32)
        return torch.zeros((), dtype=dtype, device=batch.labels.device)

    # ---- computing ----------------------------------------------------------------------------------------------

    def _compute(self, action: Action, batch: Batch, held: Held) -> None:
        stage, microbatch = action.stage, action.microbatch
        layout = self._plan.layout
        self._model.mask_key.microbatch = self._comm.coordinate.dp * layout.microbatches + microbatch
        self._comm.phase = "forward" if action.kind == "forward" else "backward"
        if action.kind == "forward":
            names = {name for edge in self._leaving[stage] for name in edge.carries}
            held.forward(self.parts[stage], batch, (stage, microbatch), names)
        elif action.kind == "backward":
            held.backward((stage, microbatch))
        elif action.kind == "backward_input":
            with self._deferral.collect(stage, microbatch):
                held.backward((stage, microbatch))
        else:
            self._deferral.run(stage, microbatch)

    def _hand_over(self, action: Action, held: Held) -> None:
        """Gives what an action made to the other stages of this rank."""
        if action.gives is None:
            return
        direction, stage, microbatch = action.gives
        for edge in (self._leaving if direction == "forward" else self._entering)[stage]:
            other = edge.last if direction == "forward" else edge.first
            if other in self.parts:
                for name in edge.carries:
                    held.enter((direction, other, microbatch), name, held.made[name].detach())

    # ---- sending and receiving ----------------------------------------------------------------------------------

    def _send(self, transfer: Transfer, batch: Batch, held: Held, under_way: "_UnderWay") -> None:
        """Sends what the action before made."""
        messages = []
        for name in transfer.edge.carries:
            self._check(held.made[name], self._edge_shape(name, batch), name, transfer)
            messages.append(self._message(transfer, name, held.made[name].detach().contiguous()))
        peer = self._plan.ranks[transfer.peer]
        pending = self._comm.send(messages, peer, direction=transfer.direction)
        under_way.sent[transfer] = list(zip(messages, pending, strict=True))

    def _receive(self, transfer: Transfer, batch: Batch, held: Held, under_way: "_UnderWay") -> None:
        """Posts buffers; `_arrive` waits for them."""
        messages = [
            self._message(
                transfer, name, torch.empty(self._edge_shape(name, batch), dtype=self._dtype, device=self._comm.device)
            )
            for name in transfer.edge.carries
        ]
        pending = self._comm.receive(messages, self._plan.ranks[transfer.peer], direction=transfer.direction)
        under_way.posted[transfer] = list(zip(messages, pending, strict=True))

    def _arrive(self, action: Action, held: Held, under_way: "_UnderWay") -> None:
        """Waits for what an action uses."""
        if action.gives is None:
            return
        direction, stage, microbatch = action.gives
        for edge in (self._entering if direction == "forward" else self._leaving)[stage]:
            transfer = Transfer(operation="receive", direction=direction, edge=edge, microbatch=microbatch)
            if transfer not in under_way.posted:
                continue
            for name, (message, pending) in zip(edge.carries, under_way.posted.pop(transfer), strict=True):
                pending.wait()
                held.enter(action.gives, name, message.tensor)
            if direction == "backward":
                under_way.release(edge, "forward", (microbatch,))
            else:
                under_way.release(edge, "backward", self._acknowledged["forward", edge.first, microbatch])

    def _message(self, transfer: Transfer, name: Carried, tensor: Tensor) -> Message:
        return Message(tensor=tensor, site=Site(name=transfer.edge.name, stream=name))

    def _edge_shape(self, name: Carried, batch: Batch) -> tuple[int, int, int]:
        plan = self._plan
        positions, width = carried_size(
            plan.config,
            name,
            source_length=batch.stream_length("source") if plan.config.has_encoder else 0,
            target_length=batch.stream_length("target") if plan.config.has_decoder else 0,
            tp=plan.layout.tp,
            sp=plan.layout.sp,
        )
        return positions, batch.num_sequences, width

    def _check(self, tensor: Tensor, expected: tuple[int, ...], name: str, transfer: Transfer) -> None:
        if tuple(tensor.shape) != expected or tensor.dtype != self._dtype:
            raise RuntimeError(
                f"{transfer.edge.name} {transfer}: {name} is {tuple(tensor.shape)} {tensor.dtype}, "
                f"the edge carries {expected} {self._dtype}"
            )
        if transfer.direction == "forward" and not tensor.requires_grad:
            raise RuntimeError(f"{transfer.edge.name} {transfer}: {name} has no gradient to send back")


class _UnderWay:
    """Messages whose end has not been waited for; a tensor stays until then."""

    def __init__(self) -> None:
        self.sent: dict[Transfer, list[tuple[Message, Pending]]] = {}
        self.posted: dict[Transfer, list[tuple[Message, Pending]]] = {}

    def release(self, edge: Edge, direction: Direction, microbatches: Sequence[int]) -> None:
        """Lets go of what was sent over an edge and is known to have been used."""
        for microbatch in microbatches:
            sent = Transfer(operation="send", direction=direction, edge=edge, microbatch=microbatch)
            for _, pending in self.sent.pop(sent):
                pending.wait()

    def finish(self) -> None:
        """Waits for the sends that nothing answered."""
        for messages in self.sent.values():
            for _, pending in messages:
                pending.wait()
        self.sent.clear()
        assert not self.posted, f"nobody used {', '.join(map(str, self.posted))}"
