"""How is DeepSpeed brought to compute in float64, as a comparison with one process needs?

It knows float32 and halves only: a float64 model has its gradients reduced in float32, or is refused (zero 0, zero 3),
and has float32 masters under ZeRO. That is all right for training, and a thousand times what an error of parity may be.
Here float64 is let in and kept; what is called, sent and kept stays the same, eight bytes instead of four. Not used at
other dtypes. Source: deepspeed 0.19.
"""

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero.partition_parameters import InsertPostInitMethodToModuleSubClasses
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer


@contextlib.contextmanager
def admitting_double(*, is_zero: bool) -> Iterator[None]:
    """Inside, engines for float64 models can be made; call `keep_double` on each."""
    if not is_zero:
        yield
        return

    def as_single(module: Any, *_: Any) -> None:
        # Only what is made later would get this dtype, and here nothing is.
        module.dtype = torch.float32

    with (
        mock.patch.object(DeepSpeedEngine, "get_data_types", return_value=(torch.float64, torch.float64)),
        mock.patch.object(InsertPostInitMethodToModuleSubClasses, "_set_dtype", as_single),
    ):
        yield


def keep_double(engine: Any, *, is_zero: bool) -> None:
    """Makes an engine reduce in float64 and, under ZeRO, keep masters in it."""
    accelerator: Any = get_accelerator()
    dtypes: list[torch.dtype] = accelerator.supported_dtypes()
    if torch.float64 not in dtypes:
        accelerator.supported_dtypes = lambda: [*dtypes, torch.float64]
    engine.communication_data_type = torch.float64
    if not is_zero:
        return
    optimizer = engine.optimizer
    if isinstance(optimizer, DeepSpeedZeroOptimizer) and optimizer.sequence_parallel_size > 1:
        _reduce_as_it_is(optimizer)
    (bucket,) = optimizer.ipg_buckets.values()
    optimizer.communication_data_type, optimizer.ipg_buckets = torch.float64, {torch.float64: bucket}
    if isinstance(bucket.buffer, torch.Tensor):
        bucket.buffer = torch.empty_like(bucket.buffer, dtype=torch.float64)
    for name in ("single_partition_of_fp32_groups", "fp32_partitioned_groups_flat"):
        for master in getattr(optimizer, name, []):
            master.data = master.data.double()


def _reduce_as_it_is(optimizer: DeepSpeedZeroOptimizer) -> None:
    """Where ranks share sequences, ZeRO 1 and 2 reduce every bucket in float32; here in the bucket's own dtype."""
    reduce = optimizer.allreduce_bucket

    def reduced(*args: Any, divide: bool = True, **kwargs: Any) -> Any:
        # The degree is read for the dtype, and for a mean that ZeRO has taken before it comes here.
        assert not divide, "the mean over ranks is taken here"
        with mock.patch.object(optimizer, "sequence_parallel_size", 1):
            return reduce(*args, divide=False, **kwargs)

    optimizer.allreduce_bucket = reduced
