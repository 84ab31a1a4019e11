"""The Triton kernels against the indexed copies: on a GPU if available, else in Triton's interpreter."""

import os
from typing import Any

import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it when the kernels are defined
pytest.importorskip("triton", reason="Triton is not installed here; test_layouts.py runs these tests where it is")

from host_control.layouts import NOWHERE, PagedLayout  # noqa: E402
from shadowserve_tools.bench.parts import gpu_kernels  # noqa: E402

LAYERS, BLOCKS, HEADS, BLOCK, SIZE = 3, 11, 2, 4, 6
ORDERS = ["LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC"]
KINDS = [(torch.float32, ()), (torch.bfloat16, (0, 1, 2)), (torch.uint8, ()), (torch.float16, (1, 3))]
# The interpreter is slow. With it, except at night, each order has two cases; one has blocks with the index NOWHERE.
EACH_WITH_EACH = DEVICE == "cuda" or bool(os.environ.get("TEST_NIGHTLY"))
TRIED = [
    pytest.param(order, *KINDS[kind], id=f"{order}-{str(KINDS[kind][0]).removeprefix('torch.')}")
    for place, order in enumerate([*ORDERS, "latent", "cells"])
    for kind in range(len(KINDS))
    if EACH_WITH_EACH or kind // 2 == place % 2
]


def caches(order: str, dtype: Any) -> tuple[list[Any], Any]:
    """Return zeroed caches, logical [block, head, token, content], in one allocation; MLA's where order is latent."""
    if order == "latent":
        return [torch.zeros(BLOCKS, 1, BLOCK, 9, dtype=dtype, device=DEVICE) for _ in range(LAYERS)], "latent"
    if order == "cells":
        return [torch.zeros(BLOCKS, HEADS, BLOCK, 9, dtype=dtype, device=DEVICE) for _ in range(LAYERS)], "cells"
    extent = {"L": LAYERS, "B": BLOCKS, "H": HEADS, "N": BLOCK, "C": 2 * SIZE}
    memory = torch.zeros([extent[name] for name in order], dtype=dtype, device=DEVICE)
    return list(memory.permute([order.index(name) for name in "LBHNC"]).unbind(0)), "kv_cells"


def bytes_of(tensors: list[Any]) -> Any:
    return torch.stack([tensor.contiguous() for tensor in tensors]).view(torch.uint8)


@pytest.mark.parametrize(("order", "dtype", "nowhere"), TRIED)
def test_kernels_move_what_indexing_moves(order: str, dtype: Any, nowhere: tuple[int, ...]) -> None:
    found, kind = caches(order, dtype)
    wanted, _ = caches(order, dtype)
    kernels, indexing = PagedLayout(found, kind, "triton"), PagedLayout(wanted, kind, "torch")
    blocks = [NOWHERE if place in nowhere else block for place, block in enumerate([7, 2, 9, 0])]
    # Numbers, and not random bits: torch's copies may quiet a NaN.
    count = 2 * kernels.chunk_bytes(2 * BLOCK) // dtype.itemsize
    chunks = torch.randint(1, 100, (count,)).to(dtype).to(DEVICE).view(torch.uint8)
    kernels.scatter(chunks, blocks, 2)
    indexing.scatter(chunks, blocks, 2)
    assert torch.equal(bytes_of(found), bytes_of(wanted))
    for place, block in enumerate([7, 2, 9, 0]):
        assert [bool(cache[block].any()) for cache in found] == [place not in nowhere] * LAYERS
    for cache in found:
        cache.zero_()
    for layers in ((1, LAYERS), (0, 1)):
        kernels.scatter(chunks, blocks, 2, layers)
        assert any(cache.any() for cache in found[slice(*layers)]) or len(nowhere) == len(blocks)
    assert torch.equal(bytes_of(found), bytes_of(wanted)), "the same, layer by layer"
    gathered = torch.zeros(kernels.chunk_bytes(2 * BLOCK), dtype=torch.uint8, device=DEVICE)
    kernels.gather(gathered, [9, 0])
    if not nowhere:
        assert torch.equal(gathered, chunks[len(gathered) :])
    there = torch.zeros(len(gathered), dtype=torch.uint8)
    kernels.gather(there, [9, 0])
    assert torch.equal(there, gathered.cpu())


def test_layers_with_other_strides_are_left_to_indexing() -> None:
    first, second = torch.zeros(BLOCKS, HEADS, BLOCK, 12), torch.zeros(BLOCKS, BLOCK, HEADS, 12).transpose(1, 2)
    with pytest.raises(ValueError, match="strides"):
        PagedLayout([first, second], "kv_cells", "triton")


def test_vectors_of_any_length_are_moved_whole() -> None:
    for heads, size in ((1, 576), (5, 80), (3, 1), (8, 128)):
        cache = torch.zeros(4, heads, BLOCK, 2 * size, dtype=torch.bfloat16, device=DEVICE)
        layout = PagedLayout([cache], "kv_cells", "triton")
        chunk = torch.randn(layout.chunk_bytes(BLOCK) // 2).to(torch.bfloat16).to(DEVICE).view(torch.uint8)
        layout.scatter(chunk, [2])
        gathered = torch.empty_like(chunk)
        layout.gather(gathered, [2])
        assert torch.equal(gathered, chunk)
        assert not cache[[0, 1, 3]].any()


def test_the_benchmark_s_stand_in_computes_what_torch_does() -> None:
    symbols = torch.randint(0, 255, (9, 300), dtype=torch.uint8).to(DEVICE)
    found, wanted = (torch.zeros(symbols.shape, dtype=torch.bfloat16, device=DEVICE) for _ in range(2))
    gpu_kernels.decompress(symbols, gpu_kernels.table(DEVICE), found, use_triton=True)
    gpu_kernels.decompress(symbols, gpu_kernels.table(DEVICE), wanted, use_triton=False)
    assert torch.equal(found, wanted) and len(found.unique()) > 100
