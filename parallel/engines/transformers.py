"""The transformers engine: its own Llama or T5, in one process, to hold the native engine's blocks against.

    config  ->  config.json  ->  LlamaForCausalLM or T5ForConditionalGeneration with our weights  ->  step

It partitions nothing. Both kernels are those that the layout names: `fused` is its `sdpa`, `materialised` its `eager`,
for Llama and T5 alike. Loss, microbatches, gradient norm and optimizer are as in every engine: the logits are scored
here, because its own loss is a mean of each microbatch. Padding on the right is masked where a valid position could
read it, which a causal one cannot. Nothing is cached and nothing computed twice. Its norms, rope and eager softmax ask
for float32 whatever the model has; at float64, for comparison alone, they get float64 instead.

Source: transformers 5.24. Left out: recomputation, models that `models/published_fields.py` refuses. Dropout is its
own: it draws other masks than every other engine, and T5 has one more behind the final norms.
"""

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import LlamaConfig, LlamaForCausalLM, T5Config, T5ForConditionalGeneration

from models.architectures import build
from models.batch import Batch
from models.config import ModelConfig
from models.head import CrossEntropy
from models.huggingface_weights import store_weights, translate
from models.initial import canonical_name, draw
from models.published_fields import published_fields
from parallel.comm import Comm
from parallel.engines.engine import Quantity, StepFacts
from parallel.engines.foreign import ForeignEngine
from parallel.engines.gathered import Gathered, put_together
from parallel.engines.settings import EngineSettings
from parallel.layouts import Layout
from parallel.pipeline import Observer
from parallel.plan import WHOLE, Plan
from parallel.sequence import microbatches

_CLASSES: dict[str, tuple[type[Any], type[Any]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "t5": (T5Config, T5ForConditionalGeneration),
}
_KERNELS = {"fused": "sdpa", "materialised": "eager"}


def unsupported(config: ModelConfig, layout: Layout) -> str | None:
    """Why this engine cannot run a layout, as one line; None when it can."""
    degrees = [f"{axis} = {getattr(layout, axis)}" for axis in ("tp", "pp", "dp", "cp") if getattr(layout, axis) > 1]
    if degrees or layout.chunks > 1:
        told = ", ".join(degrees) or f"chunks = {layout.chunks}"
        return f"the transformers engine runs in one process: {told}; use 1"
    if layout.recompute != "none":
        return f"the transformers engine recomputes nothing: recompute = {layout.recompute!r}; use 'none'"
    try:
        published_fields(config)
    except ValueError as error:
        return f"the transformers engine runs Llama and T5: {error}"
    return None


class TransformersEngine(ForeignEngine):
    """The one rank of a layout without degrees.

    Raises ValueError for a layout that `unsupported` names.
    """

    def __init__(self, *, plan: Plan, comm: Comm, settings: EngineSettings) -> None:
        reason = unsupported(plan.config, plan.layout)
        super().__init__(plan=plan, comm=comm, settings=settings, reason=reason)
        self._score = CrossEntropy()
        content = published_fields(plan.config)
        self._family = content["model_type"]
        with self._precision():
            self.model = _model(plan, content).to(device=self.device, dtype=self.dtype).train()
        store_weights(_drawn(plan.config, settings.seed), self.model.state_dict(), plan.config, self._family)
        self.optimizer = settings.optimizer_of(self.model.parameters())

    def step(self, batch: Batch, *, update: bool = True, observer: Observer | None = None) -> StepFacts:
        """As `parallel.engines.engine.Engine` says; `observer` is not read."""
        self.optimizer.zero_grad(set_to_none=True)
        num_tokens = self._all_loss_tokens(batch)
        losses = []
        for part in microbatches(batch.to(self.device, self.dtype), self.plan.layout):
            with self._precision():
                logits_BLV = self.model(**self._inputs(part), use_cache=False).logits
            # Neither side is sequence-first: what matters to the loss is that both have one order.
            loss: Tensor = self._score(logits_BLV, part.labels.t()) / num_tokens
            loss.backward()
            losses.append(loss.detach())
        norm = self._gradient_norm()
        if update:
            self.optimizer.step()
        return StepFacts(loss=torch.stack(losses).sum().item(), loss_tokens=num_tokens, gradient_norm=norm)

    def gather(self, quantity: Quantity) -> Gathered | None:
        """Gradients or weights under our names. For checks, not for speed."""
        entries = self.model.state_dict(keep_vars=True)
        if quantity == "gradient":
            entries = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in entries.items()}
        translated = translate(self.plan.config, entries, self._family)
        config = self.plan.config
        held = {
            name: (WHOLE, tensor.detach().to("cpu", copy=True))
            for name, tensor in translated.items()
            if canonical_name(config, name) == name
        }
        return put_together([held])

    # ---- what it holds ------------------------------------------------------------------------------------------

    @property
    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.model.parameters())

    @property
    def parameter_bytes(self) -> int:
        return _bytes(self.model.parameters())

    @property
    def gradient_bytes(self) -> int:
        """Zero before the first step."""
        return _bytes(parameter.grad for parameter in self.model.parameters() if parameter.grad is not None)

    @property
    def optimizer_bytes(self) -> int:
        states = (value for state in self.optimizer.state.values() for value in state.values())
        return _bytes(value for value in states if isinstance(value, Tensor))

    # ---- inside -------------------------------------------------------------------------------------------------

    def _precision(self) -> contextlib.AbstractContextManager[object]:
        """What the model is made and run in."""
        return _InDouble() if self.dtype == torch.float64 else contextlib.nullcontext()

    def _inputs(self, batch: Batch) -> dict[str, Tensor]:
        """The arguments of their forward."""
        if batch.source is None:
            return {"input_ids": batch.stream("target")}
        inputs = {"input_ids": batch.source, "decoder_input_ids": batch.stream("target")}
        length = batch.stream_length("source")
        if min(batch.source_lengths) < length:
            lengths = torch.tensor(batch.source_lengths, device=self.device)
            inputs["attention_mask"] = (torch.arange(length, device=self.device) < lengths[:, None]).long()
        return inputs

    def _gradient_norm(self) -> float:
        dtype = torch.promote_types(self.dtype, torch.float32)
        gradients = [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
        norms = [torch.linalg.vector_norm(gradient, dtype=dtype) for gradient in gradients]
        total: float = torch.linalg.vector_norm(torch.stack(norms)).item()
        return total


class _InDouble(TorchFunctionMode):
    """Context in which whoever asks for float32 by name gets float64."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        widened = {name: _widened(value) for name, value in (kwargs or {}).items()}
        return func(*map(_widened, args), **widened)


def _widened(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


def _model(plan: Plan, content: Mapping[str, Any]) -> nn.Module:
    """Their model of a config.json with the layout's kernel, its values their own."""
    make_config, make_model = _CLASSES[content["model_type"]]
    fields = {name: value for name, value in content.items() if name != "model_type"}
    config = make_config(**fields, attn_implementation=_KERNELS[plan.layout.attention], use_cache=False)
    model: nn.Module = make_model(config)
    return model


def _drawn(config: ModelConfig, seed: int) -> dict[str, Tensor]:
    """Whole parameters as every engine starts with them."""
    with torch.device("meta"):
        shapes = {name: tuple(parameter.shape) for name, parameter in build(config).named_parameters()}
    return {name: draw(config, name, shape, seed=seed) for name, shape in shapes.items()}


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
