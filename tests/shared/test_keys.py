"""Names of models, chains and keys: the format is frozen, and every input that changes the KV changes the key."""

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

from shadowserve.chunk import ChunkLayout, DType, Quantizer
from shadowserve.keys import (
    Extra,
    Input,
    KVNamespace,
    ModelIdentity,
    prefix_chain,
    record_keys,
    segment_of,
    storage_key,
    tail_chunk_key,
)

MODEL = ModelIdentity(model="a/model", dtype="bfloat16")
LAYOUT = ChunkLayout(
    dtype=DType.BFLOAT16, layers=32, kinds=2, vector_length=1024, tokens=256, quantizer=Quantizer.BINNED, bins=32
)
NAMESPACE = KVNamespace(model=MODEL, layers=(0, 32), heads=(0, 8))

# Every later version must find today's records. If one of these values changes, SCHEMA_VERSION must change, too.
GOLDEN_MODEL = "3b86ca8d1b24b739b0cee657131abeb5a670fc2669c09536565d9ae654678468"
GOLDEN_NAMESPACE = "b5765fd2a2126cd67d740bcdd9d4cc757de441b4d8ee4ca5980f066151943977"
GOLDEN_LINKS = [
    "295d258109c5d033cbdb601e474e04f30bbdbe758c68b58a0a40b0d482c09183",
    "76383e95c0e6ab3572da01760b504aab2a78b04f3b9d06d10a40b0d482c09183",
    "f3c7a6d5e8656823539224d23f2c035f5d9f843e401c02370a40b0d482c09183",
]
GOLDEN_LINKS_SALTED = [
    "a18d00687cfeca5912eeaf700da7dbbeaefff859704d055760362c61c564f134",
    "82e158b91fbfc835622cbaef82dd3f649bd9893c590ec2aa60362c61c564f134",
]
GOLDEN_KEYS = [
    "3092b1150b14f29427dddae01e0acd4f60edd3346da20332e695758bc8320b58",
    "3647fc93175bfa83148c76242e5802602fc89609dacaa182e695758bc8320b58",
    "f9b2eed71f423c123a9da6f186534965400f8c5a7e6d64aae695758bc8320b58",
]
SCHEMA_4_KEY = "72287bf35353b2be9f303140e352ff4f7637ab7647a3c3596e5d4b44a888d734"
"""Key of the same tokens and model in schema 4."""

# One other value for each field. A new field must be added here.
OTHER_MODEL: dict[str, Any] = {
    "model": "another/model",
    "weights": "0123abc",
    "dtype": "float16",
    "chunk_tokens": 128,
    "tenant_salt": "tenant",
}
OTHER_PART: dict[str, Any] = {
    "model": replace(MODEL, weights="0123abc"),
    "layers": (32, 64),
    "heads": (8, 16),
    "group": "sliding window 4096",
    "steps": "small of 0123456789abcdef",
}
OTHER_LAYOUT: dict[str, Any] = {
    "dtype": DType.FLOAT16,
    "kinds": 1,
    "vector_length": 512,
    "quantizer": Quantizer.LOSSLESS,
    "bins": 64,
    "value_bins": 16,
    "scale_tokens": 4,
}

TOKENS = list(range(1000))


def reference_links(model: bytes, tokens: list[int], chunk_tokens: int, extra: Extra) -> list[bytes]:
    """Return the chain by the definition in prefix_chain's docstring, one token at a time."""
    links = []
    previous = hashlib.sha256(b"shadowserve chain 3\0" + model).digest()
    for start in range(0, len(tokens) - chunk_tokens + 1, chunk_tokens):
        chunk = b"".join(struct.pack("<I", token) for token in tokens[start : start + chunk_tokens])
        before = previous + chunk + struct.pack("<I", len(extra.request)) + extra.request
        there = [
            each
            for each in extra.inputs
            if {*range(each.offset, each.offset + each.length)} & {*range(start, start + chunk_tokens)}
        ]
        inputs = [each.content + struct.pack("<qq", each.offset - start, each.length) for each in there]
        previous = hashlib.sha256(before + b"".join(inputs)).digest()
        previous = previous[:24] + (links[-1] if len(links) % 4 else previous)[24:]
        links.append(previous)
    return links


def named(namespace: KVNamespace = NAMESPACE, layout: ChunkLayout = LAYOUT) -> bytes:
    return namespace.name(layout).namespace


def test_the_digests_are_frozen() -> None:
    assert (MODEL.digest().hex(), named().hex()) == (GOLDEN_MODEL, GOLDEN_NAMESPACE)


def test_the_chain_is_frozen() -> None:
    assert [link.hex() for link in prefix_chain(MODEL.digest(), TOKENS)] == GOLDEN_LINKS
    salted = prefix_chain(MODEL.digest(), range(9), chunk_tokens=4, extra=Extra(b"salt"))
    assert [link.hex() for link in salted] == GOLDEN_LINKS_SALTED


def test_the_keys_of_records_are_frozen() -> None:
    links = prefix_chain(MODEL.digest(), TOKENS)
    assert [key.hex() for key in record_keys(named(), links)] == GOLDEN_KEYS
    before = b"shadowserve record 4\0" + named()
    end = hashlib.sha256(before + links[0][24:]).digest()[:8]
    assert record_keys(named(), links) == [hashlib.sha256(before + link).digest()[:24] + end for link in links]
    assert SCHEMA_4_KEY not in GOLDEN_KEYS, "records of an earlier schema must be misses"


def test_keys_of_one_segment_end_alike_and_those_of_other_segments_do_not() -> None:
    other = named(replace(NAMESPACE, heads=(8, 16)))
    tokens = list(range(9 * 256))
    links = prefix_chain(MODEL.digest(), tokens)
    assert links == prefix_chain(MODEL.digest(), tokens, after=links[:6])
    tail = tail_chunk_key(MODEL.digest(), tokens, 100, after=links[:5])
    keys = record_keys(named(), [*links, tail])
    ends = [segment_of(key) for key in keys]
    assert ends == [ends[0]] * 4 + [ends[4]] * 4 + [ends[8], ends[4]] and len(set(ends)) == 3
    branched = prefix_chain(MODEL.digest(), [*tokens[:1024], *tokens], after=links[:4])
    branched_ends = [segment_of(key) for key in record_keys(named(), branched)]
    assert branched_ends[:4] == ends[:4] and not {*branched_ends[4:]} & {*ends}
    assert not {*ends} & {segment_of(key) for key in record_keys(other, links)}, (
        "ranks and groups must have different placements"
    )


def test_the_storage_key_is_frozen() -> None:
    assert storage_key(bytes(range(32))) == b"kv:" + bytes(range(32)).hex().encode()


def test_the_digests_are_those_of_canonical_json() -> None:
    layout = {
        "dtype": "bfloat16", "layers": 32, "kinds": 2, "vector_length": 1024, "tokens": 256, "quantizer": "binned",
        "bins": 32, "value_bins": 0, "scale_tokens": 1,
    }  # fmt: skip
    part = {"model": GOLDEN_MODEL, "group": "full", "layers": [0, 32], "heads": [0, 8], "layout": layout}
    for content, digest in ((asdict(MODEL), GOLDEN_MODEL), (part, GOLDEN_NAMESPACE)):
        text = json.dumps(content | {"schema_version": 5}, sort_keys=True, separators=(",", ":"))
        assert hashlib.sha256(text.encode()).hexdigest() == digest


@pytest.mark.parametrize("name", [field.name for field in fields(ModelIdentity)])
def test_each_field_of_a_model_changes_every_link(name: str) -> None:
    changed = replace(MODEL, **{name: OTHER_MODEL[name]})
    assert not set(prefix_chain(changed.digest(), TOKENS)) & set(prefix_chain(MODEL.digest(), TOKENS))


def test_each_part_of_a_models_kv_in_each_form_has_a_name_of_its_own() -> None:
    assert set(OTHER_PART) == {field.name for field in fields(KVNamespace)}
    parts = [replace(NAMESPACE, **{name: value}) for name, value in OTHER_PART.items()]
    forms = [
        replace(LAYOUT, **{name: value}, **({"bins": 0} if value is Quantizer.LOSSLESS else {}))
        for name, value in OTHER_LAYOUT.items()
    ]
    counted = {"namespace", "layers", "tokens"}  # the namespace's own layers and tokens
    assert set(OTHER_LAYOUT) | counted == {field.name for field in fields(ChunkLayout)}
    fewer = named(replace(NAMESPACE, layers=(0, 31)), replace(LAYOUT, layers=31))
    last = named(layout=replace(LAYOUT, tokens=LAYOUT.tokens // 2))  # layout of a window
    names = [named(), fewer, last, *(named(part) for part in parts), *(named(layout=form) for form in forms)]
    assert len(set(names)) == len(names)
    links = prefix_chain(MODEL.digest(), TOKENS)
    assert len({key for name in names for key in record_keys(name, links)}) == len(names) * len(links)


@pytest.mark.parametrize(
    "changes", [{"layers": (0, 31)}, {"layers": (-1, 31)}, {"heads": (0, 3)}, {"heads": (8, 8)}, {"heads": (-8, 0)}]
)
def test_a_part_that_chunks_of_this_size_do_not_hold_has_no_name(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"layers|heads|tokens"):
        replace(NAMESPACE, **changes).name(LAYOUT)


def test_a_name_that_was_there_does_not_matter() -> None:
    assert named(layout=replace(LAYOUT, namespace=bytes(range(32)))) == named()


def test_neighbouring_texts_do_not_run_into_each_other() -> None:
    assert replace(MODEL, model="ab", weights="c").digest() != replace(MODEL, model="a", weights="bc").digest()


@settings(max_examples=60)
@given(
    tokens=st.lists(st.integers(0, 2**32 - 1), max_size=70),
    chunk_tokens=st.integers(1, 20),
    request=st.binary(max_size=8),
    inputs=st.lists(
        st.builds(Input, st.integers(0, 80), st.integers(1, 30), st.binary(min_size=32, max_size=32)), max_size=4
    ),
)
def test_keys_equal_the_definition_and_extend_those_of_every_prefix(
    tokens: list[int], chunk_tokens: int, request: bytes, inputs: list[Input]
) -> None:
    extra = Extra(request, tuple(sorted(inputs)))
    model = MODEL.digest()
    keys = prefix_chain(model, tokens, chunk_tokens=chunk_tokens, extra=extra)
    assert keys == reference_links(model, tokens, chunk_tokens, extra)
    for length in range(len(tokens) + 1):
        shorter = prefix_chain(model, tokens[:length], chunk_tokens=chunk_tokens, extra=extra)
        assert shorter == keys[: length // chunk_tokens]


@settings(max_examples=60)
@given(position=st.integers(0, 8 * 16 - 1), token=st.integers(0, 2**32 - 1))
def test_a_changed_token_changes_its_chunk_and_all_later_ones_only(position: int, token: int) -> None:
    tokens = list(range(8 * 16))
    tokens[position] = token if token != position else token + 1
    before = prefix_chain(MODEL.digest(), list(range(8 * 16)), chunk_tokens=16)
    after = prefix_chain(MODEL.digest(), tokens, chunk_tokens=16)
    changed = position // 16
    assert after[:changed] == before[:changed]
    assert not set(after[changed:]) & set(before)


@pytest.mark.parametrize("count", range(5))
def test_a_chain_goes_on_behind_known_keys_and_does_not_change_them(count: int) -> None:
    extra = Extra(b"x", (Input(300, 300, bytes(32)),))
    keys = prefix_chain(MODEL.digest(), TOKENS, chunk_tokens=200, extra=extra)
    known = keys[:count]
    assert prefix_chain(MODEL.digest(), TOKENS, chunk_tokens=200, extra=extra, after=known) == keys
    assert known == keys[:count]


def test_more_known_keys_than_chunks_are_cut() -> None:
    keys = prefix_chain(MODEL.digest(), TOKENS)
    assert prefix_chain(MODEL.digest(), TOKENS[:600], after=keys) == keys[:2]


def test_namespace_and_extra_keys_separate_equal_prompts() -> None:
    chains = [
        prefix_chain(MODEL.digest(), TOKENS),
        prefix_chain(replace(MODEL, tenant_salt="other").digest(), TOKENS),
        prefix_chain(MODEL.digest(), TOKENS, extra=Extra(b"adapter")),
        prefix_chain(MODEL.digest(), TOKENS, extra=Extra(b"adapter\0")),
    ]
    assert len({key for chain in chains for key in chain}) == 4 * len(chains[0])


@pytest.mark.parametrize(
    ("offset", "length", "same"), [(0, 1, 0), (255, 1, 0), (256, 1, 1), (300, 500, 1), (511, 2, 1)]
)
def test_an_image_changes_the_chunks_from_its_own_on_and_not_the_text_before_it(
    offset: int, length: int, same: int
) -> None:
    model, tokens = MODEL.digest(), list(range(1024))
    text = prefix_chain(model, tokens)
    chains = [
        prefix_chain(model, tokens, extra=Extra(b"", (Input(offset, length, bytes([one] * 32)),))) for one in (1, 2)
    ]
    for chain in chains:
        assert chain[:same] == text[:same]
    assert len({link for chain in (text, *chains) for link in chain[same:]}) == 3 * (4 - same)
    salted = prefix_chain(model, tokens, extra=Extra(b"adapter", (Input(offset, length, bytes(32)),)))
    assert not set(salted) & set(text), "an input of the whole request must change all keys"


def test_an_image_counts_by_its_place_and_its_length_and_not_by_its_place_in_a_list() -> None:
    one, other = Input(10, 20, b"1" * 32), Input(40, 2, b"2" * 32)
    sets = [(one, other), (one,), (replace(one, offset=11), other), (replace(one, length=21), other)]
    assert len({prefix_chain(MODEL.digest(), TOKENS, extra=Extra(b"", each))[0] for each in sets}) == len(sets)
    turned = prefix_chain(MODEL.digest(), TOKENS, extra=Extra(b"", (other, one)))
    assert turned == prefix_chain(MODEL.digest(), TOKENS, extra=Extra(b"", (one, other)))


@pytest.mark.parametrize("given", [(-1, 1, bytes(32)), (0, 0, bytes(32)), (0, 1, bytes(31))])
def test_an_input_that_is_nowhere_in_a_prompt_has_no_name(given: tuple[int, int, bytes]) -> None:
    with pytest.raises(ValueError, match="an input of"):
        Input(*given)


@pytest.mark.parametrize("dtype", ["<u4", ">u4", "<i4", "<i8", ">i8", "<u8", "<u2"])
def test_arrays_of_any_integer_type_have_the_keys_of_the_list(dtype: str) -> None:
    array = np.array(TOKENS, dtype=dtype)
    assert prefix_chain(MODEL.digest(), array) == prefix_chain(MODEL.digest(), TOKENS)
    assert prefix_chain(MODEL.digest(), np.repeat(array, 2)[::2]) == prefix_chain(MODEL.digest(), TOKENS)


@pytest.mark.parametrize("token", [-1, 2**32, 2**40 + 5, 2**63, 2**70, 1.5])
def test_a_token_that_does_not_fit_is_refused_and_not_wrapped_around(token: Any) -> None:
    tokens = [*TOKENS[:255], token]
    for given_tokens in (tokens, np.array(tokens)) if token < 2**63 else (tokens,):
        with pytest.raises(OverflowError if isinstance(token, int) else TypeError):
            prefix_chain(MODEL.digest(), given_tokens)
    largest = [2**32 - 1] * 256
    assert prefix_chain(MODEL.digest(), largest) == reference_links(MODEL.digest(), largest, 256, Extra())


@pytest.mark.parametrize(
    ("model_bytes", "chunk_tokens", "message"),
    [(0, 256, "32 bytes"), (31, 256, "32 bytes"), (33, 256, "32 bytes"), (32, 0, "at least one token"), (32, -1, "at")],
)
def test_a_chain_without_a_model_or_without_tokens_is_refused(
    model_bytes: int, chunk_tokens: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        prefix_chain(bytes(model_bytes), TOKENS, chunk_tokens=chunk_tokens)


@pytest.mark.parametrize("seed", ["0", "1", "4242"])
def test_keys_are_the_same_in_every_process(seed: str) -> None:
    program = (
        "from shadowserve.keys import ModelIdentity, prefix_chain\n"
        "model = ModelIdentity(model='a/model', dtype='bfloat16').digest()\n"
        "print(model.hex(), *[link.hex() for link in prefix_chain(model, range(1000))])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONHASHSEED": seed},
        capture_output=True,
        text=True,
        check=True,
        timeout=NEVER_S,
    )
    assert done.stdout.split() == [GOLDEN_MODEL, *GOLDEN_LINKS]


def test_a_tail_has_a_link_of_its_own_tokens_and_of_all_before_them() -> None:
    tokens = list(range(22))
    links = prefix_chain(MODEL.digest(), tokens, chunk_tokens=8)

    def link(tokens: list[int], size: int, **named: Any) -> bytes:
        return tail_chunk_key(MODEL.digest(), tokens, size, chunk_tokens=8, **{"after": links, **named})

    text = b"shadowserve tail 2\0" + links[1] + np.arange(16, 20, dtype="<u4").tobytes() + struct.pack("<I", 0)
    definition = hashlib.sha256(text).digest()[:24] + links[0][24:]
    assert link(tokens, 4) == definition, "the definition is frozen"
    assert link(tokens[:20], 4) == link(np.array(tokens), 4) == link(tokens, 4)
    image = Input(17, 2, bytes(32))
    others = [
        link(tokens, 5),
        link([9, *tokens[1:]], 4, after=prefix_chain(MODEL.digest(), [9, *tokens[1:]], chunk_tokens=8)),
        link([*tokens[:19], 9], 4),
        link(tokens, 4, extra=Extra(b"salt")),
        link(tokens, 4, extra=Extra(inputs=(image,))),
        prefix_chain(MODEL.digest(), tokens[16:20], chunk_tokens=4)[0],
        prefix_chain(MODEL.digest(), tokens, chunk_tokens=4)[4],
    ]
    assert len({link(tokens, 4), *links, *others}) == 1 + len(links) + len(others)
    assert link(tokens, 4, extra=Extra(inputs=(Input(20, 2, bytes(32)),))) == link(tokens, 4), (
        "an image behind the chunk must not change its key"
    )


@pytest.mark.parametrize(("count", "size"), [(22, 0), (22, 8), (19, 4), (15, 4)])
def test_a_tail_that_the_prompt_does_not_have_has_no_link(count: int, size: int) -> None:
    links = prefix_chain(MODEL.digest(), list(range(16)), chunk_tokens=8)
    with pytest.raises(ValueError, match="no tail of"):
        tail_chunk_key(MODEL.digest(), list(range(count)), size, chunk_tokens=8, after=links)
