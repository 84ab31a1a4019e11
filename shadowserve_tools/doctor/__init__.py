"""``shadowserve doctor``: what this machine has, what is missing, and how to mend it.

``process`` looks at the interpreter, the C core and limits; ``host`` and ``dpu`` at either side of a BlueField, through
``pci``; ``storage`` at a storage node's devices; ``certificates`` at TLS's files. Each check is a function that yields
findings.
"""

import json
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Final, Literal, TypeVar

import click

from dpu_dataplane.config import DataPlaneConfig
from host_control.config import HostConfig
from shadowserve import __version__
from shadowserve.config import CONFIG_FILE_VARIABLE, Section
from shadowserve.errors import ConfigurationError
from shadowserve_tools.doctor import dpu, host, process
from shadowserve_tools.doctor import storage as node
from shadowserve_tools.doctor.access import access
from shadowserve_tools.doctor.certificates import certificates
from shadowserve_tools.doctor.finding import Finding, Machine, look
from storage_kv.config import StorageConfig

__all__ = ["doctor"]

_COLOURS: Final = {"ok": "green", "warning": "yellow", "failed": "red"}
_HERE: Final = ("127.0.0.1", "localhost", "::1", "0.0.0.0", "::")
_TLS_FILES: Final = ("tls_ca", "tls_client_ca", "tls_cert", "tls_key")

_S = TypeVar("_S", bound=Section)
Role = Literal["host", "dpu", "storage"]
Check = Callable[[], Iterator[Finding]]


@click.command()
@click.option(
    "--role",
    type=click.Choice(["host", "dpu", "storage"]),
    help="What the machine is for. [default: dpu on a BlueField's own system, else host]",
)
@click.option(
    "--config", type=click.Path(dir_okay=False), envvar=CONFIG_FILE_VARIABLE, help="The program's YAML file: its "
    "addresses, cores and certificates are looked at."
)  # fmt: skip
@click.option("--storage", metavar="HOST:PORT", help="Storage server. [default: as configured]")
@click.option("--data-plane", metavar="HOST:PORT", help="Data plane. [default: as configured]")
@click.option(
    "--root",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    default=Path("/"),
    show_default=True,
    help="Look for hardware and settings in the system under this folder: a mounted image, say.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON.")
def doctor(
    role: Role | None, config: str | None, storage: str | None, data_plane: str | None, root: Path, as_json: bool
) -> None:
    """Say what this machine has, what is missing, and how to mend it.

    Exits with 1 when something will not work; a program that merely does not run now is a warning.
    """
    machine = Machine(root)
    role = role or ("dpu" if machine.is_bluefield else "host")
    checks = {"host": _host_checks, "dpu": _dpu_checks, "storage": _storage_checks}[role]
    findings = [finding for check in checks(machine, config, storage, data_plane) for finding in look(check)]
    if as_json:
        report = {"version": __version__, "role": role, "findings": [asdict(finding) for finding in findings]}
        click.echo(json.dumps(report))
    else:
        _print(role, findings)
    if any(finding.state == "failed" for finding in findings):
        sys.exit(1)


def _host_checks(machine: Machine, file: str | None, storage: str | None, data_plane: str | None) -> Iterator[Check]:
    config, configured = _configuration(HostConfig, machine, file)
    yield from _moving(configured)
    yield process.shared_memory
    yield process.engine
    for check in (host.card, host.doca, host.gpus):
        yield partial(check, machine)
    yield partial(certificates, machine, _tls_files(config))
    address = data_plane or config.data_plane.replace("{rank}", "0")
    if not host.cards(machine):
        plane, plane_configured = _configuration(DataPlaneConfig, machine, file, "data plane's configuration")
        yield plane_configured
        yield partial(process.reachable, "data plane", address, _start(plane, machine, file, address))
        yield from _reach_storage(machine, file, storage, plane)
        return
    yield partial(process.reachable, "data plane", address, "on the card: systemctl start shadowserve-dpu")
    if storage:  # the card's business, and perhaps on a network that the host is not on
        yield from _reach_storage(machine, file, storage)


def _dpu_checks(machine: Machine, file: str | None, storage: str | None, data_plane: str | None) -> Iterator[Check]:
    config, configured = _configuration(DataPlaneConfig, machine, file)
    keys = ("net_cores", "decompress_cores", "dequantize_cores", "dma_cores", "store_cores")
    lists = {key: getattr(config, key) for key in keys if getattr(config, key) != "auto"}
    net = [core for core in lists.get("net_cores", ()) if core >= 0]
    yield from _moving(configured)
    for check in (dpu.card, dpu.arm_cores, host.doca, dpu.huge_pages):
        yield partial(check, machine)
    yield partial(dpu.accelerators, machine, config.device)
    if storage or config.storage:
        yield partial(dpu.xlio, machine, int((storage or config.storage).rpartition(":")[2]))
    yield partial(dpu.core_lists, machine, lists)
    yield partial(dpu.isolation, machine, net)
    yield partial(dpu.unit, machine)
    yield partial(certificates, machine, _tls_files(config))
    address = data_plane or config.listen
    yield partial(process.reachable, "data plane", address, _start(config, machine, file, address))
    yield from _reach_storage(machine, file, storage, config)


def _storage_checks(machine: Machine, file: str | None, storage: str | None, __: str | None) -> Iterator[Check]:
    config, configured = _configuration(StorageConfig, machine, file)
    yield from (process.interpreter, process.native_core, process.locked_memory, configured)
    yield node.device_access
    yield partial(node.namespaces, machine)
    yield partial(node.memory, machine, int(config.memory_budget_bytes))
    yield partial(node.devices, machine, config.devices)
    yield partial(certificates, machine, _tls_files(config))
    yield partial(access, machine, config)
    yield from _reach_storage(machine, file, storage or _own_address(config))


def _moving(configured: Check) -> Iterator[Check]:
    """Where KV is moved: on a host and on a DPU."""
    yield from (process.interpreter, process.native_core, process.decoding)
    yield from (process.locked_memory, process.cores, configured)


def _reach_storage(
    machine: Machine, file: str | None, address: str | None, plane: DataPlaneConfig | None = None
) -> Iterator[Check]:
    """Whether storage answers: at ``address`` or, without one, wherever the data plane is told that it is."""
    addresses = [address]
    if plane is not None and not address:
        addresses = [*(plane.storage_nodes or plane.storage_cluster or [plane.storage])]
    if plane is not None and addresses == [""]:
        return  # tiers alone
    own, _ = _configuration(StorageConfig, machine, file)
    for each in addresses:
        what = "storage server" if len(addresses) == 1 else f"storage node {each}"
        yield partial(process.reachable, what, str(each), _start(own, machine, file, str(each)))


def _configuration(
    section: type[_S], machine: Machine, given: str | None, what: str = "configuration"
) -> tuple[_S, Check]:
    """Return what a program would run with (the defaults, where that is nothing), and the check that says so."""
    file = _file(section, machine, given)

    def sound() -> Iterator[Finding]:
        yield Finding(what, "ok", file or "the defaults")

    def broken() -> Iterator[Finding]:
        mend = f"'shadowserve config' and 'shadowserve {section.section} --help' have every key"
        yield Finding(what, "failed", message, mend)

    try:
        return section.load(file), sound
    except ConfigurationError as error:
        message = str(error)
        return section.load(environment={}), broken


def _file(section: type[Section], machine: Machine, given: str | None) -> str | None:
    """Return the file that a program reads: the given one, else that of the service which is installed."""
    installed = machine.path(f"/etc/shadowserve/{section.section}.yaml")
    return given or (str(installed) if installed.is_file() else None)


def _own_address(config: StorageConfig | DataPlaneConfig) -> str:
    return config.listen if isinstance(config, DataPlaneConfig) else f"{config.host}:{config.port}"


def _start(config: StorageConfig | DataPlaneConfig, machine: Machine, file: str | None, address: str) -> str:
    """Return the command that starts a program at ``address``, here or where that is.

    Args:
        config: that the program would have here.
        machine: this one; it may have the program as a service.
        file: given to the doctor.
        address: ``host:port``, or ``unix:/path``.
    """
    host, colon, port = address.rpartition(":")
    if not address.startswith("unix:") and not (host and colon and port.isdigit()):
        return "give the address as HOST:PORT"
    if not address.startswith("unix:") and host.strip("[]") not in _HERE and address != _own_address(config):
        return f"on {host}: shadowserve {config.section}, or systemctl start shadowserve-{config.section}"
    if machine.path(f"/etc/systemd/system/shadowserve-{config.section}.service").exists():
        return f"systemctl start shadowserve-{config.section}"
    command = f"shadowserve {config.section}"
    if file and config != type(config)():
        command += f" --config {file}"
    if address == _own_address(config):
        return command
    return f"{command} --listen {address}" if isinstance(config, DataPlaneConfig) else f"{command} --port {port}"


def _tls_files(config: Section) -> Mapping[str, str]:
    """Return the files that a program's TLS keys name; which of the keys there are depends on the program."""
    return {key: str(getattr(config, key)) for key in _TLS_FILES if key in type(config).model_fields}


def _print(role: Role, findings: list[Finding]) -> None:
    """Print for people. Commands are never cut or broken within a word: they are there to be copied."""
    click.echo(f"{role}, ShadowServe {__version__}")
    column = max(len(finding.what) for finding in findings)
    indent = " " * (column + 11)
    width = max(shutil.get_terminal_size().columns, len(indent) + 40)
    for finding in findings:
        head = click.style(f"{finding.state:<9}", fg=_COLOURS[finding.state]) + f"{finding.what:<{column}}  "
        click.echo(head + _wrapped(finding.found, indent, width))
        if finding.mend:
            click.echo(indent + _wrapped(f"-> {finding.mend}", f"{indent}   ", width))
    counts = [sum(finding.state == state for finding in findings) for state in ("failed", "warning")]
    click.echo(f"{counts[0]} failed, {counts[1]} warnings")


def _wrapped(text: str, indent: str, width: int) -> str:
    lines = textwrap.wrap(text, width - len(indent), break_long_words=False, break_on_hyphens=False)
    return f"\n{indent}".join(lines)
