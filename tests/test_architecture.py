"""Does the source tree keep the rules of the house that no linter knows?

Each rule is a function from a root folder to the places that break it. Every rule is tested twice: on this tree, where
it finds nothing, and on a small broken tree, where it must find the break. The direction of imports is left to
import-linter, whose torch-free contract is tried here on a fresh interpreter.
"""

import ast
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("models", "parallel", "launch", "results")
QUIET_PACKAGES = ("models", "parallel", "results")
MAX_LINES = 320

ENVIRONMENT_READERS = ("launch/env.py",)
ENVIRONMENT_NAMES = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}
COMMUNICATORS = ("parallel/comm.py", "parallel/dry.py", "parallel/recorder.py", "launch/env.py", "parallel/engines/")
DRAWER_NAMES = {"common", "helper", "helpers", "misc", "util", "utils"}


def sources(root: Path, packages: tuple[str, ...]) -> Iterator[tuple[str, Path]]:
    """Yield every Python file of the packages with its path from the root."""
    for package in packages:
        for path in sorted((root / package).rglob("*.py")):
            yield path.relative_to(root).as_posix(), path


def parsed_sources(root: Path, packages: tuple[str, ...]) -> Iterator[tuple[str, ast.Module]]:
    """Yield the syntax tree of every Python file of the packages."""
    for name, path in sources(root, packages):
        yield name, ast.parse(path.read_text(encoding="utf-8"), filename=name)


def imported_names(node: ast.AST) -> list[str]:
    """Return the dotted names that an import statement brings in: `from a import b` may be the module `a.b`."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.module is not None:
        return [f"{node.module}.{alias.name}" for alias in node.names]
    return []


def dotted(node: ast.AST) -> str:
    """Return `a.b.c` for an attribute chain on a plain name, and an empty string for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        prefix = dotted(node.value)
        return f"{prefix}.{node.attr}" if prefix else ""
    return ""


def too_long_files(root: Path) -> list[str]:
    return [
        f"{name}: {num_lines} lines"
        for name, path in sources(root, (*PACKAGES, "tests"))
        if (num_lines := len(path.read_text(encoding="utf-8").splitlines())) > MAX_LINES
    ]


def environment_readers(root: Path) -> list[str]:
    """Find uses of the process environment, under whatever name os was imported."""
    found = []
    for name, tree in parsed_sources(root, (*PACKAGES, "tests")):
        if name in ENVIRONMENT_READERS:
            continue
        os_names = {
            alias.asname or alias.name
            for node in ast.walk(tree)
            if isinstance(node, ast.Import)
            for alias in node.names
            if alias.name == "os"
        }
        forbidden = {f"{os_name}.{attribute}" for os_name in os_names for attribute in ENVIRONMENT_NAMES}
        forbidden_imports = {f"os.{attribute}" for attribute in ENVIRONMENT_NAMES}
        found += [
            f"{name}:{node.lineno}"
            for node in ast.walk(tree)
            if (isinstance(node, ast.Attribute) and dotted(node) in forbidden)
            or (isinstance(node, ast.ImportFrom) and forbidden_imports & set(imported_names(node)))
        ]
    return found


def communicators(root: Path) -> list[str]:
    """Find uses of torch.distributed, imported or reached through torch."""
    prefix = "torch.distributed"
    found = []
    for name, tree in parsed_sources(root, PACKAGES):
        if name.startswith(COMMUNICATORS):
            continue
        found += [
            f"{name}:{node.lineno}"
            for node in ast.walk(tree)
            if (isinstance(node, ast.Attribute) and dotted(node) == prefix)
            or (
                isinstance(node, ast.Import | ast.ImportFrom)
                and any(f"{imported}.".startswith(f"{prefix}.") for imported in imported_names(node))
            )
        ]
    return found


def printers(root: Path) -> list[str]:
    return [
        f"{name}:{node.lineno}"
        for name, tree in parsed_sources(root, QUIET_PACKAGES)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and dotted(node.func) == "print"
    ]


def drawers(root: Path) -> list[str]:
    """Find files and folders named after no noun in particular."""
    return [
        name
        for name, _ in sources(root, (*PACKAGES, "tests"))
        if DRAWER_NAMES & set(name.removesuffix(".py").split("/"))
    ]


def torch_free_modules(root: Path) -> list[str]:
    """Return the modules of the torch-free contract in pyproject.toml, a package standing for all it contains."""
    with (root / "pyproject.toml").open("rb") as file:
        contracts = tomllib.load(file)["tool"]["importlinter"]["contracts"]
    (contract,) = (contract for contract in contracts if contract.get("id") == "torch-free")
    modules = []
    for module in contract["source_modules"]:
        folder = root / module.replace(".", "/")
        files = sorted(folder.rglob("*.py")) if folder.is_dir() else [folder.with_suffix(".py")]
        modules += [
            ".".join(file.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
            for file in files
            if file.stem != "__main__"
        ]
    return modules


def torch_loaders(root: Path, modules: list[str]) -> list[str]:
    """Import the modules one after the other in one fresh interpreter; return the first with which torch came."""
    program = "import importlib, sys\nfor name in sys.argv[1:]:\n    importlib.import_module(name)\n"
    program += "    if 'torch' in sys.modules:\n        sys.exit('torch came with ' + name)\n"
    command = [sys.executable, "-c", program, *modules]
    result = subprocess.run(command, check=False, cwd=root, capture_output=True, text=True)
    return [] if result.returncode == 0 else [result.stderr.strip().splitlines()[-1]]


def write(root: Path, name: str, text: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def test_files_fit_in_one_reading() -> None:
    assert too_long_files(ROOT) == []


def test_a_long_file_is_found(tmp_path: Path) -> None:
    write(tmp_path, "models/whole.py", "x = 1\n" * MAX_LINES)
    write(tmp_path, "tests/test_long.py", "x = 1\n" * (MAX_LINES + 1))
    assert too_long_files(tmp_path) == [f"tests/test_long.py: {MAX_LINES + 1} lines"]


def test_one_file_reads_the_process_environment() -> None:
    assert environment_readers(ROOT) == []


def test_a_second_reader_of_the_environment_is_found(tmp_path: Path) -> None:
    write(tmp_path, "launch/env.py", "import os\nrank = os.environ['RANK']\n")
    write(tmp_path, "launch/cell.py", "import os as system\n\nrank = system.environ.get('RANK')\n")
    write(tmp_path, "models/config.py", "from os import getenv\n")
    write(tmp_path, "tests/test_env.py", "import os\nrank = os.getenv('RANK')\nname = os.path.join('a', 'b')\n")
    assert environment_readers(tmp_path) == ["models/config.py:1", "launch/cell.py:3", "tests/test_env.py:2"]


def test_communication_leaves_through_the_named_files() -> None:
    assert communicators(ROOT) == []


def test_communication_elsewhere_is_found(tmp_path: Path) -> None:
    write(tmp_path, "parallel/comm.py", "import torch.distributed as dist\n")
    write(tmp_path, "parallel/engines/native.py", "import torch.distributed as dist\n")
    write(tmp_path, "parallel/a.py", "import torch.distributed as dist\n")
    write(tmp_path, "parallel/b.py", "from torch import distributed\n")
    write(tmp_path, "parallel/c.py", "from torch.distributed.pipelining import PipelineStage\n")
    write(tmp_path, "parallel/d.py", "import torch\n\nrank = torch.distributed.get_rank()\n")
    write(tmp_path, "parallel/e.py", "from torch.distributions import Normal\n")
    assert communicators(tmp_path) == ["parallel/a.py:1", "parallel/b.py:1", "parallel/c.py:1", "parallel/d.py:3"]


def test_the_library_never_prints() -> None:
    assert printers(ROOT) == []


def test_a_print_is_found(tmp_path: Path) -> None:
    write(tmp_path, "results/report.py", "text = 'print(1)'\nprint(text)\n")
    write(tmp_path, "launch/cli.py", "print('the command line may')\n")
    assert printers(tmp_path) == ["results/report.py:2"]


def test_every_file_is_named_after_a_noun() -> None:
    assert drawers(ROOT) == []


def test_a_drawer_for_odds_and_ends_is_found(tmp_path: Path) -> None:
    write(tmp_path, "parallel/utils.py", "")
    write(tmp_path, "tests/helpers/__init__.py", "")
    write(tmp_path, "models/utilisation.py", "")
    assert drawers(tmp_path) == ["parallel/utils.py", "tests/helpers/__init__.py"]


def test_torch_free_modules_load_without_torch() -> None:
    modules = torch_free_modules(ROOT)
    assert "models.config" in modules
    assert torch_loaders(ROOT, modules) == []


def test_a_module_that_brings_torch_is_found(tmp_path: Path) -> None:
    contract = "[[tool.importlinter.contracts]]\nid = 'torch-free'\nsource_modules = ['models.config', 'results']\n"
    write(tmp_path, "pyproject.toml", contract)
    write(tmp_path, "torch.py", "")  # found before the installed one, and faster
    write(tmp_path, "models/__init__.py", "")
    write(tmp_path, "models/config.py", "")
    write(tmp_path, "models/block.py", "import torch\n")
    write(tmp_path, "results/__init__.py", "")
    write(tmp_path, "results/report.py", "from models import block\n")
    modules = torch_free_modules(tmp_path)
    assert modules == ["models.config", "results", "results.report"]
    assert torch_loaders(tmp_path, modules) == ["torch came with results.report"]
