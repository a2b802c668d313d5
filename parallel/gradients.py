"""How the ranks' partial gradients become the gradient of one process, and its norm.

All gradients of a rank are views of one flat buffer, so that no collective needs a copy. After the last backward of a
step these are summed, each over the ranks whose parts add up:

    sequence      parameters that every tp rank holds whole but that saw a shard of the sequence (sp)     over tp
    kv_replica    rows of KV heads that several tp ranks hold, having fewer heads than ranks              over those
    tied          parameters of which several pp ranks hold a copy (embeddings, head, relative biases)      over those
    dp            everything                                                                              over dp

One all-reduce each (one a shared parameter for `tied`), once a step whatever the number of microbatches. In buckets
(`parallel/buckets.py`) the sums over dp leave while the backward runs, and come before the others. Under ZeRO 1 it is a
reduce-scatter instead, after which a rank has the sums of its own slice of the buffer and partial ones beside it; the
buffer is padded to slices of equal length. Gradients that products write stand behind all others of their bucket and
are not zeroed: the first of a step overwrites them (`parallel/deferral.py`). The sums are linear, so their order does
not matter. The loss is divided by the step's tokens before the backward: nothing is averaged here. The norm counts
every parameter once: of copies, only the first counts. Left out: clipping.
"""

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from parallel.arrivals import Arrivals, Bucket
from parallel.buckets import fill, home_block
from parallel.comm import Comm, Pending, Site
from parallel.deferral import Deferral, Writers
from parallel.plan import Plan


@dataclasses.dataclass(frozen=True, slots=True)
class Norm:
    """A global norm that is being summed up."""

    square: Tensor
    pending: Pending

    def wait(self) -> float:
        """The norm, when every rank's share has come."""
        self.pending.wait()
        return self.square.sqrt().item()


class Gradients:
    """The gradients of one rank's stages.

    Attributes:
        flat: all gradients, bucket after bucket, and padding.
        num_elements: without the padding.
        own: the slice of `flat` that this rank updates; all of it without ZeRO.
        views: gradient of each parameter, a view of `flat`, by its local name.
        counted: what this rank counts towards the norm; all ranks of a replica together count every number once.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        comm: Comm,
        deferral: Deferral,
        writers: Writers,
        stages: Iterable[nn.Module],
    ) -> None:
        self._plan, self._comm, self._deferral = plan, comm, deferral
        parameters = dict(model.named_parameters())
        first = next(iter(parameters.values()))
        self.num_elements = sum(p.numel() for p in parameters.values())
        self._num_slices = plan.layout.dp if plan.layout.zero else 1
        num_padded = -(-self.num_elements // self._num_slices) * self._num_slices
        self.flat = torch.zeros(num_padded, dtype=first.dtype, device=first.device)
        self.own = self.own_of(self.flat)
        self.views: dict[str, Tensor] = {}

        in_sequence = {name for name in parameters if plan.sums_over_sequence(name)}
        only_written = _only_written(model, writers)
        written = {name for name, one in parameters.items() if id(one) in only_written} - in_sequence
        self._written = [parameters[name] for name in written]
        self._added: list[Tensor] = []
        buckets = []
        for names in self._bucketed({name: one.numel() for name, one in parameters.items()}, in_sequence):
            ordered = sorted(names, key=lambda name: (name not in in_sequence, name in written))
            self._lay(ordered, parameters)
            self._added.append(self._span([name for name in ordered if name not in written]))
            buckets.append(Bucket(self._span(ordered), [parameters[name] for name in ordered]))
        self._sequence = self._span([name for name in parameters if name in in_sequence])
        self._arrivals: Arrivals | None = None
        if plan.layout.gradient_bucket_bytes:
            self._arrivals = Arrivals(
                buckets,
                stages=stages,
                writers=writers,
                deferral=deferral,
                microbatches=plan.layout.microbatches,
                comm=comm,
            )
        self._replicated = [rows for name in self.views if (rows := self._replicated_rows(name)) is not None]
        parts = (self._own_part(part) for name in self.views for part in self._counted(name))
        self.counted = [part for part in parts if part.numel()]

    def _bucketed(self, counts: Mapping[str, int], in_sequence: Collection[str]) -> list[list[str]]:
        """Names of the parameters of each bucket, in the order of sending; all in one where there is no least."""
        least_bytes = self._plan.layout.gradient_bucket_bytes
        if not least_bytes:
            return [list(counts)]
        home = {name: home_block(self._plan, self._comm.coordinate.pp, name) for name in counts}
        elements: dict[int, int] = defaultdict(int)
        for name, block in home.items():
            elements[block] += 0 if name in in_sequence else counts[name]
        buckets = [
            [name for name in counts if home[name] in blocks and name not in in_sequence]
            for blocks in fill(elements, least_bytes / self.flat.element_size())
        ]
        return buckets + [[name for name in counts if name in in_sequence]] * bool(in_sequence)

    def _lay(self, names: Iterable[str], parameters: Mapping[str, nn.Parameter]) -> None:
        """Makes the gradients of some parameters views of the next places of the buffer."""
        offset = sum(view.numel() for view in self.views.values())
        for name in names:
            parameter = parameters[name]
            view = self.flat[offset : offset + parameter.numel()].view(parameter.shape)
            parameter.grad = self.views[name] = view
            offset += parameter.numel()

    def _span(self, names: Sequence[str]) -> Tensor:
        """The part of the buffer that some gradients fill without a gap."""
        first = min((self.views[name].storage_offset() for name in names), default=0)
        return self.flat[first : first + sum(self.views[name].numel() for name in names)]

    def own_of(self, flat: Tensor) -> Tensor:
        """This rank's slice of a buffer that is laid out as `flat`."""
        return flat.chunk(self._num_slices)[self._comm.coordinate.dp if self._num_slices > 1 else 0]

    def zero(self) -> None:
        """Forgets the last step."""
        torch._foreach_zero_(self._added)
        self._deferral.begin(self._written)
        if self._arrivals is not None:
            self._arrivals.begin()

    def synchronise(self) -> None:
        """Turns partial gradients into whole ones; the result stands in `views` and in every parameter's `grad`."""
        self._deferral.finish()
        if self._arrivals is not None:
            self._arrivals.finish()
        if self._sequence.numel():
            self._all_reduce(self._sequence, "tp", "gradient.sequence")
        if self._comm.size("kv_replica") > 1 and self._replicated:
            joined = torch.cat([rows.reshape(-1) for rows in self._replicated])
            self._all_reduce(joined, "kv_replica", "gradient.kv_replica")
            for rows, summed in zip(
                self._replicated, joined.split([rows.numel() for rows in self._replicated]), strict=True
            ):
                rows.copy_(summed.view(rows.shape))
        for shared in self._plan.shared:
            holder = dict(shared.holders).get(self._comm.coordinate.pp)
            if holder is not None:
                self._all_reduce(self.views[holder], f"tied:{shared.name}", f"gradient.tied.{shared.name}")
        if self._arrivals is not None:
            return
        if self._num_slices == 1:
            self._all_reduce(self.flat, "dp", "gradient.dp")
            return
        summed, pending = self._comm.reduce_scatter(self.flat, "dp", site=Site(name="gradient.dp"), phase="step")
        pending.wait()
        self.own.copy_(summed)

    def gather(self) -> None:
        """Makes every number of `views` whole where ZeRO left slices. Collective; for checks, not for speed."""
        if self._num_slices == 1:
            return
        mine = self._comm.coordinate
        for other, own in self._comm.gather_objects((mine, self.own.to("cpu", copy=True))):
            if dataclasses.replace(other, dp=mine.dp) == mine:
                self.flat.chunk(self._num_slices)[other.dp].copy_(own)

    def start_norm(self) -> Norm:
        """Begins to sum up the global norm over the model: each parameter counted once. One scalar is reduced."""
        dtype = torch.promote_types(self.flat.dtype, torch.float32)
        square = self.flat.new_zeros((), dtype=dtype)
        if self.counted:
            square = torch.stack(torch._foreach_norm(self.counted, 2, dtype)).square().sum()  # noqa: SLF001, one call
        site = Site(name="gradient.norm")
        pending = self._comm.all_reduce(square, "model", site=site, phase="step")
        if self._num_slices > 1:
            pending.wait()
            pending = self._comm.all_reduce(square, "dp", site=site, phase="step")
        return Norm(square, pending)

    def _counted(self, name: str) -> list[Tensor]:
        """The parts of a gradient that this rank counts; copies elsewhere count the others."""
        view, tp = self.views[name], self._comm.coordinate.tp
        for shared in self._plan.shared:
            is_held_here = dict(shared.holders).get(self._comm.coordinate.pp) == name
            if is_held_here and shared.ranks[0] != self._comm.coordinate.pp:
                return []
        shard = self._plan.shard(name, tp)
        if shard.is_whole:
            return [view] if tp == 0 else []
        if shard.replicas > 1 and tp % shard.replicas:
            return [view.narrow(shard.dim, 0, shard.replicated_rows[0])]
        return [view]

    def _own_part(self, part: Tensor) -> Tensor:
        """What of a part of `flat` stands in this rank's slice."""
        assert part.is_contiguous(), "a rank counts whole rows"
        first, own = part.storage_offset(), self.own.storage_offset()
        start, stop = max(first, own), min(first + part.numel(), own + self.own.numel())
        return self.flat[start : max(start, stop)]

    def _replicated_rows(self, name: str) -> Tensor | None:
        shard = self._plan.shard(name, self._comm.coordinate.tp)
        if shard.replicas == 1:
            return None
        start, stop = shard.replicated_rows
        return self.views[name].narrow(shard.dim, start, stop - start)

    def _all_reduce(self, tensor: Tensor, axis: str, site: str) -> None:
        self._comm.all_reduce(tensor, axis, site=Site(name=site), phase="step").wait()


def _only_written(model: nn.Module, writers: Writers) -> set[int]:
    """Ids of the weights that one product writes and nobody else uses."""
    num_users = Counter(id(one) for module in model.modules() for one in module.parameters(recurse=False))
    weights = {id(own[0]) for own in writers.values()}
    return {weight for weight in weights if num_users[weight] == 1}
