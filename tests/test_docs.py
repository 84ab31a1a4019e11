"""What the documents name is there: files, outcomes, metrics, commands."""

import re
from pathlib import Path

import click
import pytest

from shadowserve import __version__
from shadowserve.proto.dataplane_pb2 import Outcome
from shadowserve_tools import COMMANDS, main

REPOSITORY = Path(__file__).parents[1]
FOLDERS = (
    "shadowserve",
    "shadowserve_tools",
    "storage_kv",
    "dpu_dataplane",
    "host_control",
    "native",
    "scripts",
    "tests",
)
DOCUMENTS = sorted([*REPOSITORY.glob("*.md"), *(REPOSITORY / "docs").rglob("*.md")])
TOLD = [*DOCUMENTS, *sorted(path for folder in FOLDERS for path in (REPOSITORY / folder).rglob("*.md"))]
ROOMS = [path for path in TOLD if path.name in ("README.md", "decisions.md") and path not in DOCUMENTS]
DECISIONS = [path for path in TOLD if path.name == "decisions.md"]
COMMAND_LINE = re.compile(
    r"(?:^(?:> )? {4}(?:\S+=\S+ |sudo |taskset \S+ \S+ )*|`)(?:\S*/)?shadowserve ([^`\n#&|]+)", re.MULTILINE
)
SOURCES = "".join(
    path.read_text()
    for package in ("storage_kv", "dpu_dataplane", "host_control")
    for path in (REPOSITORY / package).rglob("*.py")
)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_each_file_that_a_document_names_is_there(document: Path) -> None:
    named = re.findall(r"`([\w.]+(?:/[\w.*-]+)*/[\w.*-]+\.(?:py|c|h|proto|yaml|md)|[\w/]+/)`", document.read_text())
    absent = [name for name in named if not list(REPOSITORY.glob(name))]
    assert not absent


def anchors(document: Path) -> set[str]:
    """Return what the document's headings are called in links."""
    headings = re.findall(r"^#+ (.+)$", document.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", TOLD, ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_each_link_of_a_document_leads_somewhere(document: Path) -> None:
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#\s]*)(?:#([^)]*))?\)", document.read_text()):
        path = document.parent / target if target else document
        assert path.exists(), target
        assert not anchor or anchor in anchors(path), f"{target}#{anchor}"


@pytest.mark.parametrize("document", ROOMS, ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_each_file_that_a_room_names_is_there(document: Path) -> None:
    named = re.findall(r"`([\w./-]+\.(?:py|c|h|md|yaml|proto))`", document.read_text())
    for name in (each for each in named if Path(each).name != "_cffi.py"):  # which is built
        nearby = [*document.parent.rglob(Path(name).name), *(REPOSITORY / "tests").rglob(name)]
        assert nearby or (document.parent / name).exists() or (REPOSITORY / name).exists(), name


@pytest.mark.parametrize("document", DECISIONS, ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_each_decision_has_its_day(document: Path) -> None:
    entries = re.findall(r"^\*\*.*?(?=\n\n|\Z)", document.read_text(), re.MULTILINE | re.DOTALL)
    assert entries
    for entry in entries:
        assert re.match(r"\*\*[^*]+\*\* \(\d{4}-\d\d-\d\d\) \S", entry.replace("\n", " ")), entry


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_each_command_that_a_document_names_is_one(document: Path) -> None:
    named = set(re.findall(r"(?:^ {4}|`)shadowserve ([a-z]\w+)", document.read_text(), re.MULTILINE))
    assert named <= set(COMMANDS)


@pytest.mark.parametrize("document", TOLD, ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_each_flag_that_a_document_gives_to_a_command_is_one_of_its(document: Path) -> None:
    text = document.read_text().replace("\\\n", " ")  # a command that goes on in the next line
    context = click.Context(main, **main.context_settings)  # a command keeps the help option that its first context had
    for line in COMMAND_LINE.findall(text):
        command: click.Command | None = main
        for word in line.split():
            if not isinstance(command, click.Group) or word.startswith("-"):
                break
            command = command.get_command(context, word)
        if command is None or command is main or "Not available here" in (command.help or ""):
            continue
        known = {option for parameter in command.get_params(context) for option in parameter.opts}
        assert set(re.findall(r"(?<![\w-])--[a-z][\w-]*", line)) <= known | {"--help"}, line


@pytest.mark.parametrize("document", TOLD, ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_no_document_says_to_signal_processes_by_what_their_names_look_like(document: Path) -> None:
    """Whoever has another storage server, or an editor open on storage.yaml, would have hit that as well."""
    found = re.findall(r".*\b(?:pkill|pgrep|killall|pidof)\b.*", document.read_text())
    assert not found


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_each_metric_that_a_document_names_is_counted(document: Path) -> None:
    for name in re.findall(r"`(?:vllm:)?shadowserve_(\w+)(?:\{\w+\})?`", document.read_text()):
        counted = name.removesuffix("_total")
        assert any(f'"{each}"' in SOURCES for each in (counted, counted.removeprefix("storage_"))), name


def test_each_promise_names_a_test_that_is_there() -> None:
    rows = re.findall(r"^\| .* \| (.*) \|$", (REPOSITORY / "docs" / "security.md").read_text(), re.MULTILINE)
    named = [test for row in rows for test in re.findall(r"`(test_\w+\.py)::(test_\w+)`", row)]
    assert len(named) > 30
    for file, test in named:
        sources = [path.read_text() for path in (REPOSITORY / "tests").rglob(file)]
        assert any(f"def {test}(" in source for source in sources), f"{file}::{test}"


def test_the_failures_document_explains_every_outcome() -> None:
    text = (REPOSITORY / "docs" / "failures.md").read_text()
    explained = set(re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE))
    outcomes = {name.removeprefix("OUTCOME_").lower() for name in Outcome.keys()} - {"unspecified"}
    assert outcomes <= explained


def test_the_changelog_begins_with_the_version_of_the_code() -> None:
    first = re.search(r"^## (\S+?),? ", (REPOSITORY / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert first is not None and first[1] == __version__
