"""Where do real pairs of texts come from?

    *.po, *.mo     gettext catalogues: source message -> translation, with polib
    *.tsv          two columns, source and target
    *.jsonl        one object a line with the strings `source` and `target`
    django:de,ja   the catalogues that the installed Django ships, for each named language; Django is never imported

Nothing is fetched. Translations of Django come from its contributors under the BSD 3-clause licence of Django itself.
Fuzzy, obsolete and untranslated messages are left out. A message with plural forms gives one pair a form: the form used
for one thing belongs to the singular source, every other form to the plural source. Pairs keep the order of their file,
and Django's files are read in the order of their paths, so that a source always gives the same list.

Left out: contexts and comments of a message, repeated messages (kept as often as they occur), any other format.
"""

import dataclasses
import difflib
import gettext
import importlib.util
import json
import re
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import polib


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TextPair:
    """One text and its translation; neither is empty."""

    source: str
    target: str

    def __post_init__(self) -> None:
        if not self.source or not self.target:
            raise ValueError(f"a pair needs two texts, got {self.source!r} and {self.target!r}")


def read_pairs(source: str | Path) -> list[TextPair]:
    """Return the pairs of a file, or of Django's catalogues in some languages.

    Args:
        source: a path ending in .po, .mo, .tsv or .jsonl, or `django:` and languages joined by commas.

    Raises:
        ValueError: the source is missing, broken or without a translated pair; the message says where and what is
            expected.
    """
    if isinstance(source, str) and source.startswith("django:"):
        return _django_pairs(source)
    path = Path(source)
    if path.suffix not in _READERS:
        raise ValueError(
            f"{source}: unknown kind of text {path.suffix!r}; expected {', '.join(_READERS)} or django:LANGUAGE"
        )
    if not path.is_file():
        raise ValueError(f"{source}: no such file; expected {path.suffix} with pairs of texts")
    try:
        pairs = list(_READERS[path.suffix](path))
    except UnicodeDecodeError as error:
        raise ValueError(f"{source}: byte {error.start} is not {error.encoding}; expected text in UTF-8") from None
    if not pairs:
        raise ValueError(f"{source}: no translated pair; expected at least one source with a translation")
    return pairs


# ---- gettext --------------------------------------------------------------------------------------------------------


_QUOTED_LINE = re.compile(r'(msgctxt|msgid|msgid_plural|msgstr(\[\d+\])?)?\s*"([^"\\]|\\.)*"')


def _catalogue_pairs(path: Path) -> Iterator[TextPair]:
    catalogue = _compiled(path) if path.suffix == ".mo" else _plain(path)
    form_of_one = _form_of_one(catalogue.metadata.get("Plural-Forms", ""), path)
    for entry in catalogue.translated_entries():
        texts = {
            form: (entry.msgid if form == form_of_one else entry.msgid_plural, text)
            for form, text in sorted(entry.msgstr_plural.items())
        }
        for text, translation in texts.values() if texts else [(entry.msgid, entry.msgstr)]:
            if text and translation:
                yield TextPair(source=text, target=translation)


def _plain(path: Path) -> polib.POFile:
    # polib takes the last character of an unfinished line for its quote, and loses a letter of the message.
    with path.open(encoding=polib.detect_encoding(str(path))) as file:
        for number, line in enumerate(file, start=1):
            text = line.strip()
            if text and not text.startswith("#") and not _QUOTED_LINE.fullmatch(text):
                raise ValueError(
                    f"{path}, line {number}: broken catalogue; expected a message in quotes, found {text!r}"
                )
    try:
        return polib.pofile(str(path))
    except OSError as error:
        line_number = re.search(r"line (\d+)", str(error))
        place = f"{path}, line {line_number[1]}" if line_number else str(path)
        raise ValueError(f"{place}: broken catalogue; expected msgid and msgstr in turn") from None


def _compiled(path: Path) -> polib.MOFile:
    try:
        # polib reads a file that was cut off as empty messages; the standard library says that it is corrupt.
        with path.open("rb") as file:
            gettext.GNUTranslations(file)
        return polib.mofile(str(path))
    except UnicodeDecodeError:
        raise
    except (OSError, ValueError, struct.error) as error:
        detail = getattr(error, "strerror", None) or str(error)
        raise ValueError(f"{path}: broken catalogue, {detail}; expected compiled gettext messages") from None


def _form_of_one(rule: str, path: Path) -> int:
    """Return the index of the plural form that is used for one thing, from a catalogue's `Plural-Forms`."""
    expression = re.search(r"plural\s*=\s*([^;]+)", rule)
    if expression is None:
        return 0
    try:
        return gettext.c2py(expression[1].strip())(1)
    except ValueError as error:
        raise ValueError(f"{path}: broken catalogue, Plural-Forms {rule!r}: {error}") from None


def _django_pairs(source: str) -> list[TextPair]:
    package = importlib.util.find_spec("django")
    if package is None or package.origin is None:
        raise ValueError(f"{source}: Django is not installed; pip install 'twinshard[study]' brings its catalogues")
    root = Path(package.origin).parent
    languages = sorted(path.name for path in (root / "conf" / "locale").iterdir() if (path / "LC_MESSAGES").is_dir())
    pairs = []
    for language in source.removeprefix("django:").split(","):
        if language not in languages:
            nearest = difflib.get_close_matches(language.replace("-", "_"), languages, n=3) or languages
            raise ValueError(f"{source}: Django has no language {language!r}; try {', '.join(nearest)}")
        files = sorted(root.glob(f"**/locale/{language}/LC_MESSAGES/*.po"))
        found = [pair for file in files for pair in _catalogue_pairs(file)]
        if not found:
            raise ValueError(f"{source}: Django's {language!r} has no translated message; take another language")
        pairs += found
    return pairs


# ---- lines ----------------------------------------------------------------------------------------------------------


def _tsv_pairs(path: Path) -> Iterator[TextPair]:
    for place, line in _lines(path):
        columns = line.split("\t")
        if len(columns) != 2:
            raise ValueError(f"{place}: expected 2 columns, source and target with a tab between, found {len(columns)}")
        if all(columns):
            yield TextPair(source=columns[0], target=columns[1])


def _jsonl_pairs(path: Path) -> Iterator[TextPair]:
    for place, line in _lines(path):
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{place}: not JSON, {error.msg}; expected an object with source and target") from None
        match record:
            case {"source": str(text), "target": str(translation)}:
                if text and translation:
                    yield TextPair(source=text, target=translation)
            case _:
                raise ValueError(f"{place}: expected an object with the strings source and target, found {line[:60]!r}")


def _lines(path: Path) -> Iterator[tuple[str, str]]:
    """Yield every line that is not blank, without its end, and its place as `file, line n`."""
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield f"{path}, line {number}", line.rstrip("\r\n")


_READERS: dict[str, Callable[[Path], Iterator[TextPair]]] = {
    ".po": _catalogue_pairs,
    ".mo": _catalogue_pairs,
    ".tsv": _tsv_pairs,
    ".jsonl": _jsonl_pairs,
}
