"""Which part of a block does `torch.compile` see, and what does it leave as it is?

    block                    compiled on its first call, once for all blocks of a kind that are called alike
    products that send       run as they are: between two of them lies a graph of its own
    active dropouts          likewise: their masks come from a key, not from a generator that a graph may hold

Nothing in a block depends on what changes from microbatch to microbatch but its tensors: of a mask it reads the tensor,
which holds the valid lengths. Code is compiled for each shape. A region that is compiled too often is an error,
never a block that runs uncompiled. Compiled blocks compute what they compute otherwise, up to the order of sums; what
they keep for the backward is the compiler's choice. So a layout that says what is kept (`selective`), or leaves weight
gradients for later, is refused; `full` runs the compiled block twice. Left out: embedding, head, loss and optimizer.
"""

import contextlib
import functools
import importlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
from torch import Tensor, nn

from models.blocks import DecoderBlock, EncoderBlock
from models.dropout import Dropout
from parallel.layouts import Layout
from parallel.tensor import ColumnLinear, RowLinear

BACKEND: Final = "inductor"
"""Who makes code of a graph."""
MOST_VARIANTS: Final = 64
"""Of one function: shapes, kinds of masks, blocks with and without what another lacks."""
_OPTIONS: Final[dict[str, Any]] = {"dynamic": False, "recompile_limit": MOST_VARIANTS, "isolate_recompiles": True}
"""Isolated, because neither the limit nor the search for code that fits may depend on what else a process compiles."""


def not_compiled(layout: Layout) -> str | None:
    """Why the blocks of a layout are not compiled, as one line; None when they can be."""
    if "isolate_recompiles" not in inspect.signature(torch.compile).parameters:
        return f"blocks are compiled by torch 2.13 or later, and this is {torch.__version__}"
    if layout.schedule not in ("gpipe", "1f1b", "interleaved"):
        return (
            f"compiled blocks do not leave weight gradients for later, as schedule {layout.schedule!r} may ask: "
            "use gpipe, 1f1b or interleaved"
        )
    if layout.recompute == "selective":
        return (
            "what a compiled block keeps is the compiler's choice: recompute = 'selective' says otherwise; "
            "use 'none' or 'full'"
        )
    return None


def compile_blocks(model: nn.Module) -> None:
    """Replaces the forward of every block; whatever recomputes blocks is installed afterwards, around it."""
    # Beyond the limit of variants torch would run a block uncompiled and say nothing.
    torch._dynamo.config.fail_on_recompile_limit_hit = True  # noqa: SLF001, has no public name
    # It cuts graphs at DDP's buckets, for which a block is too small, and refuses buckets below DDP's first.
    torch._dynamo.config.optimize_ddp = False  # noqa: SLF001, has no public name
    # Attention is a kernel already; what looks for it again dies of a relative bias and a batch of one sequence. The
    # import takes a second, which ranks that compile nothing do not have to spend.
    inductor: Any = importlib.import_module("torch._inductor.config")
    inductor.pattern_matcher = False
    compiled: dict[tuple[type[nn.Module], bool], Callable[..., Tensor]] = {}
    apart: dict[type[nn.Module], type[nn.Module]] = {}
    blocks: list[nn.Module] = [one for one in model.modules() if isinstance(one, EncoderBlock | DecoderBlock)]
    for block in blocks:
        kind = (type(block), not _set_apart(block, apart))
        if kind not in compiled:
            compiled[kind] = _compiled(*kind)
        block.forward = functools.partial(compiled[kind], block)


@contextlib.contextmanager
def compilations() -> Iterator[list[str]]:
    """Context that lists what this process compiles inside of it, forward or backward."""
    told: list[str] = []

    def tell(compilation: Any) -> None:
        told.append(compilation.callback_trigger.name.lower())

    handler = torch._dynamo.callback.callback_handler  # noqa: SLF001, has no public name
    handler.register_start_callback(tell)
    try:
        yield told
    finally:
        handler.remove_start_callback(tell)


@contextlib.contextmanager
def as_written() -> Iterator[None]:
    """Context in which compiled blocks run as they would without a compiler, and nothing is compiled.

    Whoever watches operators needs it: where a `TorchDispatchMode` is active, torch uses no compiled code.
    """
    # Not before the context is entered: torch's takes effect when it is made.
    with torch.compiler.set_stance("force_eager"):
        yield


def _compiled(block: type[nn.Module], is_whole: bool) -> Callable[..., Tensor]:
    """A block's forward as one graph where nothing of it is set apart."""
    made: Callable[..., Tensor] = torch.compile(block.forward, backend=BACKEND, fullgraph=is_whole, **_OPTIONS)
    return made


def _set_apart(block: nn.Module, apart: dict[type[nn.Module], type[nn.Module]]) -> bool:
    """Makes the compiler leave modules of a block alone; returns whether there are any. `apart` holds their classes."""
    found: list[nn.Module] = [
        module
        for module in block.modules()
        if isinstance(module, ColumnLinear | RowLinear) or (isinstance(module, Dropout) and module.probability)
    ]
    for module in found:
        kind = type(module)
        if kind not in apart:
            apart[kind] = type(kind.__name__, (kind,), {"forward": torch.compiler.disable(kind.forward)})
        # A class, not a function of its own for each module: compiled code is shared by blocks whose parts are alike.
        module.__class__ = apart[kind]
    return bool(found)
