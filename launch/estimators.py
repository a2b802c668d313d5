"""What do public estimators say of the figures that others published? Run, never quoted.

    llm-analysis   parameters, and activations of a block under Megatron's parallelism, of decoder-only models
    deepspeed      bytes of model states under ZeRO-2 and ZeRO-3, from a number of parameters
    accelerate     parameters of transformers' model, built without storage

Each is asked with the options that come closest to how the figure was made, and told so in a note. `python -m
launch.estimators FOLDER` reads the published rows and writes CSV; `twinshard validate --estimators` puts it beside
our own figures. An estimator that is not installed is a row that says so. None of them reaches a hub: they get sizes,
not names.
"""

import csv
import importlib
import importlib.metadata
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from models.config import ModelConfig
from models.named import MODEL_NAMES, named_model

COLUMNS = ("estimator", "version", "table", "row", "quantity", "estimate", "note")
NOTE_FFN = "ffn width as published; it counts two matrices an ffn"
GB = 10**9
GIB = 2**30

Told = tuple[str, str, str, int | float, str]
"""Table, row, quantity, estimate, note."""


def estimates(folder: Path) -> Iterator[tuple[str, ...]]:
    """Rows of all estimators on the published figures of a folder, in `COLUMNS`."""
    estimators: dict[str, tuple[Sequence[str], Callable[[Path], Iterator[Told]]]] = {
        "llm-analysis": (("llm_analysis.analysis", "llm_analysis.config"), _llm_analysis),
        "deepspeed": (("deepspeed.runtime.zero.stage_1_and_2", "deepspeed.runtime.zero.stage3"), _deepspeed),
        "accelerate": (("accelerate", "transformers"), _accelerate),
    }
    for name, (modules, ask) in estimators.items():
        try:
            for module in modules:
                importlib.import_module(module)
            version = importlib.metadata.version(name)
        except ImportError as error:
            yield name, "", "", "", "", "", f"not installed: {error}"
            continue
        for table, row, quantity, estimate, note in ask(folder):
            yield name, version, table, row, quantity, str(estimate), note


def _rows(folder: Path, table: str) -> Iterator[dict[str, str]]:
    with (folder / f"{table}.csv").open(encoding="utf-8", newline="") as file:
        yield from csv.DictReader(file)


def _published_models(folder: Path) -> Iterator[tuple[str, ModelConfig]]:
    """Published counts of models that can be called by name, without what stands in brackets."""
    for row in _rows(folder, "parameters"):
        if row["model"] in MODEL_NAMES:
            yield row["model"], named_model(row["model"])


# ---- llm-analysis ---------------------------------------------------------------------------------------------------


def _llm_analysis(folder: Path) -> Iterator[Told]:
    analysis, config = (importlib.import_module(f"llm_analysis.{name}") for name in ("analysis", "config"))

    def ask(model: Any, **degrees: int) -> Any:
        parallelism = config.ParallelismConfig(**degrees)
        gpu = config.get_gpu_config_by_name("a100-sxm-80gb")
        return analysis.LLMAnalysis(model, gpu, config.get_dtype_config_by_name("w16a16e16"), parallelism)

    for name, model in _published_models(folder):
        if model.architecture == "decoder_only":
            told = config.ModelConfig(
                name=name,
                num_layers=model.num_decoder_blocks,
                n_head=model.num_heads,
                hidden_dim=model.width,
                vocab_size=model.vocabulary,
                max_seq_len=model.max_length,
                num_key_value_heads=model.num_kv_heads,
                ffn_embed_dim=model.ffn_width,
                expansion_ratio=model.ffn_width / model.width,
            )
            yield (
                "parameters",
                name,
                "parameters",
                round(ask(told).get_num_params_total()),
                NOTE_FFN,
            )
    for row in _rows(folder, "activation_memory"):
        yield from _llm_analysis_activations(row, ask, analysis, config)


def _llm_analysis_activations(
    row: dict[str, str], ask: Callable[..., Any], analysis: Any, config: Any
) -> Iterator[Told]:
    num_layers, tp, pp = int(row["layers"]), int(row["tp"]), int(row["pp"])
    told = config.ModelConfig(
        name=row["model"],
        num_layers=num_layers,
        n_head=int(row["heads"]),
        hidden_dim=int(row["hidden"]),
        vocab_size=int(row["vocabulary"]),
        max_seq_len=int(row["sequence"]),
    )
    recomputation = analysis.ActivationRecomputation
    variants = (
        ("activation_tp_gib", "activation tp, GiB", 1, recomputation.NONE),
        ("activation_tp_sp_selective_gib", "activation tp sp selective, GiB", tp, recomputation.SELECTIVE),
    )
    for column, quantity, sp, recompute in variants:
        if not row.get(column):
            continue
        one = ask(told, tp_size=tp, pp_size=pp, sp_size=sp).get_activation_memory_per_layer(
            int(row["microbatch"]),
            int(row["sequence"]),
            is_inference=False,
            activation_recomputation=recompute,
            layernorm_dtype_bytes=2,
            flash_attn=False,
            softmax_dropout=True,
        )
        note = "a block times all blocks; it does not know interleaved stages; half-precision norms, scores stored"
        yield "activation_memory", row["model"], quantity, num_layers * one / GIB, note


# ---- DeepSpeed ------------------------------------------------------------------------------------------------------


def _deepspeed(folder: Path) -> Iterator[Told]:
    zero2 = importlib.import_module("deepspeed.runtime.zero.stage_1_and_2").estimate_zero2_model_states_mem_needs
    zero3 = importlib.import_module("deepspeed.runtime.zero.stage3").estimate_zero3_model_states_mem_needs
    for row in _rows(folder, "zero"):
        count, dp = round(float(row["parameters_billion"]) * 10**9), int(row["data_parallel"])
        name = f"{row['parameters_billion']}B dp {dp}"
        _, two = zero2(count, num_gpus_per_node=dp, num_nodes=1, cpu_offload=False)
        _, three, _ = zero3(
            count,
            largest_layer_params=0,
            num_gpus_per_node=dp,
            num_nodes=1,
            cpu_offload=False,
            cpu_offload_params=False,
        )
        yield "zero", name, "states, ZeRO-2, GB", two / GB, "without offload"
        yield "zero", name, "states, ZeRO-3, GB", three / GB, "without offload, its largest layer left out"


# ---- accelerate -----------------------------------------------------------------------------------------------------


def _accelerate(folder: Path) -> Iterator[Told]:
    accelerate, transformers = importlib.import_module("accelerate"), importlib.import_module("transformers")
    sizes = importlib.import_module("accelerate.utils").calculate_maximum_sizes
    for name, model in _published_models(folder):
        kind, fields = _transformers_config(model)
        built_by = {
            "gpt2": "GPT2LMHeadModel",
            "llama": "LlamaForCausalLM",
            "t5": "T5ForConditionalGeneration",
            "bart": "BartForConditionalGeneration",
        }
        with accelerate.init_empty_weights(include_buffers=False):
            built = getattr(transformers, built_by[kind])(transformers.CONFIG_MAPPING[kind](**fields))
        built.tie_weights()
        total_bytes, _ = sizes(built)
        yield (
            "parameters",
            name,
            "parameters",
            total_bytes // 4,
            "model of transformers, float32 bytes over 4, buffers too",
        )


def _transformers_config(model: ModelConfig) -> tuple[str, dict[str, Any]]:
    """The type and the sizes of a model in the words of transformers."""
    if model.positions == "rope":
        return "llama", {
            "vocab_size": model.vocabulary,
            "hidden_size": model.width,
            "intermediate_size": model.ffn_width,
            "num_hidden_layers": model.num_decoder_blocks,
            "num_attention_heads": model.num_heads,
            "num_key_value_heads": model.num_kv_heads,
            "tie_word_embeddings": model.tying == "head",
        }
    if model.architecture == "decoder_only":
        return "gpt2", {
            "vocab_size": model.vocabulary,
            "n_positions": model.max_length,
            "n_embd": model.width,
            "n_layer": model.num_decoder_blocks,
            "n_head": model.num_heads,
            "n_inner": model.ffn_width,
        }
    if model.positions == "relative":
        return "t5", {
            "vocab_size": model.vocabulary,
            "d_model": model.width,
            "d_kv": model.head_width,
            "d_ff": model.ffn_width,
            "num_layers": model.num_encoder_blocks,
            "num_decoder_layers": model.num_decoder_blocks,
            "num_heads": model.num_heads,
            "feed_forward_proj": "gated-gelu" if model.is_gated else "relu",
            "tie_word_embeddings": model.tying == "all",
        }
    return "bart", {
        "vocab_size": model.vocabulary,
        "max_position_embeddings": model.max_length,
        "d_model": model.width,
        "encoder_layers": model.num_encoder_blocks,
        "decoder_layers": model.num_decoder_blocks,
        "encoder_attention_heads": model.num_heads,
        "decoder_attention_heads": model.num_heads,
        "encoder_ffn_dim": model.ffn_width,
        "decoder_ffn_dim": model.ffn_width,
    }


def main(arguments: Sequence[str]) -> int:
    """Write what the estimators say of the figures in a folder, as CSV."""
    if len(arguments) != 1 or not Path(arguments[0]).is_dir():
        sys.stderr.write("error: give one folder with the published figures\n")
        return 2
    logging.disable(logging.WARNING)
    # What an estimator prints must not stand between the rows.
    output, sys.stdout = sys.stdout, sys.stderr
    writer = csv.writer(output, lineterminator="\n")
    writer.writerow(COLUMNS)
    writer.writerows(estimates(Path(arguments[0])))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
