"""KV of a model's shape, as records in a storage node.

The values have the channel structure of real KV, which entropy coding depends on. Measured on the project's own model:
the spread of channels is log-normal with a sigma of 0.4 for keys and 0.17 for values; a channel of a value has a mean
of 0.45 of its spread (root mean square); half of a key's power is a vector that its position rotates. With vectors as
short as that model's (128), 32 bins give 4.2 bits of order-0 entropy for each symbol, and 2.6 % less with the channels
of a slice in 8 classes by spread; the real KV has 4.4 bits, and 2.9 % less. Vectors of 1024 have larger maxima, so that
their symbols are smaller: 3.83 bits, 2.4 % less in 8 classes.
"""

import dataclasses
import math
import os
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from dpu_dataplane.config import DataPlaneConfig, codec_name
from host_control.config import HostConfig
from shadowserve import native, record
from shadowserve.addresses import split_address
from shadowserve.calibration import Steps
from shadowserve.chunk import ChunkLayout, DType, Quantizer
from shadowserve.errors import ShadowServeError
from shadowserve.keys import (
    DEFAULT_CHUNK_TOKENS,
    KEY_BYTES,
    KVNamespace,
    ModelIdentity,
    prefix_chain,
    record_keys,
    storage_key,
)
from shadowserve_tools.report import tracked
from shadowserve_tools.storage_client import Login, StorageClient

if TYPE_CHECKING:
    import redis

MODEL: Final = ModelIdentity(model="bench/llama-3.1-8b", dtype="bfloat16")
ROPE_BASE: Final = 500_000.0
"""RoPE base of Llama 3. From one channel of a key to the next, rotation slows down by its 64th root."""
HEAD_SIZE: Final = 128
STEP_OF_SPREAD: Final = 2 ** (0.5 * math.log2(2 * math.pi * math.e) - 3.55)
"""Step, as a share of a normally distributed channel's spread, with which an element has 3.55 bits of entropy. Records
take 3.6 bits, with headers and tables, as those of ``near_lossless`` do on a real model (``bench quality``)."""


@dataclass(frozen=True)
class Workload:
    """Chunks of one prompt, as records.

    Attributes:
        crcs: CRC-32 of each chunk's KV as it must be delivered.
        steps: Steps of all layers and heads, with ``weighted``.
    """

    layout: ChunkLayout
    codec: native.Codec
    tokens: list[int]
    keys: list[bytes]
    records: list[bytes]
    crcs: list[int]
    steps: Steps | None = None

    @property
    def label(self) -> str:
        if self.steps is not None:
            return "near lossless"
        if self.layout.quantizer is not Quantizer.BINNED:
            return self.layout.quantizer.label
        return f"binned {self.layout.bins}/{self.layout.value_bins} (lossy)"

    @property
    def raw_bytes(self) -> int:
        return len(self.keys) * self.layout.raw_bytes

    @property
    def stored_bytes(self) -> int:
        return sum(map(len, self.records))

    def check(self, memory: Any, count: int | None = None, first: int = 0) -> None:
        """Compare ``count`` chunks in memory, by default all, with the stored ones from ``first`` on."""
        size, view = self.layout.raw_bytes, memoryview(memory).cast("B")
        for index, crc in enumerate(self.crcs[first:][:count]):
            if native.crc32(view[index * size : (index + 1) * size]) != crc:
                raise ShadowServeError(f"chunk {first + index} in memory is not what was stored; please report this")


def llama_8b(
    chunks: int, *, layers: int = 32, quantizer: Quantizer = Quantizer.LOSSLESS, codec: str | None = None,
    after: Workload | None = None,
) -> Workload:  # fmt: skip
    """Return chunks of Llama-3.1-8B's shape: 8 KV heads of 128, bfloat16; 32 MiB each with all layers.

    Args:
        after: Chunks of the same shape that the prompt begins with, such as a system prompt.
        layers: Number of layers; fewer make a chunk smaller, and its slices keep their size.
        quantizer: Lossless, the default of users, binned with the default bins (lossy), or weighted with steps of
            ``STEP_OF_SPREAD``.
        codec: Name of the codec; None for the default of a data plane.
    """
    host = HostConfig.model_fields
    bins, value_bins = (host[name].default for name in ("bins", "value_bins"))
    binned = {"bins": bins, "value_bins": value_bins} if quantizer is Quantizer.BINNED else {}
    chosen = native.Codec[(codec or default_codec()).upper()]
    layout = named_layout(layers, 8, kinds=2, vector_length=8 * 128, quantizer=quantizer, **binned)
    generator = np.random.default_rng(int.from_bytes(os.urandom(4)))
    tokens = generator.integers(0, 128_000, chunks * DEFAULT_CHUNK_TOKENS).tolist()
    tokens, records, crcs = (after.tokens + tokens, [*after.records], [*after.crcs]) if after else (tokens, [], [])
    keys = keys_of(layout, tokens)
    patterns = kv_patterns(generator, layout)
    steps = near_lossless(patterns) if quantizer is Quantizer.WEIGHTED else None
    channels = steps.channels(layout.tokens) if steps is not None else None
    for index in tracked(range(len(records), len(keys)), "making KV"):
        kv = memoryview(np.roll(patterns, index * 7, axis=2).reshape(-1)).cast("B")
        position = index * DEFAULT_CHUNK_TOKENS
        encoded = record.encode(keys[index], chosen, layout, kv, channels=channels, position=position)
        records.append(encoded)
        crcs.append(native.crc32(record.decode(encoded, keys[index], layout, channels=channels)))
    return Workload(layout, chosen, tokens, keys, records, crcs, steps)


def near_lossless(patterns: npt.NDArray[np.uint16]) -> Steps:
    """Return steps for KV of the shape [layers, kinds, tokens, heads x 128], with keys of all positions alike."""
    layers, kinds, tokens, _ = patterns.shape
    values = (patterns.astype(np.uint32) << 16).view(np.float32).reshape(layers, kinds, tokens, -1, HEAD_SIZE)
    frequencies = ROPE_BASE ** -np.arange(0, 1, 2 / HEAD_SIZE)
    angles = (np.arange(tokens)[:, None] * frequencies)[:, None]
    first, second = np.split(values[:, 0].copy(), 2, axis=-1)
    cosines, sines = np.cos(angles), np.sin(angles)
    values[:, 0] = np.concatenate([first * cosines + second * sines, second * cosines - first * sines], axis=-1)
    return Steps(np.float32(STEP_OF_SPREAD) * values.std(axis=2), values.mean(axis=2), frequencies.astype(np.float64))


def named_layout(layers: int, heads: int, group: str = "", **shape: Any) -> ChunkLayout:
    """Return the layout of chunks of MODEL, by default in bfloat16 and of the usual number of tokens."""
    namespace = KVNamespace(model=MODEL, layers=(0, layers), heads=(0, heads), **({"group": group} if group else {}))
    defaults = {"dtype": DType.BFLOAT16, "tokens": DEFAULT_CHUNK_TOKENS}
    return namespace.name(ChunkLayout(**(defaults | {"layers": layers} | shape)))


def keys_of(layout: ChunkLayout, tokens: Sequence[int] | npt.NDArray[np.int64]) -> list[bytes]:
    """Return the key of each chunk of a prompt."""
    return record_keys(layout.namespace, prefix_chain(MODEL.digest(), np.asarray(tokens)))


def default_codec() -> str:
    """Return the name of the codec that a data plane stores with by default."""
    fields = DataPlaneConfig.model_fields
    return codec_name(fields["codec"].default, fields["backend"].default)


def kv_patterns(generator: np.random.Generator, layout: ChunkLayout) -> npt.NDArray[np.uint16]:
    """Return one chunk's KV as bfloat16 bit patterns: layer, kind, token, element. The module has the distribution."""
    shape = (layout.layers, layout.kinds, layout.tokens, layout.vector_length)
    values = generator.standard_normal(shape, dtype=np.float32)
    channels = (layout.layers, 1, layout.vector_length)
    angles = np.arange(layout.tokens)[:, None] * ROPE_BASE ** -(np.arange(layout.vector_length) % 64 / 64)
    phases = generator.uniform(0, 2 * np.pi, channels)
    values[:, 0] = np.sqrt(0.5) * values[:, 0] + np.cos(angles + phases)
    values[:, 1:] += 0.45 * generator.standard_normal(channels)[:, None]
    sigma = np.array([0.4] + [0.17] * (layout.kinds - 1))[:, None, None]
    values *= np.exp(sigma * generator.standard_normal((layout.layers, layout.kinds, 1, layout.vector_length)))
    return (values.view(np.uint32) >> 16).astype(np.uint16)


def made_up_slices(layers: int, vector_length: int, tokens: int = DEFAULT_CHUNK_TOKENS) -> npt.NDArray[np.uint16]:
    """Return slices of KV, always the same ones, as bfloat16 bit patterns: slice, token, element."""
    layout = ChunkLayout(
        namespace=bytes(KEY_BYTES), dtype=DType.BFLOAT16, layers=layers, kinds=2, vector_length=vector_length,
        tokens=tokens, quantizer=Quantizer.LOSSLESS,
    )  # fmt: skip
    return kv_patterns(np.random.default_rng(8), layout).reshape(-1, tokens, vector_length)


def uncompressed(workload: Workload, chunks: Iterable[bytes]) -> Workload:
    """Return chunks of the same shape without compression; ``chunks`` has their bytes."""
    layout = dataclasses.replace(
        workload.layout, namespace=secrets.token_bytes(KEY_BYTES), quantizer=Quantizer.PASSTHROUGH, bins=0
    )
    keys = keys_of(layout, workload.tokens)
    kept = list(chunks)
    records = [record.encode(key, native.Codec.NONE, layout, kv) for key, kv in zip(keys, kept, strict=True)]
    return Workload(layout, native.Codec.NONE, workload.tokens, keys, records, [native.crc32(kv) for kv in kept])


def client(address: str, password: str | None = None) -> "redis.Redis":
    """Return a redis-py client for ``host:port``."""
    import redis

    host, port = split_address(address)
    return redis.Redis(host=host, port=port, password=password, socket_timeout=30)


def put(workload: Workload, address: str, password: str | None = None) -> None:
    """Store a workload's records in the storage node at ``host:port``."""
    with StorageClient(Login.at(address, password=password or ""), timeout_s=30) as server:
        for key, value in zip(workload.keys, workload.records, strict=True):
            server.call("SET", storage_key(key), value)
