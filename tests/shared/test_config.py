"""Configuration: flag, then environment, then file, then default. Unknown keys are errors."""

import re
from pathlib import Path
from typing import Any, ClassVar

import pytest
import yaml
from click.testing import CliRunner
from pydantic import Field, SecretStr, ValidationError

from dpu_dataplane.config import DataPlaneConfig
from host_control.config import HostConfig
from shadowserve.config import CONFIG_FILE_VARIABLE, SECTIONS, Section, sections_of
from shadowserve.errors import ConfigurationError
from shadowserve.sizes import ByteSize
from shadowserve_tools import main
from storage_kv.config import StorageConfig

REPOSITORY = Path(__file__).parents[2]
PROGRAMS: list[type[Section]] = [StorageConfig, DataPlaneConfig, HostConfig]
CONFIG_FILES = sorted((REPOSITORY / "configs").glob("*.yaml"))
DEPLOYMENTS = {"bluefield.yaml", "one-host.yaml"}
"""Files for one kind of machine. They have only the differences, without the explanation of every key."""


class SmallConfig(Section):
    """A section with one key of each kind."""

    section: ClassVar[str] = "storage"

    port: int = Field(1, ge=0, le=65535)
    """A number."""
    name: str = "default"
    """A text."""
    cores: list[int] = [0]
    """A list."""
    password: str = Field("", repr=False)
    """A secret text."""
    token: SecretStr = SecretStr("")
    """A secret."""
    buffer_bytes: ByteSize = ByteSize(4096)
    """A size."""


def write(folder: Path, content: object) -> Path:
    path = folder / "config.yaml"
    path.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
    return path


# ---- Precedence ------------------------------------------------------------------------------------------------------

# (section, key, value in file, in environment, on the command line); all differ from each other and from the default.
LAYERS: list[tuple[type[Section], str, Any, Any, Any]] = [
    (SmallConfig, "port", 2, 3, 4),
    (SmallConfig, "name", "file", "environment", "flag"),
    (SmallConfig, "cores", [1], [2, 3], [4]),
    (StorageConfig, "port", 2, 3, 4),
    (StorageConfig, "host", "::1", "127.0.0.2", "localhost"),
    (StorageConfig, "idle_timeout_s", 2.5, 3.5, 4.5),
    (DataPlaneConfig, "fetch_queue", 2, 3, 4),
    (DataPlaneConfig, "storage", "a:1", "b:2", "c:3"),
    (DataPlaneConfig, "net_cores", [1], [2], [-1, -1]),
    (HostConfig, "lookup_threads", 3, 4, 5),
    (HostConfig, "data_plane", "a:1", "b:2", "c:3"),
    (HostConfig, "store_timeout_s", 2.5, 3.5, 4.5),
]


@pytest.mark.parametrize("layers", range(4))
@pytest.mark.parametrize(("section", "key", "in_file", "in_environment", "as_flag"), LAYERS)
def test_the_nearest_of_the_four_places_wins(
    tmp_path: Path, section: type[Section], key: str, in_file: Any, in_environment: Any, as_flag: Any, layers: int
) -> None:
    values = [section.model_fields[key].default, in_file, in_environment, as_flag]
    assert all(value != other for i, value in enumerate(values) for other in values[:i])
    file = write(tmp_path, {section.section: {key: in_file}}) if layers >= 1 else None
    variable = f"SHADOWSERVE_{section.section}_{key}".upper()
    environment = {variable: str(in_environment)} if layers >= 2 else {}
    flags = {key: as_flag} if layers >= 3 else {}
    assert getattr(section.load(file, flags, environment), key) == values[layers]


@pytest.mark.parametrize("section", PROGRAMS)
def test_every_key_has_a_default_and_a_description(section: type[Section]) -> None:
    loaded, described = section.load(environment={}), section.descriptions()
    for key, field in section.model_fields.items():
        assert getattr(loaded, key) == field.default
        assert described.get(key), f"{section.__name__}.{key} has no docstring"


@pytest.mark.parametrize("section", PROGRAMS)
def test_a_loaded_section_cannot_be_changed(section: type[Section]) -> None:
    loaded = section.load(environment={})
    with pytest.raises(ValidationError):
        setattr(loaded, next(iter(section.model_fields)), "another")


def test_the_file_may_be_named_by_the_environment(tmp_path: Path) -> None:
    path = write(tmp_path, {"storage": {"port": 2}})
    assert SmallConfig.load(environment={CONFIG_FILE_VARIABLE: str(path)}).port == 2


def test_a_file_that_is_given_wins_over_one_that_the_environment_names(tmp_path: Path) -> None:
    path = write(tmp_path, {"storage": {"port": 2}})
    assert SmallConfig.load(path, environment={CONFIG_FILE_VARIABLE: "/nonexistent"}).port == 2


def test_the_environment_of_the_process_is_the_default_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHADOWSERVE_STORAGE_PORT", "7")
    assert SmallConfig.load().port == 7


def test_a_flag_that_was_not_given_does_not_count() -> None:
    loaded = SmallConfig.load(flags={"port": None, "name": "flag"}, environment={"SHADOWSERVE_STORAGE_PORT": "3"})
    assert (loaded.port, loaded.name) == (3, "flag")


def test_one_file_serves_all_programs(tmp_path: Path) -> None:
    path = write(tmp_path, {"storage": {"port": 2}, "dpu": {"fetch_queue": 3}, "host": {"lookup_threads": 4}})
    assert StorageConfig.load(path, environment={}).port == 2
    assert DataPlaneConfig.load(path, environment={}).fetch_queue == 3
    assert HostConfig.load(path, environment={}).lookup_threads == 4
    assert set(sections_of(path)) == set(SECTIONS)


def test_variables_of_other_programs_are_theirs() -> None:
    environment = {"SHADOWSERVE_DPU_FETCH_QUEUE": "3", "SHADOWSERVE_HOST_STORE": "false", "PATH": "/bin"}
    assert SmallConfig.load(environment=environment) == SmallConfig.load(environment={})


@pytest.mark.parametrize("content", ["storage:\n", "dpu: {}\nstorage:\n", "storage: {}\n"])
def test_a_section_that_is_empty_leaves_the_defaults(tmp_path: Path, content: str) -> None:
    assert SmallConfig.load(write(tmp_path, content), environment={}) == SmallConfig.load(environment={})


# ---- Values ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["1234", "true", "null", "[1", "a: b", "", " x "])
@pytest.mark.parametrize("key", ["name", "password"])
def test_text_from_the_environment_is_taken_as_it_is(key: str, text: str) -> None:
    assert getattr(SmallConfig.load(environment={f"SHADOWSERVE_STORAGE_{key.upper()}": text}), key) == text


def test_a_secret_of_digits_from_the_environment_is_text() -> None:
    assert SmallConfig.load(environment={"SHADOWSERVE_STORAGE_TOKEN": "0012"}).token.get_secret_value() == "0012"
    storage = StorageConfig.load(environment={"SHADOWSERVE_STORAGE_PASSWORD": "0012"})
    assert storage.password.get_secret_value() == "0012"


@pytest.mark.parametrize(("text", "size"), [("8192", 8192), ("8KiB", 8192), ("1 MiB", 1 << 20)])
def test_sizes_take_units(text: str, size: int) -> None:
    assert SmallConfig.load(environment={"SHADOWSERVE_STORAGE_BUFFER_BYTES": text}).buffer_bytes == size


@pytest.mark.parametrize(
    ("section", "key", "text"),
    [
        (SmallConfig, "port", "none"),
        (SmallConfig, "name", "default"),
        (SmallConfig, "cores", "[0]"),
        (SmallConfig, "token", "none"),
        (SmallConfig, "buffer_bytes", "4 KiB"),
        (DataPlaneConfig, "fused", "auto"),
        (DataPlaneConfig, "decompression_buffer_bytes", "256 MiB"),
        (DataPlaneConfig, "storage_password", "none"),
        (StorageConfig, "memory_budget_bytes", "4 GiB"),
        (StorageConfig, "metrics_port", "none"),
    ],
)
def test_defaults_are_shown_as_one_would_write_them(section: type[Section], key: str, text: str) -> None:
    expected = "1" if (section, key) == (SmallConfig, "port") else text
    assert section.default_text(key) == expected


# ---- Mistakes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("devices", [5, "/dev/nvme0n1", {"path": "/dev/nvme0n1"}])
def test_devices_that_are_no_list_are_refused(devices: object) -> None:
    with pytest.raises(ConfigurationError, match="command line: devices: .*list"):
        StorageConfig.load(flags={"devices": devices}, environment={})


@pytest.mark.parametrize("section", PROGRAMS)
def test_each_key_misspelled_is_refused(section: type[Section]) -> None:
    for key in section.model_fields:
        with pytest.raises(ConfigurationError, match=f"there is no key '{key}_'; did you mean '"):
            section.load(flags={f"{key}_": 1}, environment={})


@pytest.mark.parametrize(
    ("flags", "environment", "file", "message"),
    [
        ({"port": "many"}, {}, None, "command line: port: .*integer.*'many'"),
        ({"port": -1}, {}, None, "command line: port: .*greater than or equal to 0.*-1"),
        ({}, {"SHADOWSERVE_STORAGE_PORT": "65536"}, None, "environment: port: .*65536"),
        ({}, {"SHADOWSERVE_STORAGE_CORES": "[0, x]"}, None, r"environment: cores\[1\]: .*'x'"),
        ({}, {}, {"storage": {"name": [1]}}, r"file .*: name: .*string.*\[1\]"),
        ({}, {}, {"storage": {"cores": 3}}, "file .*: cores: .*list"),
        ({"port": "x", "cores": "y"}, {}, None, "port.*; .*cores"),  # all are named at once
        ({}, {"SHADOWSERVE_STORAGE_CORES": "[1"}, None, "SHADOWSERVE_STORAGE_CORES.*not a YAML value"),
        ({"cors": [1]}, {}, None, "command line: there is no key 'cors'; did you mean 'cores'"),
        (
            {},
            {"SHADOWSERVE_STORAGE_BUFFER_BYTE": "1"},
            None,
            "environment: there is no key 'buffer_byte'.*buffer_bytes'",
        ),
        ({}, {}, {"storage": {"prot": 2}}, r"file .*config\.yaml: there is no key 'prot'; did you mean 'port'"),
        ({}, {}, {"storgae": {"port": 2}}, "there is no section 'storgae'; did you mean 'storage'"),
        *(
            (
                {},
                {f"SHADOWSERVE_{name}": "1"},
                None,
                f"no variable 'SHADOWSERVE_{name}'; did you mean 'SHADOWSERVE_{near}'",
            )
            for name, near in (
                ("STORGAE_PORT", "STORAGE_PORT"),
                ("CONFIGFILE", "CONFIG_FILE"),
                ("PORT", "STORAGE_PORT"),
                ("STORAGE", "STORAGE_PORT"),
            )
        ),
    ],
)
def test_a_mistake_is_refused_with_its_place_and_the_nearest_name(
    tmp_path: Path, flags: dict[str, Any], environment: dict[str, str], file: object, message: str
) -> None:
    path = write(tmp_path, file) if file else None
    with pytest.raises(ConfigurationError, match=message):
        SmallConfig.load(path, flags, environment)


@pytest.mark.parametrize(
    ("section", "flags"),
    [
        (SmallConfig, {"password": ["hunter2"], "port": 1}),
        (SmallConfig, {"token": ["hunter2"]}),
        (StorageConfig, {"password": ["hunter2"]}),
        (StorageConfig, {"password": "hunter2", "request_bytes_max": 1024}),
        (DataPlaneConfig, {"storage_password": ["hunter2"]}),
        (DataPlaneConfig, {"storage_password": "hunter2", "listen": "192.0.2.1:1"}),
    ],
)
def test_a_message_never_shows_a_secret(section: type[Section], flags: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError) as caught:
        section.load(flags=flags, environment={})
    error: BaseException | None = caught.value
    while error is not None and not error.__suppress_context__:
        assert "hunter2" not in str(error)
        error = error.__cause__ or error.__context__
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    ("section", "flags"),
    [
        (StorageConfig, {"password": "hunter2"}),
        (DataPlaneConfig, {"storage_password": "hunter2"}),
        (SmallConfig, {"password": "hunter2", "token": "hunter2"}),
    ],
)
def test_a_printed_section_shows_no_secret(section: type[Section], flags: dict[str, Any]) -> None:
    loaded = section.load(flags=flags, environment={})
    assert "hunter2" not in f"{loaded!r} {loaded}"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        *(
            (text, "config.yaml")
            for text in ("", "[1, 2]", "text", "storage: [1]", "storage: 5", "a\t: b", "? [1]\n: 2")
        ),
        ("storage: {port: 1", "config.yaml"),
        ("storage: {name: !!python/object/apply:os.getcwd []}\n", "cannot read configuration file"),
        ("storage: {port: 1, port: 2}", "is a duplicate key"),
        ("storage:\n  port: 1\nstorage:\n  name: x\n", "is a duplicate key"),
    ],
)
def test_a_file_that_is_no_configuration_is_refused(tmp_path: Path, content: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        SmallConfig.load(write(tmp_path, content), environment={})


@pytest.mark.parametrize(
    ("value", "place"),
    [
        ("hunter2: x", "line 3, column 20: mapping values"),
        ('"hunter2', "line 4, column 1: .* quoted scalar from line 3$"),
        ("hunter2\n  password: hunter2", "line 4, column 3: 'password' is a duplicate key"),
        ("*hunter2", "line 3, column 13: found undefined alias$"),
        ("!hunter2", "line 3, column 13: could not determine a constructor for the tag$"),
        ("!!int hunter2", "cannot convert"),
    ],
    ids=["colon", "quote", "duplicate", "alias", "tag", "type"],
)
def test_an_error_of_a_file_shows_no_password(tmp_path: Path, value: str, place: str) -> None:
    """Symptom: PyYAML's message quoted the line with the password, and the log had it."""
    with pytest.raises(ConfigurationError, match=place) as raised:
        SmallConfig.load(write(tmp_path, f"storage:\n  port: 1\n  password: {value}\n"), environment={})
    assert "hunter2" not in str(raised.value)


def test_a_key_without_a_blank_behind_it_shows_no_password(tmp_path: Path) -> None:
    """Symptom: in braces, the message about the unknown key 'password:hunter2' had the password."""
    with pytest.raises(ConfigurationError, match="did you mean 'password'. Write a blank after the colon") as raised:
        SmallConfig.load(write(tmp_path, "storage: {port: 1, password:hunter2}"), environment={})
    assert "hunter2" not in str(raised.value)


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="cannot read configuration file .*absent"):
        SmallConfig.load(tmp_path / "absent.yaml", environment={})
    with pytest.raises(ConfigurationError, match="cannot read configuration file"):
        SmallConfig.load(tmp_path, environment={})
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"\xff\xfe\x00storage")
    with pytest.raises(ConfigurationError, match="cannot read configuration file"):
        SmallConfig.load(binary, environment={})


# ---- Messages --------------------------------------------------------------------------------------------------------


def problem(section: type[Section], **flags: Any) -> str:
    with pytest.raises(ConfigurationError) as error:
        section.load(flags=flags, environment={})
    return str(error.value)


@pytest.mark.parametrize(
    ("section", "flags", "message"),
    [
        (StorageConfig, {"devices": [{"pth": "/a"}]}, "devices[0].pth: there is no such key; did you mean 'devices[0]"
         ".path'? Known: access, "),
        (StorageConfig, {"tenants": {"a": {"bytes_mx": 1}}}, "did you mean 'tenants.a.bytes_max'?"),
        (StorageConfig, {"s3": {"bucket": "abc", "endpont": "x"}}, "did you mean 's3.endpoint'?"),
        (StorageConfig, {"s3": {"bucket": "UPPER"}}, "[a-z0-9]$', such as kv-cache (given"),
        (StorageConfig, {"s3": {"bucket": "abc", "endpoint": "minio:9000"}}, "such as https://minio.example:9000"),
        (StorageConfig, {"s3": {"bucket": "abc", "object_bytes": "1 GiB"}}, "s3.object_bytes: "),
        (StorageConfig, {"tenants": {"a b": {}}}, "'a b' is no valid name of a tenant"),
        (StorageConfig, {"tenants": {"a": {"keys_max": 0}}}, "tenants.a.keys_max: "),
        (StorageConfig, {"tenants": {"a": {"commands_per_s": -1}}}, "tenants.a.commands_per_s: "),
        (StorageConfig, {"tenants": ["a"]}, "tenants: "),
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
def test_a_message_names_the_key_and_what_to_write(section: type[Section], flags: dict[str, Any], message: str) -> None:
    assert message in problem(section, **flags)


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
        section.load(REPOSITORY / "configs" / name, environment={})


def test_a_misspelt_command_gets_the_nearest_name() -> None:
    done = CliRunner().invoke(main, ["storge"])
    assert done.exit_code == 2 and "did you mean 'storage'?" in done.output


# ---- Keys without effect ---------------------------------------------------------------------------------------------

DEVICE = [{"path": "/dev/null/values.pool", "size": "64MiB"}]


@pytest.mark.parametrize(
    ("section", "flags", "named"),
    [
        (StorageConfig, {"admission": "second_hit"}, ("admission: second_hit", "devices")),
        (StorageConfig, {"memory_homes": True}, ("memory_homes: true", "devices")),
        (StorageConfig, {"strict_order": True}, ("strict_order: true", "devices")),
        (StorageConfig, {"scrub_bytes_per_s": "4MiB"}, ("scrub_bytes_per_s", "devices")),
        (DataPlaneConfig, {"tiers": {"admission": "second_hit"}}, ("tiers", "admission: second_hit")),
        (DataPlaneConfig, {"tiers": {"scrub_bytes_per_s": "4MiB"}}, ("tiers", "scrub_bytes_per_s")),
        (HostConfig, {"pages": True, "quantizer": "binned"}, ("pages: true", "quantizer: binned")),
        (HostConfig, {"pages": True, "data_plane": "10.0.0.1:50151"}, ("pages: true", "data_plane", "10.0.0.1:50151")),
    ],
    ids=lambda value: str(value)[:50],
)
def test_keys_that_would_do_nothing_are_refused(
    section: type[Section], flags: dict[str, Any], named: tuple[str, ...]
) -> None:
    """Symptom: the program started, and the key had no effect."""
    with pytest.raises(ConfigurationError) as raised:
        section.load(flags=flags, environment={})
    assert all(name in str(raised.value) for name in named), raised.value
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("section", "flags"),
    [
        (StorageConfig, {"scrub_bytes_per_s": 0}),
        (StorageConfig, {"devices": DEVICE, "admission": "second_hit", "strict_order": True}),
        (DataPlaneConfig, {"tiers": {"strict_order": True}}),
        (DataPlaneConfig, {"tiers": {"devices": DEVICE, "scrub_bytes_per_s": "4MiB"}}),
        (HostConfig, {"pages": True, "data_plane": "unix:/run/dpu.sock", "quantizer": "passthrough"}),
    ],
    ids=lambda value: str(value)[:50],
)
def test_keys_that_do_what_they_say_are_accepted(section: type[Section], flags: dict[str, Any]) -> None:
    section.load(flags=flags, environment={})


# ---- Files in the repository -----------------------------------------------------------------------------------------

KEY_LINE = re.compile(r"^  (?P<off># ?)?(?P<key>[a-z][a-z0-9_]*):(?: +(?P<value>.*))?$")


def keys_of(path: Path, section: str) -> dict[str, str]:
    """Return each key of a file's section, also if it is commented out, with the text of its value."""
    keys: dict[str, str] = {}
    inside = False
    for line in path.read_text().splitlines():
        if re.match(r"^[a-z]", line):
            inside = line.startswith(f"{section}:")
        elif inside and (match := KEY_LINE.match(line)):
            assert match["key"] not in keys, f"{path.name} has {match['key']} twice"
            keys[match["key"]] = match["value"] or ""
    return keys


def test_there_is_a_file_for_each_program() -> None:
    names = {path.name for path in CONFIG_FILES}
    assert {"storage.yaml", "emulated.yaml"} <= names
    sections = {section for path in CONFIG_FILES for section in yaml.safe_load(path.read_text())}
    assert sections == set(SECTIONS)


@pytest.mark.parametrize("path", CONFIG_FILES, ids=lambda path: path.name)
def test_a_file_that_we_ship_can_be_loaded(path: Path) -> None:
    content = yaml.safe_load(path.read_text())
    for section in PROGRAMS:
        if section.section in content:
            section.load(path, environment={})


@pytest.mark.parametrize(
    "path", [path for path in CONFIG_FILES if path.name not in DEPLOYMENTS], ids=lambda path: path.name
)
def test_a_file_that_we_ship_explains_every_key_with_its_default(path: Path) -> None:
    content = yaml.safe_load(path.read_text())
    for section in PROGRAMS:
        if section.section not in content:
            continue
        written = keys_of(path, section.section)
        assert sorted(written) == sorted(section.model_fields), f"{path.name}, section {section.section}"
        assert section.load(path, environment={}) == section.load(environment={})
        for key in written.keys() - (content[section.section] or {}).keys():
            text = written[key]
            loaded = section.load(flags={key: yaml.safe_load(text)}, environment={})
            assert getattr(loaded, key) == section.model_fields[key].default, f"{path.name}: {key}: {text}"


def test_the_defaults_of_the_programs_meet() -> None:
    storage = StorageConfig.load(environment={})
    data_plane = DataPlaneConfig.load(environment={})
    assert data_plane.storage == f"{storage.host}:{storage.port}"
    assert HostConfig.load(environment={}).data_plane == data_plane.listen


@pytest.mark.parametrize(
    "text", ["9" * 5000, "!!bool x", "!!timestamp x", "!!int x", "[" * 5000, "!!map [1]"], ids=lambda text: text[:12]
)
def test_what_yaml_stumbles_over_is_refused_as_any_other_text(text: str, tmp_path: Path) -> None:
    """Symptom: a traceback. 'make fuzz' found the first one."""
    file = tmp_path / "configuration.yaml"
    file.write_text(f"storage:\n  port: {text}\n", encoding="utf-8")
    with pytest.raises(ConfigurationError, match="cannot read configuration file"):
        StorageConfig.load(file, environment={})
    with pytest.raises(ConfigurationError, match="port"):
        StorageConfig.load(environment={"SHADOWSERVE_STORAGE_PORT": text})
