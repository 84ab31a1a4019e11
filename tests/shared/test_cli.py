"""The ``shadowserve`` command: what it prints, and the exit codes that scripts rely on."""

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result
from machine import NEVER_S, PATIENT

from dpu_dataplane.config import DataPlaneConfig
from shadowserve import __version__
from shadowserve.cli import COMMANDS, main
from shadowserve.cli.bench import BENCHES
from shadowserve.cli.processes import start_data_plane, start_storage
from shadowserve.cli.simulate import SIMULATIONS
from shadowserve.config import Section
from storage_kv.config import StorageConfig

PROGRAMS: list[tuple[str, type[Section]]] = [("storage", StorageConfig), ("dpu", DataPlaneConfig)]


@pytest.fixture(autouse=True)
def no_configuration_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in [name for name in os.environ if name.startswith("SHADOWSERVE_") and "NATIVE" not in name]:
        monkeypatch.delenv(variable)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, list(arguments), prog_name="shadowserve")


# ---- Help ------------------------------------------------------------------------------------------------------------


def test_the_command_explains_itself() -> None:
    done = run("--help")
    assert done.exit_code == 0
    assert all(re.search(rf"^  {name} ", done.output, re.MULTILINE) for name in COMMANDS)
    assert "Exit codes:" in done.output


@pytest.mark.parametrize("flag", ["--help", "-h"])
@pytest.mark.parametrize(
    "command",
    [[name] for name in COMMANDS]
    + [["bench", name] for name in BENCHES]
    + [["simulate", name] for name in SIMULATIONS],
    ids=" ".join,
)
def test_every_command_explains_itself_and_each_of_its_options(command: list[str], flag: str) -> None:
    done = run(*command, flag)
    assert done.exit_code == 0, done.output
    assert done.output.startswith(f"Usage: shadowserve {' '.join(command)} [OPTIONS]")
    options = re.findall(r"^  (?:-\w, )?(--[\w-]+)[^\n]*(\n[ ]{6,}\S)?", done.output, re.MULTILINE)
    assert "--help" in {name for name, _ in options}
    for option in re.findall(r"^  --[\w-]+(?: [A-Z\[<|:.\]a-z0-9>_-]+)?$(?!\n {6})", done.output, re.MULTILINE):
        pytest.fail(f"{option.strip()} has no help")


@pytest.mark.parametrize(("command", "section"), PROGRAMS)
def test_a_program_has_a_flag_for_each_key_with_its_default(command: str, section: type[Section]) -> None:
    text = " ".join(run(command, "--help").output.split())
    for key, field in section.model_fields.items():
        assert f" --{key.replace('_', '-')} VALUE" in text
        assert " ".join((field.description or "").split()) in text
        assert f"[default: {section.default_text(key)}]" in text


def test_the_version_is_the_one_that_is_written_once() -> None:
    done = run("--version")
    assert (done.exit_code, done.output) == (0, f"shadowserve, version {__version__}\n")


def test_the_command_runs_without_its_script() -> None:
    command = [sys.executable, "-m", "shadowserve.cli", "--version"]
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
def test_what_cannot_be_used_ends_with_2_and_says_so(arguments: list[str], message: str) -> None:
    done = run(*arguments)
    assert done.exit_code == 2
    assert re.search(message, " ".join(done.output.split()))


def test_an_unknown_key_in_a_file_ends_with_2_and_names_the_nearest(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("storage: {prot: 1}\n")
    done = run("storage", "--config", str(file))
    assert done.exit_code == 2
    assert "there is no key 'prot'; did you mean 'port'" in done.output


def test_an_unknown_variable_ends_with_2_and_names_the_nearest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHADOWSERVE_STORAGE_PROT", "1")
    done = run("storage")
    assert done.exit_code == 2
    assert "did you mean 'port'" in done.output


def test_what_does_not_work_ends_with_1_and_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("shadowserve.cli.demo._path", lambda: str(tmp_path))
    done = run("demo")
    assert done.exit_code == 1
    assert re.fullmatch(r"Error: the demo needs vLLM.*make setup.*\n", done.output)


@pytest.mark.parametrize(("command", "flags"), [("storage", ["--port"]), ("dpu", ["--listen"])])
def test_an_address_in_use_ends_with_2_in_one_line(command: str, flags: list[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        address = port if command == "storage" else f"127.0.0.1:{port}"
        program = [sys.executable, "-m", "shadowserve.cli", command, *flags, address]
        done = subprocess.run(program, capture_output=True, text=True, timeout=NEVER_S)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert port in done.stderr.splitlines()[-1]


# ---- The programs ----------------------------------------------------------------------------------------------------


def test_both_programs_start_meet_and_stop_cleanly_on_sigterm(tmp_path: Path) -> None:
    small = ["--decompression-buffer-bytes", "8 MiB", "--store-buffer-bytes", "8 MiB"]
    with (
        start_storage(tmp_path) as storage,
        start_data_plane(tmp_path, storage.address, *PATIENT, *small) as data_plane,
    ):
        done = run("doctor", "--json", "--storage", storage.address, "--data-plane", data_plane.address)
        states = {finding["what"]: finding["state"] for finding in json.loads(done.output)["findings"]}
        assert (states["storage server"], states["data plane"]) == ("ok", "ok")
    for child in (storage, data_plane):
        assert child.process.returncode == 0, child.log.read_text()
        assert "Traceback" not in child.log.read_text()


# ---- Doctor ----------------------------------------------------------------------------------------------------------


def test_the_doctor_reports_findings_that_a_script_can_read() -> None:
    done = run("doctor", "--json", "--storage", "127.0.0.1:1", "--data-plane", "127.0.0.1:1")
    report = json.loads(done.output)
    assert report["version"] == __version__
    findings = {finding["what"]: finding for finding in report["findings"]}
    assert len(findings) == len(report["findings"])
    assert {"Python", "system", "C core", "shared memory", "storage server", "data plane"} <= set(findings)
    assert {"codec none", "codec deflate", "codec lz4", "codec zstd", "codec kvrans"} <= set(findings)
    for finding in report["findings"]:
        assert set(finding) == {"what", "state", "found", "mend"}
        assert finding["state"] in ("ok", "warning", "failed")
        assert finding["found"]
        assert finding["mend"] or finding["state"] == "ok"
    assert done.exit_code == any(finding["state"] == "failed" for finding in report["findings"])


def test_the_doctor_finds_what_it_needs_to_run_these_tests() -> None:
    findings = {finding["what"]: finding for finding in json.loads(run("doctor", "--json").output)["findings"]}
    assert [findings[what]["state"] for what in ("Python", "system", "C core", "codec none")] == ["ok"] * 4


@pytest.mark.parametrize("address", ["127.0.0.1:1", "nowhere", "127.0.0.1:many", ""])
def test_a_program_that_does_not_run_is_a_warning_with_the_command_that_starts_it(address: str) -> None:
    done = run("doctor", "--json", "--storage", address)
    (finding,) = [item for item in json.loads(done.output)["findings"] if item["what"] == "storage server"]
    assert (finding["state"], finding["mend"]) == ("warning", "shadowserve storage --config configs/storage.yaml")


def test_the_doctor_ends_with_1_when_something_will_not_work(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise OSError("no shared memory here")

    monkeypatch.setattr("shutil.disk_usage", broken)
    done = run("doctor", "--json")
    assert done.exit_code == 1
    assert any("no shared memory here" in finding["found"] for finding in json.loads(done.output)["findings"])


def test_the_doctor_talks_to_people_too() -> None:
    done = run("doctor")
    assert "C core" in done.output and re.search(r"^\d+ failed, \d+ warnings$", done.output, re.MULTILINE)


def test_every_command_is_one() -> None:
    context = click.Context(main)
    assert all(isinstance(main.get_command(context, name), click.Command) for name in COMMANDS)
    assert main.get_command(context, "absent") is None
