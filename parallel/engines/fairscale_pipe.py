"""How does fairscale's Pipe run the stages of a model, all of them from one process?

    rank 0    every stage, on a device of its own       cpu for all, or cuda:0 ... cuda:pp-1
    others    no stage, no parameter: rank 0 tells them loss and gradient norm, and nothing else is sent

    stages    the plan's, or by a tool of fairscale's from the first batch, to which embedding and head are layers too
    time      seconds of each layer, forward and backward, over and over for a second         balance_by_time
    size      bytes of its parameters and of what it allocates; for CUDA's allocator alone    balance_by_size

Pipe runs microbatch i on stage j at clock i + j, and backwards when all forwards are done (GPipe, arXiv 1811.06965).
Threads of its own do so, one a device. What it is given it cuts along dim 0 into chunks, where tensors here have their
length. So it is given the numbers of the microbatches, one each, by which every layer finds its part of the batch; a
ragged one is like others. What a stage hands on ends with the number: where Pipe recomputes, it pairs gradients by
order with those tensors that need one, wrongly if one before them needs none.

`recompute = "full"` is Pipe's checkpoint of a stage: its input is kept, not that of each block. Pipe refuses one
parameter on two devices, so on GPUs nothing is tied over stages. Source: fairscale 0.4.13, nn/pipe. Left out: Pipe's
deferred batch norm and skip connections; tensor and data parallelism (`parallel/engines/fairscale.py`).
"""

import dataclasses
import functools
import itertools
import weakref
from collections.abc import Sequence
from typing import Any, cast

import torch
from fairscale.nn.pipe import Pipe
from fairscale.nn.pipe.balance import balance_by_size, balance_by_time
from fairscale.nn.pipe.worker import join_workers
from torch import Tensor, nn

from models.architectures import build
from models.batch import Batch
from models.dropout import Dropout, MaskKey
from models.head import CrossEntropy
from parallel.comm import Comm
from parallel.engines.engine import Quantity, StepFacts
from parallel.engines.fairscale_limits import unsupported
from parallel.engines.foreign import ForeignEngine
from parallel.engines.gathered import Gathered, put_together
from parallel.engines.layer_list import Listed, first_layers, layer_list
from parallel.engines.listed_layers import Current, Parts, States, TiedRows, packed, qualified_name, unpacked
from parallel.engines.settings import EngineSettings
from parallel.engines.silence import silence
from parallel.pipeline import Observer
from parallel.plan import WHOLE, Plan
from parallel.sequence import microbatches


def unsupported_size() -> str | None:
    """Why stages cannot be cut by size here, as one line; None when they can."""
    if torch.cuda.is_available():
        return None
    return "fairscale's balance_by_size reads CUDA's allocator, and there is no GPU: use fairscale:time"


class NumberedLayer(nn.Module):
    """A layer that finds its microbatch by the number that comes with the states: (*states, number) -> the same.

    Every layer has a `Current` and a `MaskKey` of its own: threads of several stages run at once.
    """

    def __init__(self, listed: Listed, layer: nn.Module, parts: Parts, current: Current, *, seed: int) -> None:
        super().__init__()
        self.layer, self.current, self.key = layer, current, MaskKey(seed=seed)
        self._use = None if listed.use is None else functools.partial(listed.use, parts, current)
        for module in layer.modules():
            if isinstance(module, Dropout):
                module.key = self.key

    def forward(self, states: States) -> States:
        """The first layer is given the number alone."""
        *tensors, number = unpacked(states)
        self.current.index = self.key.microbatch = int(number)
        given = packed(*tensors)
        made = self.layer(given) if self._use is None else self._use(cast("TiedRows", self.layer), given)
        return packed(*unpacked(made), number)


class ScoredLayer(NumberedLayer):
    """The last layer with the loss: (hidden_LBD, number) -> summed cross-entropy, [1]."""

    def forward(self, states: States) -> Tensor:
        """Pipe concatenates what the last stage gives of each microbatch."""
        logits_LBV, _ = super().forward(states)
        loss: Tensor = CrossEntropy()(logits_LBV, self.current.batch.labels)
        return loss.reshape(1)


class PipeEngine(ForeignEngine):
    """One rank of one layout of one model.

    Args:
        plan, comm: as for every engine.
        settings: likewise; the device is `cpu`, or any GPU: rank 0 drives the first pp of them.
        partition: `time` or `size`; empty for the plan's stages.

    Raises ValueError for a layout that `unsupported` names, and on GPUs for too few of them and for tied parameters.
    """

    has_own_threads = True
    balance: tuple[int, ...] = ()
    """Layers of each stage; none on ranks that have no stage, nor before fairscale's tool has seen a batch."""
    optimizer: torch.optim.Optimizer | None = None
    _pipe: Any = None

    def __init__(self, *, plan: Plan, comm: Comm, settings: EngineSettings, partition: str = "") -> None:
        reason = unsupported(plan.config, plan.layout) or no_devices(plan, settings.device)
        super().__init__(plan=plan, comm=comm, settings=settings, reason=reason)
        self._partition = partition
        self._layers: Any = nn.Sequential()
        if comm.rank == 0:
            self._layers = _layers(plan, settings)
            if not partition:
                self._make_pipe(_balance_of_plan(plan))
        self._names = _names(plan, self._layers)
        if self._names:
            self.optimizer = settings.optimizer_of(self._names)

    def step(self, batch: Batch, *, update: bool = True, observer: Observer | None = None) -> StepFacts:
        """As `parallel.engines.engine.Engine` says; `observer` is not read: actions are Pipe's threads' own."""
        loss_tokens = self._all_loss_tokens(batch)
        told = torch.zeros(2, dtype=torch.promote_types(self.dtype, torch.float32), device=self.device)
        if self.optimizer is not None:
            told[0] = self._run(batch, loss_tokens)
            told[1] = self._norm()
            if update:
                self.optimizer.step()
        for layer in self._layers:
            layer.key.step += update
        loss, norm = self._sum(told, "pp").tolist()
        return StepFacts(loss=loss, loss_tokens=loss_tokens, gradient_norm=norm)

    def gather(self, quantity: Quantity) -> Gathered | None:
        """Whole gradients or weights on rank 0, None elsewhere. Collective; for checks, not for speed."""
        held = {}
        for parameter, name in self._names.items():
            tensor = parameter.detach() if quantity == "weight" else parameter.grad
            if tensor is not None:
                held[name] = (WHOLE, tensor.to("cpu", copy=True))
        everyone = self.comm.collect_objects(held)
        return None if everyone is None else put_together(everyone)

    # ---- what this rank holds ---------------------------------------------------------------------------------

    @property
    def held_blocks(self) -> tuple[int, ...]:
        """All on rank 0, none on others."""
        return tuple(range(self.plan.config.num_blocks)) if self._names else ()

    @property
    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self._names)

    @property
    def parameter_bytes(self) -> int:
        return sum(parameter.numel() * parameter.element_size() for parameter in self._names)

    @property
    def gradient_bytes(self) -> int:
        """Zero before the first step."""
        return sum(parameter.grad.nbytes for parameter in self._names if parameter.grad is not None)

    @property
    def optimizer_bytes(self) -> int:
        """Bytes of the state tensors as they are; zero before the first step, and without stages."""
        states = self.optimizer.state.values() if self.optimizer is not None else ()
        return sum(value.nbytes for state in states for value in state.values() if isinstance(value, Tensor))

    # ---- inside -------------------------------------------------------------------------------------------------

    def _run(self, batch: Batch, loss_tokens: int) -> Tensor:
        """Forward and backward of the whole step -> its loss."""
        parts = microbatches(batch.to(self.device, self.dtype), self.plan.layout)
        if self._pipe is None:
            self._give(parts, [self.device] * len(self._layers))
            self._make_pipe(self._found_balance())
        devices = zip(self._pipe.devices, self.balance, strict=True)
        self._give(parts, [device for device, count in devices for _ in range(count)])
        self._layers.zero_grad(set_to_none=True)
        losses: Tensor = self._pipe(torch.arange(len(parts)))
        loss = losses.sum() / loss_tokens
        torch.autograd.backward(loss)
        return loss.detach()

    def _give(self, parts: Sequence[Batch], devices: Sequence[torch.device]) -> None:
        """Tells each layer, which lives on one of the devices, the microbatches of the step."""
        on = {device: [part.to(device) for part in parts] for device in dict.fromkeys(devices)}
        for layer, device in zip(self._layers, devices, strict=True):
            layer.current.batches = on[device]

    def _found_balance(self) -> list[int]:
        """By fairscale's tool, from the first microbatch; it profiles copies of the layers."""
        pp, number = self.plan.layout.pp, torch.tensor([0])
        with silence():
            if self._partition == "time":
                found = balance_by_time(pp, self._layers, number, device=self.device)
            else:
                # Copies of the parameters in a step, as its documentation has them.
                copies = 4.0 if isinstance(self.optimizer, torch.optim.AdamW) else 2.0
                found = balance_by_size(pp, self._layers, number, param_scale=copies, device=self.device)
        return [*found]

    def _make_pipe(self, balance: Sequence[int]) -> None:
        layout = self.plan.layout
        with silence():
            # It tells that torch has taken it over, which torch has undone since.
            self._pipe = Pipe(
                self._layers,
                balance,
                devices=_devices(self.device, layout.pp),
                chunks=layout.microbatches,
                checkpoint="always" if layout.recompute == "full" else "never",
            )
        self.balance = tuple(balance)
        weakref.finalize(self, _end_threads, self._pipe.pipeline)

    def _norm(self) -> float:
        square = torch.zeros((), dtype=torch.promote_types(self.dtype, torch.float32), device=self.device)
        for parameter in self._names:
            if parameter.grad is not None:
                square += torch.linalg.vector_norm(parameter.grad, dtype=square.dtype).square().to(self.device)
        return square.sqrt().item()


def no_devices(plan: Plan, device: torch.device) -> str | None:
    """Why these GPUs cannot hold the stages, as one line."""
    pp = plan.layout.pp
    if device.type != "cuda":
        return None
    num_gpus = torch.cuda.device_count()
    if num_gpus < pp:
        return f"fairscale's Pipe drives a GPU a stage from one process: pp = {pp}, and {num_gpus} can be seen"
    if plan.config.tie_groups:
        return "fairscale's Pipe ties no parameters over GPUs: " + ", ".join(plan.config.tie_groups[0])
    return None


def _devices(device: torch.device, pp: int) -> list[torch.device]:
    """One a stage."""
    return [torch.device("cuda", index) if device.type == "cuda" else device for index in range(pp)]


def _layers(plan: Plan, settings: EngineSettings) -> nn.Sequential:
    """The whole model, with its values."""
    with torch.device("meta"):
        model = build(plan.config)
    layout = plan.layout
    # Pipe's own checkpoints stand for those of whole blocks.
    kept = dataclasses.replace(plan, layout=layout.replace(recompute="none")) if layout.recompute == "full" else plan
    parts = Parts(model, kept, seed=settings.seed, dtype=settings.dtype, device=settings.device)
    listed = layer_list(plan.config)
    rows: nn.Module | None = None
    layers: list[NumberedLayer] = []
    for place, one in enumerate(listed):
        current = Current()
        if one.use is None:
            layer = one.kind(parts, current, *one.arguments)
        else:
            # One module at all its places.
            layer = rows = rows or one.kind(parts, *one.arguments)
        kind = ScoredLayer if place == len(listed) - 1 else NumberedLayer
        layers.append(kind(one, layer, parts, current, seed=settings.seed))
    return nn.Sequential(*layers).train()


def _balance_of_plan(plan: Plan) -> list[int]:
    """Layers of each of the plan's stages."""
    listed = layer_list(plan.config)
    starts = [*first_layers(listed, plan.stages), len(listed)]
    return [last - first for first, last in itertools.pairwise(starts)]


def _names(plan: Plan, layers: nn.Sequential) -> dict[nn.Parameter, str]:
    """Canonical name of every parameter."""

    def layer_of(number: str) -> nn.Module:
        return layers.get_submodule(f"{number}.layer")

    told = ((local.replace(".layer.", ".", 1), parameter) for local, parameter in layers.named_parameters())
    return {parameter: qualified_name(plan, layer_of, local) for local, parameter in told}


def _end_threads(pipeline: Any) -> None:
    """Pipe ends its threads when it is deleted, and waits for them for ever where the interpreter has ended them."""
    join_workers(pipeline.in_queues, pipeline.out_queues)
    pipeline.in_queues = pipeline.out_queues = ()
