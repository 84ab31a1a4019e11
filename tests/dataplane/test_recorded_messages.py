"""Messages recorded from a release are answered by this one as they were by that one: docs/guides/upgrade.md.

A change that breaks a message of the current protocol fails here. Repair it, or raise PROTOCOL_VERSION and record it
again, with ``TEST_RECORD=1`` in the environment.
"""

import asyncio
import base64
import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest
from dataplane_support import WAIT_MAX_MS, Segment, Server, hello_request, keys_of, kvs, layout, running
from google.protobuf import descriptor_pb2, descriptor_pool, json_format, message_factory

from shadowserve.keys import RECORD_VERSION, SCHEMA_VERSION, storage_key
from shadowserve.proto import PROTOCOL_VERSION, SESSION_KEY
from shadowserve.proto import dataplane_pb2 as pb
from shadowserve.proto.convert import layout_message

ASSETS = Path(__file__).parents[1] / "assets"
RECORDING = ASSETS / "wire" / f"protocol-{PROTOCOL_VERSION}.json"
SERVICE = "/shadowserve.v1.DataPlane/"
SHAPE = layout()
KEYS = keys_of(SHAPE, 2, seed=7)
MEMORY_ID = 0x1122334455667788
NAME = f"shadowserve-{'0' * 16}"
VARYING = {"session", "version", "memory_id", "stored_bytes", "fetched_bytes", "moved_bytes", "backend", "device"}
"""Fields whose values are random, or differ between releases and machines."""
RECORD_KEY = storage_key(bytes(range(32)))
COMMANDS: tuple[tuple[str | bytes, ...], ...] = (
    ("SET", RECORD_KEY, "v2-none-passthrough-uint8.bin"),
    ("EXISTS", RECORD_KEY),
    ("STRLEN", RECORD_KEY),
    ("GET", RECORD_KEY),
    ("KV.META", RECORD_KEY, "kv:absent"),
    ("KV.LAYERS", "0", "0", "0", RECORD_KEY),
    ("KV.LOAD",),
    ("KV.PUBLISH", "60000", storage_key(bytes(32))),
    ("KV.PUBLISH", "0", storage_key(bytes(32))),
    ("KV.PENDING", storage_key(bytes(32)), RECORD_KEY),
    ("KV.PREFETCH", RECORD_KEY),
    ("KV.PIN", "60", RECORD_KEY),
    ("KV.UNPIN",),
    ("DEL", RECORD_KEY),
)
"""Commands of a data plane or an operator; arguments that end with .bin are golden records."""


def messages() -> list[tuple[str, Any]]:
    """Return the calls of an engine: it stores two chunks, and loads them in both orders."""
    part = pb.FetchPart(memory_id=MEMORY_ID, length=SHAPE.raw_bytes * 2, keys=KEYS)
    fetch: dict[str, Any] = {"parts": [part], "timeout_ms": WAIT_MAX_MS}
    chain = pb.KeyChain(keys=KEYS, namespace=SHAPE.namespace)
    memory = pb.SharedMemory(name=NAME, size=SHAPE.raw_bytes * 2)
    store = pb.StoreRequest(job_id="s", memory_id=MEMORY_ID, keys=KEYS, timeout_ms=WAIT_MAX_MS)
    engine = pb.Engine(model=bytes(32), chunk_tokens=SHAPE.tokens, quantizer="lossless")
    said = {"layout": layout_message(SHAPE), "chunk_bytes": SHAPE.raw_bytes, "engine": engine}
    arrival = pb.Arrival(request=1, chains=[chain])
    return [
        ("Hello", hello_request(**said)),
        ("RegisterMemory", pb.RegisterMemoryRequest(layouts=[layout_message(SHAPE)], shared_memory=memory)),
        ("Publish", pb.PublishRequest(keys=KEYS, lasts_ms=1000, timeout_ms=WAIT_MAX_MS)),
        ("Store", store),
        ("Lookup", pb.LookupRequest(chains=[chain], timeout_ms=WAIT_MAX_MS, published=True)),
        ("Expect", pb.ExpectRequest(queue=b"q", number=1, whole=True, arrivals=[arrival], lasts_ms=1000)),
        ("ReportSteps", pb.StepReport(engine=b"e", interference_budget=0.02, lasts_ms=1000)),
        ("Fetch", pb.FetchRequest(job_id="f", **fetch)),
        ("FetchLayers", pb.FetchRequest(job_id="l", order=pb.ORDER_LAYERS, **fetch)),
        ("Cancel", pb.CancelRequest(job_id="gone")),
        ("ReleaseMemory", pb.ReleaseMemoryRequest(memory_id=MEMORY_ID)),
    ]


class Reader:
    """Reads answers with the recorded description of the wire, as a program of that release does."""

    def __init__(self, description: bytes) -> None:
        file = descriptor_pb2.FileDescriptorProto.FromString(description)
        pool = descriptor_pool.DescriptorPool()
        pool.Add(file)
        self._types = {
            method.name: message_factory.GetMessageClass(pool.FindMessageTypeByName(method.output_type[1:]))
            for method in file.service[0].method
        }

    def read(self, method: str, answer: bytes) -> tuple[Any, dict[str, Any]]:
        message = self._types[method].FromString(answer)
        values = json_format.MessageToDict(message, preserving_proto_field_name=True)
        return message, {name: value for name, value in values.items() if name not in VARYING}


async def play(address: str, calls: Sequence[tuple[str, bytes]], reader: Reader) -> list[dict[str, Any]]:
    """Send recorded calls to a data plane; return the answers. Names of memory are those of this run."""
    segment = Segment(SHAPE.raw_bytes * 2)
    data = b"".join(kvs(SHAPE, 2))
    segment.memory[:] = bytearray(data)
    metadata: list[tuple[str, bytes]] = []
    given = {NAME.encode(): segment.name.encode()}
    answers = []
    try:
        async with grpc.aio.insecure_channel(address) as channel:
            for method, request in calls:
                for recorded, actual in given.items():
                    request = request.replace(recorded, actual)
                if method in ("Fetch", "FetchLayers"):
                    segment.memory[:] = 0
                if method == "FetchLayers":
                    stream = channel.unary_stream(SERVICE + method)(request, metadata=metadata)
                    answer = [each async for each in stream][-1]
                else:
                    answer = await channel.unary_unary(SERVICE + method)(request, metadata=metadata)
                message, values = reader.read(method, answer)
                if method == "Hello":
                    metadata = [(SESSION_KEY, message.session)]
                if method == "RegisterMemory":
                    given[MEMORY_ID.to_bytes(8, "little")] = message.memory_id.to_bytes(8, "little")
                if method in ("Fetch", "FetchLayers"):
                    assert segment.memory.tobytes() == data, method
                    values.get("answer", {}).pop("fetched_bytes", None)
                answers.append(values)
    finally:
        segment.close()
    return answers


def converse(storage: Server, commands: Sequence[Sequence[str]]) -> list[str]:
    """Send commands over one connection; return the replies as they are on the wire."""
    replies = []
    with storage._connection() as connection:
        for command in commands:
            words = [
                (ASSETS / "records" / each).read_bytes() if each.endswith(".bin") else each.encode("latin-1")
                for each in command
            ]
            # An unknown command marks the end of the reply.
            sent = [*words], [b"NO.SUCH"]
            connection.sendall(b"".join(b"*%d\r\n" % len(each) + b"".join(map(_bulk, each)) for each in sent))
            reply = b""
            while b"-ERR unknown command 'NO.SUCH'" not in reply or not reply.endswith(b"\r\n"):
                data = connection.recv(1 << 16)
                assert data, f"{command[0]}: the server closed the connection after {reply!r}"
                reply += data
            replies.append(reply.partition(b"-ERR unknown command 'NO.SUCH'")[0].decode("latin-1"))
    return replies


def _bulk(word: bytes) -> bytes:
    return b"$%d\r\n%b\r\n" % (len(word), word)


@pytest.fixture(scope="module")
def recording() -> Any:
    if os.environ.get("TEST_RECORD"):
        asyncio.run(record())
    return json.loads(RECORDING.read_text())


async def test_a_data_plane_answers_the_recorded_calls_of_an_engine(mortal_storage: Server, recording: Any) -> None:
    calls = [(each["method"], bytes.fromhex(each["request"])) for each in recording["calls"]]
    async with running(mortal_storage) as (daemon, _):
        answers = await play(daemon.address, calls, Reader(base64.b64decode(recording["description"])))
    for call, answer in zip(recording["calls"], answers, strict=True):
        assert answer == call["answer"], call["method"]
    # And it sends a storage node of that release no command that this does not know.
    assert {name.upper() for name in mortal_storage.calls()} <= set(recording["commands_of_the_data_plane"])


def test_a_storage_node_answers_the_recorded_commands(storage: Server, recording: Any) -> None:
    commands = [each["command"] for each in recording["commands"]]
    for each, reply in zip(recording["commands"], converse(storage, commands), strict=True):
        assert reply == each["reply"], each["command"][0]


def test_the_recording_is_of_the_current_versions(recording: Any) -> None:
    assert recording["versions"] == [PROTOCOL_VERSION, RECORD_VERSION, SCHEMA_VERSION]


async def record() -> None:
    """Record the messages of this release."""
    description = pb.DESCRIPTOR.serialized_pb
    with tempfile.TemporaryDirectory() as folder:
        storage = Server("storage_kv", Path(folder)).start()
        try:
            calls = [(method, message.SerializeToString(deterministic=True)) for method, message in messages()]
            async with running(storage) as (daemon, _):
                answers = await play(daemon.address, calls, Reader(description))
            used = sorted(name.upper() for name in storage.calls())
            commands = [[word.decode() if isinstance(word, bytes) else word for word in each] for each in COMMANDS]
            replies = converse(storage, commands)
        finally:
            storage.kill()
    found = {
        "versions": [PROTOCOL_VERSION, RECORD_VERSION, SCHEMA_VERSION],
        "description": base64.b64encode(description).decode(),
        "calls": [
            {"method": method, "request": request.hex(), "answer": answer}
            for (method, request), answer in zip(calls, answers, strict=True)
        ],
        "commands_of_the_data_plane": used,
        "commands": [{"command": command, "reply": reply} for command, reply in zip(commands, replies, strict=True)],
    }
    RECORDING.parent.mkdir(exist_ok=True)
    RECORDING.write_text(json.dumps(found, indent=1) + "\n")
