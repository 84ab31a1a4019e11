"""``shadowserve storage``: run the storage server until SIGTERM or SIGINT."""

from typing import Any

import click

from shadowserve_tools.flags import Program, section_flags
from storage_kv.config import StorageConfig


@click.command(cls=Program, section=StorageConfig)
@section_flags(StorageConfig)
def storage(config: str | None, **flags: Any) -> None:
    """Run the storage node: a key-value store for any Redis client.

    Precedence: flag, environment variable (SHADOWSERVE_STORAGE_<KEY>), file, default.
    """
    from storage_kv.server import run

    def load() -> StorageConfig:
        return StorageConfig.load(config, flags)

    run(load(), load)
