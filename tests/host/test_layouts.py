"""Scatter and gather against element-by-element copies, for every layout and dtype."""

import importlib.util
import itertools
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from machine import NEVER_S

from host_control.layouts import NOWHERE, LayoutKind, PagedLayout, element_type
from shadowserve.chunk import DType

LAYERS, BLOCKS, HEADS, BLOCK, SIZE = 3, 11, 2, 4, 6
TILED_BLOCK, TILED_SIZE = 32, 48


def cells(order: str, dtype: Any) -> list[Any]:
    """Caches of all layers in one allocation; ``order`` is the physical order of L, B, H, N, C."""
    extent = {"L": LAYERS, "B": BLOCKS, "H": HEADS, "N": BLOCK, "C": 2 * SIZE}
    memory = torch.zeros([extent[name] for name in order], dtype=dtype)
    whole = memory.permute([order.index(name) for name in "LBHNC"])
    return list(whole.unbind(0))


def naive_address(kind: LayoutKind, cache: Any, which: int, block: int, token: int, head: int, dim: int) -> Any:
    if kind == "kv_cells":
        return cache[block, head, token], which * SIZE + dim
    if kind in ("latent", "cells"):
        return cache[block, head, token], dim
    page = cache[block, head].reshape(-1)  # K as [dimension, token], then V as [token, dimension]
    return page, (dim * BLOCK + token if which == 0 else BLOCK * SIZE + token * SIZE + dim)


def naive_read(kind: LayoutKind, caches: list[Any], blocks: list[int]) -> Any:
    kinds, heads = 1 if kind in ("latent", "cells") else 2, caches[0].shape[1]
    size = caches[0].shape[-1] // kinds
    out = torch.empty(len(caches), kinds, len(blocks) * BLOCK, heads, size, dtype=caches[0].dtype)
    for layer, which, token, head, dim in itertools.product(*map(range, out.shape)):
        block = blocks[token // BLOCK]
        row, position = naive_address(kind, caches[layer], which, block, token % BLOCK, head, dim)
        out[layer, which, token, head, dim] = row[position]
    return out


def caches_of(kind: LayoutKind, order: str, dtype: Any) -> list[Any]:
    if kind == "latent":
        return [torch.zeros(BLOCKS, 1, BLOCK, 7, dtype=dtype) for _ in range(LAYERS)]
    if kind == "cells" and order == "padded":  # like recurrent state: other bytes of the page follow
        return [torch.zeros(BLOCKS, HEADS, BLOCK, 16, dtype=dtype)[..., 3:8] for _ in range(LAYERS)]
    return cells(order, dtype)


CASES = [
    ("cpu_pages", "LBHNC"),
    ("kv_cells", "LBHNC"),
    ("kv_cells", "LBNHC"),
    ("kv_cells", "LHBNC"),
    ("kv_cells", "BLHNC"),
    ("kv_cells", "BLNHC"),
    ("kv_cells", "BHLNC"),
    ("latent", ""),
    ("cells", "LBHNC"),
    ("cells", "LBNHC"),
    ("cells", "BLNHC"),
    ("cells", "padded"),
]
WAYS = {
    "all": [7, 2, 9],
    "not the first": [NOWHERE, 2, 9],
    "not the last": [7, 2, NOWHERE],
    "neither": [NOWHERE, 2, NOWHERE],
    "not the one between": [7, NOWHERE, 9],
    "none": [NOWHERE] * 3,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.uint8])
@pytest.mark.parametrize(("kind", "order"), CASES)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("mover", ["native", "torch"])
def test_scatter_places_every_element(kind: LayoutKind, order: str, dtype: Any, way: str, mover: Any) -> None:
    caches = caches_of(kind, order, dtype)
    layout = PagedLayout(caches, kind, mover)
    blocks = WAYS[way]
    generator = torch.Generator().manual_seed(5)
    count = layout.chunk_bytes(len(blocks) * BLOCK) // dtype.itemsize
    chunk = torch.randint(1, 120, (count,), generator=generator).to(dtype)
    layout.scatter(chunk.view(torch.uint8).numpy(), blocks)
    meant = [place for place, block in enumerate(blocks) if block != NOWHERE]
    found = naive_read(kind, caches, [blocks[place] for place in meant])
    tokens = [place * BLOCK + token for place in meant for token in range(BLOCK)]
    expected = chunk.view(*found.shape[:2], len(blocks) * BLOCK, *found.shape[3:])[:, :, tokens]
    assert torch.equal(found, expected)
    others = [block for block in range(BLOCKS) if block not in blocks]
    assert not any(cache[others].any() for cache in caches), "other blocks stay as they are"


@pytest.mark.parametrize(("kind", "order"), CASES)
@pytest.mark.parametrize("nowhere", [(), (0,), (0, 1, 2), (5,), (1, 4), (2, 3), range(6)], ids=str)
@pytest.mark.parametrize(("mover", "reshaping_chunks"), [("native", 0), ("torch", 0), ("torch", 3), ("torch", 9)])
def test_a_batch_is_scattered_like_single_chunks(
    kind: LayoutKind, order: str, nowhere: Sequence[int], mover: Any, reshaping_chunks: int
) -> None:
    """With any size of the reshaping buffer."""
    caches, expected = caches_of(kind, order, torch.float32), caches_of(kind, order, torch.float32)
    one_by_one = PagedLayout(expected, kind, mover)
    chunk_bytes = one_by_one.chunk_bytes(2 * BLOCK)
    layout = PagedLayout(caches, kind, mover, reshaping_chunks * chunk_bytes)
    blocks = [NOWHERE if place in nowhere else block for place, block in enumerate([7, 2, 9, 0, 5, 1])]
    chunks = torch.randint(0, 255, (3 * chunk_bytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(7))
    for index, chunk in enumerate(chunks.split(chunk_bytes)):
        one_by_one.scatter(chunk, blocks[2 * index : 2 * index + 2])
    layout.scatter(chunks, blocks, 2)
    as_bytes = [(torch.stack([*pair]).view(torch.uint8)) for pair in zip(caches, expected, strict=True)]
    assert all(torch.equal(found, wanted) for found, wanted in as_bytes)
    for place, block in enumerate([7, 2, 9, 0, 5, 1]):
        assert bool(expected[0][block].any()) == (place not in nowhere)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
@pytest.mark.parametrize(("tokens", "size"), [(32, 128), (16, 80), (48, 36), (128, 64)], ids=str)
def test_real_page_sizes_are_moved_exactly(dtype: Any, tokens: int, size: int) -> None:
    shape, kind, blocks = (5, 3, tokens, 2 * size), "cpu_pages", [3, 0, 4]
    generator = torch.Generator().manual_seed(11)
    held = [torch.randint(0, 120, shape, generator=generator).to(dtype) for _ in range(2)]
    moved, expected = [[cache.clone() for cache in held] for _ in range(2)]
    native, plain = (PagedLayout(caches, kind, mover) for caches, mover in ((moved, "native"), (expected, "torch")))
    chunks = [torch.zeros(native.chunk_bytes(3 * tokens), dtype=torch.uint8) for _ in range(2)]
    for layout, chunk in zip((native, plain), chunks, strict=True):
        layout.gather(chunk, blocks)
    assert torch.equal(*chunks)
    for layout in (native, plain):
        layout.scatter(chunks[0], [2, 1, 0])
    assert all(map(torch.equal, moved, expected))


@pytest.mark.parametrize(("kind", "order"), CASES)
@pytest.mark.parametrize(("mover", "reshaping_chunks"), [("native", 0), ("torch", 0), ("torch", 9)])
def test_single_layers_are_scattered(kind: LayoutKind, order: str, mover: Any, reshaping_chunks: int) -> None:
    """In any order of layers; layers that have not arrived do not reach pages."""
    caches, expected = caches_of(kind, order, torch.float32), caches_of(kind, order, torch.float32)
    whole = PagedLayout(expected, kind, mover)
    chunk_bytes = whole.chunk_bytes(2 * BLOCK)
    layout = PagedLayout(caches, kind, mover, reshaping_chunks * chunk_bytes)
    blocks = [7, 2, NOWHERE, 0, 5, 1]
    chunks = torch.randint(0, 99, (3 * chunk_bytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(7))
    whole.scatter(chunks, blocks, 2)
    for first, end in ((2, 3), (0, 2)):
        arrived = torch.full_like(chunks, 0x7F).view(3, LAYERS, -1)
        arrived[:, first:end] = chunks.view(3, LAYERS, -1)[:, first:end]
        before = [cache.clone() for cache in caches]
        layout.scatter(arrived.flatten(), blocks, 2, (first, end))
        for layer in range(LAYERS):
            wanted = expected[layer] if first <= layer < end else before[layer]
            assert torch.equal(caches[layer].contiguous().view(torch.uint8), wanted.contiguous().view(torch.uint8))


@pytest.mark.parametrize(("kind", "order"), CASES)
@pytest.mark.parametrize("mover", ["native", "torch"])
def test_gather_is_the_inverse(kind: LayoutKind, order: str, mover: Any) -> None:
    caches = caches_of(kind, order, torch.float32)
    for cache in caches:
        cache.copy_(torch.randn(cache.shape, generator=torch.Generator().manual_seed(6)))
    layout = PagedLayout(caches, kind, mover)
    blocks = [1, 10, 0, 5]
    out = torch.empty(layout.chunk_bytes(len(blocks) * BLOCK), dtype=torch.uint8)
    layout.gather(out.numpy(), blocks)
    expected = naive_read(kind, caches, blocks)
    assert torch.equal(out.view(torch.float32).view(expected.shape), expected)
    assert layout.vector_length == expected.shape[3] * expected.shape[4]


@pytest.mark.parametrize(
    ("interpreted", "files"),
    [(True, ["test_layouts_triton.py", "test_digest_triton.py"]), (False, ["test_triton_compiles.py"])],
    ids=["interpreted", "compiled"],
)
def test_the_triton_kernels_pass_their_tests(interpreted: bool, files: list[str]) -> None:
    """In their own process: engines in this process must not find Triton."""
    folder = Path(sys.prefix, "triton")
    if not importlib.util.find_spec("triton") and not folder.exists():
        pytest.skip("needs Triton (scripts/setup-triton)")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command += [str(Path(__file__).with_name(name)) for name in files]
    environment = os.environ | {"PYTHONPATH": str(folder)} | ({"TRITON_INTERPRET": "1"} if interpreted else {})
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=NEVER_S)
    assert done.returncode == 0 and " skipped" not in done.stdout, done.stdout[-4000:] + done.stderr[-2000:]


def tiled_addresses() -> Any:
    """Return the position of [kind, token, dimension] in a head's page with AMX (vLLM 0.32)."""
    token, dim = torch.meshgrid(torch.arange(TILED_BLOCK), torch.arange(TILED_SIZE), indexing="ij")
    key = token // 16 * 16 * TILED_SIZE + dim // 2 * 32 + token % 16 * 2 + dim % 2
    value = dim // 16 * 16 * TILED_BLOCK + token // 2 * 32 + dim % 16 * 2 + token % 2
    return torch.stack([key, TILED_BLOCK * TILED_SIZE + value])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("mover", ["native", "torch"])
def test_tiles_are_scattered_to_where_amx_reads_them_and_gathered_back(dtype: Any, way: str, mover: Any) -> None:
    caches = [torch.zeros(BLOCKS, HEADS, TILED_BLOCK, 2 * TILED_SIZE, dtype=dtype) for _ in range(LAYERS)]
    layout = PagedLayout(caches, "cpu_tiles", mover)
    blocks = [7, 2, 9]
    shape = (LAYERS, 2, len(blocks), TILED_BLOCK, HEADS, TILED_SIZE)
    chunk = torch.randint(1, 120, shape, generator=torch.Generator().manual_seed(8)).to(dtype)
    raw = chunk.view(torch.uint8).reshape(-1)
    layout.scatter(raw.numpy(), WAYS[way])
    pages = torch.stack(caches).reshape(LAYERS, BLOCKS, HEADS, -1)
    for place, block in enumerate(blocks):
        found = pages[:, block][:, :, tiled_addresses()]
        expected = chunk[:, :, place].permute(0, 3, 1, 2, 4)
        assert torch.equal(found, expected if WAYS[way][place] == block else torch.zeros_like(expected))
    assert not pages[:, [block for block in range(BLOCKS) if block not in blocks]].any()
    layout.scatter(raw, blocks)
    back = torch.zeros_like(raw)
    layout.gather(back.numpy(), blocks)
    assert torch.equal(back, raw)


def test_fp8_moves_as_bytes() -> None:
    caches = [torch.zeros(BLOCKS, HEADS, BLOCK, 2 * SIZE, dtype=torch.float8_e4m3fn)]
    layout = PagedLayout(caches, "kv_cells")
    assert layout.dtype == torch.uint8 and element_type(torch.float8_e4m3fn) is DType.UINT8
    chunk = torch.arange(layout.chunk_bytes(BLOCK), dtype=torch.uint8)
    layout.scatter(chunk, [3])
    out = torch.empty_like(chunk)
    layout.gather(out, [3])
    assert torch.equal(out, chunk)


@pytest.mark.parametrize(
    ("caches", "kind", "message"),
    [
        ([], "kv_cells", "no KV caches"),
        ([torch.zeros(4, 2, 4, 12), torch.zeros(4, 2, 4, 14)], "kv_cells", "another shape"),
        ([torch.zeros(4, 2, 4, 13)], "kv_cells", "equal size"),
        ([torch.zeros(4, 2, 4, 12)], "latent", "one head"),
        ([torch.zeros(4, 2, 12)], "kv_cells", "not supported"),
        ([torch.zeros(4, 2, 4, 12, dtype=torch.int32)], "kv_cells", "not supported"),
        ([torch.zeros(4, 4, 2, 12).transpose(1, 2)], "cpu_pages", "not contiguous"),
        ([torch.zeros(4, 2, 8, 64)], "cpu_tiles", "cannot be divided into tiles"),
    ],
)
def test_caches_that_do_not_fit_are_refused(caches: list[Any], kind: LayoutKind, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PagedLayout(caches, kind)


@pytest.mark.parametrize("number", [-2, BLOCKS])
def test_an_invalid_block_is_refused(number: int) -> None:
    layout = PagedLayout(cells("LBHNC", torch.float32), "cpu_pages")
    chunk = torch.zeros(layout.chunk_bytes(2 * BLOCK), dtype=torch.uint8)
    with pytest.raises(IndexError):
        layout.scatter(chunk, [3, number])
    with pytest.raises(IndexError):
        layout.gather(chunk, [number, 3])


@pytest.mark.parametrize("mover", ["native", "torch"])
@pytest.mark.parametrize(
    ("blocks", "rows", "moved"),
    [
        ([NOWHERE, 3, 5], None, range(BLOCK, 3 * BLOCK)),
        *(([5, 3, NOWHERE], rows, range(rows)) for rows in (1, BLOCK - 1, BLOCK, BLOCK + 1)),
    ],
    ids=str,
)
def test_gathering_zeroes_what_it_does_not_move(mover: Any, blocks: list[int], rows: int | None, moved: range) -> None:
    """Symptoms: records with another chunk's bytes, and with KV of a block's previous owner behind a tail."""
    caches = caches_of("cpu_pages", "LBHNC", torch.float32)
    for cache in caches:
        cache.copy_(torch.randn(cache.shape, generator=torch.Generator().manual_seed(6)))
    layout = PagedLayout(caches, "cpu_pages", mover)
    chunk = torch.full((layout.chunk_bytes(3 * BLOCK),), 7, dtype=torch.uint8)
    layout.gather(chunk, blocks, rows)
    whole = torch.zeros_like(chunk)
    layout.gather(whole, [3 if block == NOWHERE else block for block in blocks])
    found, wanted = (each.view(torch.float32).view(len(caches) * 2, 3 * BLOCK, -1).clone() for each in (chunk, whole))
    wanted[:, [token for token in range(3 * BLOCK) if token not in moved]] = 0
    assert torch.equal(found, wanted) and wanted.any()


@pytest.mark.parametrize("kind", ["cpu_pages", "cpu_tiles"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cpu_layouts_are_not_copied_element_by_element(kind: LayoutKind, dtype: Any) -> None:
    """Copies element by element would run below 0.1 GB/s."""
    caches = [torch.zeros(64, 8, 32, 256, dtype=dtype) for _ in range(4)]
    layout = PagedLayout(caches, kind)
    chunk = torch.zeros(layout.chunk_bytes(256), dtype=torch.uint8)
    blocks = list(range(0, 64, 8))
    for move in (layout.scatter, layout.gather):
        move(chunk, blocks)
        best = min(_seconds(lambda move=move: move(chunk, blocks)) for _ in range(5))
        assert chunk.numel() / best > 1e8


def _seconds(call: Any) -> float:
    begin = time.thread_time()
    call()
    return time.thread_time() - begin
