"""Who runs the schedule: one executor over a table of actions, for one stage as for many.

An edge carries named tensors (`source`, `memory`, `target`), forward the hidden states and backward their gradients.
Token ids and masks never travel: every stage cuts its own microbatch from the batch. Shape, dtype and requires_grad of
each tensor are checked here before data moves, because gloo accepts a message that is too short and dies of one that is
too long.

A stage that only hands the memory on sends the very tensor it received; its gradient is what came from the next stage
plus what its own blocks add. Receives are waited for before they are used, sends when the stage they went to answers.
"""

import itertools
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from models.batch import Batch
from models.model import Hidden, Model
from parallel.comm import Comm, Pending, Site, Transfer
from parallel.partition import Carried
from parallel.plan import Plan
from parallel.schedule import Action, batches, with_transfers


class Observer(Protocol):
    """Watches the executor; what it enters around an action must not change what the action does."""

    def action(self, action: Action) -> AbstractContextManager[None]:
        """Around one forward, backward or transfer."""

    def synchronise(self) -> AbstractContextManager[None]:
        """Around gradient synchronisation and update."""


class Unobserved:
    """Watches nothing."""

    def action(self, action: Action) -> AbstractContextManager[None]:
        return nullcontext()

    def synchronise(self) -> AbstractContextManager[None]:
        return nullcontext()


class Pipeline:
    """Runs this rank's row of the schedule.

    Args:
        model: this rank's stage.
        plan: tells stage, edges and schedule.
        comm: sends and receives.
        dtype: of hidden states on the edges.
    """

    def __init__(self, *, model: Model, plan: Plan, comm: Comm, dtype: torch.dtype) -> None:
        self._model, self._plan, self._comm, self._dtype = model, plan, comm, dtype
        self._stage = plan.stages[comm.coordinate.pp]
        self._actions = batches(with_transfers(plan.table)[comm.coordinate.pp])

    def run(self, microbatches: Sequence[Batch], loss_tokens: int, observer: Observer) -> Tensor:
        """Forward and backward of every microbatch; gradients add up in the parameters.

        Args:
            microbatches: this data-parallel rank's share of the step, streams padded to their sharded length.
            loss_tokens: labels of the whole step, all ranks together: the loss is divided by it.
            observer: entered around every action.

        Returns:
            This rank's share of the loss, already divided; zero unless this is the last stage.
        """
        step = _Step(self._model, microbatches, loss_tokens, torch.promote_types(self._dtype, torch.float32))
        sends: dict[int, list[Pending]] = {-1: [], +1: []}
        for batch in self._actions:
            with observer.action(batch[0]):
                if batch[0].is_transfer:
                    self._exchange(step, batch, sends[batch[0].peer])
                else:
                    self._compute(step, batch[0])
        for send in itertools.chain(*sends.values()):
            send.wait()
        return step.loss

    def _compute(self, step: "_Step", action: Action) -> None:
        microbatch = action.microbatch
        layout = self._plan.layout
        self._model.mask_key.microbatch = self._comm.coordinate.dp * layout.microbatches + microbatch
        if action.kind == "forward":
            self._comm.phase = "forward"
            step.forward(microbatch)
        else:
            self._comm.phase = "backward"
            step.backward(microbatch)

    def _exchange(self, step: "_Step", actions: Sequence[Action], sends: list[Pending]) -> None:
        """Issues a batch of transfers with one stage and waits for what is received; `sends` are under way to it."""
        transfers: list[Transfer] = []
        places: list[tuple[int, Action, Carried, Tensor]] = []
        for action in actions:
            sent, names = self._edge(action)
            for name in names:
                held = step.place(action)
                expected = self._edge_shape(name, step.microbatches[action.microbatch])
                if sent:
                    tensor = held.pop(name)
                    self._check(tensor, expected, name, action)
                    tensor = tensor.detach().contiguous()
                else:
                    tensor = torch.empty(expected, dtype=self._dtype, device=self._comm.device)
                    places.append((len(transfers), action, name, tensor))
                transfers.append(
                    Transfer(
                        operation="send" if sent else "receive",
                        tensor=tensor,
                        offset=action.peer,
                        site=Site(name=self._edge_name(action), stream=name),
                    )
                )
        pending = self._comm.exchange(transfers)
        for index, action, name, tensor in places:
            pending[index].wait()
            step.place(action)[name] = tensor.requires_grad_(action.kind == "receive_forward")
        if places:
            # Whoever sends has received what was sent to it before. A send that is waited for lets its tensor go.
            for send in sends:
                send.wait()
            sends.clear()
        received = {index for index, *_ in places}
        sends += [work for index, work in enumerate(pending) if index not in received]

    def _edge(self, action: Action) -> tuple[bool, tuple[Carried, ...]]:
        """Whether this stage sends, and which tensors cross the edge."""
        names = self._stage.outputs if action.peer > 0 else self._stage.inputs
        return action.kind.startswith("send"), names

    def _edge_name(self, action: Action) -> str:
        first = self._stage.index + min(action.peer, 0)
        return f"edge.{first}-{first + 1}"

    def _edge_shape(self, name: Carried, batch: Batch) -> tuple[int, int, int]:
        length = batch.stream_length("target" if name == "target" else "source")
        if self._plan.layout.sp:
            length //= self._plan.layout.tp
        return length, batch.num_sequences, self._plan.config.width

    def _check(self, tensor: Tensor, expected: tuple[int, ...], name: str, action: Action) -> None:
        is_forward = action.kind == "send_forward"
        if tuple(tensor.shape) != expected or tensor.dtype != self._dtype:
            raise RuntimeError(
                f"{self._edge_name(action)} {action}: {name} is {tuple(tensor.shape)} {tensor.dtype}, "
                f"the edge carries {expected} {self._dtype}"
            )
        if is_forward and not tensor.requires_grad:
            raise RuntimeError(f"{self._edge_name(action)} {action}: {name} has no gradient to send back")


class _Step:
    """What a stage holds between the actions of one step."""

    def __init__(self, model: Model, microbatches: Sequence[Batch], loss_tokens: int, loss_dtype: torch.dtype) -> None:
        self.microbatches = microbatches
        self.loss = torch.zeros((), dtype=loss_dtype, device=microbatches[0].labels.device)
        self._model, self._loss_tokens = model, loss_tokens
        self._inputs: dict[int, Hidden] = {}
        self._outputs: dict[int, dict[str, GradientEdge]] = {}
        self._to_send: dict[int, Hidden] = {}
        self._gradients: dict[int, Hidden] = {}
        self._gradients_to_send: dict[int, Hidden] = {}

    def place(self, action: Action) -> Hidden:
        """Where the tensors of a transfer are taken from or put, by name."""
        places = {
            "receive_forward": self._inputs,
            "send_forward": self._to_send,
            "receive_backward": self._gradients,
            "send_backward": self._gradients_to_send,
        }
        return places[action.kind].setdefault(action.microbatch, {})

    def forward(self, microbatch: int) -> None:
        batch = self.microbatches[microbatch]
        left = self._model(batch, self._inputs.setdefault(microbatch, {}))
        if "logits" in left:
            assert self._model.loss is not None
            loss = self._model.loss(left["logits"], batch.labels) / self._loss_tokens
            self.loss = self.loss + loss.detach()
            left = {"loss": loss}
        else:
            self._to_send[microbatch] = left
        # An edge of the graph instead of the tensor: what was sent need not be kept to start the backward. What has no
        # gradient is refused where it is sent.
        edges = {name: get_gradient_edge(tensor) for name, tensor in left.items() if tensor.requires_grad}
        self._outputs[microbatch] = edges

    def backward(self, microbatch: int) -> None:
        outputs, gradients = self._outputs.pop(microbatch), self._gradients.pop(microbatch, {})
        torch.autograd.backward(list(outputs.values()), [gradients.get(name) for name in outputs])
        entered = self._inputs.pop(microbatch)
        received = {name: tensor.grad for name, tensor in entered.items()}
        assert None not in received.values(), f"no gradient for {[n for n, g in received.items() if g is None]}"
        self._gradients_to_send[microbatch] = {n: g for n, g in received.items() if g is not None}
