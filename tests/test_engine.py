"""Is there one way to every engine, and is what an engine cannot do told before anything starts?"""

import importlib.util
import re
import subprocess
import sys

import pytest

from parallel.engines.engine import ENGINES, engine_name, unsupported
from parallel.layouts import Layout
from tests.small_models import small_config


def test_names_of_engines_are_known_without_torch() -> None:
    code = "import sys, parallel.engines.engine; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("text", "near"), [("Native", "native"), ("pytorch", "torch"), ("deep-speed", "deepspeed"), ("fair", "fairscale")]
)
def test_an_unknown_engine_is_told_with_the_nearest(text: str, near: str) -> None:
    line = (
        f"engine = {text!r}; choose one of native, torch, deepspeed, fairscale, transformers; the nearest is {near!r}"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(line)}$"):
        engine_name(text)
    assert [engine_name(name) for name in ENGINES] == list(ENGINES)


@pytest.mark.parametrize("name", ["deepspeed", "fairscale", "transformers"])
def test_an_engine_that_is_not_installed_says_how_to_get_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _package: None)
    told = unsupported(engine_name(name), small_config("decoder_only"), Layout())
    assert told == f"the {name} engine is not installed: pip install 'twinshard[engines]'"
