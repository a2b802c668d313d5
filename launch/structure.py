"""What do built models show of their structure? Facts that no closed form holds, for those who read no torch.

    model, fact, value        logits 16 50 26        encoder.self_attention.read 16 100 100        encoder.steps ...

Shapes are read off a forward on the meta device, where nothing is stored: of the logits, and of what every query may
read of every key, for each sequence. The steps of a block are found by running each sublayer with its last product set
to zero: what is left is the input where a residual branch has its norm inside, and the norm of the input where the norm
comes last.

`python -m launch.structure` writes `results/structure.csv` again; a test says when it has to be. Left out: values.
"""

import csv
import io
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from models.architectures import build
from models.attention import AttentionMask, CoreAttention
from models.batch import Batch
from models.blocks import DecoderBlock, EncoderBlock
from models.config import ModelConfig
from models.named import named_model
from models.sublayers import Attention, Ffn, Sublayer

COLUMNS = ("model", "fact", "value")
FORWARDS = {"speech": (16, 100, 50), "transformer-base": (2, 7, 5), "gpt-classic": (2, 0, 10)}
"""Model -> sequences, source and target positions of its forward: the articles' own where they have some."""
PATH = Path(__file__).resolve().parent.parent / "results" / "structure.csv"


def facts() -> Iterator[tuple[str, str, str]]:
    """All facts, in `COLUMNS`."""
    for name, (num_sequences, source_length, target_length) in FORWARDS.items():
        config = named_model(name)
        told = _forward(config, num_sequences, source_length, target_length) | _blocks(config)
        for fact, value in told.items():
            yield name, fact, value


def table() -> str:
    """The facts as CSV."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    writer.writerows(facts())
    return text.getvalue()


# ---- shapes ---------------------------------------------------------------------------------------------------------


def _forward(config: ModelConfig, num_sequences: int, source_length: int, target_length: int) -> dict[str, str]:
    read: dict[str, str] = {}
    with torch.device("meta"):
        model = build(config).eval()
        for name, module in model.named_modules():
            if isinstance(module, Attention):
                stack, _, _, sublayer = name.split(".")
                module.core = _recording(module.core, read, f"{stack}.{sublayer}.read")
        source = target = None
        if config.has_encoder:
            shape = (num_sequences, source_length, *([config.feature_width] if config.feature_width else []))
            source = torch.zeros(shape) if config.feature_width else torch.zeros(shape, dtype=torch.long)
        if config.has_decoder:
            target = torch.zeros(num_sequences, target_length, dtype=torch.long)
        batch = Batch(
            labels=torch.zeros(num_sequences, target_length, dtype=torch.long),
            source=source,
            # One sequence is shorter, so that keys have to be masked.
            source_lengths=(source_length - 1,) + (source_length,) * (num_sequences - 1) if config.has_encoder else (),
            target=target,
            target_lengths=(target_length,) * num_sequences,
        )
        logits_BLV = model(batch, {})["logits"].permute(1, 0, 2)
    return {"logits": _words(logits_BLV.shape)} | read


def _recording(core: CoreAttention, read: dict[str, str], fact: str) -> CoreAttention:
    """The same core, which notes the shape of what each query may read: sequences, queries, keys."""

    def recorded(q_LBNH: Tensor, k_SBKH: Tensor, v_SBKH: Tensor, mask: AttentionMask) -> Tensor:
        num_queries, num_sequences = q_LBNH.shape[:2]
        shape = torch.Size((num_sequences, 1, num_queries, k_SBKH.shape[0]))
        if mask.added_BNQK is not None:
            # Fails where the mask is of other positions.
            assert torch.broadcast_shapes(mask.added_BNQK.shape, shape) == shape
        read[fact] = _words((num_sequences, num_queries, k_SBKH.shape[0]))
        read[f"{fact}_causal"] = str(mask.is_causal)
        return core(q_LBNH, k_SBKH, v_SBKH, mask)

    return recorded


# ---- blocks ---------------------------------------------------------------------------------------------------------


def _blocks(config: ModelConfig) -> dict[str, str]:
    with torch.device("meta"):
        model = build(config)
    told: dict[str, str] = {}
    for stack_name, stack in (("encoder", model.encoder), ("decoder", model.decoder)):
        if stack is None:
            continue
        first = stack.block["0"]
        assert isinstance(first, EncoderBlock | DecoderBlock)
        told |= {
            f"{stack_name}.blocks": str(len(stack.block)),
            f"{stack_name}.width": str(first.self_attention.output.weight.shape[0]),
            f"{stack_name}.heads": str(first.self_attention.output.weight.shape[1] // first.self_attention.head_width),
            f"{stack_name}.ffn_width": str(first.ffn.down.weight.shape[1]),
            f"{stack_name}.steps": _steps(config, type(first)),
        }
    return told


def _steps(config: ModelConfig, kind: type[EncoderBlock] | type[DecoderBlock]) -> str:
    """The steps of a block, in the order of the computation."""
    torch.manual_seed(0)
    steps: list[str] = []
    block = kind(config, None).eval()
    for parameter in block.parameters():
        nn.init.normal_(parameter)
    hidden_LBD = torch.randn(3, 2, config.width)
    mask = AttentionMask(is_causal=False)
    for name, sublayer in block.named_children():
        assert isinstance(sublayer, Sublayer)
        if isinstance(sublayer, Ffn):
            last, run = sublayer.down, _bound(sublayer, hidden_LBD)
        else:
            assert isinstance(sublayer, Attention)
            last = sublayer.output
            memory = [hidden_LBD] if name == "cross_attention" else []
            run = _bound(sublayer, hidden_LBD, *memory, mask)
        with torch.no_grad():
            for parameter in last.parameters():
                parameter.zero_()
            left_LBD = run()
            if torch.equal(left_LBD, hidden_LBD):
                steps += ["norm", name, "add"]
            elif torch.equal(left_LBD, sublayer.norm(hidden_LBD)):
                steps += [name, "add", "norm"]
            else:
                steps.append(name)
    return " ".join(steps)


def _bound(sublayer: Sublayer, *arguments: object) -> Callable[[], Tensor]:
    def run() -> Tensor:
        left_LBD: Tensor = sublayer(*arguments)
        return left_LBD

    return run


def _words(shape: tuple[int, ...]) -> str:
    return " ".join(map(str, shape))


if __name__ == "__main__":
    PATH.write_text(table(), encoding="utf-8")
