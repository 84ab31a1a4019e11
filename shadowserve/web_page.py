"""The web page of a program: what :mod:`shadowserve.summary` says, live. Read-only; all of its files are in ``web/``.

The page polls ``/summary.json``. uPlot (MIT, web/uplot.LICENSE) draws the charts.
"""

import json
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from prometheus_client import CollectorRegistry

from shadowserve.summary import Samples, Summarizer

Summaries = Callable[[], Sequence[dict[str, Any]]]
"""Returns for each program ``where``, and either ``summary`` or ``error``."""

_FOLDER: Final = Path(__file__).parent / "web"
_FILES: Final = {
    "/": ("page.html", "text/html; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
    "/uplot.js": ("uplot.js", "text/javascript; charset=utf-8"),
    "/uplot.css": ("uplot.css", "text/css; charset=utf-8"),
}
HEADERS: Final = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
}
"""Headers of every answer: a browser runs the page's own script alone, and shows the page in no frame."""
_LASTS_S: Final = 1.0
"""A summary answers all clients for this long, so that many pages do not cost more than one."""


class Page:
    """Answers the paths of the page."""

    def __init__(self, summaries: Summaries) -> None:
        self._summaries = summaries
        self._lock = threading.Lock()
        self._body, self._until_s = b"", 0.0

    def answer(self, path: str) -> tuple[str, bytes] | None:
        """Return content type and body; None for a path that is not the page's."""
        if path == "/summary.json":
            return "application/json", self._summary()
        if path not in _FILES:
            return None
        name, content_type = _FILES[path]
        return content_type, (_FOLDER / name).read_bytes()

    def _summary(self) -> bytes:
        with self._lock:
            if time.monotonic() >= self._until_s:
                self._body = json.dumps({"programs": list(self._summaries())}).encode()
                self._until_s = time.monotonic() + _LASTS_S
            return self._body


def own_summaries(registry: CollectorRegistry) -> Summaries:
    """Return the summary of the program that has this registry."""
    summarizer = Summarizer()

    def summaries() -> list[dict[str, Any]]:
        samples = Samples.of(registry.collect())
        try:
            return [{"where": "", "summary": summarizer.step(samples, time.monotonic(), time.time())}]
        except ValueError as error:
            return [{"where": "", "error": str(error)}]

    return summaries
