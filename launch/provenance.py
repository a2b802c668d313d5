"""Where does a record come from? The commit, the machine and the versions that made it."""

import datetime
import functools
import os
import platform
import shutil
import socket
import subprocess
from importlib import metadata
from pathlib import Path

import torch

from launch.env import num_cores
from results.schema import Provenance

_ROOT = Path(__file__).resolve().parent.parent
_PACKAGES = ("twinshard", "torch", "numpy", "Django")


def provenance() -> Provenance:
    """The provenance of a record that is written now."""
    return Provenance(
        commit=_commit(),
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds"),
        hostname=socket.gethostname(),
        processor=_processor(),
        num_cores=num_cores(),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        accelerator=torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        versions=_versions(),
    )


@functools.cache
def _commit() -> str:
    """Commit of the checkout that this file is part of, with `+` when it was changed; `unknown` elsewhere."""
    git = shutil.which("git")
    if git is None or not (_ROOT / ".git").exists():
        return "unknown"
    try:
        head, changes = (
            subprocess.run(
                [git, "-C", str(_ROOT), *arguments], check=True, capture_output=True, text=True, timeout=10
            ).stdout.strip()
            for arguments in (("rev-parse", "HEAD"), ("status", "--porcelain", "--untracked-files=no"))
        )
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return head + "+" * bool(changes)


@functools.cache
def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


@functools.cache
def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version(), "linux": platform.release()}
    for package in _PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return versions
