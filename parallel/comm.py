"""Who sends: the one issuer of communication in the native engine.

`Comm` holds the process groups of one mesh for one rank and the verbs on them. It is handed down, nothing is global.
Each verb issues the operation and writes one event; over a group of one rank it does neither and returns at once, so
that degree 1 is plain PyTorch. Verbs over tensors return a `Pending`: `wait()` before the result is used.

Groups are named: the axes `dp pp cp tp`, `model` (pp x cp x tp, all that hold one replica of the model), `kv_replica`
(ranks with the same KV head), `tied:<name>` (pipeline ranks with a copy of one parameter) and one a channel: messages
from one pipeline rank to another in one direction. A channel is first in, first out, and no channel waits for another:
each has a group of its own, which on NCCL is a stream of its own. Control messages (`gather_objects`,
`collect_objects`, `barrier`) are no events: they never happen inside a step.

Verbs call the process group itself: `torch.distributed`'s functions check and log each call in Python, which takes as
long as a small message.
"""

import dataclasses
import datetime
import functools
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions, AllreduceOptions, ReduceScatterOptions

from parallel.ledger import Event, Ledger, Operation, Phase
from parallel.mesh import AXES, Axis, Coordinate, Mesh
from parallel.plan import Plan
from parallel.schedule import Direction
from parallel.transfers import channels

Group = Any
"""torch.distributed.ProcessGroup; typed loosely because builds without distributed lack the class."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Site:
    """Where in the model a communication happens, and whose stream it carries."""

    name: str
    stream: str = "none"


class Pending(Protocol):
    """A communication under way."""

    def wait(self) -> Any:
        """Blocks (or orders the device's stream) until the result may be used."""


class Done:
    """Nothing was sent."""

    def wait(self) -> None:
        return


_DONE = Done()


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Message:
    """One tensor to send, or buffer to fill."""

    tensor: Tensor
    site: Site


class Groups:
    """Makes process groups once and keeps them: many layouts of one world share most of theirs.

    Making a group is collective: every rank of the world must ask for the same lists in the same order.
    """

    def __init__(self, timeout_seconds: float) -> None:
        self._timeout = datetime.timedelta(seconds=timeout_seconds)
        self._made: dict[tuple[str, tuple[int, ...]], Group] = {}

    def make(
        self,
        rank_lists: Sequence[tuple[int, ...]],
        rank: int,
        *,
        carries: str = "collectives",
    ) -> tuple[Group, tuple[int, ...]]:
        """Makes a group for every list and returns the one `rank` is in; (None, ()) when it is in none.

        Groups that carry different things are different groups, also of the same ranks.
        """
        mine: tuple[Group, tuple[int, ...]] = (None, ())
        for ranks in rank_lists:
            if len(ranks) > 1 and (carries, ranks) not in self._made:
                self._made[carries, ranks] = group = dist.new_group(list(ranks), timeout=self._timeout)
                if rank in ranks and dist.get_backend(group) == "nccl":
                    # NCCL connects a group at its first collective, which all members must join; a send between two
                    # stages would come first otherwise.
                    dist.all_reduce(torch.zeros(1, device="cuda"), group=group)
            if rank in ranks:
                mine = (self._made.get((carries, ranks)), ranks)
        return mine


@dataclasses.dataclass(frozen=True, slots=True)
class _Named:
    group: Group
    ranks: tuple[int, ...]


class Comm:
    """The groups and verbs of one rank on one mesh.

    `phase` is set by whoever runs the step; a forward collective that runs while the phase is `backward` belongs to a
    recomputation and is written as such.
    """

    def __init__(
        self, *, mesh: Mesh, rank: int, groups: Mapping[str, _Named], maker: Groups, device: torch.device
    ) -> None:
        self.mesh = mesh
        self.rank = rank
        self.coordinate: Coordinate = mesh.coordinate(rank)
        self.device = device
        self.ledger = Ledger()
        self.phase: Phase = "forward"
        self._groups = dict(groups)
        self._maker = maker
        # On NCCL messages that are not one batch would wait for each other.
        self._coalesces = dist.is_initialized() and dist.get_backend() == "nccl"

    @classmethod
    def create(cls, *, plan: Plan, rank: int, groups: Groups, device: torch.device) -> "Comm":
        """Makes or finds every group that a plan needs. Collective over the world.

        Raises ValueError when the plan's degrees are not the world's size.
        """
        mesh = plan.layout.mesh
        plan.layout.check_world(dist.get_world_size() if dist.is_initialized() else 1)
        named: dict[str, _Named] = {}
        for axis in AXES:
            named[axis] = _Named(*groups.make(mesh.groups(axis), rank))
        for source, target, direction in channels(plan.edges, plan.ranks):
            pairs = [(line[source], line[target]) for line in mesh.groups("pp")]
            name = _channel_name(source, target, direction)
            named[name] = _Named(*groups.make([tuple(sorted(pair)) for pair in pairs], rank, carries=name))
        named["model"] = _Named(*groups.make(mesh.groups("pp", "cp", "tp"), rank))
        replicas = max(1, mesh.tp // plan.config.num_kv_heads)
        named["kv_replica"] = _Named(*groups.make(_runs(mesh.groups("tp"), replicas), rank))
        for shared in plan.shared:
            lists = [tuple(line[pp] for pp in sorted(shared.ranks)) for line in mesh.groups("pp")]
            named[f"tied:{shared.name}"] = _Named(*groups.make(lists, rank))
        return cls(mesh=mesh, rank=rank, groups=named, maker=groups, device=device)

    def size(self, axis: str) -> int:
        """Ranks in this rank's group along `axis`; 1 when it is in none."""
        return max(1, len(self._groups[axis].ranks))

    def position(self, axis: str) -> int:
        """This rank's place in its group along `axis`."""
        ranks = self._groups[axis].ranks
        return ranks.index(self.rank) if ranks else 0

    def group(self, axis: str) -> Group:
        """The process group along `axis`, for engines that communicate on their own; None over one rank."""
        return self._groups[axis].group if self.size(axis) > 1 else None

    def another_group(self, axis: Axis, carries: str) -> Group:
        """A group of the same ranks that carries something else. Collective over the world."""
        return self._maker.make(self.mesh.groups(axis), self.rank, carries=carries)[0]

    def forward_phase(self) -> Phase:
        """Phase of a collective that belongs to a forward: `recompute` while a backward runs."""
        return "recompute" if self.phase == "backward" else self.phase

    # ---- collectives ------------------------------------------------------------------------------------------

    def all_reduce(self, tensor: Tensor, axis: str, *, site: Site, phase: Phase) -> Pending:
        """Sums `tensor` in place over the group."""
        if self.size(axis) == 1:
            return _DONE
        self._write("all_reduce", axis, tensor, site, phase)
        return self._pending(self._groups[axis].group.allreduce([tensor], _asynchronous(AllreduceOptions)))

    def all_gather(
        self, shard: Tensor, axis: str, *, site: Site, phase: Phase, into: Tensor | None = None
    ) -> tuple[Tensor, Pending]:
        """Concatenates the group's equal shards along dim 0, in the order of the ranks.

        `into` is the result's tensor where there is one; `shard` may be this rank's slice of it.
        """
        if self.size(axis) == 1:
            return shard, _DONE
        whole = shard.new_empty((self.size(axis) * shard.shape[0], *shard.shape[1:])) if into is None else into
        self._write("all_gather", axis, whole, site, phase)
        group, options = self._groups[axis].group, _asynchronous(AllgatherOptions)
        return whole, self._pending(group._allgather_base(whole, shard.contiguous(), options))  # noqa: SLF001

    def reduce_scatter(self, whole: Tensor, axis: str, *, site: Site, phase: Phase) -> tuple[Tensor, Pending]:
        """Sums `whole` over the group and keeps this rank's equal slice of dim 0."""
        size = self.size(axis)
        if size == 1:
            return whole, _DONE
        assert whole.shape[0] % size == 0, f"{site.name}: length {whole.shape[0]} over {size} ranks"
        shard = whole.new_empty((whole.shape[0] // size, *whole.shape[1:]))
        self._write("reduce_scatter", axis, whole, site, phase)
        group, options = self._groups[axis].group, _asynchronous(ReduceScatterOptions)
        return shard, self._pending(group._reduce_scatter_base(shard, whole.contiguous(), options))  # noqa: SLF001

    # ---- point to point ---------------------------------------------------------------------------------------

    def send(self, messages: Sequence[Message], peer: int, *, direction: Direction) -> list[Pending]:
        """Sends tensors to the rank at a pipeline coordinate as one batch; one `Pending` a message, in order."""
        name = _channel_name(self.coordinate.pp, peer, direction)
        return self._exchange("send", messages, name, direction)

    def receive(self, messages: Sequence[Message], peer: int, *, direction: Direction) -> list[Pending]:
        """Posts buffers for what the rank at a pipeline coordinate sends, in the order in which it does."""
        name = _channel_name(peer, self.coordinate.pp, direction)
        return self._exchange("receive", messages, name, direction)

    def _exchange(
        self, operation: Operation, messages: Sequence[Message], name: str, direction: Direction
    ) -> list[Pending]:
        channel = self._groups[name]
        for message in messages:
            self._write(operation, "pp", message.tensor, message.site, direction)
        if not self._coalesces:
            other = 1 - channel.ranks.index(self.rank)
            verb = channel.group.send if operation == "send" else channel.group.recv
            return [self._pending(verb([message.tensor], other, 0)) for message in messages]
        (other,) = (rank for rank in channel.ranks if rank != self.rank)
        verb = dist.isend if operation == "send" else dist.irecv
        works = dist.batch_isend_irecv([dist.P2POp(verb, m.tensor, other, group=channel.group) for m in messages])
        if len(works) == len(messages):
            return list(works)
        # NCCL coalesces a batch into one handle: every message is done when it is.
        return [works[-1]] * len(messages)

    # ---- control, outside of steps ------------------------------------------------------------------------------

    def gather_objects(self, value: Any) -> list[Any]:
        """Values of all ranks, on every rank, in the order of the ranks."""
        if self.mesh.size == 1:
            return [value]
        values: list[Any] = [None] * self.mesh.size
        dist.all_gather_object(values, value)
        return values

    def collect_objects(self, value: Any) -> list[Any] | None:
        """Values of all ranks on rank 0, in the order of the ranks; None elsewhere."""
        if self.mesh.size == 1:
            return [value]
        values: list[Any] | None = [None] * self.mesh.size if self.rank == 0 else None
        dist.gather_object(value, values, dst=0)
        return values

    def barrier(self) -> None:
        """Waits for all ranks."""
        if self.mesh.size > 1:
            dist.barrier()

    def _write(self, operation: Operation, axis: str, tensor: Tensor, site: Site, phase: Phase) -> None:
        self.ledger.write(
            Event(
                operation=operation,
                axis=axis.partition(":")[0],
                group_size=2 if operation in ("send", "receive") else self.size(axis),
                payload_bytes=tensor.numel() * tensor.element_size(),
                site=site.name,
                stream=site.stream,
                phase=phase,
            )
        )

    @staticmethod
    def _pending(work: Pending | None) -> Pending:
        assert work is not None, "this rank is not in the group"
        return work


@functools.cache
def _asynchronous(options: Any) -> Any:
    """Options of a collective whose end is waited for elsewhere."""
    made = options()
    made.asyncOp = True
    return made


def _channel_name(source: int, target: int, direction: Direction) -> str:
    return f"channel:{source}>{target} {direction}"


def _runs(groups: Sequence[tuple[int, ...]], length: int) -> list[tuple[int, ...]]:
    """Each group cut into runs of `length` neighbours."""
    return [group[start : start + length] for group in groups for start in range(0, len(group), length)]
