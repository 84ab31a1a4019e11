"""Namespaces and key chains: the format is frozen, and nothing that changes the KV can be left out of a key."""

import hashlib
import json
import os
import struct
import subprocess
import sys
from dataclasses import asdict, fields, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from machine import NEVER_S

from shadowserve.keys import DEFAULT_CHUNK_TOKENS, KVNamespace, chunk_keys, storage_key

NAMESPACE = KVNamespace(
    model="a/model",
    dtype="bfloat16",
    layers=32,
    kv_heads=8,
    head_size=128,
    attention="gqa",
    quantizer="binned",
    quantizer_parameters={"bins": 32},
)

# What is stored today must be found by every later version: if one of these changes, SCHEMA_VERSION must, too.
GOLDEN_DIGEST = "bc87c4859ab25e1337d16951ceec24e34a02abf9a0b316d3883a3760ea856608"
GOLDEN_KEYS = [
    "8cc68081d41f00c5e6dd536d396b9eace1ed012c8a74ce247fcd0c1bc5dc42bf",
    "a9a21b5d3ce1773062256069dddfc8a9c499f54f67e75ded6a91fc43681d80a7",
    "6e01fe484ed3ee10d3036b06e43c2ce902fc049d5638459b795ac7d6c10d73f2",
]
GOLDEN_KEYS_SALTED = [
    "b77d09612c64d71c0efba137600638ef88d34857cafaa0a3ceaec9ea58b1fbb7",
    "850fdc5be63eb3c38818500883881a3e4135113cc949ef153b1d1c3fdbaf6f86",
]

# One other value for each field; a field that is added to KVNamespace has to be added here to pass.
OTHER: dict[str, Any] = {
    "model": "another/model",
    "weights": "0123abc",
    "dtype": "float16",
    "layers": 31,
    "kv_heads": 4,
    "head_size": 64,
    "attention": "mha",
    "kv_groups": ("layers 0-31: sliding window 4096",),
    "chunk_tokens": 128,
    "tp_rank": 1,
    "tp_size": 2,
    "pp_rank": 1,
    "pp_size": 2,
    "quantizer": "lossless",
    "quantizer_parameters": {"bins": 64},
    "tenant_salt": "tenant",
}

TOKENS = list(range(1000))


def reference_keys(namespace: bytes, tokens: list[int], chunk_tokens: int, extra: bytes) -> list[bytes]:
    """The chain as the docstring of chunk_keys defines it, one token at a time."""
    keys = []
    previous = hashlib.sha256(b"shadowserve chain 1\0" + namespace).digest()
    for start in range(0, len(tokens) - chunk_tokens + 1, chunk_tokens):
        chunk = b"".join(struct.pack("<I", token) for token in tokens[start : start + chunk_tokens])
        previous = hashlib.sha256(previous + chunk + struct.pack("<I", len(extra)) + extra).digest()
        keys.append(previous)
    return keys


def test_the_namespace_digest_is_frozen() -> None:
    assert NAMESPACE.digest().hex() == GOLDEN_DIGEST


def test_the_key_chain_is_frozen() -> None:
    assert [key.hex() for key in chunk_keys(NAMESPACE.digest(), TOKENS)] == GOLDEN_KEYS
    salted = chunk_keys(NAMESPACE.digest(), range(9), chunk_tokens=4, extra=b"salt")
    assert [key.hex() for key in salted] == GOLDEN_KEYS_SALTED


def test_the_storage_key_is_frozen() -> None:
    assert storage_key(bytes(range(32))) == b"kv:" + bytes(range(32)).hex().encode()


def test_the_digest_is_that_of_the_canonical_json() -> None:
    content = asdict(NAMESPACE) | {"schema_version": 2}
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    assert NAMESPACE.digest() == hashlib.sha256(text.encode()).digest()


@pytest.mark.parametrize("name", [field.name for field in fields(KVNamespace)])
def test_each_field_changes_the_digest(name: str) -> None:
    changed = replace(NAMESPACE, **{name: OTHER[name]})
    assert getattr(changed, name) != getattr(NAMESPACE, name)
    assert changed.digest() != NAMESPACE.digest()


def test_no_two_of_the_changed_namespaces_share_a_digest() -> None:
    digests = {replace(NAMESPACE, **{name: value}).digest() for name, value in OTHER.items()}
    assert len(digests) == len(OTHER) == len(fields(KVNamespace))


def test_neighbouring_texts_do_not_run_into_each_other() -> None:
    assert replace(NAMESPACE, model="ab", weights="c").digest() != replace(NAMESPACE, model="a", weights="bc").digest()
    assert replace(NAMESPACE, kv_groups=("a", "b")).digest() != replace(NAMESPACE, kv_groups=("a,b",)).digest()


def test_the_order_of_quantizer_parameters_does_not_matter() -> None:
    forward = replace(NAMESPACE, quantizer_parameters={"bins": 32, "groups": 4})
    backward = replace(NAMESPACE, quantizer_parameters={"groups": 4, "bins": 32})
    assert forward.digest() == backward.digest()


def test_no_quantizer_parameters_are_the_same_as_empty_ones() -> None:
    without = replace(NAMESPACE, quantizer_parameters=None)
    assert without.digest() == replace(NAMESPACE, quantizer_parameters={}).digest()


@settings(max_examples=60)
@given(
    tokens=st.lists(st.integers(0, 2**32 - 1), max_size=70),
    chunk_tokens=st.integers(1, 20),
    extra=st.binary(max_size=8),
)
def test_keys_equal_the_definition_and_extend_those_of_every_prefix(
    tokens: list[int], chunk_tokens: int, extra: bytes
) -> None:
    namespace = NAMESPACE.digest()
    keys = chunk_keys(namespace, tokens, chunk_tokens=chunk_tokens, extra=extra)
    assert keys == reference_keys(namespace, tokens, chunk_tokens, extra)
    for length in range(len(tokens) + 1):
        shorter = chunk_keys(namespace, tokens[:length], chunk_tokens=chunk_tokens, extra=extra)
        assert shorter == keys[: length // chunk_tokens]


@settings(max_examples=60)
@given(position=st.integers(0, 8 * 16 - 1), token=st.integers(0, 2**32 - 1))
def test_a_changed_token_changes_its_chunk_and_all_later_ones_only(position: int, token: int) -> None:
    tokens = list(range(8 * 16))
    tokens[position] = token if token != position else token + 1
    before = chunk_keys(NAMESPACE.digest(), list(range(8 * 16)), chunk_tokens=16)
    after = chunk_keys(NAMESPACE.digest(), tokens, chunk_tokens=16)
    changed = position // 16
    assert after[:changed] == before[:changed]
    assert not set(after[changed:]) & set(before)


@pytest.mark.parametrize("known", range(5))
def test_a_chain_goes_on_behind_known_keys(known: int) -> None:
    namespace = NAMESPACE.digest()
    keys = chunk_keys(namespace, TOKENS, chunk_tokens=200, extra=b"x")
    assert chunk_keys(namespace, TOKENS, chunk_tokens=200, extra=b"x", after=keys[:known]) == keys


def test_more_known_keys_than_chunks_are_cut() -> None:
    keys = chunk_keys(NAMESPACE.digest(), TOKENS)
    assert chunk_keys(NAMESPACE.digest(), TOKENS[:600], after=keys) == keys[:2]


def test_known_keys_are_not_changed() -> None:
    known = chunk_keys(NAMESPACE.digest(), TOKENS[:256])
    chunk_keys(NAMESPACE.digest(), TOKENS, after=known)
    assert len(known) == 1


@pytest.mark.parametrize("length", [0, 1, DEFAULT_CHUNK_TOKENS - 1])
def test_a_prompt_without_a_full_chunk_has_no_keys(length: int) -> None:
    assert chunk_keys(NAMESPACE.digest(), TOKENS[:length]) == []


def test_namespace_and_extra_keys_separate_equal_prompts() -> None:
    chains = [
        chunk_keys(NAMESPACE.digest(), TOKENS),
        chunk_keys(replace(NAMESPACE, tenant_salt="other").digest(), TOKENS),
        chunk_keys(NAMESPACE.digest(), TOKENS, extra=b"adapter"),
        chunk_keys(NAMESPACE.digest(), TOKENS, extra=b"adapter\0"),
    ]
    assert len({key for chain in chains for key in chain}) == 4 * len(chains[0])


@pytest.mark.parametrize("dtype", ["<u4", ">u4", "<i4", "<i8", ">i8", "<u8", "<u2"])
def test_arrays_of_any_integer_type_have_the_keys_of_the_list(dtype: str) -> None:
    array = np.array(TOKENS, dtype=dtype)
    assert chunk_keys(NAMESPACE.digest(), array) == chunk_keys(NAMESPACE.digest(), TOKENS)
    assert chunk_keys(NAMESPACE.digest(), np.repeat(array, 2)[::2]) == chunk_keys(NAMESPACE.digest(), TOKENS)


@pytest.mark.parametrize("token", [-1, 2**32, 2**63, 2**70, -(2**40)])
def test_a_token_that_does_not_fit_is_refused_and_not_wrapped_around(token: int) -> None:
    with pytest.raises(OverflowError):
        chunk_keys(NAMESPACE.digest(), [*TOKENS[:255], token])


@pytest.mark.parametrize("token", [-1, 2**32, 2**40 + 5])
def test_an_array_with_a_token_that_does_not_fit_is_refused_and_not_wrapped_around(token: int) -> None:
    with pytest.raises(OverflowError):
        chunk_keys(NAMESPACE.digest(), np.array([*TOKENS[:255], token], dtype=np.int64))


def test_tokens_that_are_no_integers_are_refused() -> None:
    with pytest.raises(TypeError):
        chunk_keys(NAMESPACE.digest(), [1.5] * 256)  # type: ignore[list-item]
    with pytest.raises(TypeError):
        chunk_keys(NAMESPACE.digest(), np.full(256, 1.5))


def test_the_largest_token_fits() -> None:
    assert chunk_keys(NAMESPACE.digest(), [2**32 - 1] * 256) == reference_keys(
        NAMESPACE.digest(), [2**32 - 1] * 256, 256, b""
    )


@pytest.mark.parametrize("size", [0, 31, 33, 64])
def test_a_namespace_of_another_length_is_refused(size: int) -> None:
    with pytest.raises(ValueError, match="32 bytes"):
        chunk_keys(bytes(size), TOKENS)


@pytest.mark.parametrize("chunk_tokens", [0, -1])
def test_a_chunk_without_tokens_is_refused(chunk_tokens: int) -> None:
    with pytest.raises(ValueError, match="at least one token"):
        chunk_keys(NAMESPACE.digest(), TOKENS, chunk_tokens=chunk_tokens)


@pytest.mark.parametrize("seed", ["0", "1", "4242"])
def test_keys_are_the_same_in_every_process(seed: str) -> None:
    program = (
        "from shadowserve.keys import KVNamespace, chunk_keys\n"
        "n = KVNamespace(model='a/model', dtype='bfloat16', layers=32, kv_heads=8, head_size=128, attention='gqa',"
        " quantizer='binned', quantizer_parameters={'bins': 32})\n"
        "print(n.digest().hex(), *[key.hex() for key in chunk_keys(n.digest(), range(1000))])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONHASHSEED": seed},
        capture_output=True,
        text=True,
        check=True,
        timeout=NEVER_S,
    )
    assert done.stdout.split() == [GOLDEN_DIGEST, *GOLDEN_KEYS]
