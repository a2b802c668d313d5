"""Do real texts become the batches that the docstring draws, and is nothing lost in silence?"""

import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import polib
import pytest
import torch

from models.architectures import build
from models.batch import IGNORED
from models.catalogue import TextPair, read_pairs
from models.config import ModelConfig
from models.named import named_model
from models.text import LossOn, TextBatch, Truncation, pair_batch
from models.vocabulary import BEGIN, END, MASK, PAD, SEPARATOR, VOCABULARY, decode, encode

NO = IGNORED
A, B, C, X, Y = encode("abcxy")
ONE = [TextPair(source="abc", target="xy")]
HEADER = 'msgid ""\nmsgstr ""\n"Content-Type: text/plain; charset=UTF-8\\n"\n'
ARCHITECTURES = ("tiny-encoder-decoder", "tiny-decoder", "tiny-encoder")


def written(tmp_path: Path, name: str, content: str | bytes) -> Path:
    path = tmp_path / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def texts(path: Path) -> list[tuple[str, str]]:
    return [(pair.source, pair.target) for pair in read_pairs(path)]


def one_row(name: str, *, source_length: int = 3, target_length: int = 3, loss_on: LossOn = "target") -> TextBatch:
    return pair_batch(
        named_model(name),
        ONE,
        num_sequences=1,
        source_length=source_length,
        target_length=target_length,
        seed=0,
        loss_on=loss_on,
    )


def german(config: ModelConfig, *, seed: int = 1, loss_on: LossOn = "target", num_sequences: int = 8) -> TextBatch:
    return pair_batch(
        config,
        read_pairs("django:de"),
        num_sequences=num_sequences,
        source_length=48,
        target_length=40,
        seed=seed,
        loss_on=loss_on,
    )


# ---- vocabulary -----------------------------------------------------------------------------------------------------


def test_text_survives_its_ids() -> None:
    text = "Jahr, год, 年, سنة\n"
    assert decode([BEGIN, *encode(text), END, PAD]) == text
    assert max(encode(text)) < min(PAD, BEGIN, END, SEPARATOR, MASK)
    assert len({PAD, BEGIN, END, SEPARATOR, MASK}) == 5
    assert max(PAD, BEGIN, END, SEPARATOR, MASK) < VOCABULARY


# ---- sources --------------------------------------------------------------------------------------------------------


def test_fuzzy_obsolete_and_untranslated_messages_are_left_out(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        "django.po",
        HEADER
        + '\nmsgid "one"\nmsgstr "eins"\n\n#, fuzzy\nmsgid "two"\nmsgstr "drei"\n\nmsgid "three"\nmsgstr ""\n'
        + '\n#~ msgid "four"\n#~ msgstr "vier"\n\nmsgid "five"\nmsgstr "fünf"\n',
    )
    assert texts(path) == [("one", "eins"), ("five", "fünf")]


def test_the_form_for_one_thing_belongs_to_the_singular(tmp_path: Path) -> None:
    message = '\nmsgid "a day"\nmsgid_plural "days"\nmsgstr[0] "null"\nmsgstr[1] "ein"\nmsgstr[2] "viele"\n'
    rule = '"Plural-Forms: nplurals=3; plural=n==0 ? 0 : n==1 ? 1 : 2;\\n"\n'
    assert texts(written(tmp_path, "ruled.po", HEADER + rule + message)) == [
        ("days", "null"),
        ("a day", "ein"),
        ("days", "viele"),
    ]
    assert texts(written(tmp_path, "unruled.po", HEADER + message))[0] == ("a day", "null")
    broken = '"Plural-Forms: nplurals=2; plural=(n !! 1);\\n"\n'
    with pytest.raises(ValueError, match=r"broken catalogue, Plural-Forms .*n !! 1"):
        read_pairs(written(tmp_path, "broken.po", HEADER + broken + message))


def test_a_compiled_catalogue_holds_the_same_pairs(tmp_path: Path) -> None:
    message = (
        '\nmsgid "a day"\nmsgid_plural "days"\nmsgstr[0] "ein Tag"\nmsgstr[1] "Tage"\n\nmsgid "no"\nmsgstr "nein"\n'
    )
    path = written(tmp_path, "django.po", HEADER + message)
    polib.pofile(str(path)).save_as_mofile(str(tmp_path / "django.mo"))
    compiled = tmp_path / "django.mo"
    assert sorted(texts(compiled)) == sorted(texts(path))
    compiled.write_bytes(compiled.read_bytes()[:-10])
    with pytest.raises(ValueError, match=r"django\.mo: broken catalogue, File is corrupt"):
        read_pairs(compiled)


def test_lines_of_tables_and_of_json_are_pairs(tmp_path: Path) -> None:
    table = written(tmp_path, "pairs.tsv", "one\teins\n\n\tzwei\nthree\t\nfour\tvier\r\n")
    assert texts(table) == [("one", "eins"), ("four", "vier")]
    lines = written(
        tmp_path, "pairs.jsonl", '{"source": "one", "target": "eins", "id": 7}\n\n{"source":"","target":"x"}\n'
    )
    assert texts(lines) == [("one", "eins")]


def test_djangos_catalogues_are_read_in_one_order_without_running_django() -> None:
    program = (
        "import sys\nfrom models.catalogue import read_pairs\npairs = read_pairs('django:de,ja')\n"
        "assert pairs == read_pairs('django:de') + read_pairs('django:ja') and len(pairs) > 1000\n"
        "assert 'torch' not in sys.modules and 'django' not in sys.modules\n"
        "assert any(pair.target == '日本語' for pair in pairs)\n"
    )
    root = Path(__file__).resolve().parent.parent
    result = subprocess.run([sys.executable, "-c", program], check=False, cwd=root, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", "x", r"a\.txt: unknown kind of text '\.txt'; expected \.po, \.mo, \.tsv, \.jsonl or django:LANGUAGE"),
        ("a.po", "", r"a\.po: no translated pair"),
        ("a.po", HEADER + '\nmsgid "x"\nmsgstr ""\n', r"a\.po: no translated pair"),
        (
            "a.po",
            'msgid "x"\nmsgstr "y\n',
            r"a\.po, line 2: broken catalogue; expected a message in quotes, found 'msgstr",
        ),
        ("a.po", 'msgid "x"\nmsgstr "y"\nnonsense\n', r"a\.po, line 3: broken catalogue"),
        ("a.po", 'msgstr "y"\n', r"a\.po, line 1: broken catalogue; expected msgid and msgstr"),
        ("a.po", b'msgid "x"\nmsgstr "\xff"\n', r"a\.po: byte 18 is not utf-8"),
        ("a.mo", b"", r"a\.mo: broken catalogue"),
        ("a.mo", b"abcdefgh", r"a\.mo: broken catalogue, Bad magic number"),
        ("a.mo", struct.pack("I", 0x950412DE), r"a\.mo: broken catalogue"),
        ("a.tsv", "one\teins\ntwo\n", r"a\.tsv, line 2: expected 2 columns, source and target with a tab .*, found 1"),
        ("a.tsv", "\n\n", r"a\.tsv: no translated pair"),
        ("a.tsv", b"a\tb\n\xff\tb\n", r"a\.tsv: byte 4 is not utf-8"),
        ("a.jsonl", '{"source": "a", "target": "b"}\n{"source": "a"}\n', r"a\.jsonl, line 2: expected an object with"),
        ("a.jsonl", '{"source": 1, "target": "b"}\n', r"a\.jsonl, line 1: expected an object with the strings"),
        ("a.jsonl", "{\n", r"a\.jsonl, line 1: not JSON"),
    ],
)
def test_a_broken_source_is_named_with_its_line(tmp_path: Path, name: str, content: str | bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_pairs(written(tmp_path, name, content))


def test_a_source_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"none\.po: no such file; expected \.po with pairs"):
        read_pairs(tmp_path / "none.po")
    with pytest.raises(ValueError, match=r"Django has no language 'pt-br'; try .*pt_BR"):
        read_pairs("django:pt-br")
    with pytest.raises(ValueError, match="Django's 'en' has no translated message"):
        read_pairs("django:de,en")
    with pytest.raises(ValueError, match="a pair needs two texts"):
        TextPair(source="a", target="")


# ---- batches --------------------------------------------------------------------------------------------------------


def test_an_encoder_decoder_reads_the_target_one_position_late() -> None:
    batch = one_row("tiny-encoder-decoder", source_length=4, target_length=5)
    assert batch.stream("source").tolist() == [[A, B, C, PAD]]
    assert batch.stream("target").tolist() == [[BEGIN, X, Y, PAD, PAD]]
    assert batch.labels.tolist() == [[X, Y, END, NO, NO]]
    assert (batch.source_lengths, batch.target_lengths) == ((3,), (3,))


@pytest.mark.parametrize(
    ("loss_on", "labels"), [("target", [NO, NO, NO, X, Y, END, NO]), ("all", [B, C, SEPARATOR, X, Y, END, NO])]
)
def test_a_decoder_reads_source_separator_and_target_as_one(loss_on: LossOn, labels: list[int]) -> None:
    batch = one_row("tiny-decoder", source_length=4, loss_on=loss_on)
    assert batch.stream("target").tolist() == [[A, B, C, SEPARATOR, X, Y, PAD]]
    assert batch.labels.tolist() == [labels]
    assert batch.target_lengths == (6,)


@pytest.mark.parametrize(("loss_on", "places"), [("target", {4, 5}), ("all", {0, 1, 2, 4, 5})])
def test_an_encoder_guesses_masked_bytes(loss_on: LossOn, places: set[int]) -> None:
    whole = [A, B, C, SEPARATOR, X, Y]
    seen = set()
    for seed in range(40):
        batch = pair_batch(
            named_model("tiny-bert"), ONE, num_sequences=1, source_length=3, target_length=3, seed=seed, loss_on=loss_on
        )
        (ids,), (labels,) = batch.stream("source").tolist(), batch.labels.tolist()
        (place,) = (at for at, label in enumerate(labels) if label != NO)
        assert (ids[place], labels[place]) == (MASK, whole[place])
        assert [id_ for at, id_ in enumerate(ids) if at != place] == [
            id_ for at, id_ in enumerate(whole) if at != place
        ]
        assert batch.token_types is not None
        assert batch.token_types.tolist() == [[0, 0, 0, 0, 1, 1]]
        seen.add(place)
    assert seen == places


def test_an_encoder_guesses_its_share_of_the_bytes() -> None:
    batch = german(named_model("tiny-encoder"), num_sequences=64)
    target_bytes = sum(min(len(encode(pair.target)), 39) for pair in drawn(64))
    assert batch.num_loss_tokens() == pytest.approx(0.15 * target_bytes, rel=0.1)


def drawn(num_sequences: int) -> list[TextPair]:
    """Read back the pairs of `german`: 400 positions cut none of their texts."""
    batch = pair_batch(
        named_model("tiny-transformer"),
        read_pairs("django:de"),
        num_sequences=num_sequences,
        source_length=400,
        target_length=400,
        seed=1,
    )
    assert batch.truncation == Truncation(num_sources=0, num_targets=0, num_source_tokens=0, num_target_tokens=0)
    rows = zip(batch.stream("source").tolist(), batch.labels.tolist(), strict=True)
    return [TextPair(source=decode(source), target=decode(labels)) for source, labels in rows]


def test_architectures_read_the_same_bytes_and_predict_the_same_tokens() -> None:
    config = named_model("tiny-encoder-decoder")
    two, one, masked = (german(named_model(name).replace(max_length=128)) for name in ARCHITECTURES)
    assert two.truncation == one.truncation == masked.truncation
    assert two.num_loss_tokens() == one.num_loss_tokens() < masked.stream("source").numel()
    assert torch.equal(two.labels[two.labels != NO], one.labels[one.labels != NO])
    sums = tuple(map(sum, zip(two.source_lengths, two.target_lengths, strict=True)))
    assert sums == one.target_lengths == masked.source_lengths
    assert german(config, loss_on="all").num_loss_tokens() == two.num_loss_tokens()


def test_a_decoder_with_loss_on_all_has_a_label_at_every_position() -> None:
    batch = german(named_model("tiny-decoder"), loss_on="all")
    assert batch.num_loss_tokens() == sum(batch.target_lengths)


def test_what_is_cut_off_is_counted() -> None:
    batch = one_row("tiny-encoder-decoder", source_length=2, target_length=2)
    assert batch.labels.tolist() == [[X, Y]]
    assert batch.truncation == Truncation(num_sources=1, num_targets=1, num_source_tokens=1, num_target_tokens=1)
    for name in ARCHITECTURES:
        assert one_row(name, source_length=2, target_length=2).truncation == batch.truncation
        assert one_row(name).truncation.num_target_tokens == 0
    moved = batch.to("cpu")
    assert isinstance(moved, TextBatch)
    assert moved.truncation == batch.truncation


def test_sequences_differ_in_length_as_texts_do() -> None:
    batch = german(named_model("tiny-encoder-decoder"))
    assert len(set(batch.source_lengths)) > 3
    assert len(set(batch.target_lengths)) > 3
    assert batch.source_lengths != batch.target_lengths


def test_the_same_seed_draws_the_same_batch_and_every_pair_comes_once() -> None:
    config = named_model("tiny-encoder-decoder")
    assert torch.equal(german(config, seed=3).labels, german(config, seed=3).labels)
    assert not torch.equal(german(config, seed=3).labels, german(config, seed=4).labels)
    pairs = [TextPair(source=letter, target=letter) for letter in "abcde"]
    batch = pair_batch(config, pairs, num_sequences=7, source_length=1, target_length=2, seed=0)
    ids = batch.stream("source")[:, 0].tolist()
    assert sorted(ids[:5]) == encode("abcde")
    assert ids[5:] == ids[:2]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_larger_vocabulary_works_too_and_a_model_runs(name: str) -> None:
    config = named_model(name).replace(vocabulary=300, source_vocabulary=0 if name == "tiny-decoder" else 300)
    with torch.device("meta"):
        model = build(config)
    logits = model(german(config).to("meta"), {})["logits"]
    assert logits.shape == (40 if config.has_cross_attention else 88, 8, 300)


def test_mistakes_are_answered_before_a_batch_is_made() -> None:
    decoder, encoder = named_model("tiny-decoder"), named_model("tiny-encoder")
    lengths: dict[str, Any] = {"num_sequences": 1, "source_length": 8, "target_length": 8, "seed": 0}
    with pytest.raises(ValueError, match="no pairs of texts"):
        pair_batch(decoder, [], **lengths)
    with pytest.raises(ValueError, match="loss_on = 'source'; choose one of target, all"):
        pair_batch(decoder, ONE, **lengths, loss_on="source")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="reads features of width 8; text needs a token embedding"):
        pair_batch(named_model("tiny-speech"), ONE, **lengths)
    with pytest.raises(ValueError, match="has a vocabulary of 256; bytes and specials need 264"):
        pair_batch(decoder.replace(vocabulary=256), ONE, **lengths)
    with pytest.raises(ValueError, match="target_length = 1; it must be at least 2"):
        pair_batch(encoder, ONE, **lengths | {"target_length": 1})
    with pytest.raises(ValueError, match="source_length = 0; it must be at least 1"):
        pair_batch(decoder, ONE, **lengths | {"source_length": 0})
    with pytest.raises(ValueError, match=r"a pair of 100 \+ 8 positions needs 108 learned positions; .* has 64"):
        pair_batch(decoder.replace(max_length=64), ONE, **lengths | {"source_length": 100})
