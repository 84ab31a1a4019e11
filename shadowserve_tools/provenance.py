"""What a benchmark's figures depend on: the repository's own code that it runs, found out, not declared.

From the benchmark's module on, imports are followed, those inside functions too, and through packages that only pass
names on to the module that has them. A module named in a string counts as imported (``python -m``), and starting one of
the programs as importing it. Where Python calls the C core (``lib.ss_...``) the folder of ``native/src`` that defines
the function belongs to it, with all folders that this one includes headers of. Comments and docstrings do not count.
"""

import ast
import functools
import hashlib
import io
import re
import subprocess
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

__all__ = ["commit", "digest", "sources"]

REPOSITORY: Final = Path(__file__).resolve().parents[1]
PROGRAMS: Final = {
    "shadowserve_tools.processes.start_storage": "shadowserve_tools.programs.storage.storage",
    "shadowserve_tools.processes.start_data_plane": "shadowserve_tools.programs.dpu.dpu",
}
ASIDE: Final = {
    REPOSITORY / name
    for name in ("shadowserve_tools/report.py", "shadowserve_tools/charts.py", "shadowserve/native/_library.py")
}
"""How figures are written down and the C core is loaded: what these use for that is not measured."""
_C_COMMENT: Final = re.compile(r"/\*.*?\*/|//[^\n]*", re.DOTALL)
_C_DEFINITION: Final = re.compile(r"^\w[\w *]*?\b(ss_\w+)\(", re.MULTILINE)
_C_INCLUDE: Final = re.compile(r'^#include "([^"]+)"', re.MULTILINE)


def digest(bench: str) -> str | None:
    """Return a digest of the sources of a benchmark; None where only the installed package is there."""
    if not (REPOSITORY / "native" / "src").is_dir():
        return None
    total = hashlib.sha256()
    for file in sources(bench):
        total.update(f"{file.relative_to(REPOSITORY)}\n".encode() + _code(file))
    return total.hexdigest()[:16]


def commit(bench: str) -> str | None:
    """Return the commit that is checked out, with ``+`` behind it if sources of the benchmark differ from it.

    None where only the installed package is there.
    """
    if not (REPOSITORY / "native" / "src").is_dir():
        return None
    files = list(map(str, sources(bench)))
    head = _git("rev-parse", "--short=10", "HEAD")
    return head and head + "+" * bool(_git("status", "--porcelain", "--", *files))


def sources(bench: str) -> list[Path]:
    """Return the files that the benchmark of this name depends on, in order."""
    found: set[Path] = set()
    waiting = [_file(f"shadowserve_tools.bench.{bench}")]
    while waiting:
        file = waiting.pop()
        if file and file not in found:
            found.add(file)
            if file not in ASIDE:
                waiting += map(_resolved, _names(file))
    functions = {name for file in found - ASIDE for name in re.findall(r"\blib\.(ss_\w+)", file.read_text())}
    return sorted(found | set(_native(functions)))


def _git(*arguments: str) -> str | None:
    try:
        return subprocess.run(
            ["git", *arguments], cwd=REPOSITORY, check=True, capture_output=True, text=True
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


# ---- Python ----------------------------------------------------------------------------------------------------------


def _file(dotted: str) -> Path | None:
    """Return the file of a module of ours that is no package."""
    file = REPOSITORY.joinpath(*dotted.split(".")).with_suffix(".py")
    return file if dotted and file.is_file() else None


def _package(dotted: str) -> Path | None:
    file = REPOSITORY.joinpath(*dotted.split("."), "__init__.py")
    return file if dotted and file.is_file() else None


def _resolved(dotted: str) -> Path | None:
    """Return the file that has what ``package.module.name`` or ``package.name`` means."""
    package, _, name = dotted.rpartition(".")
    if found := _file(dotted) or _file(package):
        return found
    home = _package(package)
    if home is None or _package(dotted):
        return None
    for node in _tree(home).body:
        if isinstance(node, ast.ImportFrom):
            named = any((alias.asname or alias.name) == name for alias in node.names)
            if named or (node.names[0].name == "*" and name in _exports(_file(node.module or ""))):
                return _resolved(f"{node.module}.{name}")
    return home


@functools.cache
def _exports(file: Path | None) -> frozenset[str]:
    """Return a module's ``__all__``."""
    for node in _tree(file).body if file else ():
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return frozenset(ast.literal_eval(node.value))
    return frozenset()


@functools.cache
def _tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


@functools.cache
def _names(file: Path) -> frozenset[str]:
    """Return the dotted names that a module uses of others."""
    return frozenset(_used(file))


def _used(file: Path) -> Iterator[str]:
    packages: dict[str, str] = {}
    for node in ast.walk(_tree(file)):
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                dotted = f"{node.module}.{alias.name}"
                packages[alias.asname or alias.name] = dotted
                yield PROGRAMS.get(dotted, dotted)
                yield dotted
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and re.fullmatch(r"[\w.]+", node.value):
            yield node.value if _file(node.value) else ""
    for node in ast.walk(_tree(file)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in packages:
            dotted = packages[node.value.id]
            if _package(dotted):
                yield f"{dotted}.{node.attr}"


# ---- C ---------------------------------------------------------------------------------------------------------------


def _native(functions: Iterable[str]) -> Iterator[Path]:
    """Yield the files of the C core that define functions, and those that they include, folder by folder."""
    folders = {folder: _c_files(folder) for folder in (REPOSITORY / "native" / "src").iterdir()}
    defined = {name: folder for folder, files in folders.items() for file in files for name in _defined(file)}
    waiting = {defined[name] for name in functions if name in defined}
    done: set[Path] = set()
    while waiting:
        folder = waiting.pop()
        done.add(folder)
        yield from folders[folder]
        included = {name for file in folders[folder] for name in _C_INCLUDE.findall(file.read_text())}
        public = (REPOSITORY / "native" / "include" / name for name in included)
        yield from (header for header in public if header.is_file())
        waiting |= {folder.parent / Path(name).parts[0] for name in included if "/" in name} - done


def _c_files(folder: Path) -> list[Path]:
    return sorted(file for file in folder.rglob("*") if file.suffix in (".c", ".h"))


@functools.cache
def _defined(file: Path) -> list[str]:
    return _C_DEFINITION.findall(file.read_text())


@functools.cache
def _code(file: Path) -> bytes:
    """Return a file without comments, docstrings and empty lines."""
    text = file.read_text()
    if file.suffix != ".py":
        lines = _C_COMMENT.sub("", text).splitlines()
    else:
        lines = text.splitlines()
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.COMMENT:
                row, column = token.start
                lines[row - 1] = lines[row - 1][:column]
        for node in ast.walk(_tree(file)):
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
                lines[node.lineno - 1 : node.end_lineno] = [""] * ((node.end_lineno or 0) - node.lineno + 1)
    return "\n".join(line.rstrip() for line in lines if line.strip()).encode()
