"""Two minimal proxies in front of a prefill engine and a decode engine.

:class:`SharedStorage` works like llm-d's sidecar with ``--kv-connector=shared-storage``, :class:`CarriesParams` like
vLLM's toy proxy for NIXL.
"""

import json
import urllib.error
import urllib.request
from abc import ABC, abstractmethod
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

from machine import NEVER_S


def post(url: str, body: dict[str, Any]) -> dict[str, Any]:
    """Post JSON and return the JSON answer. The first answer of an engine with several ranks may take minutes.

    Raises:
        OSError: There is no answer, or an error status.
    """
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=NEVER_S) as answer:
            return dict(json.load(answer))
    except urllib.error.HTTPError as error:
        raise OSError(f"{url} answered {error.code}: {error.read()[:1000]!r}") from error


class Proxy(ABC):
    """A proxy with its own port.

    Attributes:
        url: URL of the proxy.
        told: Last ``kv_transfer_params`` of the prefill engine.
    """

    def __init__(self, prefill: str, decode: str) -> None:
        self.prefill, self.decode = prefill, decode
        self.told: Any = None
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                status = 200
                try:
                    answer = json.dumps(proxy.answer(self.path, body)).encode()
                except OSError as error:
                    status, answer = 502, f"request to {proxy.decode} failed: {error}".encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *arguments: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    @abstractmethod
    def answer(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Return the answer for the client."""

    def first(self, path: str, body: dict[str, Any], **more: Any) -> dict[str, Any]:
        """Send the prompt to the prefill engine; return ``{}`` if it does not answer."""
        short = body | {"max_tokens": 1, "stream": False} | more
        short.pop("stream_options", None)
        try:
            return post(self.prefill + path, short)
        except OSError:
            return {}


class SharedStorage(Proxy):
    def answer(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        self.told = self.first(path, body, max_completion_tokens=1, cache_hit_threshold=0).get("kv_transfer_params")
        return post(self.decode + path, body)


class CarriesParams(Proxy):
    def answer(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        params = {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "remote_engine_id": None,
            "remote_block_ids": None,
            "remote_host": None,
            "remote_port": None,
        }
        self.told = self.first(path, body, kv_transfer_params=params).get("kv_transfer_params")
        return post(self.decode + path, body | ({"kv_transfer_params": self.told} if self.told else {}))
