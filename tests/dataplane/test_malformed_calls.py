"""Malformed calls are refused before any of their work, and the message names the field."""

import os
from collections.abc import Callable
from typing import Any

import grpc
import pytest
from dataplane_support import (
    EXHAUSTED,
    FAILED,
    INVALID,
    Client,
    Segment,
    Server,
    hello_request,
    keys_of,
    layout,
    refused,
    running,
)

from dpu_dataplane.shared_rate import RATE_MIN
from shadowserve import __version__
from shadowserve.keys import SCHEMA_VERSION, ModelIdentity
from shadowserve.pool.next_use import REQUESTS_MAX
from shadowserve.proto import PROTOCOL_VERSION
from shadowserve.proto import dataplane_pb2 as pb
from shadowserve.proto.convert import engine_message, layout_message

SHAPE = layout()
OTHER = layout("binned", "float32", layers=4, vector_length=32)
HUGE = layout(namespace=b"h" * 32, layers=40)
PAGES = layout("passthrough", "uint8", layers=2, kinds=1, vector_length=4096, tokens=2)
KEYS = keys_of(SHAPE, 4)
ONE = SHAPE.raw_bytes
END = 2 * max(ONE, OTHER.raw_bytes)
"""Chunks of the registered memory end here; then there is room for a progress word."""
SIZE = END + 64
SPACE = SHAPE.namespace
PAGED = {"first": [0, 4096], "stride": 8192, "blocks": SIZE // 8192 + 1}

Row = tuple[dict[str, Any], list[str]] | tuple[dict[str, Any], list[str], grpc.StatusCode]


def described(**changes: Any) -> dict[str, Any]:
    """Return the registration of a layout with changed fields."""
    message = layout_message(SHAPE)
    for name, value in changes.items():
        setattr(message, name, value)
    return {"layouts": [message]}


def part(client: Client, keys: list[bytes] = KEYS[:1], **changes: Any) -> pb.FetchPart:
    return client.part(keys, **({"length": ONE} | changes))


def other_part(client: Client, **changes: Any) -> pb.FetchPart:
    fields = {"keys": KEYS[:1], "layout": 1, "offset": OTHER.raw_bytes, "length": OTHER.raw_bytes}
    return client.part(**(fields | changes))


def arrivals(keys: int = 1, size: int = 32, requests: int = 1, chains: int = 1) -> list[pb.Arrival]:
    chain = pb.KeyChain(keys=[bytes(size)] * keys, namespace=SPACE)
    return [pb.Arrival(request=index, chains=[chain] * chains) for index in range(requests)]


def engine(**changes: Any) -> dict[str, pb.Engine]:
    made = engine_message(ModelIdentity(model="a model", dtype="bfloat16"), SHAPE, paged=False)
    made.MergeFrom(pb.Engine(**changes))
    return {"engine": made}


MAKE: dict[str, Callable[..., Any]] = {
    "Hello": lambda client, **changes: hello_request(**changes),
    "Lookup": lambda client, **changes: pb.LookupRequest(**({"timeout_ms": 100} | changes)),
    "Pin": lambda client, **changes: pb.PinRequest(**({"keys": KEYS[:1], "timeout_ms": 100} | changes)),
    "Expect": lambda client, **changes: pb.ExpectRequest(**({"queue": b"q", "lasts_ms": 1000} | changes)),
    "ReportSteps": lambda client, **changes: pb.StepReport(**({"engine": b"e", "lasts_ms": 1} | changes)),
    "RegisterMemory": lambda client, **changes: client.register_request(**changes),
    "Fetch": lambda client, keys=KEYS[:1], **changes: client.fetch_request(keys, **changes),
    "Fetch of parts": lambda client, parts, **changes: client.fetch_request(
        [], **({"parts": [make(client, **fields) for make, fields in parts]} | changes)
    ),
    "FetchLayers": lambda client, **changes: client.fetch_request(
        KEYS[:1], **({"order": pb.ORDER_LAYERS, "length": END} | changes)
    ),
    "FetchPages": lambda client, **changes: pb.FetchPagesRequest(
        **(
            {"job_id": "j", "memory_id": client.memory_id, "keys": KEYS[:1], "blocks": [0, 1], "timeout_ms": 9}
            | changes
        )
    ),
    "Store": lambda client, keys=KEYS[:1], **changes: client.store_request(keys, **changes),
    "Trace": lambda client, **changes: pb.TraceRequest(**({"timeout_ms": 1, "fetches": 1} | changes)),
    "Decided": lambda client, **changes: pb.Decision(**changes),
}

JOB: list[Row] = [
    ({"keys": []}, ["keys has 0"]),
    ({"keys": [b"short"]}, ["keys[0]", "32"]),
    ({"keys": [*KEYS, bytes(33)]}, ["keys[4]", "33"]),
    ({"keys": [bytes(32)] * 65537}, ["keys", "65537"]),
    ({"job_id": ""}, ["job_id"]),
    ({"job_id": "x" * 129}, ["job_id", "129"]),
    ({"timeout_ms": 0}, ["timeout_ms", "every call has a deadline"]),
    ({"timeout_ms": 2**32 - 1}, ["timeout_ms"]),
    ({"offset": 1}, ["offset", "multiple of 2"]),
    ({"layout": 2}, ["layout is 2", "2 layouts"]),
    ({"purpose": 7}, ["purpose is 7"]),
]
SHAPE_FIELDS = {"layout": layout_message(SHAPE), "chunk_bytes": ONE}
LARGE = layout_message(layout(vector_length=1 << 16, namespace=b"l" * 32))
CHANGED = layout(layers=2)
ROWS: dict[str, list[Row]] = {
    "Hello": [
        ({"protocol_version": 77}, ["version 77", f"version {PROTOCOL_VERSION}", "same release"], FAILED),
        ({"record_version": 9, "version": "3.2.1"}, ["version 9", "3.2.1", __version__, "same release"], FAILED),
        ({"key_schema": 0}, ["key schema 0", f"key schema {SCHEMA_VERSION}", "same release"], FAILED),
        (SHAPE_FIELDS | {"chunk_bytes": 12}, ["12 bytes", f"{ONE}"], FAILED),
        (SHAPE_FIELDS | {"layout": LARGE, "chunk_bytes": 1 << 24}, ["buffer_bytes"], FAILED),
        (
            {"layout": layout_message(CHANGED), "chunk_bytes": CHANGED.raw_bytes},
            ["registered memory has layout", "same release"],
            FAILED,
        ),
        ({"host": ""}, ["host"]),
        ({"host": "x" * 65}, ["host"]),
        ({"process": "x" * 257}, ["process"]),
        (engine(model=b"short"), ["model"]),
        (engine(chunk_tokens=1 << 20), ["chunk_tokens"]),
        (engine(quantizer="x" * 65), ["quantizer"]),
        (engine(quantizer="two\nlines"), ["printable"]),
        (engine(process="a process"), ["process none"]),
    ],
    "Lookup": [
        ({"chains": [pb.KeyChain(keys=[b"x"], namespace=SPACE)]}, ["chains[0].keys[0]"]),
        (
            {"chains": [pb.KeyChain(keys=KEYS, namespace=SPACE), pb.KeyChain(keys=KEYS)]},
            ["chains[1].namespace"],
        ),
        ({"chains": [pb.KeyChain(keys=[bytes(32)] * 40000, namespace=SPACE)] * 2}, ["80000"]),
        ({"chains": [pb.KeyChain(namespace=SPACE)] * 5000}, ["5000"]),
        ({"timeout_ms": 0}, ["timeout_ms"]),
    ],
    "Pin": [
        ({"keys": []}, ["keys has 0"]),
        ({"keys": [b"short"]}, ["keys[0]", "32"]),
        ({"keys": [bytes(32)] * 65537}, ["65537"]),
        ({"session": bytes(33)}, ["session"]),
        ({"timeout_ms": 0}, ["timeout_ms"]),
    ],
    "Expect": [
        ({"queue": b""}, ["queue"]),
        ({"queue": b"q" * 33}, ["queue"]),
        ({"lasts_ms": 0}, ["lasts_ms"]),
        ({"lasts_ms": 1 << 31}, ["lasts_ms"]),
        ({"gone": range(REQUESTS_MAX + 1)}, ["gone"]),
        ({"order": range(REQUESTS_MAX + 1)}, ["order"]),
        ({"begins_in_ms": [1, 2, 3]}, ["begins_in_ms has 3"]),
        ({"arrivals": arrivals(requests=REQUESTS_MAX + 1)}, ["arrivals"]),
        ({"arrivals": arrivals(size=1)}, ["keys[0]"]),
        ({"arrivals": arrivals(keys=70_000)}, ["70000"]),
        ({"arrivals": arrivals(keys=0, chains=5000)}, ["5000"]),
    ],
    "ReportSteps": [
        ({"engine": b""}, ["engine"]),
        ({"engine": bytes(33)}, ["engine"]),
        ({"rate": 1}, ["rate is 1"]),
        ({"rate": RATE_MIN - 1}, ["rate"]),
        ({"interference_budget": -1}, ["interference_budget"]),
        ({"interference_budget": float("nan")}, ["interference_budget"]),
        ({"lasts_ms": 0}, ["lasts_ms"]),
        ({"lasts_ms": 3_600_000}, ["lasts_ms"]),
    ],
    "RegisterMemory": [
        ({"shared_memory": None}, ["memory"]),
        (described(dtype="float8"), ["layout: dtype", "float8"]),
        (described(quantizer="magic"), ["layout: quantizer"]),
        (described(quantizer="weighted"), ["shards has 0 entries"]),
        (described(namespace=b""), ["namespace"]),
        (described(layers=0), ["layers"]),
        (described(kinds=3), ["kinds"]),
        (described(bins=7), ["bins"]),
        (described(quantizer="binned", bins=32, value_bins=7), ["value_bins"]),
        (described(value_bins=16), ["value_bins"]),
        (described(quantizer="binned", bins=32, scale_tokens=1 << 20), ["scale_tokens"]),
        (described(vector_length=2**32 - 1), ["2 MiB"]),
        (described(layers=2**32 - 1), ["slices"]),
        (described(tokens=2**32 - 1), ["tokens", "65536"]),
        (described(vector_length=1 << 16), ["buffer_bytes"], FAILED),
        ({"layouts": []}, ["layouts has 0 entries"]),
        ({"layouts": [layout_message(SHAPE)] * 257}, ["257", "1 to 256"]),
        ({"layouts": [layout_message(SHAPE), layout_message(HUGE)]}, [f"{HUGE.raw_bytes}"]),
        ({"shared_memory": pb.SharedMemory(name="../etc/passwd", size=SIZE)}, ["name"]),
        ({"shared_memory": pb.SharedMemory(name="shadowserve-0000000a\n", size=SIZE)}, ["name"]),
        ({"shared_memory": pb.SharedMemory(name="shadowserve-0000000a", size=SIZE)}, ["cannot open"]),
        ({"shared_memory": pb.SharedMemory(name="shadowserve-0000000a", size=2**64 - 1)}, ["bytes_max"], EXHAUSTED),
        ({"pages": pb.PagedMemory(**PAGED)}, ["one kind"]),
    ],
    "Fetch": [
        *JOB,
        ({"length": 0}, ["length"]),
        ({"length": ONE - 1}, ["length", f"a chunk takes {ONE}"]),
        ({"layout": 1, "length": OTHER.raw_bytes - 1}, [f"a chunk takes {OTHER.raw_bytes}"]),
        ({"length": SIZE + 1}, ["offset", "outside"]),
        ({"offset": ONE, "length": SIZE}, ["offset", "outside"]),
        ({"offset": 2**64 - 2, "length": 2**64 - 2}, ["outside"]),
        ({"keys": [bytes(32)] * 65536, "layout": 2}, ["layout is 2"]),
        ({"progress": 0, "length": END}, ["outside the regions of the parts"]),
        ({"progress": END - 4, "length": END}, ["outside the regions of the parts"]),
        ({"progress": END + 2, "length": END}, ["multiple of 4"]),
        ({"progress": SIZE, "length": END}, ["at least 4 bytes before the end"]),
        ({"progress": 2**64 - 4, "length": END}, ["at least 4 bytes before the end"]),
    ],
    "Fetch of parts": [
        ({"parts": []}, ["parts has 0"]),
        ({"parts": [(part, {})] * 65}, ["parts has 65"]),
        ({"parts": [(part, {})], "order": 7}, ["order is 7", "ORDER_LAYERS"]),
        ({"parts": [(part, {}), (other_part, {"keys": [b"x"]})]}, ["parts[1].keys[0]"]),
        ({"parts": [(part, {}), (other_part, {"keys": []})]}, ["parts[1].keys has 0"]),
        ({"parts": [(part, {}), (other_part, {"keys": [bytes(32)] * 65536})]}, ["65537 keys together"]),
        ({"parts": [(part, {}), (other_part, {"wanted": b"\1\1"})]}, ["parts[1].wanted", "4 has 1 bytes"]),
        ({"parts": [(part, {}), (other_part, {"wanted": b"\x80"})]}, ["parts[1].wanted", "after its end"]),
        ({"parts": [(part, {}), (other_part, {"length": OTHER.raw_bytes - 1})]}, ["parts[1].length"]),
        ({"parts": [(part, {"first_layer": 1})]}, ["parts[0]", "window of 0 layers from 1 on"]),
        ({"parts": [(part, {"first_layer": 1, "layers": 2**32 - 1})]}, ["parts[0]", "window", "layers"]),
        ({"parts": [(part, {"layers": 1, "wanted": b"\xff"})]}, ["parts[0].wanted"]),
        ({"parts": [(part, {}), (other_part, {"offset": ONE + 2})]}, ["offset", "multiple of 4"]),
        ({"parts": [(part, {}), (other_part, {"length": SIZE})]}, ["outside"]),
        ({"parts": [(part, {"length": END}), (part, {"offset": ONE})]}, ["parts[0]", "parts[1]", "share bytes"]),
        (
            {"parts": [(part, {}), (part, {"offset": ONE, "layers": 1})], "order": pb.ORDER_LAYERS, "progress": END},
            ["parts with the same window of layers"],
        ),
    ],
    "FetchLayers": [
        ({"order": pb.ORDER_CHUNKS}, ["order of layers"]),
        ({"progress": END}, ["not in a word"]),
        ({"timeout_ms": 0}, ["every call has a deadline"]),
        ({"parts": []}, ["parts has 0"]),
    ],
    "Store": [
        *JOB,
        ({"keys": KEYS[:2], "parents": [b""]}, ["parents", "2 keys"]),
        ({"keys": KEYS[:1], "parents": [bytes(31)]}, ["parents[0]", "31 bytes"]),
        ({"keys": keys_of(SHAPE, SIZE // ONE + 1)}, ["outside"]),
        ({"offset": 2**64 - 2}, ["outside"]),
        ({"layout": 1, "offset": SIZE - 4}, ["end outside the registered memory"]),
        ({"keep": 7}, ["keep is 7"]),
    ],
    "Trace": [({"timeout_ms": 0}, ["timeout_ms"]), ({"fetches": 0}, ["fetches"])],
    "Decided": [
        ({"kind": "k" * 33}, ["kind has 33"]),
        ({"predicted": {"way" * 11: 1.0}}, ["predicted has up to"]),
        ({"predicted": {str(way): 1.0 for way in range(9)}}, ["predicted has up to"]),
        ({"predicted": {"fetch": float("nan")}}, ["nan"]),
        ({"tier_bytes": {str(tier): 1 for tier in range(5)}}, ["tier_bytes has up to"]),
        ({"seconds": -1.0}, ["-1.0"]),
        ({"seconds": float("inf")}, ["inf"]),
        ({"cold_seconds": float("nan")}, ["nan"]),
        ({"queued_seconds": -2.0}, ["-2.0"]),
    ],
}


@pytest.mark.parametrize("call", ROWS)
async def test_a_malformed_call_names_the_field(storage: Server, call: str) -> None:
    async with running(storage, tiers={"memory_budget_bytes": "8MiB"}) as (daemon, client):
        client.own(SHAPE, SIZE)
        request = client.register_request(layouts=[layout_message(SHAPE), layout_message(OTHER)])
        client.memory_id = (await client.stub.RegisterMemory(request)).memory_id
        for changes, words, *code in ROWS[call]:
            method = getattr(client.stub, call.partition(" ")[0])(MAKE[call](client, **changes))
            await refused(method.read() if hasattr(method, "read") else method, *(code or [INVALID]), *words)
        assert not daemon.budget.bounded and len(daemon._source._prefetcher._requests) == 0
        assert daemon.metrics.gauges["hosts"][1]() == daemon.metrics.gauges["registrations"][1]() == 1
        assert (await client.fetch(KEYS[:1])).outcome == pb.OUTCOME_ABSENT


async def test_impossible_pages_are_refused(storage: Server) -> None:
    wrong_memory: list[tuple[dict[str, Any], str]] = [
        ({"stride": 8192 + 512}, "4096"),
        ({"blocks": SIZE // 8192 + 2}, "outside"),
        ({"blocks": 2**32 - 1, "stride": 2**52}, "outside"),
        ({"first": [0]}, "layers"),
        ({"first": [64, 4096 + 64]}, "4096"),
        ({"stride": 0}, "overlap"),
        ({"blocks": 0}, "blocks"),
    ]
    wrong_calls: list[tuple[dict[str, Any], str]] = [
        ({"blocks": [PAGED["blocks"], 0]}, "blocks"),
        ({"blocks": [1]}, "blocks"),
        ({"progress": 2}, "progress"),
        ({"progress": SIZE + 8192}, "progress"),
        ({"keys": []}, "keys"),
    ]
    async with running(storage) as (_, client):
        client.own(PAGES, SIZE // 8192 * 8192 + 8192)
        for changes, word in wrong_memory:
            request = client.register_request(pages=pb.PagedMemory(**(PAGED | changes)))
            await refused(client.stub.RegisterMemory(request), INVALID, word)
        request = client.register_request(pages=pb.PagedMemory(**PAGED))
        paged = (await client.stub.RegisterMemory(request)).memory_id
        for changes, word in wrong_calls:
            fields = {"memory_id": paged} | changes
            await refused(client.stub.FetchPages(MAKE["FetchPages"](client, **fields)), INVALID, word)
        plain = (await client.stub.RegisterMemory(client.register_request())).memory_id
        for memory_id, outcome in ((paged, pb.OUTCOME_ABSENT), (12345, pb.OUTCOME_UNKNOWN_MEMORY)):
            answer = await client.stub.FetchPages(MAKE["FetchPages"](client, memory_id=memory_id))
            assert answer.outcome == outcome
        await refused(client.stub.FetchPages(MAKE["FetchPages"](client, memory_id=plain)), INVALID, "without pages")


async def test_more_pieces_than_a_call_may_name_are_refused_before_they_take_memory(client: Client) -> None:
    await client.register(layout("lossless", "uint8", layers=2000, kinds=1, vector_length=1, tokens=1), 1)
    await refused(client.stub.Fetch(client.fetch_request([bytes(32)] * 60000)), INVALID, "layers of chunks")


async def test_oversized_messages_are_refused(client: Client) -> None:
    await client.register(SHAPE, 1)
    await refused(client.stub.Fetch(client.fetch_request([bytes(1000)] * 20000)), EXHAUSTED)
    assert (await client.fetch(KEYS[:1])).outcome == pb.OUTCOME_ABSENT


async def test_only_own_regular_files_are_mapped(client: Client) -> None:
    await client.register(SHAPE, 1)
    target = Segment(SHAPE.raw_bytes)
    client.segments.append(target)
    link, pipe, folder, theirs = (f"/dev/shm/shadowserve-{digit * 8}" for digit in "abcd")
    os.symlink(target.path, link)
    os.mkfifo(pipe)
    os.mkdir(folder)
    with open(theirs, "wb") as file:
        file.truncate(SHAPE.raw_bytes)
    try:
        if os.geteuid() == 0:
            os.chown(theirs, 12345, 12345)
        else:
            os.chmod(theirs, 0)  # without the right to change owners: an unreadable file
        for path in (link, pipe, folder, theirs, target.path):
            more = path == target.path
            memory = pb.SharedMemory(name=os.path.basename(path), size=SHAPE.raw_bytes + more)
            await refused(client.stub.RegisterMemory(client.register_request(shared_memory=memory)), INVALID, path)
    finally:
        for path in (link, pipe, theirs):
            os.unlink(path)
        os.rmdir(folder)
