"""A plain ``pip install`` without extras: each command works, or prints one line that names the package to install."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from machine import NEVER_S

from shadowserve import native
from shadowserve_tools import COMMANDS
from shadowserve_tools.bench import BENCHES, NEEDS

REPOSITORY = Path(__file__).parents[2]

# Hides all packages except those of a plain installation: ours, and its dependencies without extras.
HIDE = """
import re, sys
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
def plain(name):
    return re.sub("[-_.]+", "-", name).lower()
allowed, waiting = {"pip", "setuptools"}, ["shadowserve"]
while waiting:
    name = plain(waiting.pop())
    if name not in allowed:
        allowed.add(name)
        try:
            wanted = requires(name) or ()
        except PackageNotFoundError:
            continue
        waiting += [re.match(r"[\\w.-]+", each)[0] for each in wanted if "extra ==" not in each]
for module, owners in packages_distributions().items():
    if not allowed & set(map(plain, owners)) and not module.startswith("_"):
        sys.modules[module] = None
"""
WALK = """
import json
from click.testing import CliRunner
from shadowserve_tools import COMMANDS, main
from shadowserve_tools.bench import BENCHES
found = {}
for words in [[], *([name] for name in COMMANDS), *(["bench", name] for name in BENCHES), ["simulate", "bluefield"]]:
    done = CliRunner().invoke(main, [*words, "--help"])
    found[" ".join(words)] = done.exit_code, done.output, repr(done.exception)
print(json.dumps(found))
"""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(HIDE)
    (tmp_path / "bin").mkdir()
    plain = {name: value for name, value in os.environ.items() if not name.startswith("SHADOWSERVE_")}
    return {**plain, "PYTHONPATH": str(tmp_path / "site"), "PATH": "/usr/bin:/bin", "COLUMNS": "100"}


def command(environment: dict[str, str], *arguments: str) -> "subprocess.CompletedProcess[str]":
    program = [sys.executable, "-m", "shadowserve_tools", *arguments]
    return subprocess.run(
        program, capture_output=True, text=True, timeout=NEVER_S, env=environment, cwd=REPOSITORY, check=False
    )


def test_every_command_explains_itself_without_extras(environment: dict[str, str]) -> None:
    script = [sys.executable, "-c", WALK]
    done = subprocess.run(script, capture_output=True, text=True, timeout=NEVER_S, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert len(found) == 1 + len(COMMANDS) + len(BENCHES) + 1
    for words, (code, output, exception) in found.items():
        assert code == 0 and "Usage: " in output, f"{words}: {exception}"
    absent = {words for words, (_, output, _) in found.items() if "\n  Not available here" in output}
    assert absent == {"events", "bench gpu", *(f"bench {name}" for name in NEEDS)}
    assert "torch" in found["bench gpu"][1] and "redis" in found["bench fetch"][1]


def test_trace_works_without_extras(environment: dict[str, str], tmp_path: Path) -> None:
    settings = [f"--set={key}=40MiB" for key in ("decompression_buffer_bytes", "store_buffer_bytes")]
    done = command(environment, "trace", "-o", str(tmp_path / "fetch.json"), "--chunks", "1", *settings)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads((tmp_path / "fetch.json").read_text())["traceEvents"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["bench", "gpu", "--device", "cpu"],
            "needs the Python package torch, which is not .*pip install vllm",
        ),
        (["bench", "control"], "needs the Python package vllm, .*pip install vllm"),
        (["bench", "ablation", "--requests", "1"], "needs the Python package vllm, .*pip install vllm"),
        (["bench", "stages"], r"needs the Python package redis, .*pip install 'shadowserve\[bench\]'"),
        (["bench", "memory", "--plot", "x.svg"], r"pip install 'shadowserve\[bench\]'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_needs_more_says_in_a_line_what_to_install(
    environment: dict[str, str], arguments: list[str], message: str
) -> None:
    done = command(environment, *arguments)
    assert done.returncode in (1, 2)
    assert "Traceback" not in done.stderr
    assert re.search(message, done.stderr.splitlines()[-1]), done.stderr


# ---- Shared libraries ------------------------------------------------------------------------------------------------


def without(libraries: list[str], target: Path) -> None:
    """Write a copy of the C core that needs unavailable versions of ``libraries``."""
    content = Path(native.library_path()).read_bytes()
    for library in libraries:
        assert content.count(f"\0{library}\0".encode()) == 1
        content = content.replace(f"\0{library}\0".encode(), f"\0{library[:-1]}9\0".encode())
    target.write_bytes(content)
    for emulator in Path(native.library_path()).parent.glob("libdoca_emulator.so"):
        shutil.copy(emulator, target.parent)  # the core finds it in its own folder


def needed() -> list[str]:
    """The libraries that the C core here is linked with, except the C library's own."""
    listed = subprocess.run(["ldd", native.library_path()], capture_output=True, text=True, check=True).stdout
    names = re.findall(r"(lib(?:isal|deflate|lz4|zstd|uring|ssl|crypto)\.so\.\d)\b", listed)
    return sorted(set(names))


@pytest.mark.parametrize("program", [["storage", "--port", "0"], ["dpu", "--listen", "127.0.0.1:0"]])
def test_without_its_shared_libraries_a_program_says_in_a_line_what_to_install(
    tmp_path: Path, environment: dict[str, str], program: list[str]
) -> None:
    libraries = needed()
    assert libraries
    without(libraries, tmp_path / "core.so")
    done = command({**environment, "SHADOWSERVE_NATIVE_LIBRARY": str(tmp_path / "core.so")}, *program)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    (line,) = done.stderr.strip().splitlines()
    for library in libraries:
        assert f"{library[:-1]}9" in line
    packages = {"libisal": "libisal9", "liblz4": "liblz4-9", "libzstd": "libzstd9", "libssl": "libssl9"}
    packages |= {"libcrypto": "libssl9", "liburing": "liburing9", "libdeflate": "libdeflate9"}
    installed = re.search(r"apt-get install ([\w -]+)", line)
    assert installed and set(installed[1].split()) == {packages[library.partition(".")[0]] for library in libraries}


def test_the_doctor_tells_of_a_shared_library_that_is_missing(tmp_path: Path, environment: dict[str, str]) -> None:
    library = needed()[0]
    without([library], tmp_path / "core.so")
    where = {**environment, "SHADOWSERVE_NATIVE_LIBRARY": str(tmp_path / "core.so")}
    done = command(where, "doctor", "--json", "--role", "storage")
    assert done.returncode == 1 and "Traceback" not in done.stderr
    findings = {finding["what"]: finding for finding in json.loads(done.stdout)["findings"]}
    core = findings["C core"]
    assert core["state"] == "failed" and f"{library[:-1]}9" in core["found"] and "apt-get install" in core["remedy"]
    assert not [finding for finding in findings.values() if "please report this" in finding["remedy"]]
