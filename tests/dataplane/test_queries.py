"""Routers' queries over HTTP: tokens or keys in, tokens, tiers and milliseconds out."""

import asyncio
import contextlib
import http.client
import json
import socket
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
from dataplane_support import Server, client_of, config, layout, make_record
from machine import WAIT_MAX_S, http_get

from dpu_dataplane.server import Daemon
from shadowserve.keys import Extra, prefix_chain, record_keys, request_inputs
from shadowserve.proto import dataplane_pb2 as pb
from shadowserve.proto.convert import layout_message

TOKEN = "a-token-of-routers"
SHAPE = layout()
CHAIN, OTHER = b"c" * 32, b"o" * 32
TOKENS = list(range(1000, 1000 + 5 * SHAPE.tokens + 3))
WINDOW = b"w" * 32


def keys_of_prompt(namespace: bytes, salt: str | None = None) -> list[bytes]:
    extra = Extra(request_inputs(salt))
    return record_keys(namespace, prefix_chain(CHAIN, TOKENS, chunk_tokens=SHAPE.tokens, extra=extra))


def engine_of(
    instance: str, *namespaces: bytes, last: Sequence[bytes] = (), last_chunks: int = 1, model: str = "m"
) -> pb.Engine:
    index = pb.EngineIndex(
        model=model,
        instance=instance,
        chain=CHAIN,
        namespaces=namespaces,
        last_namespaces=last,
        last_chunks=[last_chunks] * len(last),
    )
    return pb.Engine(model=bytes(32), chunk_tokens=SHAPE.tokens, quantizer="lossless", index=index)


async def hello(daemon: Any, engine: pb.Engine) -> None:
    async with client_of(daemon) as client:
        process = f"a worker of {engine.index.instance}"
        await client.hello(layout=layout_message(SHAPE), chunk_bytes=SHAPE.raw_bytes, engine=engine, process=process)


def post(port: int, path: str, body: Any, token: str | None = TOKEN) -> tuple[int, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=WAIT_MAX_S)
    text = body if isinstance(body, str | bytes) else json.dumps(body)
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    try:
        connection.request("POST", path, text, headers)
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())
    finally:
        connection.close()


@contextlib.asynccontextmanager
async def asked(server: Server) -> AsyncIterator[Any]:
    """A daemon that answers queries."""
    async with Daemon(config(server, metrics_port=0, query_token=TOKEN)) as daemon:
        yield daemon


async def test_a_query_tells_tokens_tier_bytes_and_time_of_each_engine(storage: Server) -> None:
    keys = keys_of_prompt(SHAPE.namespace)
    records = [make_record(SHAPE, key, index) for index, key in enumerate(keys[:3])]
    for key, record in zip(keys, records, strict=False):
        storage.put(key, record)
    async with asked(storage) as daemon:
        port = daemon.metrics_port

        async def ask(path: str = "/query", **fields: Any) -> tuple[int, Any]:
            return await asyncio.to_thread(post, port, path, {"model": "m", "token_ids": TOKENS} | fields)

        assert await ask() == (200, {"default": {}})
        await hello(daemon, engine_of("one", SHAPE.namespace))
        await hello(daemon, engine_of("two", SHAPE.namespace, OTHER))  # the other rank's records are missing
        await hello(daemon, engine_of("three", SHAPE.namespace, model="another"))
        status, answer = await ask()
        one, two = answer["default"]["one"], answer["default"]["two"]
        size = 3 * SHAPE.tokens
        assert status == 200 and answer["default"].keys() == {"one", "two"} and two["longest_matched"] == 0
        assert one == {
            "longest_matched": size, "GPU": 0, "CPU": 0, "DISK": 0, "STORAGE": size, "COLD": 0,
            "stored_bytes": sum(map(len, records)), "expected_ms": None,
        }  # fmt: skip
        daemon.metrics.storage_pace.add(one["stored_bytes"], 0.25, 1.0)
        assert (await ask())[1]["default"]["one"]["expected_ms"] == 250
        assert (await ask(medium=["cpu"], instance_id="one"))[1]["default"]["one"]["longest_matched"] == 0
        assert (await ask(medium="L3"))[1]["default"]["one"]["longest_matched"] == size
        assert (await ask(cache_salt="s"))[1]["default"]["one"]["longest_matched"] == 0
        changed = [TOKENS[0] + 1, *TOKENS[1:]]
        assert (await ask(token_ids=changed))[1]["default"]["one"]["longest_matched"] == 0
        status, answer = await ask("/directory/lookup", model_name="m", world_size=1)
        assert status == 200 and answer["chunks"] == 5 and answer["expected_ms"] == 250
        assert [each["key"] for each in answer["results"]] == [key.hex() for key in keys]
        assert [bool(each["placements"]) for each in answer["results"]] == [True] * 3 + [False] * 2
        assert answer["results"][0]["placements"] == [{"tier": "storage", "bytes": len(records[0])}]
        status, other = await asyncio.to_thread(
            post, port, "/directory/lookup", {"keys": ["kv:" + keys[1].hex(), keys[4].hex()]}
        )
        assert status == 200 and [len(each["placements"]) for each in other["results"]] == [1, 0]
        assert daemon.metrics.queries["200"] >= 8


async def test_of_a_window_only_the_last_chunks_of_a_hit_count(storage: Server) -> None:
    full, window = keys_of_prompt(SHAPE.namespace), keys_of_prompt(WINDOW)
    for key in (*full[:4], window[1], window[3]):
        storage.put(key, make_record(SHAPE, key, 0))
    async with asked(storage) as daemon:
        await hello(daemon, engine_of("one", SHAPE.namespace, last=[WINDOW]))
        await hello(daemon, engine_of("states", last=[WINDOW]))
        await hello(daemon, engine_of("two", SHAPE.namespace, last=[WINDOW], last_chunks=2))
        body = {"model": "m", "token_ids": TOKENS}
        _, answer = await asyncio.to_thread(post, daemon.metrics_port, "/query", body)
        storage.put(window[2], make_record(SHAPE, window[2], 0))
        _, later = await asyncio.to_thread(post, daemon.metrics_port, "/query", body)
    found = answer["default"]
    assert {found[name]["longest_matched"] for name in ("one", "states")} == {4 * SHAPE.tokens}
    assert found["states"]["STORAGE"] == 4 * SHAPE.tokens and found["two"]["longest_matched"] == 0
    size = len(make_record(SHAPE, full[0], 0))
    assert later["default"]["two"]["longest_matched"] == 4 * SHAPE.tokens
    assert later["default"]["two"]["stored_bytes"] == pytest.approx(6 * size, rel=0.1)


@pytest.mark.parametrize(
    ("path", "body", "token", "status", "said"),
    [
        ("/query", {"model": "m", "token_ids": []}, None, 401, "Bearer"),
        ("/query", {"model": "m", "token_ids": []}, TOKEN[:-1], 401, "Bearer"),
        ("/other", {}, TOKEN, 404, "/query, /directory/lookup"),
        ("/query", "{", TOKEN, 400, "body"),
        ("/query", {"model": "m"}, TOKEN, 400, "token_ids"),
        ("/query", {"model": "m", "token_ids": [-1]}, TOKEN, 400, "token_ids.0"),
        ("/query", {"model": "m", "token_ids": [1], "medium": ["tape"]}, TOKEN, 400, "'tape' is none of"),
        ("/query", {"model": "m", "token_ids": [1], "lora_name": "a"}, TOKEN, 422, "lora_name"),
        ("/directory/lookup", {"keys": ["kv:12"]}, TOKEN, 400, "64 hexadecimal digits"),
        ("/query", " " * ((2 << 20) + 1), TOKEN, 413, "at most 2097152 bytes"),
    ],
)  # fmt: skip
async def test_bad_queries_are_refused_with_a_reason(
    storage: Server, path: str, body: Any, token: str | None, status: int, said: str
) -> None:
    async with asked(storage) as daemon:
        try:
            answer = await asyncio.to_thread(post, daemon.metrics_port, path, body, token)
        except (BrokenPipeError, ConnectionResetError):  # refused while the client still sends
            assert status == 413
            return
    assert answer[0] == status and said in answer[1]["error"]


async def test_slow_senders_of_bodies_leave_metrics_and_probes_alone(storage: Server) -> None:
    async with asked(storage) as daemon:
        port, head = daemon.metrics_port, f"POST /query HTTP/1.1\r\nAuthorization: Bearer {TOKEN}\r\n".encode()
        slow = [socket.create_connection(("127.0.0.1", port), WAIT_MAX_S) for _ in range(16)]
        for each in slow:
            each.sendall(head + b"Content-Length: 9999\r\n\r\n{")
        busy = asyncio.to_thread(post, port, "/query", {"model": "m", "token_ids": []})

        assert [(await asyncio.to_thread(http_get, port, path))[0] for path in ("/metrics", "/healthz")] == [200] * 2
        assert (await busy)[0] == 503
        for each in slow:
            each.close()


async def test_a_query_ends_in_time_without_storage(storage: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dpu_dataplane.queries.QUERY_TIMEOUT_S", 0.05)
    async with asked(storage) as daemon:
        await hello(daemon, engine_of("one", SHAPE.namespace))

        async def never(*_: Any, **__: Any) -> Any:
            await asyncio.Event().wait()

        monkeypatch.setattr(daemon._source, "find", never)
        body = {"model": "m", "token_ids": TOKENS}
        assert (await asyncio.to_thread(post, daemon.metrics_port, "/query", body))[0] == 504


def test_a_token_needs_an_endpoint_and_some_length() -> None:
    for keys, said in (
        ({"query_token": TOKEN}, "query_token needs metrics_port"),
        ({"query_token": "short", "metrics_port": 0}, "at least 16 visible"),
    ):
        with pytest.raises(ValueError, match=said):
            config("127.0.0.1:1", **keys)
