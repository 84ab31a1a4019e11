"""The roof: the ``shadowserve`` command, and all that runs, measures and examines the three programs.

Each subcommand (``COMMANDS``) is one module or folder, imported when it runs; ``README.md`` says what is where.
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
    "trace": "shadowserve_tools.trace:trace",
    "pool": "shadowserve_tools.pool:pool",
    "verify": "shadowserve_tools.verify:verify",
    "stats": "shadowserve_tools.stats:stats",
    "config": "shadowserve_tools.configuration:config",
    "doctor": "shadowserve_tools.doctor:doctor",
}

EXIT_CODES: Final = """
\b
Exit codes:
  0  done
  1  it did not work; the message says what failed, why, and what to do
  2  the command line or the configuration cannot be used
"""


class _Commands(LazyGroup):
    """Ends in one line and exit code 1 or 2 on our own errors, and where something is not installed."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except ConfigurationError as error:
            raise click.UsageError(str(error)) from error
        except ShadowServeError as error:
            raise click.ClickException(str(error)) from error
        except ModuleNotFoundError as error:  # of a package that is imported late
            raise click.ClickException(str(missing_package(error))) from error


@click.group(
    cls=_Commands,
    places=COMMANDS,
    epilog=EXIT_CODES,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
)
@click.version_option(__version__, prog_name="shadowserve")
def main() -> None:
    """Distributed prefix caching for LLM serving that does not disturb the serving.

    \b
    Try it on this machine:    shadowserve demo
    On the storage node:       shadowserve storage --memory-budget-bytes 64GiB
    On the DPU, or the host:   shadowserve dpu --storage 127.0.0.1:6380
    In the serving process:    vllm serve MODEL --kv-transfer-config '{"kv_connector": "ShadowServeConnector", ...}'
    What a BlueField would do: shadowserve simulate bluefield
    What a fetch's time is:    shadowserve trace -o fetch.json
    What the storage does:     shadowserve stats --watch
    Every key of a program:    shadowserve config storage.yaml > storage.yaml
    When something is wrong:   shadowserve doctor
    """
