"""``shadowserve storage`` and ``shadowserve dpu``: run one of the long-lived programs until SIGTERM or SIGINT."""

from collections.abc import Callable
from typing import Any

import click

from dpu_dataplane.config import DataPlaneConfig
from shadowserve.config import CONFIG_FILE_VARIABLE, Section
from shadowserve.errors import ConfigurationError
from storage_kv.config import StorageConfig

__all__ = ["dpu", "storage"]


def _flags(section: type[Section]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command ``--config`` and one flag for each key of a section."""

    def read(_context: click.Context, parameter: click.Parameter, text: str | None) -> Any:
        try:
            return None if text is None else section.read_text(str(parameter.name), text)
        except ConfigurationError as error:
            raise click.BadParameter(str(error), param=parameter) from error

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        for key, field in reversed(section.model_fields.items()):
            function = click.option(
                f"--{key.replace('_', '-')}",
                key,
                metavar="VALUE",
                callback=read,
                help=f"{field.description or ''}  [default: {section.default_text(key)}]",
            )(function)
        return click.option(
            "--config", type=click.Path(dir_okay=False), envvar=CONFIG_FILE_VARIABLE, help="YAML file (see configs/)."
        )(function)

    return decorate


@click.command()
@_flags(StorageConfig)
def storage(config: str | None, **flags: Any) -> None:
    """Run the storage server: a key-value store that any Redis client can talk to.

    A flag goes before the environment (SHADOWSERVE_STORAGE_<KEY>), that before the file, that before the default.
    """
    from storage_kv.server import run

    def load() -> StorageConfig:
        return StorageConfig.load(config, flags)

    run(load(), load)


@click.command()
@_flags(DataPlaneConfig)
def dpu(config: str | None, **flags: Any) -> None:
    """Run the data plane: on a DPU, or emulated on a few cores of the host.

    A flag goes before the environment (SHADOWSERVE_DPU_<KEY>), that before the file, that before the default.
    """
    from dpu_dataplane.server import run

    run(DataPlaneConfig.load(config, flags))
