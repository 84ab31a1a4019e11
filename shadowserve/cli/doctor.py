"""``shadowserve doctor``: what this machine has, what is missing, and how to mend it."""

import importlib.metadata
import importlib.util
import json
import os
import platform
import resource
import shutil
import socket
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Final, Literal

import click
from rich.console import Console
from rich.table import Table

from shadowserve import __version__

__all__ = ["doctor"]

TESTED_VLLM: Final = "0.32.0"
_STYLES: Final = {"ok": "green", "warning": "yellow", "failed": "red"}


@dataclass(frozen=True)
class Finding:
    """One thing looked at.

    Attributes:
        what: the thing.
        state: ``ok``; ``warning``: works, but slower or less safe than it could; ``failed``: will not work.
        found: what is there.
        mend: what to do about it; empty where nothing is to be done.
    """

    what: str
    state: Literal["ok", "warning", "failed"]
    found: str
    mend: str = ""


@click.command()
@click.option("--storage", metavar="HOST:PORT", default="127.0.0.1:6380", show_default=True, help="Storage server.")
@click.option("--data-plane", metavar="HOST:PORT", default="127.0.0.1:50151", show_default=True, help="Data plane.")
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON.")
def doctor(storage: str, data_plane: str, as_json: bool) -> None:
    """Say what this machine has, what is missing, and how to mend it.

    Exits with 1 when something will not work; a program that merely does not run now is a warning.
    """
    findings = [
        *_look(_interpreter),
        *_look(_native),
        *_look(_memory),
        *_look(_cores),
        *_look(_engine),
        *_look(lambda: _reachable("storage server", storage, "shadowserve storage --config configs/storage.yaml")),
        *_look(lambda: _reachable("data plane", data_plane, "shadowserve dpu --config configs/emulated.yaml")),
    ]
    if as_json:
        click.echo(json.dumps({"version": __version__, "findings": [asdict(finding) for finding in findings]}))
    else:
        table = Table("", "what", "found", "what to do", box=None, pad_edge=False)
        for finding in findings:
            style = _STYLES[finding.state]
            table.add_row(f"[{style}]{finding.state}[/]", finding.what, finding.found, finding.mend)
        Console().print(table)
    if any(finding.state == "failed" for finding in findings):
        sys.exit(1)


def _look(check: Callable[[], Iterator[Finding]]) -> list[Finding]:
    """A check that breaks is itself a finding: the doctor must not fall ill."""
    try:
        return list(check())
    except Exception as error:  # the whole point is to go on
        return [Finding(getattr(check, "__name__", "check").strip("_"), "failed", f"{type(error).__name__}: {error}")]


def _interpreter() -> Iterator[Finding]:
    sound = sys.version_info >= (3, 11)
    yield Finding(
        "Python", "ok" if sound else "failed", platform.python_version(), "" if sound else "use 3.11 or newer"
    )
    linux = sys.platform == "linux"
    yield Finding("system", "ok" if linux else "failed", platform.platform(), "" if linux else "Linux is needed")


def _native() -> Iterator[Finding]:
    try:
        from shadowserve import native
    except ImportError as error:
        yield Finding("C core", "failed", str(error), "run 'make setup', or 'pip install -e .' in the checkout")
        return
    yield Finding("C core", "ok", f"kernels use {native.isa_active().name.lower()}")
    implementations = native.codec_implementations()
    for codec in native.Codec:
        implementation = implementations.get(codec)
        if implementation is None:
            mend = (
                f"install lib{codec.name.lower()}'s development package, then 'make setup': such records are misses now"
            )
            yield Finding(f"codec {codec.name.lower()}", "warning", "not built in", mend)
        elif codec is native.Codec.DEFLATE and "isa-l" not in implementation.lower():
            mend = "install libisal-dev, then 'make setup': it decodes 2-3 times as fast"
            yield Finding("codec deflate", "warning", implementation, mend)
        else:
            yield Finding(f"codec {codec.name.lower()}", "ok", implementation)
    for backend in native.backends().values():
        imitation = "; it decodes and copies on CPU cores: for trying and testing, no DPU takes part"
        found = backend.description + (imitation if backend.emulated else "")
        yield Finding(f"backend {backend.label}", "ok", found)


def _memory() -> Iterator[Finding]:
    soft, _hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    unlimited = soft == resource.RLIM_INFINITY or os.geteuid() == 0
    found = "unlimited" if unlimited else f"{soft >> 20} MiB may be locked"
    enough = unlimited or soft >= 1 << 30
    yield Finding(
        "locked memory",
        "ok" if enough else "warning",
        found,
        "" if enough else "raise it (ulimit -l): buffers may be swapped",
    )
    shm = shutil.disk_usage("/dev/shm")
    enough = shm.free >= 512 << 20
    yield Finding(
        "shared memory",
        "ok" if enough else "failed",
        f"{shm.free >> 20} MiB free in /dev/shm",
        "" if enough else "enlarge /dev/shm (containers: --shm-size=1g)",
    )


def _cores() -> Iterator[Finding]:
    cores = sorted(os.sched_getaffinity(0))
    enough = len(cores) >= 4
    mend = "" if enough else "data plane and engine will share cores: fine for trying, not for serving (docs/cores.md)"
    yield Finding("cores", "ok" if enough else "warning", f"{len(cores)} usable: {cores}", mend)


def _engine() -> Iterator[Finding]:
    try:
        version = importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        yield Finding(
            "vLLM", "warning", "not installed", "needed in the serving process only: 'make setup' installs it"
        )
        return
    tested = version.split("+")[0] == TESTED_VLLM
    yield Finding(
        "vLLM",
        "ok" if tested else "warning",
        version,
        "" if tested else f"tested with {TESTED_VLLM}; run the tests before you rely on it",
    )
    plugins = {entry.name for entry in importlib.metadata.entry_points(group="vllm.general_plugins")}
    sound = "shadowserve" in plugins
    yield Finding(
        "plugin",
        "ok" if sound else "failed",
        f"vllm.general_plugins: {sorted(plugins)}",
        "" if sound else "pip install shadowserve",
    )
    if importlib.util.find_spec("torchvision") and "+cpu" in version:
        yield Finding(
            "torchvision",
            "warning",
            "installed",
            "a CUDA build of it breaks vLLM's CPU build: pip uninstall torchvision",
        )


def _reachable(what: str, address: str, command: str) -> Iterator[Finding]:
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), timeout=2):
            yield Finding(what, "ok", f"answers on {address}")
    except (OSError, ValueError) as error:
        yield Finding(what, "warning", f"not reached on {address}: {error}", command)
