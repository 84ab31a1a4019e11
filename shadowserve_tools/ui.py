"""``shadowserve ui``: a web page that shows several programs together. It asks only the addresses that it was given."""

import contextlib
import signal
import threading
from collections.abc import Sequence
from typing import Any, Final

import click
from prometheus_client import CollectorRegistry

from shadowserve.addresses import join_address
from shadowserve.errors import ConfigurationError
from shadowserve.health import Endpoint
from shadowserve.signals import stop_signals
from shadowserve_tools.fleet_stats import with_members
from shadowserve_tools.stats import logins, source

_ERROR_CHARACTERS_MAX: Final = 500


class _Poller:
    """Asks one program in its own thread, so that a program that does not answer delays no other."""

    def __init__(
        self, where: str, server_name: str, login: dict[str, Any], interval_s: float, stopped: threading.Event
    ) -> None:
        self.shown: dict[str, Any] = {"where": where, "error": "no answer yet"}
        self._arguments = where, server_name, login, interval_s, stopped
        self._thread = threading.Thread(target=self._run, name=f"ui-{where}", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        where, server_name, login, interval_s, stopped = self._arguments
        while not stopped.is_set():
            try:
                with contextlib.closing(source(where, login, watches=True, server_name=server_name)) as program:
                    while not stopped.is_set():
                        summary = program.step()["summary"]
                        if summary is None:
                            raise ConfigurationError(f"{where} is not a program of ShadowServe, or an older one")
                        self.shown = {"where": where, "summary": summary}
                        stopped.wait(interval_s)
            except Exception as error:  # of a program that answers nonsense, too: the thread goes on
                self.shown = {"where": where, "error": (str(error) or repr(error))[:_ERROR_CHARACTERS_MAX]}
            stopped.wait(interval_s)


@click.command()
@click.argument("addresses", metavar="ADDRESS...", nargs=-1, required=True)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", default=8090, show_default=True, type=click.IntRange(0, 65535), help="TCP port; 0: a free one.")
@click.option(
    "--interval", default=2.0, show_default=True, type=click.FloatRange(0.2), help="Interval of values, in seconds."
)
@logins
def ui(addresses: Sequence[str], host: str, port: int, interval: float, **login: Any) -> None:
    """Serve a web page that shows programs together, until SIGINT or SIGTERM.

    An ADDRESS is one of 'shadowserve stats': of a storage node, a data plane, a vLLM engine, any metrics_port, or the
    members of a fleet. All get the same login. The page changes nothing, and has no login of its own: on another
    address than loopback, everyone who reaches it sees the values.
    """
    stopped = threading.Event()
    for number in stop_signals():
        signal.signal(number, lambda *_: stopped.set())
    pollers = [_Poller(*where, login, interval, stopped) for where in dict.fromkeys(with_members(addresses))]
    try:
        endpoint = Endpoint(host, port, CollectorRegistry(), summaries=lambda: [each.shown for each in pollers])
    except OSError as error:
        raise ConfigurationError(f"cannot listen on {host} port {port}: {error}; choose another --port") from error
    click.echo(f"http://{join_address(host, endpoint.port)}/")
    stopped.wait()
    endpoint.close()
