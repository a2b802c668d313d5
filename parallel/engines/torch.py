"""The torch engine: what PyTorch itself offers, put together for the three architectures.

    tp, sp    DTensor and `parallelize_module`, loss_parallel     (`torch_modules.py`, `torch_tensor.py`)
    pp        torch.distributed.pipelining, manual stages         (`torch_pipeline.py`, `torch_anchor.py`)
    dp, zero  DistributedDataParallel, FSDP2                      (`torch_data.py`)

The cut, the microbatches and the padding of lengths are those of the plan; nothing else of the native engine is used.
The loss is divided by the labels of the whole step before the backward. All of torch's data parallelism averages over
the ranks: the loss is multiplied by their number. Tied weights on several stages are torch's to copy and nobody's to
sum: their gradients are summed here. Blocks are compiled as those of the native engine are, inside of what shards,
recomputes or sends. Left out: what `torch_limits.py` says, observers (torch's schedules have none).
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel
from torch.utils.checkpoint import checkpoint

from models.architectures import build
from models.batch import Batch
from models.blocks import DecoderBlock, EncoderBlock
from models.dropout import Dropout, MaskKey
from models.initial import draw
from models.model import Model
from models.slicing import part_of, slice_model
from models.sublayers import Attention
from parallel.comm import Comm
from parallel.compiled import compile_blocks
from parallel.compiled import not_compiled as not_compiled_anywhere
from parallel.engines import torch_modules
from parallel.engines.engine import Quantity, StepFacts
from parallel.engines.foreign import ForeignEngine, unchecked_group
from parallel.engines.gathered import Gathered, put_together
from parallel.engines.settings import EngineSettings
from parallel.engines.torch_data import accumulate, optimizer_of, wrap
from parallel.engines.torch_limits import unsupported
from parallel.engines.torch_pipeline import StageModule, StagePipeline, equal_microbatches
from parallel.engines.torch_tensor import complete_gradients, parallelize
from parallel.layouts import Layout
from parallel.mesh import Coordinate
from parallel.parallelize import choose_attention
from parallel.pipeline import Observer
from parallel.plan import WHOLE, Plan
from parallel.sequence import microbatches, pad


def not_compiled(layout: Layout) -> str | None:
    """Why the blocks of a layout are not compiled, as one line; None when they can be."""
    if layout.tp > 1:
        return (
            "gradients leave a compiled block as plain tensors, and DTensor wants its own: "
            f"tp = {layout.tp}; use tp = 1, or engine = 'native'"
        )
    return not_compiled_anywhere(layout)


class TorchEngine(ForeignEngine):
    """One rank of one layout of one model, by torch's own means; with `compiled`, the first step compiles its blocks.

    Raises ValueError for a layout that `unsupported` names, or `not_compiled` where blocks are to be compiled.
    """

    def __init__(self, *, plan: Plan, comm: Comm, settings: EngineSettings, compiled: bool = False) -> None:
        reason = unsupported(plan.config, plan.layout) or (not_compiled(plan.layout) if compiled else None)
        super().__init__(plan=plan, comm=comm, settings=settings, reason=reason)
        meshes = _meshes(comm, self.device)
        self.model = _stage_model(plan, comm, settings, meshes.get("tp"), compiled=compiled)
        self._parts = {
            stage.index: StageModule(part_of(self.model, plan.config, stage.first, stage.last), plan, stage.index)
            for stage in plan.stages_of(comm.coordinate.pp)
        }
        self._wrapped = {index: wrap(part, plan.layout, comm, meshes.get("dp")) for index, part in self._parts.items()}
        self._pipeline = None
        if plan.layout.pp > 1:
            group = unchecked_group(comm, "pp")
            self._pipeline = StagePipeline(self._wrapped, plan, group, device=self.device, dtype=self.dtype)
        self.optimizer = optimizer_of(self.model, plan.layout, meshes.get("dp"), settings)

    def step(self, batch: Batch, *, update: bool = True, observer: Observer | None = None) -> StepFacts:
        """As `parallel.engines.engine.Engine` says; `observer` is not read."""
        plan = self.plan
        self.optimizer.zero_grad(set_to_none=True)
        num_tokens = self._all_loss_tokens(batch)
        padded = pad(batch, plan).to(self.device, self.dtype)
        cut = microbatches(padded, plan.layout) if self._pipeline is None else equal_microbatches(padded, plan)
        for part in self._parts.values():
            part.microbatches, part.scale = cut, plan.layout.dp / num_tokens
        if plan.layout.tp > 1:
            with loss_parallel():
                loss = self._run(cut)
        else:
            loss = self._run(cut)
        complete_gradients(self.model)
        self._sum_tied_gradients()
        norm = self._gradient_norm()
        total = torch.zeros((), dtype=torch.float64, device=self.device) if loss is None else loss.double()
        total = self._sum(self._sum(total / plan.layout.dp, "dp"), "pp")
        if update:
            self.optimizer.step()
            self.model.mask_key.step += 1
        return StepFacts(loss=total.item(), loss_tokens=num_tokens, gradient_norm=norm)

    def _run(self, cut: list[Batch]) -> Tensor | None:
        """All microbatches forward and backward; this rank's loss where it has one."""
        if self._pipeline is not None:
            return self._pipeline.run(cut)
        (stage,) = self._wrapped.values()
        losses = []
        for number in range(len(cut)):
            with accumulate(stage, is_last=number == len(cut) - 1):
                loss: Tensor = stage(number=torch.tensor(number))
                loss.backward()
            losses.append(loss.detach())
        return torch.stack(losses).sum()

    # ---- gradients ----------------------------------------------------------------------------------------------

    def _sum_tied_gradients(self) -> None:
        """Adds the gradients of a tied weight's copies on other stages: torch's stages know nothing of each other."""
        by_name = {self._canonical(name): parameter for name, parameter in self.model.named_parameters()}
        for shared in self.plan.shared:
            if self.comm.coordinate.pp in shared.ranks:
                parameter = by_name[self._canonical(dict(shared.holders)[self.comm.coordinate.pp])]
                assert parameter.grad is not None
                self._sum(_local(parameter.grad), f"tied:{shared.name}")

    def _gradient_norm(self) -> float:
        """Over the whole model, each number counted once: sums of squares by the axes that shard them."""
        dtype = torch.promote_types(self.dtype, torch.float32)
        squares = torch.zeros(2, 2, dtype=dtype, device=self.device)
        others = {
            self._canonical(name)
            for shared in self.plan.shared
            for rank, name in shared.holders
            if rank == self.comm.coordinate.pp and rank != shared.ranks[0]
        }
        for name, parameter in self.model.named_parameters():
            gradient = parameter.grad
            if gradient is None or self._canonical(name) in others:
                continue
            axes = _sharded_axes(gradient)
            square = torch.linalg.vector_norm(_local(gradient), dtype=dtype).square()
            squares[int("tp" in axes), int("dp" in axes)] += square
        self._sum(over_tp := squares[1].clone(), "tp")
        by_dp = squares[0] + over_tp
        self._sum(over_dp := by_dp[1].clone(), "dp")
        total = by_dp[0] + over_dp
        self._sum(total, "pp")
        return total.sqrt().item()

    # ---- what this rank holds -----------------------------------------------------------------------------------

    @property
    def num_parameters(self) -> int:
        return sum(_local(parameter).numel() for parameter in self.model.parameters())

    @property
    def parameter_bytes(self) -> int:
        return sum(_bytes(parameter) for parameter in self.model.parameters())

    @property
    def gradient_bytes(self) -> int:
        """Of the gradients as they stand after a step; zero before the first."""
        return sum(_bytes(parameter.grad) for parameter in self.model.parameters() if parameter.grad is not None)

    @property
    def optimizer_bytes(self) -> int:
        optimizer = getattr(self.optimizer, "optim", self.optimizer)
        states = (value for state in optimizer.state.values() for value in state.values())
        return sum(_bytes(value) for value in states if isinstance(value, Tensor))

    def gather(self, quantity: Quantity) -> Gathered | None:
        """Whole gradients or weights on rank 0, None elsewhere. Collective; for checks, not for speed."""
        maps: dict[str, list[Tensor]] = {}
        for name, parameter in self.model.named_parameters():
            tensor = parameter.detach() if quantity == "weight" else parameter.grad
            whole = torch.zeros_like(parameter.detach()) if tensor is None else tensor.detach()
            whole = whole.full_tensor() if isinstance(whole, DTensor) else whole
            maps.setdefault(self._canonical(name), []).append(whole.to("cpu", copy=True))
        # What was one parameter stands one map below the other again.
        held = {name: (WHOLE, torch.cat(rows) if len(rows) > 1 else rows[0]) for name, rows in maps.items()}
        everyone = self.comm.collect_objects(held)
        return None if everyone is None else put_together(everyone)

    def _canonical(self, name: str) -> str:
        return torch_modules.origin(self.plan.config, name).canonical(self.plan.config)


def _meshes(comm: Comm, device: torch.device) -> dict[str, DeviceMesh]:
    """A mesh of one axis for dp and tp where they have several ranks; with both, two sides of one mesh."""
    at, axes = comm.coordinate, [axis for axis in ("dp", "tp") if comm.size(axis) > 1]
    groups = [comm.group(axis) for axis in axes]
    if len(axes) == 2:
        ranks = [
            [comm.mesh.rank(Coordinate(dp=dp, pp=at.pp, cp=at.cp, tp=tp)) for tp in range(comm.mesh.tp)]
            for dp in range(comm.mesh.dp)
        ]
        both = DeviceMesh.from_group(groups, device.type, mesh=torch.tensor(ranks), mesh_dim_names=("dp", "tp"))
        return {axis: both[axis] for axis in axes}
    return {
        axis: DeviceMesh.from_group(group, device.type, mesh_dim_names=(axis,))
        for axis, group in zip(axes, groups, strict=True)
    }


def _stage_model(plan: Plan, comm: Comm, settings: EngineSettings, mesh: DeviceMesh | None, *, compiled: bool) -> Model:
    """The blocks of this rank with their values, sharded over the mesh if there is one."""
    config, layout = plan.config, plan.layout
    with torch.device("meta"):
        model = build(config)
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters(remove_duplicate=False)}
    slice_model(model, config, *((stage.first, stage.last) for stage in plan.stages_of(comm.coordinate.pp)))
    if mesh is not None:
        torch_modules.rewrite(model, config)
    for path, module in model.named_modules():
        for leaf, _ in list(module.named_parameters(recurse=False)):
            came = torch_modules.origin(config, f"{path}.{leaf}")
            value = draw(config, came.name, shapes[came.name], seed=settings.seed)[came.start : came.stop]
            setattr(module, leaf, nn.Parameter(value.to(device=settings.device, dtype=settings.dtype).contiguous()))
    if mesh is not None:
        parallelize(model, layout, mesh)
    torch_modules.tie(model, config)
    choose_attention(model, plan)
    if compiled:
        compile_blocks(model)
    _recompute(model, plan.layout)
    for entry in plan.entries:
        if entry.style == "sharded_dropout" and isinstance(module := _found(model, entry.module), Dropout):
            module.salt = 1 + comm.coordinate.tp
    model.mask_key.seed = settings.seed
    return model.train()


def _found(model: Model, name: str) -> nn.Module | None:
    return dict(model.named_modules()).get(name)


def _recompute(model: Model, layout: Layout) -> None:
    """Torch's own checkpointing of cores or blocks."""
    for module in model.modules():
        if isinstance(module, Attention) and layout.recompute == "selective":
            module.core = _checkpointed(module.core, model.mask_key)
        if layout.recompute == "full" and isinstance(module, EncoderBlock | DecoderBlock):
            module.forward = _checkpointed(module.forward, model.mask_key)  # type: ignore[method-assign]


def _checkpointed(function: Callable[..., Tensor], key: MaskKey) -> Callable[..., Tensor]:
    def kept(*inputs: object) -> Tensor:
        number = key.microbatch

        def run(*again: object) -> Tensor:
            # Other microbatches may have come between: masks are those of the one that is computed again.
            key.microbatch = number
            return function(*again)

        # Masks depend on their key alone: no generator has a state to keep.
        recomputed: Tensor = checkpoint(run, *inputs, use_reentrant=False, preserve_rng_state=False)
        return recomputed

    return kept


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _bytes(tensor: Tensor) -> int:
    local = _local(tensor)
    return local.numel() * local.element_size()


def _sharded_axes(tensor: Tensor) -> set[str]:
    """Axes of the mesh over which ranks hold different parts of a tensor."""
    if not isinstance(tensor, DTensor):
        return set()
    names = tensor.device_mesh.mesh_dim_names or ()
    return {name for name, placement in zip(names, tensor.placements, strict=True) if not placement.is_replicate()}
