"""The Triton kernels against the indexed copies: on a GPU where there is one, else in Triton's interpreter."""

import os
from typing import Any

import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels are defined
pytest.importorskip("triton", reason="Triton is not installed; the kernels are used only where it is")

from host_control import layouts_triton  # noqa: E402

LAYERS, BLOCKS, HEADS, BLOCK, SIZE = 3, 11, 2, 4, 6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
@pytest.mark.parametrize("order", ["LBHNC", "LBNHC", "BLHNC"])
def test_kernels_move_what_indexing_moves(order: str, dtype: Any) -> None:
    extent = {"L": LAYERS, "B": BLOCKS, "H": HEADS, "N": BLOCK, "C": 2 * SIZE}
    memory = torch.zeros([extent[name] for name in order], dtype=dtype, device=DEVICE)
    caches = memory.permute([order.index(name) for name in "LBHNC"]).unbind(0)
    views = [cache.permute(0, 2, 1, 3)[..., half : half + SIZE] for cache in caches for half in (0, SIZE)]
    blocks = [7, 2, 9]
    source = torch.randint(1, 100, (2 * LAYERS, len(blocks), BLOCK, HEADS, SIZE)).to(dtype).to(DEVICE)
    layouts_triton.scatter(source, views, blocks)
    for part, view in zip(source, views, strict=True):
        assert torch.equal(view[blocks], part)
        assert not view[[0, 1, 3, 4, 5, 6, 8, 10]].any()
    target = torch.zeros_like(source)
    layouts_triton.gather(target, views, blocks)
    assert torch.equal(target, source)
