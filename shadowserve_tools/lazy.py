"""Command groups that import their commands late, and the message if a package is missing."""

import importlib
import importlib.metadata
import importlib.util
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Final

import click

from shadowserve.config_errors import unknown
from shadowserve.errors import NotInstalledError

_OWN: Final = ("shadowserve", "host_control", "dpu_dataplane", "storage_kv", "shadowserve_tools")
_ENGINE: Final = ("vllm", "torch", "triton", "transformers")


def missing_package(error: ModuleNotFoundError) -> NotInstalledError:
    """Return the error for a package that is not installed; raise ``error`` itself for a module of ShadowServe."""
    name = (error.name or "").partition(".")[0]
    if not name or name in _OWN:
        raise error
    if name in _ENGINE:
        return NotInstalledError(
            f"this needs the Python package {name}, which is not installed",
            "it comes with vLLM: pip install vllm, or 'make setup' in a checkout",
        )
    return NotInstalledError(f"this needs the Python package {name}, which is not installed", f"run {_install(name)}")


def _install(name: str) -> str:
    """Return the command that installs a package: by the extra that has it, or by its name."""
    name = {"zmq": "pyzmq"}.get(name, name)
    same = re.compile(rf"{name.replace('_', '[-_]')}\b.*extra == ['\"](\w+)['\"]", re.IGNORECASE)
    try:
        found = filter(None, map(same.match, importlib.metadata.requires("shadowserve") or ()))
        extras = {match[1] for match in found} - {"test", "lint"}
    except importlib.metadata.PackageNotFoundError:
        extras = set()
    wanted = f"'shadowserve[{min(extras)}]'" if extras else name
    return f"pip install {wanted}"


class LazyGroup(click.Group):
    """A group that imports a command when it is used.

    A command with a missing package is listed; its help names the package, and running it ends with that line and exit
    code 1.
    """

    def __init__(
        self,
        *arguments: Any,
        modules: Mapping[str, str],
        needs: Mapping[str, Sequence[str]] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(*arguments, **options)
        self.modules = modules
        self.needs = needs or {}

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.modules)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the named command; the error message for an unknown one has the nearest name."""
        name = args[0] if args else ""
        if name and not name.startswith("-") and name not in self.modules:
            ctx.fail(unknown("command", name, self.modules))
        return super().resolve_command(ctx, args)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.modules:
            return None
        module, name = self.modules[cmd_name].split(":")
        try:
            for package in self.needs.get(cmd_name, ()):
                if not _is_there(package):
                    raise ModuleNotFoundError(name=package)
            command: click.Command = getattr(importlib.import_module(module), name)
        except NotInstalledError as error:
            return _not_here(cmd_name, error)
        except ModuleNotFoundError as error:
            return _not_here(cmd_name, missing_package(error))
        return command


def _is_there(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ValueError:  # it is being imported, or is hidden
        return sys.modules.get(package) is not None


def _not_here(name: str, error: NotInstalledError) -> click.Command:
    def run(**_: object) -> None:
        raise error

    anything = {"ignore_unknown_options": True, "allow_extra_args": True}
    return click.Command(name, callback=run, help=f"Not available here: {error}.", context_settings=anything)
