"""The ``shadowserve`` command. Each subcommand is one module, imported when it runs; only here do programs meet."""

from typing import Any, Final

import click

from shadowserve import __version__
from shadowserve.cli.lazy import LazyGroup, missing_package
from shadowserve.errors import ConfigurationError, ShadowServeError

__all__ = ["main"]

COMMANDS: Final = {
    "storage": "shadowserve.cli.programs:storage",
    "dpu": "shadowserve.cli.programs:dpu",
    "demo": "shadowserve.cli.demo:demo",
    "bench": "shadowserve.cli.bench:bench",
    "simulate": "shadowserve.cli.simulate:simulate",
    "trace": "shadowserve.cli.trace:trace",
    "pool": "shadowserve.cli.pool:pool",
    "verify": "shadowserve.cli.verify:verify",
    "stats": "shadowserve.cli.stats:stats",
    "config": "shadowserve.cli.configuration:config",
    "doctor": "shadowserve.cli.doctor:doctor",
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
    cls=_Commands, places=COMMANDS, epilog=EXIT_CODES, context_settings={"help_option_names": ["-h", "--help"]}
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
