"""P/D disaggregation with ``vllm serve``: a prefill engine, a decode engine and a proxy.

Each engine has its own data plane over one storage node, or both share one data plane with tiers and without storage.
"""

import json
import urllib.error
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any, NamedTuple

import pytest
from machine import NEVER_S, PATIENT, WAIT_MAX_S, free_port, wait_for
from preloaded import Preloaded
from stack import Process, Server, data_plane

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(1800)]

STARTS_S = 600
BLOCK, CHUNK = 32, 256
SEEDS = (1, 2, 3, 4, 5)
TOKENS = 600
HELD = TOKENS // BLOCK * BLOCK


def post(url: str, body: dict[str, Any]) -> dict[str, Any]:
    """Return the JSON answer to JSON, after up to minutes at first; OSError without one, or with an error status."""
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=NEVER_S) as answer:
            return dict(json.load(answer))
    except urllib.error.HTTPError as error:
        raise OSError(f"{url} answered {error.code}: {error.read()[:1000]!r}") from error


class Proxy(ABC):
    """A proxy with its own port."""

    def __init__(self, prefill: str, decode: str) -> None:
        self.prefill, self.decode = prefill, decode
        self.params: Any = None  # last ``kv_transfer_params`` of the prefill engine
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
    """Works like llm-d's sidecar with ``--kv-connector=shared-storage``."""

    def answer(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        self.params = self.first(path, body, max_completion_tokens=1, cache_hit_threshold=0).get("kv_transfer_params")
        return post(self.decode + path, body)


class CarriesParams(Proxy):
    """Works like vLLM's toy proxy for NIXL."""

    def answer(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        params = {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "remote_engine_id": None,
            "remote_block_ids": None,
            "remote_host": None,
            "remote_port": None,
        }
        self.params = self.first(path, body, kv_transfer_params=params).get("kv_transfer_params")
        return post(self.decode + path, body | ({"kv_transfer_params": self.params} if self.params else {}))


class Setup(NamedTuple):
    """A configuration of both engines."""

    proxy: type[Proxy]
    sizes: tuple[int, int]  # numbers of ranks of the prefill and the decode engine
    one_host: bool = False  # both engines share one data plane with tiers and without storage


SETUPS = {
    "llm-d": Setup(SharedStorage, (1, 1)),
    "toy": Setup(CarriesParams, (1, 2)),
    "one host": Setup(SharedStorage, (1, 1), one_host=True),
}


class Pools:
    """Both engines with their processes."""

    def __init__(self, model: Path, folder: Path, setup: Setup, patient: dict[str, float]) -> None:
        kind, sizes, _ = setup
        if setup.one_host:
            tiers = json.dumps({"memory_budget_bytes": "256MiB"})
            plane = Process("dpu", "--listen", f"127.0.0.1:{free_port()}", "--tiers", tiers, *PATIENT)
            self.processes, planes = [plane], [plane, plane]
        else:
            storage = Process("storage", "--port", str(free_port()))
            planes = [data_plane(storage.address) for _ in sizes]
            self.processes = [*planes, storage]
        self.engines = []
        for place, plane, size in zip(("prefill", "decode"), planes, sizes, strict=True):
            role = {"pd_role": place} if kind is SharedStorage else {}
            transfer = {"data_plane": plane.address, "pd_timeout_s": WAIT_MAX_S, **patient, **role}
            options = ("--tensor-parallel-size", str(size))
            self.engines.append(Server(model, transfer, folder / f"{place}.log", *options, popen=Preloaded))
        self.prefill, self.decode = self.engines
        self._ranks = sizes[1]
        for engine in self.engines:
            engine.wait_ready(STARTS_S)
        self.proxy = kind(self.prefill.url, self.decode.url)

    def close(self) -> None:
        self.proxy.close()
        for engine in self.engines:
            engine.kill()
        for process in self.processes:
            process.stop()

    def ask(self, prompt: list[int], url: str = "") -> list[int]:
        """Return the tokens of an answer, by default from the proxy."""
        body = {"model": "small", "prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
        answer = post((url or self.proxy.url) + "/v1/completions", body | {"return_token_ids": True})
        return list(answer["choices"][0]["token_ids"])

    def counted(self) -> dict[str, int]:
        """Return the decode engine's loaded tokens and failed lookups since its start."""
        names = {"loaded": "vllm:shadowserve_loaded_tokens_total", "failed": "vllm:shadowserve_lookup_failures_total"}
        counts = {name: int(self.decode.metric(metric)) for name, metric in names.items()}
        return counts | {"loaded": counts["loaded"] // self._ranks}  # each rank counts loaded tokens

    def said(self) -> str:
        """Return the plugin's log lines of both engines."""
        lines = [line for engine in self.engines for line in engine.log.read_text().splitlines()]
        return "\n".join(line for line in lines if "shadowserve: " in line)

    def restart(self, engine: Server) -> None:
        engine.kill()
        engine.start()
        engine.wait_ready(STARTS_S)


@pytest.fixture(scope="module", params=SETUPS)
def setup(request: pytest.FixtureRequest) -> Setup:
    return SETUPS[request.param]


@pytest.fixture
def kind(setup: Setup) -> type[Proxy]:
    return setup.proxy


@pytest.fixture(scope="module")
def pools(
    setup: Setup,
    model: Path,
    patient: dict[str, float],
    reference: Any,  # its engine must have ended
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Pools]:
    with closing(Pools(model, tmp_path_factory.mktemp("pools"), setup, patient)) as pools:
        yield pools


def test_the_decode_engine_loads_whole_blocks_of_the_prompt(
    pools: Pools, kind: type[Proxy], prompt: Callable[..., list[int]], reference: Any
) -> None:
    prompts = [prompt(TOKENS, seed) for seed in SEEDS[:3]] + [prompt(240)]
    for each, expected in zip(prompts, reference(prompts), strict=True):
        held = len(each) // BLOCK * BLOCK
        before = pools.counted()
        assert pools.ask(each) == expected
        after = pools.counted()
        assert after["loaded"] - before["loaded"] == held, pools.said()
        assert after["failed"] == before["failed"]
        if kind is CarriesParams:
            assert pools.proxy.params["shadowserve"]["tokens"] == held
        else:
            assert pools.proxy.params is None


of_one_setup = pytest.mark.parametrize("setup", ["llm-d"], indirect=True)
"""Restarts of engines take long, and depend neither on the proxy nor on the number of data planes."""


@of_one_setup
def test_the_decode_engine_answers_alone_while_the_prefill_engine_is_down(
    pools: Pools, prompt: Callable[..., list[int]], reference: Any
) -> None:
    cold, warm = prompt(TOKENS, SEEDS[3]), prompt(TOKENS, SEEDS[4])
    expected = reference([cold, warm])
    pools.prefill.kill()
    before = pools.counted()
    assert pools.ask(cold) == expected[0]
    assert pools.counted() == before, "the decode engine waited for keys that were not published"
    pools.restart(pools.prefill)
    assert pools.ask(warm) == expected[1]
    assert pools.counted()["loaded"] - before["loaded"] == HELD


@of_one_setup
def test_a_restarted_decode_engine_loads_earlier_prompts(
    pools: Pools, prompt: Callable[..., list[int]], reference: Any
) -> None:
    mine = prompt(TOKENS, SEEDS[0])
    pools.ask(mine)
    pools.restart(pools.decode)
    wait_for(lambda: pools.counted() == {"loaded": 0, "failed": 0})
    assert pools.ask(mine) == reference([mine])[0]
    assert pools.counted()["loaded"] == HELD
