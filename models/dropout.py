"""Which elements does dropout zero, so that recomputation, schedules and pipeline cuts zero the same ones?

    mask = bernoulli(hash(seed, step, microbatch, site, salt))

A mask depends on these five and on its shape, never on the state of a global generator or on what was computed before.
`salt` tells apart pieces of one site that must differ, such as the shards of a sequence; it is 0 until someone sets it.
Left out: masks that a fused attention kernel draws for itself.
"""

import dataclasses
import hashlib
from typing import Any

import torch
from torch import Tensor, nn


@dataclasses.dataclass(kw_only=True, slots=True)
class MaskKey:
    """Which draw of all masks is current. One object is shared by all dropouts of a model and changed in place."""

    seed: int = 0
    step: int = 0
    microbatch: int = 0


class Dropout(nn.Module):
    """Zeroes elements with `probability` and divides the others by 1 - probability, in training mode only.

    Attributes:
        key: the `MaskKey` of the model.
        site: qualified name of this module.
        salt: see the question above.
    """

    def __init__(self, probability: float) -> None:
        super().__init__()
        self.probability = probability
        self.key = MaskKey()
        self.site = ""
        self.salt = 0

    @property
    def is_active(self) -> bool:
        return self.training and self.probability > 0.0

    def forward(self, hidden: Tensor) -> Tensor:
        """The input itself unless active; any shape."""
        if not self.is_active:
            return hidden
        keep = 1.0 - self.probability
        mask = torch.empty(hidden.shape, dtype=torch.bool, device=hidden.device)
        mask.bernoulli_(keep, generator=self._generator(hidden.device))
        masked: Tensor = _Masked.apply(hidden, mask, 1.0 / keep)  # type: ignore[no-untyped-call]
        return masked

    def mask_seed(self) -> int:
        """63 bits that depend on the key, the site and the salt."""
        key = self.key
        text = f"{key.seed}/{key.step}/{key.microbatch}/{self.site}/{self.salt}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1

    def extra_repr(self) -> str:
        """The probability, for printing."""
        return f"probability={self.probability}"

    def _generator(self, device: torch.device) -> torch.Generator:
        # Meta and fake tensors have a device that cannot draw; their values do not exist, so any generator will do.
        is_drawn_on_gpu = device.type == "cuda" and torch.cuda.is_available()
        return torch.Generator(device if is_drawn_on_gpu else "cpu").manual_seed(self.mask_seed())


class _Masked(torch.autograd.Function):
    """hidden * mask * scale in one kernel; one byte an element is kept for the backward pass."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, mask: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(mask)
        ctx.scale = scale
        return _scaled(hidden, mask, scale)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, None, None]:
        (mask,) = ctx.saved_tensors
        return _scaled(gradients[0], mask, ctx.scale), None, None


def _scaled(hidden: Tensor, mask: Tensor, scale: float) -> Tensor:
    scaled: Tensor = torch.ops.aten.native_dropout_backward(hidden, mask, scale)
    return scaled
