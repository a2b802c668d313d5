"""How many bytes does autograd keep of a core attention, by kernel, and how many more while it is computed again?

For b sequences, L queries, S keys, N heads and K KV heads of the rank, H head width, e bytes an element, a = max(4, e):

                    what projections gave            and of the kernel's own
    fused           self: the whole product          logarithms of sums L b N a; the tensor of the mask
                    L b (N + 2K) H e; with rope
                    q and k rotated too
                    cross: q, and k and v together
    composite       -                                scaled q L b N H a, scaled k S b N H a, v, probabilities b N L S a
    materialised    rotated k, where it needs no     scaled q L b N H e, k and v, probabilities b N L S e; where it is
                    copy                             causal by rule, flags L S; dropout: flags b N L S, what is left

A product over all heads at once wants them as one dim. Keys and values are slices of a projection's result: they are
copied for it if there is more than one sequence and more than one head, else viewed, and then the whole result stays.
Grouped heads are repeated, and so copied, anyway. The output L b N H e is kept by the product after it, under every
kernel.

Composite and fused take half precision differently: the composite works on float32 copies. Read off PyTorch 2.13 on a
CPU.
"""

import dataclasses

from models.costs import Side
from parallel.keeps import Microbatch
from parallel.kernels import Attention, Kernel, core_kernel


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Core:
    """The core attention of one sublayer.

    Attributes:
        micro: the microbatch.
        attention: self- or cross-attention.
        side: whose positions are the queries.
    """

    micro: Microbatch
    attention: Attention
    side: Side

    @property
    def kernel(self) -> Kernel:
        return core_kernel(self.micro.share, self.attention)

    @property
    def _queries(self) -> int:
        return self.micro.length(self.side)

    @property
    def _keys(self) -> int:
        return self._queries if self.attention == "self" else self.micro.length("encoder")

    def _heads(self, length: int, num_heads: int, element_bytes: int) -> int:
        return length * self.micro.size * num_heads * self.micro.config.head_width * element_bytes

    @property
    def output_bytes(self) -> int:
        """L b N H e."""
        return self._heads(self._queries, self.micro.share.num_heads, self.micro.element_bytes)

    @property
    def _rotated_key_bytes(self) -> int:
        if self.attention == "cross" or self.micro.config.positions != "rope":
            return 0
        return self._heads(self._keys, self.micro.share.num_kv_heads, self.micro.element_bytes)

    @property
    def keys_values_bytes(self) -> int:
        """What a projection gave as keys and values, 2 S b K H e."""
        return self._heads(self._keys, 2 * self.micro.share.num_kv_heads, self.micro.element_bytes)

    @property
    def is_projection_kept(self) -> bool:
        """Whether that stays as it is where nothing is recomputed."""
        return self.kernel == "fused" or self._viewed_bytes > self._rotated_key_bytes

    @property
    def projected_bytes(self) -> int:
        """q, k, v as a function of all three keeps them: the projections' whole results, and rope's q and k."""
        share, element = self.micro.share, self.micro.element_bytes
        queries = self._heads(self._queries, share.num_heads, element)
        rotated_keys = self._rotated_key_bytes
        return queries + self.keys_values_bytes + (rotated_keys + queries if rotated_keys else 0)

    @property
    def kept_bytes(self) -> int:
        """Kept when nothing is recomputed, but for output, mask and rope's tables."""
        if self.kernel == "fused":
            return self.projected_bytes + self._logarithm_bytes
        return self._own_bytes + self._viewed_bytes

    @property
    def recomputed_bytes(self) -> int:
        """Kept while the core alone is computed again, beside `projected_bytes` and the mask."""
        return self._logarithm_bytes + self.output_bytes if self.kernel == "fused" else self._own_bytes

    @property
    def _logarithm_bytes(self) -> int:
        return self._queries * self.micro.size * self.micro.share.num_heads * self.micro.shape.accumulated_bytes

    @property
    def _is_grouped(self) -> bool:
        return self.micro.share.num_heads != self.micro.share.num_kv_heads

    @property
    def _are_slices_copied(self) -> bool:
        return self._is_grouped or (self.micro.size > 1 and self.micro.share.num_heads > 1)

    @property
    def _own_bytes(self) -> int:
        """What separate operators keep in storages of their own: q, k, v as far as copied, probabilities, flags."""
        micro, num_heads = self.micro, self.micro.share.num_heads
        scores = micro.size * num_heads * self._queries * self._keys
        if self.kernel == "composite":
            element = micro.shape.accumulated_bytes
            is_value_copied = self._are_slices_copied or micro.element_bytes < element
            num_copied = 1 + is_value_copied
        else:
            element = micro.element_bytes
            is_key_copied = self._is_grouped or (self._are_slices_copied and not self._rotated_key_bytes)
            num_copied = is_key_copied + self._are_slices_copied
        own = self._heads(self._queries, num_heads, element) + num_copied * self._heads(self._keys, num_heads, element)
        own += scores * element
        if self.kernel == "materialised":
            has_tensor = micro.config.positions == "relative"
            own += self._queries * self._keys * (self.attention == "self" and self.side == "decoder" and not has_tensor)
            own += scores * (1 + element) * (micro.config.attention_dropout > 0.0)
        return own

    @property
    def _viewed_bytes(self) -> int:
        """What separate operators keep as views: the rotated k, or the projection that v (and k) are slices of."""
        micro = self.micro
        rotated = self._rotated_key_bytes * (not self._is_grouped)
        is_half_copied = self.kernel == "composite" and micro.element_bytes < 4
        if self._are_slices_copied or is_half_copied:
            return rotated
        num_heads, num_kv_heads = micro.share.num_heads, micro.share.num_kv_heads
        slices = 2 * num_kv_heads + (num_heads if self.attention == "self" else 0)
        return rotated + self._heads(self._keys, slices, micro.element_bytes)
