"""How is one value of a published config.json read?

A reader takes the name of a field and all values of its file, and returns fields of `ModelConfig`, or refuses the value
with the reason: what changes the mathematics and is not modelled must not be read past. Where parameters, bytes and
FLOPs stay what they are, it refuses with `SameCounts`, which whoever only counts may take for a note. The tables that
give each field its reader are in `models.families`.

Source: the configuration classes of transformers 4 and 5.
"""

from collections.abc import Callable, Mapping
from typing import Any

Fields = dict[str, Any]
Values = Mapping[str, Any]
Reader = Callable[[str, Values], Fields]


class SameCounts(ValueError):  # noqa: N818 - it names what is the case, an error only for who computes
    """A value that changes the mathematics, but not what a model holds and computes.

    Attributes:
        fields: the fields of `ModelConfig` to count with.
        note: what is passed over, and how it is counted.
    """

    def __init__(self, message: str, *, fields: Fields, note: str) -> None:
        super().__init__(message)
        self.fields = fields
        self.note = note


PLAIN_ACTIVATIONS = {
    "relu": "relu",
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}
GATED_ACTIVATIONS = {"silu": "swiglu", "swish": "swiglu", "gelu_new": "geglu", "gelu_pytorch_tanh": "geglu"}
# The name "gated-gelu" stands for the approximation by tanh, unlike "gelu".
T5_ACTIVATIONS = PLAIN_ACTIVATIONS | {"gated-gelu": "geglu", "gated-gelu_new": "geglu", "gated-silu": "swiglu"}

_WITHOUT_MEANING = """
_attn_implementation _attn_implementation_autoset _commit_hash _name_or_path _num_labels architectures
attn_implementation auto_map bad_words_ids begin_suppress_tokens bos_token_id chunk_size_feed_forward classif_dropout
classifier_dropout cls_token_id decoder_start_token_id directionality diversity_penalty do_sample dtype
early_stopping encoder_no_repeat_ngram_size eos_token_id exponential_decay_length_penalty finetuning_task
force_bos_token_to_be_generated forced_bos_token_id forced_eos_token_id gradient_checkpointing id2label init_std
initializer_factor initializer_range label2id length_penalty max_length max_sequence_length min_length model_type n_ctx
no_repeat_ngram_size num_beam_groups num_beams num_labels num_return_sequences output_attentions
output_hidden_states output_past output_scores pad_token_id pooler_fc_size pooler_num_attention_heads
pooler_num_fc_layers pooler_size_per_head pooler_type predict_special_tokens prefix pretraining_tp problem_type
remove_invalid_values reorder_and_upcast_attn repetition_penalty return_dict return_dict_in_generate sep_token_id
summary_activation summary_first_dropout summary_proj_to_labels summary_type summary_use_proj suppress_tokens
task_specific_params temperature tf_legacy_loss tokenizer_class top_k top_p torch_dtype torchscript
transformers_version typical_p use_bfloat16 use_cache
"""
IGNORED = frozenset(_WITHOUT_MEANING.split())
"""Fields that initialise, cache, return, name, pick a kernel, steer generation, or belong to another task's head."""


def count(*targets: str) -> Reader:
    """Read an integer into some fields of the model."""
    return _typed(targets, "an integer", lambda value: isinstance(value, int) and not isinstance(value, bool))


def number(*targets: str) -> Reader:
    """Read an integer or a float into some fields of the model."""
    return _typed(targets, "a number", lambda value: isinstance(value, int | float) and not isinstance(value, bool))


def flag(*targets: str) -> Reader:
    """Read a truth value into some fields of the model."""
    return _typed(targets, "true or false", lambda value: isinstance(value, bool))


def chosen(target: str, choices: Mapping[Any, Any]) -> Reader:
    """Read one of some values, each with its meaning for one field of the model."""

    def read(name: str, values: Values) -> Fields:
        if values[name] not in list(choices):
            known = " or ".join(map(repr, choices))
            raise ValueError(
                f"{name} = {values[name]!r} is not modelled; {known} {'is' if len(choices) == 1 else 'are'}"
            )
        return {target: choices[values[name]]}

    return read


def only(accepted: Any) -> Reader:
    """Accept one value that says nothing new (null says it too), and refuse every other."""

    def read(name: str, values: Values) -> Fields:
        if values[name] is not None and values[name] != accepted:
            raise ValueError(f"{name} = {values[name]!r} is not modelled; only {accepted!r} is")
        return {}

    return read


def passed_over(accepted: Any, effect: str) -> Reader:
    """Accept one value that says nothing new; others are passed over in counts, with the effect as a note."""

    def read(name: str, values: Values) -> Fields:
        try:
            return only(accepted)(name, values)
        except ValueError as error:
            raise SameCounts(str(error), fields={}, note=f"{name} = {values[name]!r} {effect}") from None

    return read


def activation(choices: Mapping[Any, Any], stand_in: str) -> Reader:
    """Read the name of an activation; one that is not modelled keeps and computes as much as the stand-in."""

    def read(name: str, values: Values) -> Fields:
        try:
            return chosen("activation", choices)(name, values)
        except ValueError as error:
            if not isinstance(values[name], str):
                raise
            note = f"{name} = {values[name]!r} is counted as {stand_in}"
            raise SameCounts(str(error), fields={"activation": stand_in}, note=note) from None

    return read


def same_as(other: str) -> Reader:
    """Accept what another field says too: the model has one number for both."""

    def read(name: str, values: Values) -> Fields:
        if values[name] != values[other]:
            raise ValueError(f"{name} = {values[name]!r} differs from {other} = {values[other]!r}; the model has one")
        return {}

    return read


def same_rate_as(other: str) -> Reader:
    """Accept the dropout rate that another field says too; counts hold whatever the rate is."""

    def read(name: str, values: Values) -> Fields:
        number()(name, values)
        try:
            return same_as(other)(name, values)
        except ValueError as error:
            note = f"{name} = {values[name]!r} is counted as {other} = {values[other]!r}"
            raise SameCounts(str(error), fields={}, note=note) from None

    return read


def null_or(reader: Reader, default: Callable[[Values], Fields]) -> Reader:
    """Read null as what the library derives from other fields."""

    def read(name: str, values: Values) -> Fields:
        return default(values) if values[name] is None else reader(name, values)

    return read


def beside(_name: str, _values: Values) -> Fields:
    """Leave a value to the reader of another field, which needs both."""
    return {}


def rope(name: str, values: Values) -> Fields:
    """Read `rope_parameters`, or the older `rope_scaling` and `rope_theta`; a base inside the object wins."""
    spelling = "rope_scaling" if values["rope_scaling"] else name
    _typed((), "an object or null", lambda value: value is None or isinstance(value, Mapping))(spelling, values)
    parameters = values[spelling] or {}
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    others = set(parameters) - {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
    share = parameters.get("partial_rotary_factor", values["partial_rotary_factor"])
    theta = parameters.get("rope_theta", values["rope_theta"])
    fields = number("rope_theta")("rope_theta", {"rope_theta": theta})
    if kind != "default" or others:
        raise SameCounts(
            f"{spelling} = {dict(parameters)!r} is not modelled; only a rope_theta of type 'default' is",
            fields=fields,
            note=f"{spelling} of type {kind!r} turns queries and keys by other angles: counts are the same",
        )
    if share not in (None, 1.0):
        raise SameCounts(
            f"partial_rotary_factor = {share!r} is not modelled; only 1.0 is",
            fields=fields,
            note=f"partial_rotary_factor = {share!r}: tables of angles are counted for whole heads",
        )
    return fields


def window(name: str, values: Values) -> Fields:
    """Accept a sliding window that every sequence fits into: then it changes nothing."""
    width, length = values[name], values["max_position_embeddings"]
    if width is None:
        return {}
    count()(name, values)
    if width >= length:
        return {}
    message = (
        f"{name} = {width!r} is shorter than the {length} positions of the longest sequence and is not modelled; "
        f"max_length = {width!r} reads the file for sequences that fit"
    )
    note = f"{name} = {width}: scores and caches are counted without a window, so for every pair of positions"
    raise SameCounts(message, fields={}, note=note)


def optional_window(name: str, values: Values) -> Fields:
    """Accept a window that is off, or that no block has: it holds from block `max_window_layers` on, or as listed."""
    kinds = values["layer_types"]
    if kinds is None:
        has_window = values["use_sliding_window"] and values["max_window_layers"] < values["num_hidden_layers"]
        return window(name, values) if has_window else {}
    if set(kinds) <= {"full_attention"}:
        return {}
    if set(kinds) <= {"full_attention", "sliding_attention"} and values["use_sliding_window"]:
        return window(name, values)
    raise ValueError(f"layer_types = {kinds!r} is not modelled; only 'full_attention' is")


def t5_ffn(name: str, values: Values) -> Fields:
    """Read `feed_forward_proj`; what newer files derive from it has to agree."""
    gate, _, plain = str(values[name]).rpartition("-")
    fields = activation(T5_ACTIVATIONS, "geglu" if gate == "gated" else "gelu")(name, values)
    only("gelu_new" if values[name] == "gated-gelu" else plain)("dense_act_fn", values)
    only(gate == "gated")("is_gated_act", values)
    return fields


def t5_head(name: str, values: Values) -> Fields:
    """Read `tie_word_embeddings`: a tied head is scaled, unless `scale_decoder_outputs` says otherwise.

    Version 5 of transformers ties every head of T5 and remembers in `scale_decoder_outputs` what the file said; a file
    that it wrote therefore describes a tied head without a scale, and is read as such.
    """
    fields = chosen("tying", {True: "all", False: "source_target"})(name, values)
    return fields | null_or(flag("head_scale"), lambda _: {"head_scale": values[name]})("scale_decoder_outputs", values)


def _typed(targets: tuple[str, ...], kind: str, is_kind: Callable[[Any], bool]) -> Reader:
    def read(name: str, values: Values) -> Fields:
        if not is_kind(values[name]):
            raise ValueError(f"{name} = {values[name]!r}; it must be {kind}")
        return dict.fromkeys(targets, values[name])

    return read
