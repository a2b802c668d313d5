"""Which kernel computes a core attention on a CPU, given what the model and the layout ask for?

    materialised   the layout says so, or probabilities are dropped out: no kernel draws masks that a key alone fixes
    composite      fused was asked for, but the scores' bias needs a gradient: PyTorch falls back on separate operators
    fused          otherwise: one kernel, no score is stored

Other devices choose otherwise; what is told here holds for PyTorch on CPUs, where it was measured.
"""

from typing import Literal

from parallel.share import Share

Attention = Literal["self", "cross"]
Kernel = Literal["fused", "composite", "materialised"]


def core_kernel(share: Share, attention: Attention) -> Kernel:
    """The kernel of all self- or cross-attentions of a rank; relative biases are added in self-attention only."""
    if share.layout.attention == "materialised" or share.config.attention_dropout > 0.0:
        return "materialised"
    return "composite" if share.config.positions == "relative" and attention == "self" else "fused"
