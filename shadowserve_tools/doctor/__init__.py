"""``shadowserve doctor``: checks this machine and the programs on it, and proposes remedies.

Each check is a generator of findings; the modules have the checks by subject.
"""

import json
import os
import shutil
import sys
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final, Literal, TypeVar

import click

from dpu_dataplane.config import DataPlaneConfig
from host_control.config import HostConfig
from shadowserve import __version__, members
from shadowserve.addresses import join_address, split_address
from shadowserve.config import CONFIG_FILE_VARIABLE, Section, sections_of
from shadowserve.errors import ConfigurationError
from shadowserve.tls import Credentials
from shadowserve_tools.doctor import bluefield, host, process
from shadowserve_tools.doctor import storage as node
from shadowserve_tools.doctor.access import access, certificates
from shadowserve_tools.doctor.connector import EngineConfig, engine_config, transfer_config
from shadowserve_tools.doctor.finding import Finding, Machine, run_check
from shadowserve_tools.doctor.reach import Node, Plane, data_plane, storage_node
from storage_kv.config import StorageConfig

_COLOURS: Final = {"ok": "green", "warning": "yellow", "failed": "red"}
_HERE: Final = ("127.0.0.1", "localhost", "::1", "0.0.0.0", "::")
_ANY: Final = {"0.0.0.0": "127.0.0.1", "::": "::1"}
"""Wildcard addresses to listen on, and the addresses to connect to instead."""
_TLS_FILES: Final = ("tls_ca", "tls_client_ca", "tls_cert", "tls_key")
_CLUSTER_NODE: Final = "start that node of the Redis or Valkey cluster, or correct 'storage_cluster'"
_CORE_LISTS: Final = ("net_cores", "decompress_cores", "dequantize_cores", "dma_cores", "store_cores")

_S = TypeVar("_S", bound=Section)
Role = Literal["host", "data-plane", "bluefield", "storage"]
Check = Iterator[Finding]


@dataclass(frozen=True)
class Options:
    """Options of the doctor: the system whose files are read; a file and addresses instead of the configured ones.

    Attributes:
        transfer: Text of vLLM's ``--kv-transfer-config``.
    """

    machine: Machine
    config: str | None
    storage: str | None
    data_plane: str | None
    transfer: str | None

    def has(self, section: type[Section]) -> bool:
        """Return True if the given file has a section."""
        return self.config is not None and section.section in _sections(self.config)


@click.command(context_settings={"show_default": True})
@click.option(
    "--role",
    type=click.Choice(["host", "data-plane", "bluefield", "storage"]),
    help="Role of the machine: engines, a data plane on CPU cores, a data plane on a BlueField, or a storage node. "
    "[default: bluefield on a BlueField's own system, else that of --config, else host]",
)
@click.option(
    "--config", type=click.Path(dir_okay=False), envvar=CONFIG_FILE_VARIABLE, help="The program's YAML file: its "
    "addresses, memory, cores, devices and certificates are checked."
)  # fmt: skip
@click.option(
    "--kv-transfer-config", "transfer", metavar="JSON",
    help="vLLM's option of this name: checked like in the plugin, including the connection to the data plane.",
)  # fmt: skip
@click.option("--storage", metavar="HOST:PORT", help="Storage server. [default: as configured]")
@click.option("--data-plane", metavar="HOST:PORT", help="Data plane. [default: as configured]")
@click.option(
    "--root", type=click.Path(exists=True, file_okay=False, path_type=Path), default=Path("/"),
    help="Root of the system to check, such as a mounted image.",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON.")
def doctor(role: Role | None, root: Path, as_json: bool, **given: str | None) -> None:
    """Check this machine, and propose a remedy for everything that is missing.

    Storage nodes and data planes are checked in their own protocols. The exit code is 1 if something will not work; a
    program that is not running is only a warning.
    """
    options = Options(Machine(root), **given)
    role = role or _role(options)
    if options.transfer is not None and role != "host":
        raise click.UsageError(f"--kv-transfer-config belongs to an engine: use it with --role host, not {role}")
    checks = {
        "host": _host_checks,
        "data-plane": _data_plane_checks,
        "bluefield": _bluefield_checks,
        "storage": _storage_checks,
    }[role]
    findings = [finding for check in checks(options) for finding in run_check(check)]
    if as_json:
        report = {"version": __version__, "role": role, "findings": [asdict(finding) for finding in findings]}
        click.echo(json.dumps(report))
    else:
        _print(role, findings)
    if any(finding.state == "failed" for finding in findings):
        sys.exit(1)


def _role(options: Options) -> Role:
    if options.machine.is_bluefield:
        return "bluefield"
    if options.transfer is not None or options.config is None or options.has(HostConfig):
        return "host"
    if options.has(DataPlaneConfig):
        return "data-plane"
    return "storage" if options.has(StorageConfig) else "host"


def _host_checks(options: Options) -> Iterator[Check]:
    machine = options.machine
    config, configured = _configuration(HostConfig, options, optional=True)
    engine, transfer = _engine(options)
    yield from _mover_checks(configured)
    yield from (process.shared_memory(), process.engine())
    yield from (host.card(machine), host.doca(machine), host.gpus(machine))
    plane, plane_configured = _configuration(DataPlaneConfig, options, "data plane's configuration", optional=True)
    if transfer is not None:
        yield transfer
    if engine is not None:
        config = engine.host
    elif options.has(DataPlaneConfig) and not options.has(HostConfig):
        config = config.model_copy(update={"data_plane": _connect_address(plane.listen)})
    yield certificates(machine, _tls_files(config))
    address, key = config.data_plane.replace("{rank}", "0"), "'data_plane' of the engine"
    if options.data_plane:
        address, key = options.data_plane, "--data-plane"
    own = not host.cards(machine)
    start = _start_command(plane, options, address) if own else "on the card: systemctl start shadowserve-dpu"
    chunks = None if engine is None or engine.is_tier else (config.chunk_tokens, config.quantizer)
    yield data_plane(Plane(address=address, start=start, key=key, config=config, chunks=chunks))
    if own:
        yield plane_configured
    # Without its configuration, the data plane alone knows its storage. The card's may be in a network that the host
    # cannot reach.
    known = _file_of(DataPlaneConfig, options, optional=True) is not None or plane != DataPlaneConfig()
    if options.storage or (own and known):
        yield from _reach_storage(options, plane)


def _engine(options: Options) -> tuple[EngineConfig | None, Check | None]:
    """Return the engine that vLLM's ``--kv-transfer-config`` describes, and its check; twice None without it."""
    if options.transfer is None:
        return None, None
    try:
        engine = engine_config(options.transfer)
    except ConfigurationError as error:
        remedy = "the README has an example; docs/reference/configuration.md has the keys of kv_connector_extra_config"
        return None, iter([Finding("kv-transfer-config", "failed", str(error), remedy)])
    return engine, transfer_config(engine)


def _data_plane_checks(options: Options) -> Iterator[Check]:
    config, configured = _configuration(DataPlaneConfig, options)
    yield from _mover_checks(configured)
    yield from _reach_data_plane(options, config)


def _reach_data_plane(options: Options, config: DataPlaneConfig) -> Iterator[Check]:
    """Yield the checks of every data plane: memory, devices of its tiers, certificates, storage."""
    machine = options.machine
    yield node.memory(machine, config.memory_budgets())
    if config.tiers is not None:
        yield node.device_access()
        yield node.devices(machine, config.tiers.devices)
    yield certificates(machine, _tls_files(config))
    address = options.data_plane or _connect_address(config.listen)
    key = "--data-plane" if options.data_plane else "'listen' of section 'dpu'"
    start = _start_command(config, options, options.data_plane or config.listen)
    yield data_plane(Plane(address=address, start=start, key=key, encrypted=bool(config.tls_cert)))
    yield from _reach_storage(options, config)


def _bluefield_checks(options: Options) -> Iterator[Check]:
    machine = options.machine
    config, configured = _configuration(DataPlaneConfig, options)
    lists = {key: getattr(config, key) for key in _CORE_LISTS if getattr(config, key) != "auto"}
    net = [core for core in lists.get("net_cores", ()) if core >= 0]
    yield from _mover_checks(configured)
    yield from (bluefield.card(machine), bluefield.arm_cores(machine))
    yield from (host.doca(machine), bluefield.huge_pages(machine))
    yield bluefield.accelerators(machine, config.device)
    if options.storage or config.storage:
        yield bluefield.xlio(machine, int((options.storage or config.storage).rpartition(":")[2]))
    yield bluefield.core_lists(machine, lists)
    yield bluefield.isolation(machine, net)
    yield bluefield.unit(machine)
    yield from _reach_data_plane(options, config)


def _storage_checks(options: Options) -> Iterator[Check]:
    machine = options.machine
    config, configured = _configuration(StorageConfig, options)
    yield from (process.interpreter(), process.native_core(), process.locked_memory(), configured)
    yield node.device_access()
    yield node.namespaces(machine)
    yield node.memory(machine, {"memory_budget_bytes": int(config.memory_budget_bytes)})
    yield node.devices(machine, config.devices)
    yield certificates(machine, _tls_files(config))
    yield access(machine, config)
    own = Node(
        what="storage server",
        address=options.storage or _connect_address(_own_address(config)),
        start=_start_command(config, options, options.storage or _own_address(config)),
        key="--storage" if options.storage else "'port' of section 'storage'",
        password=config.password.get_secret_value(),
        credentials=Credentials(authorities=config.tls_client_ca) if config.tls_cert else None,
        own=True,
    )
    yield storage_node(own)


def _mover_checks(configured: Check) -> Iterator[Check]:
    """Yield the checks of programs that move KV: hosts and data planes."""
    yield from (process.interpreter(), process.native_core(), process.decoding())
    yield from (process.locked_memory(), process.cores(), configured)


def _reach_storage(options: Options, plane: DataPlaneConfig) -> Iterator[Check]:
    """Yield a check of the storage node at the given address, or of each one in the data plane's configuration."""
    addresses = [options.storage] if options.storage else plane.storage_cluster
    if plane.storage_nodes and not addresses:
        try:
            addresses = list(members.read(plane.storage_nodes))
        except (OSError, ValueError) as error:
            found = f"{plane.storage_nodes}: {error}"
            yield iter([Finding("storage nodes", "failed", found, "correct 'storage_nodes'")])
            return
    addresses = addresses or [plane.storage]
    if addresses == [""]:
        return  # local tiers only
    several = "storage_nodes" if plane.storage_nodes else "storage_cluster" if plane.storage_cluster else "storage"
    own, _ = _configuration(StorageConfig, options, optional=True)
    names = plane.storage_tls_ca, plane.storage_tls_cert, plane.storage_tls_key
    authorities, certificate, key = (str(options.machine.path(name)) if name else "" for name in names)
    files = {"authorities": authorities, "certificate": certificate, "key": key}
    name = plane.storage_server_name or members.service_of(plane.storage_nodes)
    credentials = Credentials(**files, server_name=name) if authorities else None
    cluster = bool(plane.storage_cluster) and not options.storage
    for address in addresses:
        node = Node(
            what="storage server" if len(addresses) == 1 else f"storage node {address}",
            address=address,
            start=_CLUSTER_NODE if cluster else _start_command(own, options, address),
            key="--storage" if options.storage else f"'{several}' of section 'dpu'",
            user=plane.storage_username,
            password=plane.storage_password.get_secret_value(),
            credentials=credentials,
            cluster=cluster,
        )
        yield storage_node(node)


def _configuration(
    section: type[_S], options: Options, what: str = "configuration", *, optional: bool = False
) -> tuple[_S, Check]:
    """Return a program's configuration (the defaults if there is none), and the check of it."""
    file = _file_of(section, options, optional=optional)
    environment = {key: value for key, value in os.environ.items() if key != CONFIG_FILE_VARIABLE}
    try:
        return section.load(file, environment=environment), iter([Finding(what, "ok", file or "the defaults")])
    except ConfigurationError as error:
        remedy = f"'shadowserve config' and 'shadowserve {section.section} --help' have every key"
        return section.load(environment={}), iter([Finding(what, "failed", str(error), remedy)])


def _file_of(section: type[Section], options: Options, *, optional: bool = False) -> str | None:
    """Return a program's file: the given one, which may lack an ``optional`` section, or the installed service's."""
    if options.config is not None:
        return None if optional and not options.has(section) else options.config
    installed = options.machine.path(f"/etc/shadowserve/{section.section}.yaml")
    return str(installed) if installed.is_file() else None


def _sections(file: str) -> tuple[str, ...]:
    """Return a file's sections; empty if it is unreadable, which its program reports."""
    try:
        return sections_of(file)
    except ConfigurationError:
        return ()


def _own_address(config: StorageConfig | DataPlaneConfig) -> str:
    return config.listen if isinstance(config, DataPlaneConfig) else join_address(config.host, config.port)


def _connect_address(listen: str) -> str:
    """Return the address at which this machine connects to what listens on ``listen``."""
    if listen.startswith("unix:"):
        return listen
    name, port = split_address(listen)
    return join_address(_ANY.get(name, name), port)


def _start_command(config: StorageConfig | DataPlaneConfig, options: Options, address: str) -> str:
    """Return the command that starts a program at ``host:port`` or ``unix:/path``, on this machine or another one."""
    name, colon, port = address.rpartition(":")
    if not address.startswith("unix:") and not (name and colon and port.isdigit()):
        return "give the address as HOST:PORT"
    own = address in (_own_address(config), _connect_address(_own_address(config)))
    if not address.startswith("unix:") and name.strip("[]") not in _HERE and not own:
        return f"on {name}: shadowserve {config.section}, or systemctl start shadowserve-{config.section}"
    if options.machine.path(f"/etc/systemd/system/shadowserve-{config.section}.service").exists():
        return f"systemctl start shadowserve-{config.section}"
    command = f"shadowserve {config.section}"
    if options.has(type(config)) and config != type(config)():
        command += f" --config {options.config}"
    if own:
        return command
    return f"{command} --listen {address}" if isinstance(config, DataPlaneConfig) else f"{command} --port {port}"


def _tls_files(config: Section) -> Mapping[str, str]:
    return {key: str(getattr(config, key)) for key in _TLS_FILES if key in type(config).model_fields}


def _print(role: Role, findings: list[Finding]) -> None:
    """Print findings for people. Commands are not wrapped within a word, so that they can be copied."""
    click.echo(f"{role}, ShadowServe {__version__}")
    column = max(len(finding.what) for finding in findings)
    indent = " " * (column + 11)
    width = max(shutil.get_terminal_size().columns, len(indent) + 40)
    for finding in findings:
        head = click.style(f"{finding.state:<9}", fg=_COLOURS[finding.state]) + f"{finding.what:<{column}}  "
        click.echo(head + _wrapped(finding.found, indent, width))
        if finding.remedy:
            click.echo(indent + _wrapped(f"-> {finding.remedy}", f"{indent}   ", width))
    counts = [sum(finding.state == state for finding in findings) for state in ("failed", "warning")]
    click.echo(f"{counts[0]} failed, {counts[1]} warnings")


def _wrapped(text: str, indent: str, width: int) -> str:
    lines = textwrap.wrap(text, width - len(indent), break_long_words=False, break_on_hyphens=False)
    return f"\n{indent}".join(lines)
