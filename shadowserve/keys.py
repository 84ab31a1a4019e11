"""Identity: which bytes may stand for which.

A :class:`KVNamespace` names everything that changes the decoded values of a KV cache; its digest starts a chain of
prefix hashes over a prompt's chunks (256 tokens by default). Two chunks have the same key only if they were made by
the same model in the same way from the same tokens after the same prefix, so a mismatch is a miss, never a mixed-up
hit. The entropy codec is not part of the identity: the stored record names it.

The hash is SHA-256 (FIPS 180-4): cryptographic, the same in every process, and no slower than the alternatives where
the CPU has SHA instructions.
"""

import array
import hashlib
import json
import struct
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Final, Literal

import numpy as np
import numpy.typing as npt

__all__ = [
    "DEFAULT_CHUNK_TOKENS",
    "KEY_BYTES",
    "RECORD_VERSION",
    "SCHEMA_VERSION",
    "KVNamespace",
    "chunk_keys",
    "storage_key",
]

DEFAULT_CHUNK_TOKENS: Final = 256
"""Tokens in a chunk; ShadowServe section 5, and what CacheGen and LMCache use."""

KEY_BYTES: Final = 32
SCHEMA_VERSION: Final = 2
"""2: weights and configuration by content; 1 had the model's name, and samples."""
RECORD_VERSION: Final = 2
"""Of the stored record. Not in shadowserve.record: hosts name it, and do not load the C core, which records take."""
_CHAIN_PREFIX: Final = b"shadowserve chain 1\0"
_STORAGE_PREFIX: Final = b"kv:"


@dataclass(frozen=True, kw_only=True)
class KVNamespace:
    """Everything that changes the decoded values of a KV cache.

    Attributes:
        model: digest of what computes: the model's class, configuration, code, and what the engine was told that
            changes values (docs/identity.md). Not its name: the same model is the same under every name.
        weights: digest of the content of its weights; empty where ``model`` says it all.
        dtype: logical dtype of the cache, ``"float16"``, ``"bfloat16"``, ``"float32"`` or an fp8 name.
        layers: layers that this rank holds.
        kv_heads: KV heads that this rank holds.
        head_size: elements.
        attention: ``"mha"``, ``"gqa"`` or ``"mla"``.
        kv_groups: KV cache groups of a hybrid model, each a description of its layers; one group is the common case.
        chunk_tokens: tokens in a chunk.
        tp_rank: tensor-parallel rank; each rank stores its own shard.
        tp_size: tensor-parallel size.
        pp_rank: pipeline-parallel rank.
        pp_size: pipeline-parallel size.
        quantizer: ``"lossless"``, ``"binned"`` or ``"passthrough"``.
        quantizer_parameters: such as ``{"bins": 64, "value_bins": 16}``: all that decoded values depend on.
        tenant_salt: separates tenants; bound by the server that authenticated the caller, never by the caller.
    """

    model: str
    dtype: str
    layers: int
    kv_heads: int
    head_size: int
    attention: Literal["mha", "gqa", "mla"]
    quantizer: str
    weights: str = ""
    kv_groups: tuple[str, ...] = ()
    chunk_tokens: int = DEFAULT_CHUNK_TOKENS
    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    quantizer_parameters: Mapping[str, int] | None = None
    tenant_salt: str = ""

    def digest(self) -> bytes:
        """Return the 32-byte SHA-256 of the canonical JSON of all fields and the schema version."""
        fields = asdict(self) | {"schema_version": SCHEMA_VERSION}
        fields["quantizer_parameters"] = dict(self.quantizer_parameters or {})
        text = json.dumps(fields, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
        return hashlib.sha256(text.encode()).digest()


def chunk_keys(
    namespace: bytes,
    tokens: Sequence[int] | npt.NDArray[np.integer],
    *,
    chunk_tokens: int = DEFAULT_CHUNK_TOKENS,
    extra: bytes = b"",
    after: Sequence[bytes] = (),
) -> list[bytes]:
    """Return the key of each complete chunk of a prompt: ``len(tokens) // chunk_tokens`` keys of 32 bytes.

    ``H_0 = SHA-256(prefix || namespace)``, ``H_i = SHA-256(H_{i-1} || tokens_i as little-endian uint32 ||
    len(extra) as uint32 || extra)``. A key therefore names its chunk together with everything before it.

    Args:
        namespace: digest of the :class:`KVNamespace`, 32 bytes.
        tokens: token ids of the whole prompt, each in 0 .. 2**32 - 1.
        chunk_tokens: tokens in a chunk.
        extra: what else distinguishes this request's KV: cache salt, LoRA adapter, digests of multimodal inputs.
        after: keys already computed for a prefix of the same prompt; the chain goes on behind them.

    Raises:
        ValueError: a namespace of another length, a chunk size under 1.
        OverflowError: a token id that does not fit; wrapped around, it would be another one's.
        TypeError: token ids that are no integers.
    """
    if len(namespace) != KEY_BYTES:
        raise ValueError(f"a namespace digest has {KEY_BYTES} bytes, this one {len(namespace)}")
    if chunk_tokens < 1:
        raise ValueError(f"chunk_tokens is {chunk_tokens}; a chunk has at least one token")
    keys = list(after)
    first = len(keys) * chunk_tokens
    count = len(tokens) // chunk_tokens - len(keys)
    if count <= 0:
        return keys[: len(tokens) // chunk_tokens]
    data = _as_uint32(tokens[first : first + count * chunk_tokens])
    tail = struct.pack("<I", len(extra)) + extra
    previous = keys[-1] if keys else hashlib.sha256(_CHAIN_PREFIX + namespace).digest()
    step = chunk_tokens * 4
    for start in range(0, count * step, step):
        link = hashlib.sha256(previous)
        link.update(data[start : start + step])
        link.update(tail)
        previous = link.digest()
        keys.append(previous)
    return keys


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
