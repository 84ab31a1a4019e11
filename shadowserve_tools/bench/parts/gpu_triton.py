"""The Triton kernel of :mod:`shadowserve_tools.bench.parts.gpu_kernels`; imported only where Triton is."""

import triton
import triton.language as tl


# Triton's compiler reads annotations and knows none of Python's types.
@triton.jit  # type: ignore[untyped-decorator]
def decompress(symbols, states, target, count, lanes, mask, LANES: tl.constexpr):  # type: ignore[no-untyped-def]
    """Let each lane go through its column of ``symbols``, a state from one to the next, and write its elements."""
    lane = tl.program_id(0) * LANES + tl.arange(0, LANES)
    inside = lane < lanes
    source = symbols + lane
    there = target + lane
    state = tl.zeros((LANES,), dtype=tl.int32)
    for _ in range(count):
        symbol = tl.load(source, mask=inside, other=0).to(tl.int32)
        state = tl.load(states + ((state ^ symbol) & mask)) + (state >> 8)
        tl.store(there, (state & 0xFF).to(tl.float32).to(tl.bfloat16), mask=inside)
        source += lanes
        there += lanes
