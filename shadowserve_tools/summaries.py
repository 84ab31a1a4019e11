"""Summaries of programs for ``stats`` and ``ui``: from any metrics endpoint, and as text for the terminal."""

import contextlib
import functools
import http.client
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, Protocol
from urllib.parse import urlsplit

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Column, Table
from rich.text import Text

from shadowserve.errors import ConfigurationError, StorageUnavailableError
from shadowserve.summary import Samples, Summarizer

TIMEOUT_S: Final = 5.0
_BYTES_MAX: Final = 8 << 20
_READ_BYTES: Final = 64 << 10
_STYLES: Final = {"good": "green", "idle": "dim", "warning": "yellow", "bad": "bold red"}


def is_url(address: str) -> bool:
    """Return True for the URL of a metrics endpoint."""
    return address.startswith(("http://", "https://"))


class Source(Protocol):
    """Successive views of one program."""

    def step(self) -> dict[str, Any]:
        """Return the view now, with its ``summary``; a ShadowServeError says why there is none."""

    def render(self, view: Mapping[str, Any], where: str) -> RenderableType:
        """Return a view for the terminal."""

    def close(self) -> None: ...


class MetricsWatcher:
    """Successive summaries of the program behind a URL of metrics: a vLLM engine, or any program's ``metrics_port``."""

    def __init__(self, url: str, context: ssl.SSLContext | None = None) -> None:
        """Use ``http(s)://host:port``; without a path, /metrics. ``context``: of https; None for the system's."""
        try:
            self._url = urlsplit(url)
        except ValueError as error:
            raise ConfigurationError(f"{url!r} is no address: {error}") from error
        self._context = context
        self._summarizer = Summarizer()

    def step(self) -> dict[str, Any]:
        """Return the view now.

        Raises:
            StorageUnavailableError: There is no answer, or none with metrics of ShadowServe.
        """
        text = self._fetched()
        try:
            summary = self._summarizer.step(Samples.of_text(text), time.monotonic(), time.time())
        except ValueError as error:
            raise StorageUnavailableError(f"{self._url.netloc}: {error}") from error
        return {"kind": summary["kind"], "summary": summary}

    def _fetched(self) -> str:
        """Return the text of the metrics. Redirections and proxies are not followed."""
        url = self._url
        connect: Callable[..., http.client.HTTPConnection] = http.client.HTTPConnection
        if url.scheme == "https":
            connect = functools.partial(http.client.HTTPSConnection, context=self._context)
        try:
            with contextlib.closing(connect(url.hostname or "", url.port, timeout=TIMEOUT_S)) as connection:
                connection.connect()
                with _deadline(connection.sock):
                    connection.request("GET", url.path if url.path.strip("/") else "/metrics")
                    with connection.getresponse() as answer:
                        if answer.status != 200:
                            raise ValueError(f"HTTP status {answer.status}")
                        body = bytearray()
                        while data := answer.read1(_READ_BYTES):
                            body += data
                            if len(body) > _BYTES_MAX:
                                raise ValueError(f"more than {_BYTES_MAX >> 20} MiB")
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise StorageUnavailableError(f"cannot read the metrics of {url.netloc}: {error or repr(error)}") from error
        return body.decode("utf-8", "replace")

    def render(self, view: Mapping[str, Any], where: str) -> RenderableType:
        summary = view["summary"]
        table = Table("what", Column(summary["when"], justify="right"), box=SIMPLE_HEAD, padding=0)
        for value in summary["values"]:
            table.add_row(value["title"], value["text"])
        return Group(f"{escape(where)}, {summary['kind']}", *rendered(summary), table)

    def close(self) -> None:
        """Do nothing: each step has a connection of its own."""


@contextlib.contextmanager
def _deadline(sock: socket.socket) -> Iterator[None]:
    """Shut a socket down after TIMEOUT_S; TimeoutError if that happened. A socket's own timeout is for each part."""
    late = threading.Event()

    def shut() -> None:
        late.set()
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)

    timer = threading.Timer(TIMEOUT_S, shut)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        if late.is_set():
            raise TimeoutError(f"no whole answer within {TIMEOUT_S:g} s")


def rendered(summary: Mapping[str, Any] | None) -> list[RenderableType]:
    """Return the paragraph and the limit; nothing of a program without a summary."""
    if summary is None:
        return []
    return [Text(summary["paragraph"]), Text(summary["limit_line"], style=_STYLES[summary["level"]])]


def summarized(summarizer: Summarizer, samples: Callable[[], Samples]) -> dict[str, Any] | None:
    """Return a summary; None of a program that is not ours, or older than summaries."""
    try:
        return summarizer.step(samples(), time.monotonic(), time.time())
    except ValueError:
        return None
