"""Which values do parameters start with, whatever the layout?

    value = f(seed, name)          a hash of the two seeds a generator for the whole named tensor

So a rank draws the whole tensor and keeps its shard, and every layout starts from the same model. Tied names draw what
their canonical name draws. No parameter starts at exactly 0 or 1: dropping a bias or applying a norm twice changes the
result.

    norm weights         1 + 0.1 n        with n standard normal
    biases               0.02 n
    embeddings, head     0.02 n
    relative bias        0.1 n
    other matrices       n / sqrt(columns); the query rows once more / sqrt(head width) where scores are not scaled
"""

import hashlib

import torch
from torch import Tensor, nn

from models.config import ModelConfig
from models.slicing import tie

QUERY_NAMES = ("self_attention.qkv.weight", "cross_attention.query.weight")


def draw(config: ModelConfig, name: str, shape: tuple[int, ...], *, seed: int) -> Tensor:
    """The whole parameter of this qualified name: float32, on the CPU, the same for the same seed and name.

    Args:
        config: tells which names are tied.
        name: qualified name in the whole model.
        shape: shape of the whole parameter.
        seed: any integer.
    """
    name = canonical_name(config, name)
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    generator = torch.Generator("cpu").manual_seed(int.from_bytes(digest, "big") >> 1)
    normal = torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")
    if name.endswith("norm.weight"):
        return normal.mul_(0.1).add_(1.0)
    if name.endswith("bias") or name == "head.weight":
        return normal.mul_(0.02)
    if name.endswith("relative_bias.weight"):
        return normal.mul_(0.1)
    if ".embedding." in name and not name.endswith("features.weight"):
        return normal.mul_(0.02)
    normal.mul_(shape[-1] ** -0.5)
    if not config.attention_scale and name.endswith(QUERY_NAMES):
        normal[: config.num_heads * config.head_width].mul_(config.head_width**-0.5)
    return normal


def canonical_name(config: ModelConfig, name: str) -> str:
    """The first name of the tie group that the name is in, else the name itself."""
    for group in config.tie_groups:
        if name in group:
            return group[0]
    return name


def initialise(
    model: nn.Module, config: ModelConfig, *, seed: int, dtype: torch.dtype, device: torch.device | str
) -> None:
    """Give every parameter of a whole model or slice (on any device, meta too) its drawn values.

    Values are drawn in float32 on the CPU, then cast and moved, so that they are the same everywhere.
    """
    for prefix, module in model.named_modules():
        for leaf, parameter in list(module.named_parameters(recurse=False)):
            name = f"{prefix}.{leaf}" if prefix else leaf
            value = draw(config, name, tuple(parameter.shape), seed=seed)
            value = value.to(device=device, dtype=dtype)
            setattr(module, leaf, nn.Parameter(value, requires_grad=parameter.requires_grad))
    tie(model, config)
