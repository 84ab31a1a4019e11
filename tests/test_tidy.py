"""Rules of the project beyond the linters, for every file in git."""

import ast
import re
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import yaml
from machine import NEVER_S

REPOSITORY = Path(__file__).parents[1]
PACKAGES = ("shadowserve", "storage_kv", "dpu_dataplane", "host_control", "shadowserve_tools")
COLUMNS_MAX = 120
FUNCTION_LINES_MAX = 70
MODULE_LINES_MAX = 700
PATHS_MAX = 30
"""Cyclomatic complexity of a function: more is radon's grade E."""
STATEMENTS = ("body", "orelse", "finalbody", "handlers", "cases")
"""Attributes of a syntax tree's nodes that have statements: functions are among these."""

# Assembled from parts, so that this file does not match itself.
UNFINISHED = re.compile("|".join([r"\bTO" + r"DO\b", r"\bFIX" + r"ME\b", r"\bXX" + r"X\b"]))
_FOLDERS = "|".join(["ro" + "ot", "ho" + "me", "Us" + "ers", "wo" + "rk"])
MACHINE_PATHS = re.compile(rf"(?<![\w.~-])/(?:{_FOLDERS})/\w")
# Comments for tools may exceed the line length, as in ruff.
PRAGMA = re.compile(r"\s+# (?:type|noqa|fmt|pragma)\b.*$")
UNSAFE = re.compile(
    r"^\s*(?:import|from)\s+(?:pickle|marshal|shelve|dill|cloudpickle)\b"
    r"|\byaml\.(?:load|unsafe_load)\(|(?<![\w.])(?:eval|exec)\("
)


@cache
def files(*suffixes: str) -> list[Path]:
    """Return the existing files that git tracks, without generated code.

    New files count once they are added: a user's untracked files (logs, results) are not checked.
    """
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=True,
        timeout=NEVER_S,
    ).stdout.split("\0")
    paths = [REPOSITORY / name for name in listed if name and "_pb2" not in name]
    return sorted(path for path in paths if path.is_file() and (not suffixes or path.suffix in suffixes))


@cache
def text_of(path: Path) -> str:
    """Return a file's text; empty for binary files, such as the model's weights."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return ""


@cache
def outline(path: Path) -> tuple[bool, list[tuple[str, int, int]]]:
    """Return whether a module needs no docstring or has one, and name, line and length of its functions."""
    tree = ast.parse(text_of(path))
    functions, nodes = [], [tree]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            functions.append((node.name, node.lineno, (node.end_lineno or node.lineno) - node.lineno + 1))
        nodes += (child for block in STATEMENTS for child in getattr(node, block, ()))
    return not tree.body or bool(ast.get_docstring(tree)), functions


def paths_through(function: ast.AST) -> int:
    """Return the cyclomatic complexity of a function, as radon counts it."""
    count = 1
    for node in ast.walk(function):
        match node:
            case ast.If() | ast.IfExp() | ast.For() | ast.AsyncFor() | ast.While() | ast.ExceptHandler() | ast.Assert():
                count += 1
            case ast.comprehension(ifs=conditions):
                count += 1 + len(conditions)
            case ast.BoolOp(values=values):
                count += len(values) - 1
            case ast.match_case():
                count += 1
    return count


def place(path: Path, line: int = 0) -> str:
    return f"{path.relative_to(REPOSITORY)}:{line}" if line else str(path.relative_to(REPOSITORY))


def matches(pattern: re.Pattern[str], paths: list[Path]) -> Iterator[str]:
    for path in paths:
        for number, line in enumerate(text_of(path).splitlines(), start=1):
            if pattern.search(line):
                yield f"{place(path, number)}: {line.strip()[:100]}"


def complain(found: list[str]) -> None:
    assert not found, "\n" + "\n".join(found)


def python_functions(path: Path) -> list[tuple[str, int, int]]:
    return outline(path)[1]


def c_functions(path: Path) -> Iterator[tuple[str, int, int]]:
    """Yield functions in clang-format's layout: ``) {`` or ``{`` alone outside of any other, up to ``}`` alone."""
    start, name = 0, ""
    for number, line in enumerate(text_of(path).splitlines(), start=1):
        if start and line == "}":
            yield name, start, number - start + 1
            start = 0
        elif not start and (line == "{" or line.endswith(") {")):
            start, name = number, line.strip()[:60] if len(line) > 1 else name
        elif not start and line:
            name = line.strip()[:60]


def test_git_lists_the_files() -> None:
    assert Path(__file__) in files()
    assert len(files(".py")) > 30 and sum(len(list(c_functions(path))) for path in files(".c")) > 50


def test_functions_fit_on_a_screen() -> None:
    found = [
        f"{place(path, line)}: {name} has {length} lines; {FUNCTION_LINES_MAX} is the most"
        for suffixes, functions in (((".py",), python_functions), ((".c", ".h"), c_functions))
        for path in files(*suffixes)
        for name, line, length in functions(path)
        if length > FUNCTION_LINES_MAX
    ]
    complain(found)


def test_functions_have_few_paths() -> None:
    found = [
        f"{place(path, node.lineno)}: {node.name} has {paths} paths; {PATHS_MAX} is the most"
        for path in files(".py")
        if path.relative_to(REPOSITORY).parts[0] in PACKAGES
        for node in ast.walk(ast.parse(text_of(path)))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and (paths := paths_through(node)) > PATHS_MAX
    ]
    complain(found)


def test_modules_can_be_read_in_one_go() -> None:
    counts = {path: len(text_of(path).splitlines()) for path in files(".py", ".c", ".h", ".pyi")}
    complain([f"{place(path)} has {count} lines" for path, count in counts.items() if count > MODULE_LINES_MAX])


def test_lines_are_at_most_120_columns_without_tabs_or_blanks_at_the_end() -> None:
    code = files(".py", ".pyi", ".c", ".h", ".proto", ".toml", ".yaml", ".cmake")
    scripts = [path for path in files("") if path.name == "Makefile" or text_of(path).startswith("#!")]
    found = []
    for path in [*code, *scripts]:
        for number, line in enumerate(text_of(path).splitlines(), start=1):
            if len(PRAGMA.sub("", line)) > COLUMNS_MAX:
                found.append(f"{place(path, number)}: {len(line)} columns")
            if line != line.rstrip() or ("\t" in line and path.name != "Makefile"):
                found.append(f"{place(path, number)}: a tab, or blanks at the end")
    complain(found)


def test_text_ends_with_one_line_break() -> None:
    texts = {path: text_of(path) for path in files(".py", ".pyi", ".c", ".h", ".proto", ".toml", ".yaml", ".md")}
    complain([place(path) for path, text in texts.items() if text and (text[-1] != "\n" or text.endswith("\n\n"))])


def test_every_module_says_what_it_is() -> None:
    complain([place(path) for path in files(".py") if not outline(path)[0]])


def test_nothing_is_left_unfinished() -> None:
    complain(list(matches(UNFINISHED, files())))


def test_no_python_object_is_unpickled_or_evaluated() -> None:
    complain(list(matches(UNSAFE, files(".py"))))


def test_no_path_of_a_developers_machine_is_written_down() -> None:
    complain(list(matches(MACHINE_PATHS, files())))


def test_c_files_say_their_licence_first() -> None:
    first = {path: text_of(path).partition("\n")[0] for path in files(".c", ".h")}
    complain([place(path) for path, line in first.items() if "SPDX-License-Identifier: Apache-2.0" not in line])


def test_hooks_need_no_network() -> None:
    hooks = yaml.safe_load((REPOSITORY / ".pre-commit-config.yaml").read_text())
    assert [repository["repo"] for repository in hooks["repos"]] == ["local"]
    assert {hook["language"] for hook in hooks["repos"][0]["hooks"]} == {"system"}
