"""The format of an object in the bucket: it is frozen, and checked before use."""

from pathlib import Path

import pytest

from shadowserve.placement import partition_of
from shadowserve.pool.cold.layout import (
    FOOTER_BYTES,
    ColdObjectError,
    Contents,
    Place,
    finish,
    footer_bytes,
    parse_footer,
    parse_name,
)

CORPUS = sorted((Path(__file__).parent / "corpus" / "cold").iterdir())


def parsed(data: bytes, size: int | None = None) -> Contents:
    """Return the contents of a file of the corpus: the object's name, a line's end, the object."""
    name, _, body = data.partition(b"\n")
    size = len(body) if size is None else size
    return parse_footer(name.decode(), body[-footer_bytes(body, size) :], size)


@pytest.mark.parametrize("path", CORPUS, ids=lambda path: path.stem)
def test_only_sound_files_of_the_corpus_are_accepted(path: Path) -> None:
    if not path.stem.startswith("sound"):
        with pytest.raises(ColdObjectError):
            parsed(path.read_bytes())
        return
    data = path.read_bytes()
    contents = parsed(data)
    body = bytearray(data.partition(b"\n")[2][: sum(place.length for place in contents.places.values())])
    assert finish(body, contents.tenant, list(contents.places.items())) == contents
    assert bytes(body) == data.partition(b"\n")[2], "the format is frozen: a writer must produce the same bytes"


def test_every_changed_byte_of_a_footer_is_detected() -> None:
    data = next(path for path in CORPUS if path.stem == "sound-three").read_bytes()
    name, _, body = data.partition(b"\n")
    tail = footer_bytes(body, len(body))
    for position in range(len(body) - tail, len(body)):
        broken = bytearray(body)
        broken[position] ^= 0x41
        with pytest.raises(ColdObjectError):
            parsed(name + b"\n" + broken)
    for size in (0, FOOTER_BYTES, len(body) - 1, len(body) + 1, 1 << 63):
        with pytest.raises(ColdObjectError):
            parsed(data, size)
    with pytest.raises(ColdObjectError, match="only"):
        parse_footer(name.decode(), body[-FOOTER_BYTES:], len(body))


@pytest.mark.parametrize("tenant", ["", "team-a", "we/..%2F=x", "!~" * 64])
def test_a_name_contains_the_tenant_and_is_a_plain_path(tenant: str) -> None:
    name, other = (Contents.of(tenant, 200, [(key * 32, Place(0, 100, 10))]).name for key in (b"k", b"l"))
    parts = parse_name(name)
    assert parts.tenant == tenant
    assert name.count("/") == 2 and parts.partition == partition_of(b"k" * 32)
    assert all(each.isalnum() or each in "_-=/." for each in name)
    assert other != name


@pytest.mark.parametrize(
    "name",
    ["", "t", "000/t/x.kv", "../t/", "t/", "000/t=20/", f"000/t{'a' * 129}/", "00A/t/", "1000/t/"],
)
def test_other_names_have_no_tenant(name: str) -> None:
    assert parse_name(name + "0" * 40 + ".kv") is None


def test_an_object_with_a_duplicate_key_is_refused() -> None:
    body = bytearray(200)
    place = [(b"k" * 32, Place(0, 100, 50)), (b"k" * 32, Place(100, 100, 50))]
    contents = finish(body, "", place)
    with pytest.raises(ColdObjectError, match="each once"):
        parse_footer(contents.name, bytes(body), len(body))
