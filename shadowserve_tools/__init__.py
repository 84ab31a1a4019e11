"""The ``shadowserve`` command, and everything that runs, measures and examines the three programs.

Each subcommand (``COMMANDS``) is one module or folder, imported when it runs; ``README.md`` lists them.
"""

from typing import Any, Final

import click

from shadowserve import __version__
from shadowserve.errors import ConfigurationError, ShadowServeError
from shadowserve_tools.lazy import LazyGroup, missing_package

COMMANDS: Final = {
    "storage": "shadowserve_tools.programs.storage:storage",
    "dpu": "shadowserve_tools.programs.dpu:dpu",
    "demo": "shadowserve_tools.demo:demo",
    "bench": "shadowserve_tools.bench:bench",
    "simulate": "shadowserve_tools.simulate:simulate",
    "calibrate": "shadowserve_tools.calibrate:calibrate",
    "trace": "shadowserve_tools.trace:trace",
    "pool": "shadowserve_tools.pool:pool",
    "drain": "shadowserve_tools.drain:drain",
    "events": "shadowserve_tools.events:events",
    "verify": "shadowserve_tools.verify:verify",
    "size": "shadowserve_tools.size:size",
    "stats": "shadowserve_tools.stats:stats",
    "ui": "shadowserve_tools.ui:ui",
    "config": "shadowserve_tools.configuration:config",
    "doctor": "shadowserve_tools.doctor:doctor",
}

EXIT_CODES: Final = """
\b
Exit codes:
  0  done
  1  failed; the message has the operation, the reason and the remedy
  2  the command line or the configuration is invalid
"""


class _Commands(LazyGroup):
    """Turns ShadowServe's errors and missing packages into one line and exit code 1 or 2."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except ConfigurationError as error:
            raise click.UsageError(str(error)) from error
        except ShadowServeError as error:
            raise click.ClickException(str(error)) from error
        except ModuleNotFoundError as error:  # raised by a late import
            raise click.ClickException(str(missing_package(error))) from error


@click.group(
    cls=_Commands,
    modules=COMMANDS,
    epilog=EXIT_CODES,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
)
@click.version_option(__version__, prog_name="shadowserve")
def main() -> None:
    """Distributed prefix caching for LLM serving that does not disturb the serving.

    \b
    Demo on this machine:        shadowserve demo
    On the storage node:         shadowserve storage --memory-budget-bytes 64GiB
    On the DPU, or the host:     shadowserve dpu --storage 127.0.0.1:6380
    In the serving process:      vllm serve MODEL --kv-transfer-config '{"kv_connector": "ShadowServeConnector", ...}'
    Model of a BlueField:        shadowserve simulate bluefield
    Steps of a lossy quantizer:  shadowserve calibrate MODEL --output model.calibration
    Timeline of a fetch:         shadowserve trace -o fetch.json
    Statistics of programs:      shadowserve stats --watch
    A web page of them:          shadowserve ui 127.0.0.1:6380 127.0.0.1:50151 127.0.0.1:8000
    Configuration with all keys: shadowserve config storage.yaml > storage.yaml
    Sizes of a model:            shadowserve size --model config.json --link 10Gbps
    Diagnosis:                   shadowserve doctor
    """
