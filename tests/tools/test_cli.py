"""The ``shadowserve`` command: its output, and the exit codes for scripts."""

import json
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from machine import NEVER_S, PATIENT, free_port

from dpu_dataplane.config import DataPlaneConfig
from shadowserve import __version__
from shadowserve.config import Section
from shadowserve_tools import COMMANDS, main
from shadowserve_tools.bench import BENCHES
from shadowserve_tools.processes import start_data_plane, start_storage
from shadowserve_tools.simulate import SIMULATIONS
from storage_kv.config import StorageConfig

PROGRAMS: list[tuple[str, type[Section]]] = [("storage", StorageConfig), ("dpu", DataPlaneConfig)]


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, list(arguments), prog_name="shadowserve")


# ---- Help ------------------------------------------------------------------------------------------------------------


def test_help_lists_every_command() -> None:
    done = run("--help")
    assert done.exit_code == 0
    assert all(re.search(rf"^  {name} ", done.output, re.MULTILINE) for name in COMMANDS)
    assert "Exit codes:" in done.output


@pytest.mark.parametrize(
    "command",
    [[name] for name in COMMANDS]
    + [["bench", name] for name in BENCHES]
    + [["simulate", name] for name in SIMULATIONS],
    ids=" ".join,
)
def test_every_command_has_help_for_each_of_its_options(command: list[str]) -> None:
    done = run(*command, "-h")
    assert done.exit_code == 0, done.output
    assert done.output.startswith(f"Usage: shadowserve {' '.join(command)} [OPTIONS]")
    options = re.findall(r"^  (?:-\w, )?(--[\w-]+)[^\n]*(\n[ ]{6,}\S)?", done.output, re.MULTILINE)
    assert "--help" in {name for name, _ in options}
    for option in re.findall(r"^  --[\w-]+(?: [A-Z\[<|:.\]a-z0-9>_-]+)?$(?!\n {6})", done.output, re.MULTILINE):
        pytest.fail(f"{option.strip()} has no help")


@pytest.mark.parametrize(("command", "section"), PROGRAMS)
def test_a_program_has_a_flag_for_each_key_with_its_default(command: str, section: type[Section]) -> None:
    text = " ".join(run(command, "--help").output.split()).replace("- ", "-")  # click wraps at hyphens
    described = section.descriptions()
    assert list(described) == list(section.model_fields)
    for key, description in described.items():
        flag = rf" --{key.replace('_', '-')} (?:[A-Z:]+|\[[\w|]+\]) +\[default: {re.escape(section.default_text(key))}"
        assert re.search(flag, text), key
        assert " ".join(description.replace("``", "'").split()).replace("- ", "-") in text


def test_a_flag_has_a_placeholder_a_default_and_limits() -> None:
    shown = {name: run(name, "--help").output for name, _ in PROGRAMS}
    for program, flag in (
        ("storage", "--memory-budget-bytes BYTES  [default: 4 GiB; at least 1 MiB]"),
        ("storage", "--log-level [debug|info|warning|error]  [default: info]"),
        ("storage", "--stall-timeout-s SECONDS  [default: 60.0; above 0.0]"),
        ("storage", "--host HOST  [default: 127.0.0.1]"),
        ("storage", "--port PORT  [default: 6380; at most 65535]"),
        ("storage", "--metrics-port PORT  [default: none; at most 65535]"),
        ("storage", "--arena-nodes [auto|NODES]  [default: auto]"),
        ("storage", "--protected-mode [true|false]  [default: true]"),
        ("storage", "--tls-key PATH  [default: none]"),
        ("storage", "--tenants MAPPING  [default: {}]"),
        ("dpu", "--storage HOST:PORT  [default: 127.0.0.1:6380]"),
        ("dpu", "--fused [auto|true|false]  [default: auto]"),
        ("dpu", "--quarantine-s SECONDS  [default: 300.0; above 0, at most 86400]"),
        ("dpu", "--net-cores [auto|CORES]  [default: auto]"),
    ):
        assert f"  {flag}\n" in shown[program]
    assert " VALUE" not in "".join(shown.values())


@pytest.mark.parametrize("columns", [80, 120])
@pytest.mark.parametrize(("command", "section"), PROGRAMS)
def test_help_of_a_program_has_groups_and_fits_the_terminal(command: str, section: type[Section], columns: int) -> None:
    done = CliRunner().invoke(main, [command, "--help"], prog_name="shadowserve", terminal_width=columns)
    assert max(map(len, done.output.splitlines())) <= columns
    assert set(section.headings) <= set(section.model_fields)
    assert next(iter(section.model_fields)) in section.headings
    headings = re.findall(r"^(\S.*):$", done.output, re.MULTILINE)
    assert headings == ["General", *section.headings.values()]


# ---- The files of configs/ -------------------------------------------------------------------------------------------


def test_the_configurations_are_listed_and_printed(tmp_path: Path) -> None:
    names = run("config").output.split()
    folder = Path(__file__).parents[2] / "configs"
    assert set(names) == {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    for name in names:
        assert run("config", name).output == (folder / name).read_text()
    done = run("config", "storge.yaml")
    assert done.exit_code == 2 and "storage.yaml" in done.output


def test_the_module_runs_without_the_installed_script_and_prints_the_version() -> None:
    command = [sys.executable, "-m", "shadowserve_tools", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=NEVER_S, cwd=Path(__file__).parents[2])
    assert (done.returncode, done.stdout) == (0, f"shadowserve, version {__version__}\n")


# ---- Exit codes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["storge"], "storge"),
        (["storage", "--prot", "1"], "--prot"),
        (["storage", "--port"], "--port"),
        (["storage", "--port", "many"], "command line: port: .*integer"),
        (["storage", "--port", "[1"], "not a YAML value"),
        (["storage", "--bulk-bytes-max", "2 GiB"], "request_bytes_max is less than bulk_bytes_max"),
        (["storage", "unexpected"], "unexpected"),
        (["storage", "--config", "absent.yaml"], "cannot read configuration file absent.yaml"),
        (["dpu", "--backend", "doca5"], "backend: .*'software'"),
        (["dpu", "--listen", "192.0.2.1:1"], "can be reached from other machines"),
        (["bench", "nothing"], "nothing"),
        (["bench"], "Usage"),
        (["demo", "--turns", "0"], "--turns"),
        (["doctor", "--nothing"], "--nothing"),
        ([], "Usage"),
    ],
    ids=" ".join,
)
def test_an_invalid_command_line_exits_with_2_and_a_message(arguments: list[str], message: str) -> None:
    done = run(*arguments)
    assert done.exit_code == 2
    assert re.search(message, " ".join(done.output.split()))


def test_a_failure_exits_with_1_and_a_remedy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("shadowserve_tools.demo._path", lambda: str(tmp_path))
    done = run("demo")
    assert done.exit_code == 1
    assert re.fullmatch(r"Error: the demo needs vLLM.*make setup.*\n", done.output)


@pytest.mark.parametrize(
    ("command", "flag", "remedy"), [("storage", "--port", "choose another"), ("dpu", "--listen", "")]
)
def test_an_address_in_use_exits_with_2_and_one_line(command: str, flag: str, remedy: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        address = port if command == "storage" else f"127.0.0.1:{port}"
        program = [sys.executable, "-m", "shadowserve_tools", command, flag, address]
        done = subprocess.run(program, capture_output=True, text=True, timeout=NEVER_S)
    assert done.returncode == 2 and done.stdout == "", done.stderr
    assert "Traceback" not in done.stderr
    assert port in done.stderr.splitlines()[-1] and remedy in done.stderr


# ---- The programs ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("command", "other"), [("storage", "dpu_dataplane"), ("dpu", "storage_kv")])
def test_a_program_starts_without_the_other_and_without_reading_its_own_source(command: str, other: str) -> None:
    script = (
        "import linecache, sys; from shadowserve_tools import main; "
        f"assert main.get_command(None, {command!r}); "
        f"print([name for name in sys.modules if name.startswith({other!r})], [*linecache.cache])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=NEVER_S, check=True)
    assert done.stdout == "[] []\n"


def test_both_programs_start_connect_and_stop_on_sigterm(tmp_path: Path) -> None:
    small = ["--decompression-buffer-bytes", "8 MiB", "--store-buffer-bytes", "8 MiB"]
    with (
        start_storage(tmp_path) as storage,
        start_data_plane(tmp_path, storage.address, *PATIENT, *small) as data_plane,
    ):
        found = found_by_doctor("--storage", storage.address, "--data-plane", data_plane.address)
        assert (found["storage server"][0], found["data plane"][0]) == ("ok", "ok")
    for child in (storage, data_plane):
        assert child.process.returncode == 0, child.log.read_text()
        assert "Traceback" not in child.log.read_text()


# ---- Doctor ----------------------------------------------------------------------------------------------------------


def test_the_doctor_prints_findings_as_json() -> None:
    done = run("doctor", "--json", "--storage", "127.0.0.1:1", "--data-plane", "127.0.0.1:1")
    report = json.loads(done.output)
    assert report["version"] == __version__
    findings = {finding["what"]: finding for finding in report["findings"]}
    assert len(findings) == len(report["findings"])
    assert {"Python", "system", "C core", "shared memory", "storage server", "data plane"} <= set(findings)
    assert {"codec none", "codec deflate", "codec lz4", "codec zstd", "codec kvrans"} <= set(findings)
    for finding in report["findings"]:
        assert set(finding) == {"what", "state", "found", "remedy"}
        assert finding["state"] in ("ok", "warning", "failed")
        assert finding["found"]
        assert finding["remedy"] or finding["state"] == "ok"
    assert done.exit_code == any(finding["state"] == "failed" for finding in report["findings"])


def found_by_doctor(*arguments: str) -> dict[str, tuple[str, str, str]]:
    findings = json.loads(run("doctor", "--json", *arguments).output)["findings"]
    return {each["what"]: (each["state"], each["found"], each["remedy"]) for each in findings}


@pytest.mark.parametrize(
    ("address", "command"),
    [
        ("127.0.0.1:1", "shadowserve storage --port 1"),
        ("nowhere", "give the address as HOST:PORT"),
        ("127.0.0.1:many", "give the address as HOST:PORT"),
        (":6380", "give the address as HOST:PORT"),
    ],
)
def test_a_stopped_program_is_a_warning_with_the_command_that_starts_it(address: str, command: str) -> None:
    state, _, remedy = found_by_doctor("--storage", address)["storage server"]
    assert (state, remedy) == ("warning", command)


def test_the_doctor_uses_the_configured_addresses(tmp_path: Path) -> None:
    """Symptom: in the host's role, it tried the default port of storage, and the remedy contained another file."""
    ports = [free_port() for _ in range(2)]
    file = tmp_path / "all.yaml"
    file.write_text(
        f"host: {{data_plane: '127.0.0.1:{ports[1]}'}}\n"
        f"dpu: {{listen: '127.0.0.1:{ports[1]}', storage: '127.0.0.1:{ports[0]}'}}\nstorage: {{port: {ports[0]}}}\n"
    )
    for role in ("host", "data-plane", "storage"):
        found = found_by_doctor("--role", role, "--config", str(file))
        state, address, remedy = found["storage server"]
        assert (state, remedy) == ("warning", f"shadowserve storage --config {file}")
        assert f"127.0.0.1:{ports[0]}" in address
        if role != "storage":
            state, address, remedy = found["data plane"]
            assert (state, remedy) == ("warning", f"shadowserve dpu --config {file}")
            assert f"127.0.0.1:{ports[1]}" in address


def test_the_doctor_proposes_a_data_plane_at_the_hosts_address_and_checks_each_node_of_a_cluster(
    tmp_path: Path,
) -> None:
    file = tmp_path / "file.yaml"
    file.write_text("host: {data_plane: '127.0.0.1:1'}\n")
    assert found_by_doctor("--config", str(file))["data plane"][2] == "shadowserve dpu --listen 127.0.0.1:1"
    file.write_text("dpu: {storage_cluster: ['127.0.0.1:1', '127.0.0.1:2']}\n")
    found = found_by_doctor("--config", str(file))
    nodes = {what: remedy for what, (_, _, remedy) in found.items() if what.startswith("storage")}
    assert nodes.keys() == {"storage node 127.0.0.1:1", "storage node 127.0.0.1:2"}
    for remedy in nodes.values():  # symptom: it said to start our own storage node there
        assert "Redis or Valkey cluster" in remedy


def test_a_failed_finding_makes_the_doctor_exit_with_1(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise OSError("no shared memory here")

    monkeypatch.setattr("shutil.disk_usage", broken)
    done = run("doctor", "--json")
    assert done.exit_code == 1
    assert any("no shared memory here" in finding["found"] for finding in json.loads(done.output)["findings"])
