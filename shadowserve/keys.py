"""Identity of KV: keys that are equal only for records with the same bytes.

A prompt is cut into chunks (256 tokens by default). Each chunk has a *chunk key*: a hash of the chunk, of everything
before it, and of the :class:`ModelIdentity`. The chunk keys of a prompt form its *prefix chain*. The chain does not
depend on the number of ranks or of KV cache groups. A stored record holds a shard of a chunk: some layers and heads of
one group, in one form. A :class:`KVNamespace` describes the shard. The record's key is a hash of the namespace's digest
and the chunk key.

So two records have the same key only if they hold the same shard of what the same model computed in the same way from
the same tokens after the same prefix. Ranks, the number of ranks, and the entropy codec are not part of a key.

A prefix chain consists of *segments* of :data:`SEGMENT_CHUNKS` chunks. The keys of a segment's records in one namespace
have the same last 8 bytes (:func:`segment_of`). A client that distributes records over nodes places each segment.

The hash is SHA-256 (FIPS 180-4): the same in every process, and as fast as the alternatives on CPUs with SHA
instructions.
"""

import array
import hashlib
import json
import struct
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from shadowserve.chunk import ChunkLayout

DEFAULT_CHUNK_TOKENS: Final = 256
"""Tokens per chunk, as in ShadowServe (section 5), CacheGen and LMCache."""

KEY_BYTES: Final = 32
SCHEMA_VERSION: Final = 5
"""Version of keys and namespaces, and of what symbols become (native/src/quantize/weighted.h). A host and a data plane
of different versions refuse each other."""
RECORD_VERSION: Final = 2
"""Version of the stored record. It is here because hosts need it without the C core that shadowserve.record loads."""
SEGMENT_CHUNKS: Final = 4
"""Chunks of a segment. Of prompts that share a prefix, at most one chunk less than a segment follows the prefix to its
node; the next segment of each prompt has a node of its own."""
SEGMENT_BYTES: Final = 8
"""Trailing bytes that all keys of a segment share; the other 192 bits distinguish them."""
_CHAIN_PREFIX: Final = b"shadowserve chain 3\0"
_TAIL_PREFIX: Final = b"shadowserve tail 2\0"
_PRIVATE_PREFIX: Final = b"shadowserve private 1\0"
_RECORD_PREFIX: Final = b"shadowserve record 4\0"
STORAGE_PREFIX: Final = b"kv:"


@dataclass(frozen=True, kw_only=True)
class ModelIdentity:
    """Everything except tokens that determines a model's KV and is common to all its ranks and groups.

    Attributes:
        model: Digest of the model's class, configuration and code, and of the engine's options that change values
            (docs/design/identity.md). The model's name is not part of it.
        tenant_salt: Salt that separates tenants. The server that authenticated the caller sets it, not the caller.
    """

    model: str
    dtype: str  # logical dtype of the cache: ``"float16"``, ``"bfloat16"``, ``"float32"`` or an fp8 name
    weights: str = ""  # digest of the weights' content; empty if ``model`` covers them
    chunk_tokens: int = DEFAULT_CHUNK_TOKENS  # tokens per chunk
    tenant_salt: str = ""

    def digest(self) -> bytes:
        """Return the 32-byte digest that a prefix chain starts from."""
        return _digest(asdict(self))


@dataclass(frozen=True, kw_only=True)
class KVNamespace:
    """Shard of a model's KV that a record holds.

    Attributes:
        group: KV cache group: its cache type, and its layers if several groups of the model have the same type.
    """

    model: ModelIdentity  # identity of the model
    layers: tuple[int, int]  # range [first, end) of layers in the group
    heads: tuple[int, int]  # range [first, end) of KV heads in the model; (0, 1) for a latent, which all ranks share
    group: str = "full"
    steps: str = ""  # name of the steps of ``weighted``: the preset and the digest of its calibration; else empty

    def name(self, layout: ChunkLayout) -> ChunkLayout:
        """Return the layout of this shard's chunks, with their namespace.

        A record of a sliding-window group may hold only the last tokens of its chunk.

        Raises:
            ValueError: The layout does not fit the layers or heads.
        """
        (first_layer, end_layer), (first_head, end_head) = self.layers, self.heads
        if min(first_layer, first_head) < 0 or end_layer - first_layer != layout.layers:
            raise ValueError(f"layers {self.layers}: {layout} does not hold them")
        if end_head <= first_head or layout.vector_length % (end_head - first_head):
            raise ValueError(f"heads {self.heads}: vectors of {layout.vector_length} elements do not hold them")
        shard = {"group": self.group, "layers": self.layers, "heads": self.heads}
        if self.steps:
            shard["steps"] = self.steps
        digest = _digest({"model": self.model.digest().hex(), **shard, "layout": layout.described()})
        return replace(layout, namespace=digest)


@dataclass(frozen=True, order=True)
class Input:
    """Input that the model reads instead of placeholder tokens of the prompt, such as an image.

    Raises:
        ValueError: The range is empty or negative, or the digest has another length.
    """

    offset: int  # index of the first placeholder token
    length: int  # number of placeholder tokens
    content: bytes  # digest of the input, 32 bytes

    def __post_init__(self) -> None:
        if self.offset < 0 or self.length < 1 or len(self.content) != KEY_BYTES:
            raise ValueError(
                f"an input of {self.length} tokens at {self.offset}, its digest of {len(self.content)} bytes"
            )


@dataclass(frozen=True)
class Extra:
    """Inputs of a prompt's KV besides its tokens."""

    request: bytes = b""  # inputs of the whole prompt: salt, epoch, adapter
    inputs: tuple[Input, ...] = ()  # inputs at places of the prompt. Each affects its own chunk and all later chunks


def request_inputs(salt: str | None, epoch: str = "", **more: Any) -> bytes:
    """Return :attr:`Extra.request` of a request with a salt and ``more`` inputs, in an epoch of the weights."""
    described = {"salt": salt, "epoch": epoch, **more}
    if not any(described.values()):
        return b""
    text = json.dumps(described, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).digest()


def _digest(fields: dict[str, Any]) -> bytes:
    """Return the SHA-256 of the canonical JSON of the fields and the schema version."""
    fields = fields | {"schema_version": SCHEMA_VERSION}
    text = json.dumps(fields, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).digest()


def record_keys(namespace: bytes, chunk_keys: Iterable[bytes]) -> list[bytes]:
    """Return the keys of the records that hold a namespace's shard of chunks.

    A key is 24 bytes of ``SHA-256(prefix || namespace || chunk_key)``, then 8 bytes of
    ``SHA-256(prefix || namespace || chunk_key[-8:])``.
    """
    before, chunk_keys = _RECORD_PREFIX + namespace, list(chunk_keys)
    segments = {segment_of(key) for key in chunk_keys}
    ends = {segment: hashlib.sha256(before + segment).digest()[:SEGMENT_BYTES] for segment in segments}
    return [hashlib.sha256(before + key).digest()[:-SEGMENT_BYTES] + ends[segment_of(key)] for key in chunk_keys]


def segment_of(key: bytes) -> bytes:
    """Return the last 8 bytes of a key, which all keys of a segment (in one namespace, for record keys) share."""
    return key[-SEGMENT_BYTES:]


def private_chunk_keys(chunk_keys: Iterable[bytes], secret: bytes) -> list[bytes]:
    """Return other chunk keys for the same chunks, which only a process with the 32-byte ``secret`` can compute.

    They are one segment.
    """
    end = hashlib.sha256(_PRIVATE_PREFIX + secret).digest()[-SEGMENT_BYTES:]
    return [hashlib.sha256(_PRIVATE_PREFIX + secret + key).digest()[:-SEGMENT_BYTES] + end for key in chunk_keys]


def prefix_chain(
    model: bytes,
    tokens: Sequence[int] | npt.NDArray[np.integer],
    *,
    chunk_tokens: int = DEFAULT_CHUNK_TOKENS,
    extra: Extra | None = None,
    after: Sequence[bytes] = (),
) -> list[bytes]:
    """Return the chunk keys of a prompt's complete chunks: ``len(tokens) // chunk_tokens`` keys of 32 bytes.

    ``H_0 = SHA-256(prefix || model)``, ``H_i = SHA-256(H_{i-1} || tokens_i as little-endian uint32 || len(request) as
    uint32 || request || inputs_i)``, with the last 8 bytes of its segment's first chunk in place of its own.
    ``inputs_i`` has, for each input with a token in the chunk, in order: its content, its first token counted from the
    chunk's first as int64, its tokens as int64. So a chunk key depends on its chunk and everything before it, and on
    nothing after it.

    Args:
        model: Digest of the :class:`ModelIdentity`, 32 bytes.
        tokens: Token IDs of the whole prompt, each in 0 .. 2**32 - 1.
        chunk_tokens: Tokens per chunk, as in the identity.
        extra: Other inputs of the KV.
        after: Chunk keys of a prefix of the prompt that are already known; the result begins with them.

    Raises:
        ValueError: The digest has another length, or the chunk size is under 1.
        OverflowError: A token ID does not fit 32 bits.
        TypeError: Token IDs are not integers.
    """
    if len(model) != KEY_BYTES:
        raise ValueError(f"a model's digest has {KEY_BYTES} bytes, this one {len(model)}")
    if chunk_tokens < 1:
        raise ValueError(f"chunk_tokens is {chunk_tokens}; a chunk has at least one token")
    keys = list(after)
    first = len(keys) * chunk_tokens
    count = len(tokens) // chunk_tokens - len(keys)
    if count <= 0:
        return keys[: len(tokens) // chunk_tokens]
    data = _as_uint32(tokens[first : first + count * chunk_tokens])
    extra = extra or Extra()
    tail = struct.pack("<I", len(extra.request)) + extra.request
    inputs = _inputs_of_chunks(extra.inputs, chunk_tokens, len(keys), len(keys) + count)
    previous = keys[-1] if keys else hashlib.sha256(_CHAIN_PREFIX + model).digest()
    end = segment_of(keys[-1]) if keys else b""
    step = chunk_tokens * 4
    for start in range(0, count * step, step):
        chunk_hash = hashlib.sha256(previous)
        chunk_hash.update(data[start : start + step])
        chunk_hash.update(tail)
        if (chunk_inputs := inputs.get(len(keys))) is not None:
            chunk_hash.update(chunk_inputs)
        previous = chunk_hash.digest()
        if len(keys) % SEGMENT_CHUNKS:
            previous = previous[:-SEGMENT_BYTES] + end
        else:
            end = segment_of(previous)
        keys.append(previous)
    return keys


def tail_chunk_key(
    model: bytes,
    tokens: Sequence[int] | npt.NDArray[np.integer],
    tail_tokens: int,
    *,
    chunk_tokens: int = DEFAULT_CHUNK_TOKENS,
    extra: Extra | None = None,
    after: Sequence[bytes] = (),
) -> bytes:
    """Return the key of a prompt's tail: the ``tail_tokens`` tokens after its last complete chunk.

    It is computed as in :func:`prefix_chain`, with another prefix: ``SHA-256(prefix || H_i || tokens || ...)``. Its
    last 8 bytes are those of the chunk before it. Inputs that begin after the tail do not affect it.

    Args:
        model, tokens, chunk_tokens, extra: As for :func:`prefix_chain`.
        tail_tokens: Number of tokens, 1 to ``chunk_tokens - 1``.
        after: Chunk keys of all complete chunks before the tail.

    Raises:
        ValueError: The prompt has no such tail.
        OverflowError, TypeError: As for :func:`prefix_chain`.
    """
    first = len(after) * chunk_tokens
    if not 0 < tail_tokens < chunk_tokens or len(tokens) < first + tail_tokens:
        raise ValueError(f"no tail of {tail_tokens} tokens after {first} of {len(tokens)}, in chunks of {chunk_tokens}")
    extra = extra or Extra()
    inputs = [each for each in extra.inputs if each.offset < first + tail_tokens]
    tail = hashlib.sha256(_TAIL_PREFIX + (after[-1] if after else hashlib.sha256(_CHAIN_PREFIX + model).digest()))
    tail.update(_as_uint32(tokens[first : first + tail_tokens]))
    tail.update(struct.pack("<I", len(extra.request)) + extra.request)
    tail.update(_inputs_of_chunks(inputs, chunk_tokens, len(after), len(after) + 1).get(len(after), b""))
    digest = tail.digest()
    return digest[:-SEGMENT_BYTES] + segment_of(after[-1]) if after else digest


def _inputs_of_chunks(inputs: Iterable[Input], chunk_tokens: int, first: int, end: int) -> dict[int, bytes]:
    """Return the hashed bytes of inputs in chunks ``first`` to ``end``, by chunk index."""
    chunks: dict[int, bytes] = {}
    for each in sorted(inputs):
        last = (each.offset + each.length - 1) // chunk_tokens
        for index in range(max(each.offset // chunk_tokens, first), min(last + 1, end)):
            place = struct.pack("<qq", each.offset - index * chunk_tokens, each.length)
            chunks[index] = chunks.get(index, b"") + each.content + place
    return chunks


def _as_uint32(tokens: Sequence[int] | npt.NDArray[np.integer]) -> memoryview:
    if not isinstance(tokens, np.ndarray):
        # On a list this is three times as fast as numpy. It checks types and ranges too.
        packed = array.array("I", tokens)
        if sys.byteorder == "big":
            packed.byteswap()
        return memoryview(packed).cast("B")
    if tokens.dtype.kind not in "iu":
        raise TypeError(f"token IDs must be integers, not {tokens.dtype}")
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0 or high >= 1 << 32:
        raise OverflowError(f"token IDs are {low} to {high}; they must be 0 to 2**32 - 1")
    return memoryview(tokens.astype("<u4").tobytes())


def block_hash(key: bytes) -> int:
    """Return the block hash that KV events have for a record: the first 8 bytes of its key.

    Routers keep 64 bits of a hash. The last 8 bytes of a key are the same for all records of a segment.
    """
    return int.from_bytes(key[:8], "big")


def storage_key(key: bytes) -> bytes:
    """Return the key on the storage server: ``kv:`` and 64 hexadecimal digits."""
    return STORAGE_PREFIX + key.hex().encode()
