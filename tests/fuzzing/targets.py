"""Fuzz targets: the parsers in Python. Each accepts any bytes, and may raise only its own error."""

import contextlib
import hashlib
import itertools
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import golden_volume
from google.protobuf.message import DecodeError
from test_resp import FRAGMENTS, outcome
from test_volume_format import CORPUS, parse

from dpu_dataplane.config import DataPlaneConfig
from dpu_dataplane.jobs import CallError
from dpu_dataplane.registrations import Paging, RegistrationError
from dpu_dataplane.validation import Validator
from shadowserve import record
from shadowserve.chunk import ChunkLayout, DType, Quantizer
from shadowserve.errors import ConfigurationError, RecordError
from shadowserve.pool.cold import index_objects as cold_index
from shadowserve.pool.cold import layout as cold_layout
from shadowserve.pool.volume.format import BLOCK_BYTES
from shadowserve.proto import dataplane_pb2 as pb
from shadowserve.resp import CommandReader, Limits, ReplyReader, split_inline
from storage_kv.access.rules import RuleError, User, parse_line
from storage_kv.commands import BY_FULL_NAME
from storage_kv.config import StorageConfig

_TESTS: Final = Path(__file__).parents[1]
_REPOSITORY: Final = _TESTS.parent


@dataclass(frozen=True, slots=True)
class Target:
    """A parser, and the material for its inputs.

    Attributes:
        run: Function that parses an input, and raises an exception for each violation.
        corpus: Inputs to change.
        words: Byte strings to insert.
        size_max: Maximum size of an input.
    """

    run: Callable[[bytes], None]
    corpus: Callable[[], Sequence[bytes]]
    words: Sequence[bytes] = ()
    size_max: int = 4096


def _files(folder: Path, pattern: str = "*") -> list[bytes]:
    return [path.read_bytes() for path in sorted(folder.glob(pattern)) if path.is_file()]


def _resp(data: bytes) -> None:
    """Check that the result is the same for all splits of the input, except the error's text for a too long line."""
    for make in (ReplyReader, CommandReader):
        whole, error = outcome(make(_LIMITS), data, max(len(data), 1))
        pieces, piece_error = outcome(make(_LIMITS), data, 1 if len(data) <= 64 else 7)
        assert pieces[: len(whole)] == whole, (whole, pieces)
        assert (error is None) == (piece_error is None), (error, piece_error)
    split_inline(data)


def _record(data: bytes) -> None:
    for parser in (record.peek_header, record.header_length, record.parse_header):
        with contextlib.suppress(RecordError):
            parser(data)
    with contextlib.suppress(RecordError):
        head = record.parse_header(data)
        record.verify(data, head.key)


def _users(data: bytes) -> None:
    for line in data.split(b"\n"):
        with contextlib.suppress(RuleError):
            parsed = parse_line(line)
            user = User(b"a")
            for word in parsed[1] if parsed else ():
                user.apply(word, BY_FULL_NAME)
            user.describe()


def _volume(data: bytes) -> None:
    parse(data[:BLOCK_BYTES].ljust(BLOCK_BYTES, b"\0"))


def _volume_blocks() -> list[bytes]:
    golden = [block for _, block in golden_volume.load().blocks()]
    return [path.read_bytes() for path in CORPUS] + golden[:64]


_COLD_TENANTS: Final = ("", "team-a", "we/..%2F=x")


def _cold_object(data: bytes) -> None:
    """Check that the parsed contents of an object lie within it. The corpus has the object's name in front."""
    name, _, given = data.partition(b"\n")
    # The data behind the checksum must be parsed, too.
    summed = given[:-16] + hashlib.blake2b(given[:-16], digest_size=16).digest()
    for tail, size in itertools.product((given, summed), (len(given), len(given) + 1000)):
        with contextlib.suppress(cold_layout.ColdObjectError):
            needed = cold_layout.footer_bytes(tail, size)
            assert cold_layout.FOOTER_BYTES < needed < size
            contents = cold_layout.parse_footer(name.decode("latin-1"), tail, size)
            assert cold_layout.Contents.of(contents.tenant, size, contents.places.items()) == contents
            for place in contents.places.values():
                assert 0 < place.header_bytes <= place.length and place.offset + place.length <= size - needed


def _cold_objects() -> list[bytes]:
    found = _files(_TESTS / "pool" / "corpus" / "cold")
    for count, tenant in enumerate(_COLD_TENANTS, 1):
        body = bytearray(b"r" * 100 * count)
        keys = [bytes([number]) * 24 + bytes(8) for number in range(count)]
        places = [(key, cold_layout.Place(100 * number, 100, 50)) for number, key in enumerate(keys)]
        contents = cold_layout.finish(body, tenant, places)
        found.append(contents.name.encode() + b"\n" + body)
    return found


def _cold_index(data: bytes) -> None:
    """Check that the entries of an index object whose name fits its bytes are of its partition, and can be packed."""
    name = cold_index.parse_index_name(cold_index.index_name(0, data))
    assert name is not None
    with contextlib.suppress(cold_layout.ColdObjectError):
        entries = cold_index.parse_index(name, data)
        assert all(each.name.startswith("000/") and each.longest > 0 for each, _ in entries)
        assert cold_index.pack((used_h, each.footer) for each, used_h in entries) == data


def _cold_indexes() -> list[bytes]:
    objects = (given.partition(b"\n")[2] for given in _cold_objects()[-len(_COLD_TENANTS) :])
    footers = [body[-cold_layout.footer_bytes(body, len(body)) :] for body in objects]
    return [cold_index.pack([(7, each) for each in footers[:count]]) for count in range(len(footers) + 1)]


_LIMITS: Final = Limits(large_bulk_bytes=32, bulk_bytes_max=4096, items_max=64, line_bytes_max=256)
_VALIDATOR: Final = Validator()
_LAYOUT: Final = ChunkLayout(
    dtype=DType.BFLOAT16, layers=4, kinds=2, vector_length=64, tokens=16, quantizer=Quantizer.LOSSLESS
)
_DESTINATION: Any = SimpleNamespace(layouts=(_LAYOUT,), identity="memory", size=1 << 20)
_PAGES: Final = ChunkLayout(
    dtype=DType.UINT8, layers=2, kinds=1, vector_length=4096, tokens=2, quantizer=Quantizer.PASSTHROUGH
)
_PAGED: Any = SimpleNamespace(layouts=(_PAGES,), size=1 << 20, paging=Paging((0, 8192), 16384, 64, 4096))


def _grpc(data: bytes) -> None:
    kinds = (
        *(pb.HelloRequest, pb.LookupRequest, pb.RegisterMemoryRequest, pb.FetchRequest, pb.StoreRequest),
        *(pb.ExpectRequest, pb.FetchPagesRequest),
    )
    kind = kinds[data[0] % len(kinds)] if data else kinds[0]
    try:
        message = kind.FromString(data[1:])
    except DecodeError:
        return
    with contextlib.suppress(CallError):
        if isinstance(message, pb.HelloRequest):
            _VALIDATOR.hello(message)
        elif isinstance(message, pb.LookupRequest):
            _VALIDATOR.chains(message.chains)
        elif isinstance(message, pb.ExpectRequest):
            _VALIDATOR.expected(message)
        elif isinstance(message, pb.RegisterMemoryRequest):
            layouts = _VALIDATOR.layouts(message.layouts)
            with contextlib.suppress(RegistrationError):
                Paging.of(message.pages, layouts[0], _PAGED.size)
        elif isinstance(message, pb.FetchRequest):
            _VALIDATOR.fetch(message, lambda _: _DESTINATION)
        elif isinstance(message, pb.FetchPagesRequest):
            _VALIDATOR.pages(message, _PAGED)
        else:
            _VALIDATOR.timeout(message.timeout_ms)
            _VALIDATOR.job_id(message.job_id)
            _VALIDATOR.keys("keys", list(message.keys))
            _VALIDATOR.parents(list(message.parents), len(message.keys))
            _VALIDATOR.offset(_VALIDATOR.layout_of(_DESTINATION, message.layout), message.offset)


def _messages() -> list[bytes]:
    key = bytes(range(32))
    layout = pb.ChunkLayout(namespace=key, dtype="bfloat16", layers=4, kinds=2, vector_length=64, tokens=256)
    layout.quantizer, layout.bins, layout.value_bins, layout.scale_tokens = "binned", 32, 16, 1
    part = pb.FetchPart(memory_id=1, offset=8, length=1 << 20, keys=[key, key], wanted=b"\xb5")
    expected = pb.ExpectRequest(queue=b"queue", lasts_ms=1000, number=1, order=[1], begins_in_ms=[20])
    expected.arrivals.add(request=1).chains.add(namespace=key, keys=[key])
    return [
        b"\0" + pb.HelloRequest(protocol_version=1, record_version=2, host="host", process="1").SerializeToString(),
        b"\1" + pb.LookupRequest(chains=[pb.KeyChain(namespace=key, keys=[key, key])]).SerializeToString(),
        b"\2" + pb.RegisterMemoryRequest(layouts=[layout]).SerializeToString(),
        b"\3" + pb.FetchRequest(job_id="job", parts=[part, part], order=1, timeout_ms=1000).SerializeToString(),
        b"\4" + pb.StoreRequest(job_id="job", keys=[key], timeout_ms=1000).SerializeToString(),
        b"\5" + expected.SerializeToString(),
        b"\6" + pb.FetchPagesRequest(keys=[key], blocks=[3, 63], progress=4).SerializeToString(),
    ]


_CONFIGURATION: Final = Path(tempfile.gettempdir()) / f"shadowserve-fuzz-{os.getpid()}.yaml"


def _configuration(data: bytes) -> None:
    try:
        _CONFIGURATION.write_bytes(data)
        for kind in (StorageConfig, DataPlaneConfig):
            with contextlib.suppress(ConfigurationError):
                kind.load(_CONFIGURATION, environment={})
    finally:
        _CONFIGURATION.unlink(missing_ok=True)


def _configurations() -> list[bytes]:
    return [
        b"storage:\n  port: 6380\n  memory_budget_bytes: 64 GiB\n  devices:\n    - /dev/nvme1n1\n    - path: /x\n"
        b"      size: 200 GiB\n  eviction: lru\n",
        b"storage:\n  s3:\n    bucket: kv\n    endpoint: https://x:9000\n    timeout_s: 5\n    object_bytes: 32 MiB\n",
        b"dpu:\n  backend: doca\n  storage: [127.0.0.1:6380]\n  fetch_queue: 30\n",
        *(text[:400] for text in _files(_REPOSITORY / "configs", "*.yaml")),
    ]


_YAML: Final = (
    b": ",
    b"\n  ",
    b"- ",
    b"[",
    b"]",
    b"{",
    b"}",
    b"&a",
    b"*a",
    b"!!int ",
    b"0x",
    b"1e999",
    b"~",
    b"'",
    b'"',
)
_ACL: Final = (b"user ", b" on", b" off", b" >p", b" #", b" ~*", b" %R~", b" +@all", b" -get", b" (", b")", b" reset")

TARGETS: Final = {
    "cold_index": Target(_cold_index, _cold_indexes, (b"SSINDX01", b"SSCOLD01", b"\xff" * 4), 1024),
    "cold_object": Target(_cold_object, _cold_objects, (b"SSCOLD01", b"\xff" * 8, b"\0\0\0\0\1\0\0\0", b".kv\n"), 1024),
    "configuration": Target(_configuration, _configurations, (*_YAML, b"9" * 5000, b"[" * 300), 8192),
    "grpc_messages": Target(_grpc, _messages, (b"\x0a\x20", b"\xff\xff\xff\xff\x0f", b"\x80\x01", b"\x12\x00")),
    "record": Target(_record, lambda: _files(_TESTS / "assets" / "records"), (b"SSKV", b"\xff" * 8), 65536),
    "resp": Target(_resp, lambda: _files(_TESTS / "shared" / "corpus" / "resp"), FRAGMENTS, 512),
    "users": Target(_users, lambda: _files(_TESTS / "storage" / "corpus" / "users"), _ACL, 512),
    "volume_blocks": Target(_volume, _volume_blocks, (b"SSLG", b"SSSN", b"SSSH", b"SSVOLUME", b"\xff" * 8)),
}
"""Targets by name; ``native/fuzz`` has those in C."""
