"""How many bytes wait for the backward: the activations that autograd keeps, counted as they come and go.

A storage counts once however many functions keep it or views of it, from the first time it is kept until the last
keeper lets go. Parameters are not counted: they are there anyway. Left out: what is held outside of autograd (gradients
under way, buffers of the allocator); on CUDA the allocator's own peak tells that.
"""

import weakref
from collections import Counter
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn

from parallel.deferral import Deferral


class _Kept:
    """Stands in autograd for a tensor that it keeps."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class SavedBytes:
    """Context in which kept bytes are counted; enter it around forward and backward.

    Args:
        model: whose parameters are not counted.
        deferral: what it keeps for weight gradients counts too.

    Attributes:
        now_bytes: kept at this moment.
        peak_bytes: most that was kept at any moment.
    """

    def __init__(self, model: nn.Module, deferral: Deferral | None = None) -> None:
        self._deferral = deferral
        self.now_bytes = self.peak_bytes = 0
        self._parameters = {parameter.untyped_storage()._cdata for parameter in model.parameters()}  # noqa: SLF001
        self._keepers: Counter[int] = Counter()
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._keep, self._use)

    def __enter__(self) -> Self:
        self._hooks.__enter__()
        if self._deferral is not None:
            self._deferral.pack, self._deferral.unpack = self._keep, self._use
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._hooks.__exit__(kind, error, trace)
        if self._deferral is not None:
            self._deferral.count_nothing()

    def _keep(self, tensor: Tensor) -> Any:
        storage = tensor.untyped_storage()
        # The address of the storage, not of its data: meta and fake tensors have no data.
        address, size_bytes = storage._cdata, storage.nbytes()  # noqa: SLF001, has no public name
        if address in self._parameters or size_bytes == 0:
            return tensor
        self._keepers[address] += 1
        if self._keepers[address] == 1:
            self.now_bytes += size_bytes
            self.peak_bytes = max(self.peak_bytes, self.now_bytes)
        kept = _Kept(tensor)
        weakref.finalize(kept, self._let_go, address, size_bytes)
        return kept

    @staticmethod
    def _use(kept: Any) -> Tensor:
        tensor: Tensor = kept.tensor if isinstance(kept, _Kept) else kept
        return tensor

    def _let_go(self, address: int, size_bytes: int) -> None:
        self._keepers[address] -= 1
        if self._keepers[address] == 0:
            del self._keepers[address]
            self.now_bytes -= size_bytes
