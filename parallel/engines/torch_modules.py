"""Which modules does DTensor's `parallelize_module` want, and which of our parameters are theirs?

Its styles know `nn.Linear` and `nn.Embedding` only, so what is fused or bare is rewritten, with the same numbers:

    FusedLinear  [q; k; v]        maps.0, maps.1, maps.2    one nn.Linear each, of the same input
    TokenEmbedding                nn.Embedding
    RelativeBias                  table, an nn.Embedding
    Head                          projection, an nn.Linear
    Norm                          itself, by torch's own operator: DTensor does not shard a function of ours

`Origin` says which rows of which parameter of the model a rewritten one is. A model that is not sharded over tp stays
as it is.
"""

import dataclasses
import re

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.config import ModelConfig
from models.embedding import TokenEmbedding
from models.head import Head
from models.initial import canonical_name
from models.layers import FusedLinear, Norm
from models.model import Model
from models.positions import RelativeBias


class Maps(nn.Module):
    """A `FusedLinear` as several linear maps of one input."""

    def __init__(self, fused: FusedLinear) -> None:
        super().__init__()
        in_width, has_bias = fused.weight.shape[1], fused.bias is not None
        self.maps = nn.ModuleList(nn.Linear(in_width, width, bias=has_bias, device="meta") for width in fused.parts)

    def forward(self, hidden: Tensor) -> tuple[Tensor, ...]:
        """One [..., part] for each map."""
        return tuple(one(hidden) for one in self.maps)


class TableBias(RelativeBias):
    """A `RelativeBias` whose weight is that of an embedding."""

    def __init__(self, config: ModelConfig, *, is_causal: bool) -> None:
        super().__init__(config, is_causal=is_causal)
        del self.weight
        self.table = nn.Embedding(config.relative_buckets, config.num_heads, device="meta")

    def forward(self, query_length: int, key_length: int) -> Tensor:
        """bias_NQK, for as many heads as the table has columns here."""
        device = self.table.weight.device
        distance_QK = torch.arange(key_length, device=device) - torch.arange(query_length, device=device)[:, None]
        bias_NQK: Tensor = self.table(self._buckets(distance_QK)).permute(2, 0, 1).contiguous()
        return bias_NQK


class ProjectingHead(nn.Module):
    """A `Head` whose product is a linear map."""

    def __init__(self, head: Head) -> None:
        super().__init__()
        self.scale = head.scale
        self.transform = head.transform
        rows, width = head.weight.shape
        self.projection = nn.Linear(width, rows, bias=head.bias is not None, device="meta")

    def forward(self, hidden_LBD: Tensor) -> Tensor:
        """hidden_LBD -> logits_LBV."""
        hidden_LBD = self.transform(hidden_LBD)
        if self.scale != 1.0:
            hidden_LBD = hidden_LBD * self.scale
        logits_LBV: Tensor = self.projection(hidden_LBD)
        return logits_LBV


def rewrite(model: Model, config: ModelConfig) -> None:
    """Puts modules that DTensor's styles know in the place of ours; parameters have no values afterwards."""
    for name, module in list(model.named_modules()):
        parent, _, leaf = name.rpartition(".")
        if isinstance(module, FusedLinear):
            setattr(model.get_submodule(parent), leaf, Maps(module))
        elif isinstance(module, TokenEmbedding):
            setattr(model.get_submodule(parent), leaf, _embedding(module))
        elif isinstance(module, RelativeBias):
            setattr(model.get_submodule(parent), leaf, TableBias(config, is_causal=module.is_causal))
        elif isinstance(module, Head):
            setattr(model.get_submodule(parent), leaf, ProjectingHead(module))
        elif isinstance(module, Norm):
            module.root_mean_square = F.rms_norm


def _embedding(token: TokenEmbedding) -> nn.Embedding:
    rows, width = token.weight.shape
    return nn.Embedding(rows, width, device="meta")


def tie(model: Model, config: ModelConfig) -> None:
    """Makes the parameters of a tie group that are here one, in rewritten models too."""
    for group in config.tie_groups:
        owners = [owner for name in group if (owner := _owner(model, name)) is not None]
        for owner in owners[1:]:
            owner.weight = owners[0].weight


def _owner(model: Model, name: str) -> nn.Module | None:
    modules = dict(model.named_modules())
    path = name.removesuffix(".weight")
    return modules.get(f"{path}.projection") or modules.get(path)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Origin:
    """Rows [start, stop) of a parameter of the model; all of them where `stop` is None."""

    name: str
    """Qualified name in the model as it was built."""
    start: int = 0
    stop: int | None = None

    def canonical(self, config: ModelConfig) -> str:
        """The name that tied parameters share."""
        return canonical_name(config, self.name)


_MAP = re.compile(r"(?P<module>.*)\.maps\.(?P<index>\d+)\.(?P<leaf>weight|bias)$")
_RENAMED = ((".table.weight", ".weight"), ("head.projection.", "head."))


def origin(config: ModelConfig, name: str) -> Origin:
    """Where a parameter of a rewritten (or untouched) model comes from."""
    fused = _MAP.match(name)
    if fused is not None:
        widths, index = _parts(config, fused["module"]), int(fused["index"])
        start = sum(widths[:index])
        return Origin(name=f"{fused['module']}.{fused['leaf']}", start=start, stop=start + widths[index])
    for new, old in _RENAMED:
        name = name.replace(new, old)
    return Origin(name=name)


def _parts(config: ModelConfig, module: str) -> tuple[int, ...]:
    """Widths of the maps of a fused projection."""
    query, key = config.num_heads * config.head_width, config.num_kv_heads * config.head_width
    widths: dict[str, tuple[int, ...]] = {
        "qkv": (query, key, key),
        "query": (query,),
        "kv": (key, key),
        "up": (config.ffn_width,) * (2 if config.is_gated else 1),
    }
    return widths[module.rpartition(".")[2]]
