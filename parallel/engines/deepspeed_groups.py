"""Which ranks does DeepSpeed take for what? It keeps those of the engine made last in globals of its modules.

    data        none        all ranks are replicas
    pipeline    its grid    stages and replicas; messages go over a group of their own instead of the world's
    sequence    here        c ranks share each sequence; all hold the same parameters
    tensor      here        t ranks share each matrix; the others are replicas

`take_over` makes an engine's ranks the current ones. DeepSpeed calls an object that knows them mpu. It learns of ranks
that share sequences by one of the Ulysses kind: gradients are summed over all ranks and divided by dp, but under
ZeRO 3, where they are divided by dp x cp. Told by `data_parallel_size` and `sequence_parallel_size` in its
configuration instead, it reduces gradients over dp alone, and weights drift apart.
Source: deepspeed 0.19, utils/groups.py.
"""

import functools
from typing import Any

import torch.distributed as dist
from deepspeed.runtime.pipe import p2p
from deepspeed.runtime.pipe.topology import PipelineParallelGrid
from deepspeed.utils import groups
from torch import Tensor

from parallel.comm import Comm
from parallel.engines.foreign import unchecked_groups


class SequenceGroups:
    """The mpu of ranks that share sequences.

    Attributes:
        initialize_sequence_parallel: not called; by this name DeepSpeed knows the kind, in which every rank holds all
            parameters.
    """

    initialize_sequence_parallel = None

    def __init__(self, comm: Comm) -> None:
        self._group = comm.group("cp")

    def get_sequence_parallel_group(self) -> Any:
        """Of the ranks that share this rank's sequences."""
        return self._group

    def get_sequence_parallel_world_size(self) -> int:
        return dist.get_world_size(self._group)

    def get_sequence_parallel_rank(self) -> int:
        return dist.get_rank(self._group)

    def get_sequence_data_parallel_group(self) -> Any:
        """Of the ranks that hold the same parameters."""
        return dist.group.WORLD

    def get_sequence_data_parallel_world_size(self) -> int:
        return dist.get_world_size()

    def get_sequence_data_parallel_rank(self) -> int:
        return dist.get_rank()


class TensorGroups:
    """The ranks of a tensor degree over the whole world: AutoTP takes the module `groups` itself for its mpu."""

    mpu: Any = groups

    def __init__(self, tp: int) -> None:
        self._made = _tensor_groups(tp, dist.group.WORLD)

    def enter(self) -> None:
        """Puts these groups where DeepSpeed's module has its own."""
        _set_globals(self._made)


_GLOBALS = ("_DATA_PARALLEL_GROUP", "_TENSOR_MODEL_PARALLEL_GROUP", "_MODEL_PARALLEL_GROUP")


@functools.lru_cache(maxsize=64)
def _tensor_groups(tp: int, _world: Any) -> tuple[Any, ...]:
    """Making groups takes sockets: layouts of one degree share them for as long as the world lives. Collective."""
    before = tuple(getattr(groups, name) for name in _GLOBALS)
    with unchecked_groups():
        groups._init_tp_groups_with_new_group(tp)  # noqa: SLF001, the public way makes them once in a process
    made = tuple(getattr(groups, name) for name in _GLOBALS)
    _set_globals(before)
    return made


def _set_globals(values: tuple[Any, ...]) -> None:
    for name, value in zip(_GLOBALS, values, strict=True):
        setattr(groups, name, value)


def take_over(grid: Any) -> None:
    """Makes an engine's ranks the current ones.

    Args:
        grid: DeepSpeed's of a pipeline, or one of those here; None for data parallelism over the world.
    """
    if isinstance(grid, TensorGroups):
        grid.enter()
    groups.mpu = grid.mpu if isinstance(grid, TensorGroups) else grid
    if isinstance(grid, PipelineParallelGrid):
        p2p.init_process_groups(grid)
        group = _for_messages(dist.group.WORLD)
        p2p.send = functools.partial(_send, grid, group)
        p2p.recv = functools.partial(_receive, grid, group)


@functools.lru_cache(maxsize=4)
def _for_messages(_world: Any) -> Any:
    """A group of all ranks, whose messages are not counted; collective when it is new."""
    with unchecked_groups():
        return dist.new_group()


def _send(grid: Any, group: Any, tensor: Tensor, stage: int) -> None:
    dist.send(tensor, grid.stage_to_global(stage_id=stage), group=group)


def _receive(grid: Any, group: Any, tensor: Tensor, stage: int) -> None:
    dist.recv(tensor, grid.stage_to_global(stage_id=stage), group=group)
