"""``shadowserve dpu``: run the data plane until SIGTERM or SIGINT."""

from typing import Any

import click

from dpu_dataplane.config import DataPlaneConfig
from shadowserve_tools.flags import Program, section_flags


@click.command(cls=Program, section=DataPlaneConfig)
@section_flags(DataPlaneConfig)
def dpu(config: str | None, **flags: Any) -> None:
    """Run the data plane: on a DPU, or on a few cores of the host.

    Precedence: flag, environment variable (SHADOWSERVE_DPU_<KEY>), file, default.
    """
    from dpu_dataplane.server import run

    run(DataPlaneConfig.load(config, flags))
