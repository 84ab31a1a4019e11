"""Triton's compiler accepts every kernel for an NVIDIA GPU. This needs no GPU.

The interpreter accepts more than the compiler. test_layouts.py runs this file in its own process.
"""

import os
from typing import Any

os.environ["TRITON_DEFAULT_FP_FUSION"] = "1"  # else Triton 3.9 warns

import pytest  # noqa: E402
import triton  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from host_control import layouts_triton  # noqa: E402
from host_control.vllm import digest_triton  # noqa: E402
from shadowserve_tools.bench.parts import gpu_triton  # noqa: E402

HOPPER = GPUTarget("cuda", 90, 32)
CONSTANTS = {
    "UNIT": 8,
    "SIZE": 32,
    "BLOCK_TOKENS": 16,
    "TOKENS": 8,
    "WIDTH": 256,
    "LANES": 128,
    "BLOCK": 4096,
    "PROGRAMS": 16,
}


def compile_kernel(kernel: Any, types: dict[str, str], **constants: Any) -> str:
    """Return the kernel's PTX."""
    signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
    known = {name: value for name, value in (CONSTANTS | constants).items() if name in kernel.arg_names}
    return str(triton.compile(ASTSource(kernel, signature, known), target=HOPPER).asm["ptx"])


@pytest.mark.parametrize("integer", ["u8", "i16", "i32", "i64"])
@pytest.mark.parametrize("to_pages", [True, False])
def test_the_kernel_that_moves_kv_compiles(integer: str, to_pages: bool) -> None:
    pointers = {"chunks": f"*{integer}", "pages": f"*{integer}", "offsets": "*i64", "blocks": "*i64"}
    numbers = "count chunk_tokens heads stride_chunk stride_block stride_token stride_head".split()
    types = pointers | dict.fromkeys([*numbers, "stride_unit"], "i32")
    assert ".visible .entry _move" in compile_kernel(layouts_triton._move, types, TO_PAGES=to_pages)


def test_the_kernel_that_sums_weights_compiles() -> None:
    types = {"segments": "*i64", "count": "i32", "sums": "*i64"}
    assert ".visible .entry _sums" in compile_kernel(digest_triton._sums, types)


def test_the_benchmark_s_kernel_compiles() -> None:
    types = {"symbols": "*u8", "states": "*i32", "target": "*bf16"} | dict.fromkeys(["count", "lanes", "mask"], "i32")
    assert ".visible .entry decompress" in compile_kernel(gpu_triton.decompress, types)
