"""Whose weights does a rank update, when data-parallel ranks deal the optimizer's states among them (ZeRO, stage 1)?

    gradients   reduce-scatter over dp    each rank gets the sum of one slice      `parallel/gradients.py`
    update      of that slice             its states are held by this rank alone
    weights     all-gather over dp        every rank has all of them again

All weights of a rank are views of one flat buffer that is laid out as its gradients are, so that a slice is one tensor,
whatever parameters it cuts through, and nothing is copied to be sent. Updates are elementwise: a slice is updated as
its parameters would be. Source: Rajbhandari et al. 2019 (arXiv 1910.02054, section 5). Left out: stages 2 and 3.
"""

import torch
from torch import nn

from parallel.comm import Comm, Site
from parallel.gradients import Gradients


class FlatWeights:
    """The weights of one rank's stages, and the slice of them that it updates.

    Attributes:
        own: the slice, [numbers / dp] with the padding of the last rank; its gradient is the same slice of `gradients`.
    """

    def __init__(self, model: nn.Module, gradients: Gradients, comm: Comm) -> None:
        self._comm = comm
        self._flat = torch.zeros_like(gradients.flat)
        parameters = dict(model.named_parameters())
        for name, gradient in gradients.views.items():
            first = gradient.storage_offset()
            view = self._flat[first : first + gradient.numel()].view(gradient.shape)
            view.copy_(parameters[name].detach())
            parameters[name].data = view
        self.own = nn.Parameter(gradients.own_of(self._flat))
        self.own.grad = gradients.own

    def gather(self) -> None:
        """Brings every rank's updated slice to all of them."""
        _, pending = self._comm.all_gather(
            self.own.detach(), "dp", site=Site(name="parameter.dp"), phase="step", into=self._flat
        )
        pending.wait()
