"""Is a published config.json accounted in either style, with a note on what it passes over, and what is refused?"""

import json
from pathlib import Path
from typing import Any

import pytest

from launch.cli import answer
from models.config import ModelConfig
from models.costs import parameter_counts
from tests.published_configs import BART_LARGE, GPT2, LLAMA_2_7B, T5_SMALL


def told(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = answer(arguments)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def accounted(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    code, out, err = told(capsys, "account", *arguments, "--format", "json")
    assert code == 0, err
    document: dict[str, Any] = json.loads(out)
    return document


def test_old_and_new_files_of_one_model_count_the_same(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    old = LLAMA_2_7B | {"rope_theta": 10000.0}
    new = {key: value for key, value in LLAMA_2_7B.items() if key not in ("rope_scaling", "torch_dtype")}
    new |= {"rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}, "dtype": "float16"}
    documents = []
    for name, content in (("old", old), ("new", new)):
        (tmp_path / name).mkdir()
        file = tmp_path / name / "config.json"
        file.write_text(json.dumps(content), encoding="utf-8")
        documents.append(accounted(capsys, str(file), "--tp", "4"))
    assert documents[0] == documents[1]
    named = accounted(capsys, "llama-2-7b", "--tp", "4")
    assert documents[0]["ranks"] == named["ranks"]
    assert documents[0]["notes"] == []


@pytest.mark.parametrize(
    ("published", "changes", "note"),
    [
        (
            LLAMA_2_7B,
            {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}, "rope_theta": 5e5},
            "rope_scaling of type 'llama3' turns queries and keys by other angles",
        ),
        (LLAMA_2_7B, {"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
        (LLAMA_2_7B, {"hidden_act": "gelu"}, "hidden_act = 'gelu' is counted as swiglu"),
        (
            LLAMA_2_7B | {"model_type": "mistral"},
            {"sliding_window": 1024},
            "sliding_window = 1024: scores and caches are counted without a window",
        ),
        (GPT2, {"embd_pdrop": 0.0}, "embd_pdrop = 0.0 is counted as resid_pdrop = 0.1"),
        (GPT2, {"scale_attn_by_inverse_layer_idx": True}, "scales scores only"),
        (T5_SMALL, {"feed_forward_proj": "gated-relu"}, "feed_forward_proj = 'gated-relu' is counted as geglu"),
        (BART_LARGE, {"decoder_layerdrop": 0.1}, "decoder_layerdrop = 0.1 drops blocks at random"),
    ],
)
def test_what_changes_the_mathematics_alone_is_noted_and_still_an_error_to_build(
    published: dict[str, Any], changes: dict[str, Any], note: str
) -> None:
    content = {key: value for key, value in published.items() if key not in {"rope_scaling", "pretraining_tp"}}
    config, notes = ModelConfig.counted_from_hf(content | changes)
    assert len(notes) == 1
    assert note in notes[0]
    with pytest.raises(ValueError, match=r"is not modelled|the model has one"):
        ModelConfig.from_hf(content | changes)
    if "feed_forward_proj" not in changes:
        plain = {key: value for key, value in content.items() if key not in changes}
        plain |= {"sliding_window": None} if published.get("model_type") == "mistral" else {}
        assert parameter_counts(config) == parameter_counts(ModelConfig.from_hf(plain))


@pytest.mark.parametrize(
    "changes",
    [{"num_local_experts": 8}, {"quantization_config": {"bits": 4}}, {"model_type": "mixtral"}, {"hidden_act": 3}],
)
def test_what_changes_counts_is_never_passed_over(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(changes))):
        ModelConfig.counted_from_hf(LLAMA_2_7B | changes)


def test_notes_are_told(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    content = LLAMA_2_7B | {"rope_scaling": {"type": "linear", "factor": 2.0}}
    (tmp_path / "config.json").write_text(json.dumps(content), encoding="utf-8")
    document = accounted(capsys, str(tmp_path), "--source-length", "5")
    assert "rope_scaling of type 'linear'" in document["notes"][0]
    assert document["notes"][1] == "decoder_only has no source stream: source-length = 5 is not read"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"model_type": ', "not JSON"),
        ("[1]", "expected a JSON object, found list"),
        ('{"model_type": "mixtral"}', "model_type = 'mixtral' is not modelled; llama, "),
        ("{}", "model_type = None is not modelled"),
    ],
)
def test_a_broken_file_is_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, content: str, message: str
) -> None:
    (tmp_path / "config.json").write_text(content, encoding="utf-8")
    code, out, err = told(capsys, "account", str(tmp_path))
    assert (code, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1
