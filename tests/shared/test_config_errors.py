"""Error messages of invalid configurations: they name the key and a correction."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from dpu_dataplane.config import DataPlaneConfig
from host_control.config import HostConfig
from shadowserve.config import Section, sections_of
from shadowserve.errors import ConfigurationError
from shadowserve_tools import main
from storage_kv.config import StorageConfig

CONFIGS = Path(__file__).parents[2] / "configs"


def problem(section: type[Section], **flags: Any) -> str:
    with pytest.raises(ConfigurationError) as error:
        section.load(flags=flags, environment={})
    return str(error.value)


@pytest.mark.parametrize(
    ("section", "flags", "told"),
    [
        (StorageConfig, {"devices": [{"pth": "/a"}]}, "devices[0].pth: there is no such key; did you mean 'devices[0]"
         ".path'? Known: access, "),
        (StorageConfig, {"tenants": {"a": {"bytes_mx": 1}}}, "did you mean 'tenants.a.bytes_max'?"),
        (StorageConfig, {"s3": {"bucket": "abc", "endpont": "x"}}, "did you mean 's3.endpoint'?"),
        (DataPlaneConfig, {"tiers": {"devices": [{"pth": "/a"}]}}, "did you mean 'tiers.devices[0].path'?"),
        (StorageConfig, {"devices": [{"path:/a": None}]}, "write a blank after the colon: path: /a"),
        (StorageConfig, {"devices": [{"size": "1 GiB"}]}, "devices[0].path: it is missing"),
        (StorageConfig, {"cores": 17}, "cores: a list of numbers is written in brackets: cores: [17]"),
        (DataPlaneConfig, {"net_cores": 17}, "net_cores: [17]"),
        (DataPlaneConfig, {"fused": "no way"}, "fused: 'no way' is not auto or true or false"),
        (DataPlaneConfig, {"tiers": 3}, "tiers: it is a mapping of memory_budget_bytes, devices, "),
        (DataPlaneConfig, {"storage": "redis://127.0.0.1:6380/0"}, "write its host and port alone: 127.0.0.1:6380"),
        (DataPlaneConfig, {"storage_nodes": ["rediss://a:1"]}, "configure TLS with tls_ca"),
        (DataPlaneConfig, {"listen": "http://127.0.0.1:1"}, "write its host and port alone: 127.0.0.1:1"),
        (StorageConfig, {"host": "redis://10.0.0.1"}, "host: 'redis://...' is a URL"),
        (HostConfig, {"data_plane": "grpc://a:50151"}, "data_plane: 'grpc://...' is a URL"),
        (HostConfig, {"data_plane": "a"}, "data_plane: 'a' is not host:port"),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, dict) else "",
)  # fmt: skip
def test_a_message_names_the_key_and_what_to_write(section: type[Section], flags: dict[str, Any], told: str) -> None:
    assert told in problem(section, **flags)


def test_a_misspelt_key_is_one_problem_and_not_a_missing_key_as_well() -> None:
    assert "missing" not in problem(StorageConfig, devices=[{"pth": "/a"}])


def test_a_password_in_an_address_is_not_shown() -> None:
    assert "secret" not in problem(DataPlaneConfig, storage="redis://user:secret@127.0.0.1:6380")


@pytest.mark.parametrize(
    ("section", "name", "program"),
    [
        (StorageConfig, "emulated.yaml", "'shadowserve dpu'"),
        (StorageConfig, "host.yaml", "the plugin of the engine"),
        (DataPlaneConfig, "storage.yaml", "'shadowserve storage'"),
        (HostConfig, "one-host.yaml", "'shadowserve dpu'"),
    ],
)
def test_a_file_of_another_program_is_refused_with_the_program_that_it_is_of(
    section: type[Section], name: str, program: str
) -> None:
    """Symptom: 'shadowserve storage --config emulated.yaml' started with the defaults."""
    with pytest.raises(ConfigurationError, match=f"no section '{section.section}'.* is for {program}"):
        section.load(CONFIGS / name, environment={})


def test_a_file_of_several_programs_is_read_by_each(tmp_path: Path) -> None:
    file = tmp_path / "all.yaml"
    file.write_text(yaml.safe_dump({"storage": {"port": 1}, "dpu": None}))
    assert set(sections_of(file)) == {"storage", "dpu"}
    assert StorageConfig.load(file, environment={}).port == 1
    assert DataPlaneConfig.load(file, environment={}) == DataPlaneConfig.load(environment={})


@pytest.mark.parametrize("content", ["", "{}", "storge: {port: 1}"])
def test_a_file_without_a_known_section_is_refused(tmp_path: Path, content: str) -> None:
    file = tmp_path / "empty.yaml"
    file.write_text(content)
    with pytest.raises(ConfigurationError, match="it must begin with 'storage:'|did you mean 'storage'"):
        StorageConfig.load(file, environment={})


def test_a_misspelt_command_gets_the_nearest_name() -> None:
    done = CliRunner().invoke(main, ["storge"])
    assert done.exit_code == 2 and "did you mean 'storage'?" in done.output
