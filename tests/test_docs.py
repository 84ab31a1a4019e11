"""Documents are true as far as tests can check: links, files, commands, flags, keys, metrics and outcomes exist."""

import re
from pathlib import Path

import click
import pytest
from exposition import counters_of_the_plugin

from dpu_dataplane.metrics import Metrics
from shadowserve import __version__
from shadowserve.proto.dataplane_pb2 import Outcome
from shadowserve_tools import COMMANDS, main

REPOSITORY = Path(__file__).parents[1]
DOCS = REPOSITORY / "docs"
PACKAGES = ("shadowserve", "shadowserve_tools", "storage_kv", "dpu_dataplane", "host_control")
FOLDERS = (*PACKAGES, "native", "scripts", "tests", "configs")
DOCUMENTS = sorted([*REPOSITORY.glob("*.md"), *DOCS.rglob("*.md")])
IN_FOLDERS = sorted(path for folder in FOLDERS for path in (REPOSITORY / folder).rglob("*.md"))
ALL = [*DOCUMENTS, *IN_FOLDERS]
SOURCES = "".join(
    path.read_text()
    for package in ("storage_kv", "dpu_dataplane", "host_control")
    for path in (REPOSITORY / package).rglob("*.py")
)


def relative(path: Path) -> str:
    return str(path.relative_to(REPOSITORY))


def commands(text: str) -> list[str]:
    """Return command lines of ``shadowserve``: in fenced or indented blocks, one per line, and in backticks."""
    text = text.replace("\\\n", " ")
    blocks = re.findall(r"^( *)```\w*\n(.*?)^\1```", text, re.MULTILINE | re.DOTALL)
    lines = [line.strip() for _, block in blocks for line in block.splitlines()]
    lines += re.findall(r"^ {4,}(.+)$", text, re.MULTILINE) + re.findall(r"`([^`\n]+)`", text)
    prefix = r"(?:\$ )?(?:\S+=\S+ |sudo |taskset \S+ \S+ )*(?:\S*/)?shadowserve ([a-z].*)"
    found = [match[1] for line in lines if (match := re.fullmatch(prefix, line))]
    return [re.split(r"[#&|>]", command)[0] for command in found]


@pytest.mark.parametrize("document", DOCUMENTS, ids=relative)
def test_files_that_a_document_names_exist(document: Path) -> None:
    named = re.findall(r"`([\w.]+(?:/[\w.*-]+)*/[\w.*-]+\.(?:py|c|h|proto|yaml|md)|[\w/]+/)`", document.read_text())
    made = ("build/", "bench-results/", "dist/")
    absent = [name for name in named if not name.startswith(made) and not list(REPOSITORY.glob(name))]
    assert not absent


@pytest.mark.parametrize("document", IN_FOLDERS, ids=relative)
def test_files_that_a_document_in_a_folder_names_exist(document: Path) -> None:
    named = re.findall(r"`([\w./-]+\.(?:py|c|h|md|yaml|proto))`", document.read_text())
    for name in (each for each in named if Path(each).name != "_cffi.py"):  # built
        nearby = [*document.parent.rglob(Path(name).name), *(REPOSITORY / "tests").rglob(name)]
        assert nearby or (document.parent / name).exists() or (REPOSITORY / name).exists(), name


def anchors(document: Path) -> set[str]:
    """Return anchors of the document's headings in GitHub's form."""
    headings = re.findall(r"^#+ (.+)$", document.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", ALL, ids=relative)
def test_links_of_a_document_resolve(document: Path) -> None:
    broken = []
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#\s]*)(?:#([^)]*))?\)", document.read_text()):
        path = document.parent / target if target else document
        if not path.exists() or (anchor and anchor not in anchors(path)):
            broken.append(f"{target}#{anchor}" if anchor else target)
    assert not broken


@pytest.mark.parametrize("document", ALL, ids=relative)
def test_commands_and_flags_in_a_document_exist(document: Path) -> None:
    context = click.Context(main, **main.context_settings)
    for line in commands(document.read_text()):
        words = line.split()
        assert words[0] in COMMANDS, line
        command: click.Command | None = main
        for word in words:
            if not isinstance(command, click.Group) or word.startswith("-"):
                break
            command = command.get_command(context, word)
        if command is None or "Not available here" in (command.help or ""):
            continue
        known = {option for parameter in command.get_params(context) for option in parameter.opts}
        assert set(re.findall(r"(?<![\w-])--[a-z][\w-]*", line)) <= known | {"--help"}, line


@pytest.mark.parametrize("document", ALL, ids=relative)
def test_no_document_signals_processes_by_name(document: Path) -> None:
    """Such a command could stop a process of another program."""
    assert not re.findall(r".*\b(?:pkill|pgrep|killall|pidof)\b.*", document.read_text())


@pytest.mark.parametrize("document", ALL, ids=relative)
def test_a_row_of_a_table_is_one_line(document: Path) -> None:
    """Symptom: the second line of a row was shown as a row of its own."""
    text = re.sub(r"^```.*?^```", "", document.read_text(), flags=re.MULTILINE | re.DOTALL)
    for line in text.splitlines():
        assert not line.startswith("|") or line.endswith("|"), line


@pytest.mark.parametrize("document", DOCUMENTS, ids=relative)
def test_metrics_in_a_document_are_exported(document: Path) -> None:
    for name in re.findall(r"`(?:vllm:)?shadowserve_(\w+)(?:\{[\w, =\"]+\})?`", document.read_text()):
        counted = name.removesuffix("_total")
        names = (counted, counted.removeprefix("storage_"))
        assert any(f'"{each}"' in SOURCES or f" {each}: int = _counted(" in SOURCES for each in names), name


def test_every_counter_of_the_plugin_is_documented() -> None:
    section = (DOCS / "reference" / "metrics.md").read_text().partition("## Plugin\n")[2].partition("\n## ")[0]
    assert {f"{name}_total" for name in counters_of_the_plugin()} <= set(re.findall(r"`(\w+)(?:\{\w+\})?`", section))


def test_every_metric_of_the_data_plane_is_documented() -> None:
    families = Metrics().registry.collect()
    names = {family.name + ("_total" if family.type == "counter" else "") for family in families}
    names |= {f"shadowserve_{name}" for name in re.findall(r'gauges\["(\w+)"\]', SOURCES)}
    section = (DOCS / "reference" / "metrics.md").read_text().partition("## Data plane\n")[2].partition("\n## ")[0]
    documented = {f"shadowserve_{name}" for name in re.findall(r"`(\w+)(?:\{[\w, ]+\})?`", section)}
    assert names <= documented


def test_every_outcome_of_the_data_plane_is_documented() -> None:
    text = (DOCS / "reference" / "failures.md").read_text()
    explained = set(re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE))
    outcomes = {name.removeprefix("OUTCOME_").lower() for name in Outcome.keys()} - {"unspecified"}
    assert outcomes <= explained


def test_the_changelog_begins_with_the_version_of_the_code() -> None:
    first = re.search(r"^## (\S+?),? ", (REPOSITORY / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert first is not None and first[1] == __version__
