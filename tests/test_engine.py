"""Is there one way to every engine, and is what an engine cannot do told before anything starts?"""

import importlib.util
import subprocess
import sys

import pytest

from parallel.engines.choice import EngineChoice, EngineName
from parallel.engines.engine import unsupported
from parallel.layouts import Layout
from tests.small_models import small_config


def test_names_of_engines_are_known_without_torch() -> None:
    code = "import sys, parallel.engines.engine; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("name", ["deepspeed", "fairscale", "transformers"])
def test_an_engine_that_is_not_installed_says_how_to_get_it(name: EngineName, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _package: None)
    told = unsupported(EngineChoice(name), small_config("decoder_only"), Layout())
    assert told == f"the {name} engine is not installed: pip install 'twinshard[engines]'"
