"""Identity: which bytes may stand for which.

What a model computes has one name for each prefix of a prompt: a *link* of a chain of hashes over its chunks (256
tokens by default), which begins with the digest of a :class:`ModelIdentity`. The chain is hashed once, whatever the
number of ranks and of KV cache groups. A stored record holds a part of what a link names: some layers, some heads, of
one group, in some form. A :class:`KVNamespace` says which, and the record's key is made of its digest and of the link.

Two records have the same key only if they hold the same part of what the same model computed in the same way from the
same tokens after the same prefix, so a mismatch is a miss, never a mixed-up hit. The rank that made a record is no part
of it, nor is the number of ranks: what it holds is. Nor is the entropy codec: the stored record names it.

Keys of one namespace whose prompts begin with the same chunk end alike (:func:`chain_of`): whoever spreads records over
several nodes can keep a prefix on one of them, knowing nothing but keys.

The hash is SHA-256 (FIPS 180-4): cryptographic, the same in every process, and no slower than the alternatives where
the CPU has SHA instructions.
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

__all__ = [
    "DEFAULT_CHUNK_TOKENS",
    "KEY_BYTES",
    "RECORD_VERSION",
    "SCHEMA_VERSION",
    "Extra",
    "Input",
    "KVNamespace",
    "ModelIdentity",
    "prefix_chain",
    "chain_of",
    "private_chunk_keys",
    "record_keys",
    "storage_key",
    "tail_chunk_key",
]

DEFAULT_CHUNK_TOKENS: Final = 256
"""Tokens in a chunk; ShadowServe section 5, and what CacheGen and LMCache use."""

KEY_BYTES: Final = 32
SCHEMA_VERSION: Final = 4
"""4: keys end with what names their chain; 3: one chain for all ranks and groups, keys by what records hold; 2: a chain
for each rank; 1: with the model's name."""
RECORD_VERSION: Final = 2
"""Of the stored record. Not in shadowserve.record: hosts name it, and do not load the C core, which records take."""
_CHAIN_BYTES: Final = 8
"""Of a link and of a key, at its end, that a whole chain has in common; 192 bits are left to tell its members apart."""
_CHAIN_PREFIX: Final = b"shadowserve chain 2\0"
_TAIL_PREFIX: Final = b"shadowserve tail 2\0"
_PRIVATE_PREFIX: Final = b"shadowserve private 1\0"
_RECORD_PREFIX: Final = b"shadowserve record 4\0"
_STORAGE_PREFIX: Final = b"kv:"


@dataclass(frozen=True, kw_only=True)
class ModelIdentity:
    """Everything but tokens that changes the values of any KV of a model, and that all its ranks and groups share.

    Attributes:
        model: digest of what computes: the model's class, configuration, code, and what the engine was told that
            changes values (docs/identity.md). Not its name: the same model is the same under every name.
        dtype: logical dtype of the cache, which attention reads: ``"float16"``, ``"bfloat16"``, ``"float32"`` or an
            fp8 name.
        weights: digest of the content of its weights; empty where ``model`` says it all.
        chunk_tokens: tokens in a chunk.
        tenant_salt: separates tenants; bound by the server that authenticated the caller, never by the caller.
    """

    model: str
    dtype: str
    weights: str = ""
    chunk_tokens: int = DEFAULT_CHUNK_TOKENS
    tenant_salt: str = ""

    def digest(self) -> bytes:
        """Return 32 bytes, that the chain begins with."""
        return _digest(asdict(self))


@dataclass(frozen=True, kw_only=True)
class KVNamespace:
    """Which part of a model's KV a record holds.

    Attributes:
        model: whose KV.
        layers: first layer and the one behind the last, counted among the group's.
        heads: first KV head and the one behind the last, counted among the model's; (0, 1) for a latent, which is the
            same on all ranks.
        group: the KV cache group: what its layers keep of a prompt, and which layers they are where a model has
            several groups that keep the same.
    """

    model: ModelIdentity
    layers: tuple[int, int]
    heads: tuple[int, int]
    group: str = "full"

    def name(self, layout: ChunkLayout) -> ChunkLayout:
        """Return the description of this part's chunks with the namespace that they have in that form.

        A record may hold fewer tokens than its chunk has, the last of them: of a window, what a hit can need.

        Raises:
            ValueError: it describes other layers or heads.
        """
        (first_layer, end_layer), (first_head, end_head) = self.layers, self.heads
        if min(first_layer, first_head) < 0 or end_layer - first_layer != layout.layers:
            raise ValueError(f"layers {self.layers}: {layout} does not hold them")
        if end_head <= first_head or layout.vector_length % (end_head - first_head):
            raise ValueError(f"heads {self.heads}: vectors of {layout.vector_length} elements do not hold them")
        part = {"group": self.group, "layers": self.layers, "heads": self.heads}
        digest = _digest({"model": self.model.digest().hex(), **part, "layout": layout.described()})
        return replace(layout, namespace=digest)


@dataclass(frozen=True, order=True)
class Input:
    """What a model reads in the place of some tokens of a prompt, which only keep the place: an image, say.

    Attributes:
        offset: of the first of those tokens.
        length: tokens.
        content: digest of all that it is, 32 bytes.

    Raises:
        ValueError: it is nowhere in a prompt, or its digest has another length.
    """

    offset: int
    length: int
    content: bytes

    def __post_init__(self) -> None:
        if self.offset < 0 or self.length < 1 or len(self.content) != KEY_BYTES:
            raise ValueError(
                f"an input of {self.length} tokens at {self.offset}, its digest of {len(self.content)} bytes"
            )


@dataclass(frozen=True)
class Extra:
    """What a prompt's KV depends on beside its tokens.

    Attributes:
        request: holds for all of the prompt: salt, epoch, adapter.
        inputs: each holds for the chunks from its own on, and not for those before it.
    """

    request: bytes = b""
    inputs: tuple[Input, ...] = ()


def _digest(fields: dict[str, Any]) -> bytes:
    """Return the SHA-256 of the canonical JSON of fields and schema version."""
    fields = fields | {"schema_version": SCHEMA_VERSION}
    text = json.dumps(fields, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).digest()


def record_keys(namespace: bytes, links: Iterable[bytes]) -> list[bytes]:
    """Return the keys of the records that hold a namespace's part of the chunks that links name.

    24 bytes of ``SHA-256(prefix || namespace || link)``, then 8 of ``SHA-256(prefix || namespace || link[-8:])``.
    """
    before, links = _RECORD_PREFIX + namespace, list(links)
    chains = {chain_of(link) for link in links}
    ends = {chain: hashlib.sha256(before + chain).digest()[:_CHAIN_BYTES] for chain in chains}
    return [hashlib.sha256(before + link).digest()[:-_CHAIN_BYTES] + ends[link[-_CHAIN_BYTES:]] for link in links]


def chain_of(key: bytes) -> bytes:
    """Return the 8 bytes that links share, and keys of one namespace, if their prompts begin with the same chunk."""
    return key[-_CHAIN_BYTES:]


def private_chunk_keys(links: Iterable[bytes], secret: bytes) -> list[bytes]:
    """Return links for the same chunks that cannot be computed without ``secret``, of 32 bytes.

    They share their last 8 bytes as those of one prompt do.
    """
    end = hashlib.sha256(_PRIVATE_PREFIX + secret).digest()[-_CHAIN_BYTES:]
    return [hashlib.sha256(_PRIVATE_PREFIX + secret + link).digest()[:-_CHAIN_BYTES] + end for link in links]


def prefix_chain(
    model: bytes,
    tokens: Sequence[int] | npt.NDArray[np.integer],
    *,
    chunk_tokens: int = DEFAULT_CHUNK_TOKENS,
    extra: Extra | None = None,
    after: Sequence[bytes] = (),
) -> list[bytes]:
    """Return the link of each complete chunk of a prompt: ``len(tokens) // chunk_tokens`` links of 32 bytes.

    ``H_0 = SHA-256(prefix || model)``, ``H_i = SHA-256(H_{i-1} || tokens_i as little-endian uint32 ||
    len(request) as uint32 || request || inputs_i)``, from ``H_2`` on with the last 8 bytes of ``H_1`` in place of its
    own. ``inputs_i`` has, for each input with a token in the chunk, in order: its content, its first token counted from
    the chunk's first as int64, its tokens as int64. A link therefore names its chunk together with everything before
    it, and nothing behind it.

    Args:
        model: digest of the :class:`ModelIdentity`, 32 bytes.
        tokens: token ids of the whole prompt, each in 0 .. 2**32 - 1.
        chunk_tokens: tokens in a chunk, as the identity has them.
        extra: what else than tokens the KV depends on, if anything.
        after: links already computed for a prefix of the same prompt; the chain goes on behind them.

    Raises:
        ValueError: a digest of another length, a chunk size under 1.
        OverflowError: a token id that does not fit; wrapped around, it would be another one's.
        TypeError: token ids that are no integers.
    """
    if len(model) != KEY_BYTES:
        raise ValueError(f"a model's digest has {KEY_BYTES} bytes, this one {len(model)}")
    if chunk_tokens < 1:
        raise ValueError(f"chunk_tokens is {chunk_tokens}; a chunk has at least one token")
    links = list(after)
    first = len(links) * chunk_tokens
    count = len(tokens) // chunk_tokens - len(links)
    if count <= 0:
        return links[: len(tokens) // chunk_tokens]
    data = _as_uint32(tokens[first : first + count * chunk_tokens])
    extra = extra or Extra()
    tail = struct.pack("<I", len(extra.request)) + extra.request
    inputs = _inputs_of_chunks(extra.inputs, chunk_tokens, len(links), len(links) + count)
    previous = links[-1] if links else hashlib.sha256(_CHAIN_PREFIX + model).digest()
    end = chain_of(links[-1]) if links else b""
    step = chunk_tokens * 4
    for start in range(0, count * step, step):
        link = hashlib.sha256(previous)
        link.update(data[start : start + step])
        link.update(tail)
        if (there := inputs.get(len(links))) is not None:
            link.update(there)
        previous = link.digest()
        if end:
            previous = previous[:-_CHAIN_BYTES] + end
        else:
            end = chain_of(previous)
        links.append(previous)
    return links


def tail_chunk_key(
    model: bytes,
    tokens: Sequence[int] | npt.NDArray[np.integer],
    tail_tokens: int,
    *,
    chunk_tokens: int = DEFAULT_CHUNK_TOKENS,
    extra: Extra | None = None,
    after: Sequence[bytes] = (),
) -> bytes:
    """Return the link of a prompt's tail: of ``tail_tokens`` tokens, fewer than a chunk's, behind its whole chunks.

    As that of a chunk (:func:`prefix_chain`), of the tail's tokens alone, and hashed behind a prefix that no chunk has:
    ``SHA-256(prefix || H_i || tokens || ...)``, with the last 8 bytes of its chain's links if it has any. Inputs that
    begin behind the tail are no part of it.

    Args:
        model, tokens, chunk_tokens, extra: as of the chain.
        tail_tokens: 1 to ``chunk_tokens - 1``.
        after: links of all whole chunks before it.

    Raises:
        ValueError: the prompt has no such tail.
        OverflowError, TypeError: as for the chain.
    """
    first = len(after) * chunk_tokens
    if not 0 < tail_tokens < chunk_tokens or len(tokens) < first + tail_tokens:
        raise ValueError(f"a tail of {tail_tokens} tokens behind {first} of {len(tokens)}, in chunks of {chunk_tokens}")
    extra = extra or Extra()
    inputs = [each for each in extra.inputs if each.offset < first + tail_tokens]
    link = hashlib.sha256(_TAIL_PREFIX + (after[-1] if after else hashlib.sha256(_CHAIN_PREFIX + model).digest()))
    link.update(_as_uint32(tokens[first : first + tail_tokens]))
    link.update(struct.pack("<I", len(extra.request)) + extra.request)
    link.update(_inputs_of_chunks(inputs, chunk_tokens, len(after), len(after) + 1).get(len(after), b""))
    digest = link.digest()
    return digest[:-_CHAIN_BYTES] + chain_of(after[-1]) if after else digest


def _inputs_of_chunks(inputs: Iterable[Input], chunk_tokens: int, first: int, end: int) -> dict[int, bytes]:
    """Return what the links of chunks ``first`` up to ``end`` hold of inputs, where any is."""
    chunks: dict[int, bytes] = {}
    for each in sorted(inputs):
        last = (each.offset + each.length - 1) // chunk_tokens
        for index in range(max(each.offset // chunk_tokens, first), min(last + 1, end)):
            place = struct.pack("<qq", each.offset - index * chunk_tokens, each.length)
            chunks[index] = chunks.get(index, b"") + each.content + place
    return chunks


def _as_uint32(tokens: Sequence[int] | npt.NDArray[np.integer]) -> memoryview:
    if not isinstance(tokens, np.ndarray):
        # Three times as fast on a list as numpy, and as strict about types and range as we need.
        packed = array.array("I", tokens)
        if sys.byteorder == "big":
            packed.byteswap()
        return memoryview(packed).cast("B")
    if tokens.dtype.kind not in "iu":
        raise TypeError(f"token ids are integers, not {tokens.dtype}")
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0 or high >= 1 << 32:
        raise OverflowError(f"token ids go from {low} to {high}; they must be from 0 to 2**32 - 1")
    return memoryview(tokens.astype("<u4").tobytes())


def storage_key(key: bytes) -> bytes:
    """Return the text under which a chunk is stored: ``kv:`` and 64 hexadecimal digits, easy on redis-cli."""
    return _STORAGE_PREFIX + key.hex().encode()
