"""A stand-in for decompressing KV on a GPU, with Triton if it is installed, else with torch.

It represents an entropy decoder in the GPU (CacheGen's arithmetic decoder, or an ANS one), whose *lanes* each
decode one stream, symbol by symbol, since every symbol needs the state after the one before; then dequantization.
Each lane reads its stream's bytes in order, looks up each in a table together with its state, which gives the next
state, and writes one bfloat16 element for it. So it moves the same bytes as a decoder with byte symbols, with the same
chain of dependent loads and the same launches. It does not decode anything.
"""

import importlib.util
from typing import Any, Final

import torch

TABLE_SIZE: Final = 4096
HAS_TRITON: Final = importlib.util.find_spec("triton") is not None
_LANES: Final = 128


def table(device: Any) -> Any:
    """Return the table of states, ``TABLE_SIZE`` int32."""
    generator = torch.Generator().manual_seed(11)
    return torch.randint(0, 1 << 20, (TABLE_SIZE,), dtype=torch.int32, generator=generator).to(device)


def decompress(symbols: Any, states: Any, target: Any, *, use_triton: bool = HAS_TRITON) -> None:
    """Convert a chunk's symbols to elements on the current stream.

    Args:
        symbols: uint8, [symbol, lane].
        states: Result of :func:`table`.
        target: bfloat16 of the same shape.
        use_triton: False to use torch with up to three launches for each symbol, for tests.
    """
    if not use_triton:
        _decompress_torch(symbols, states, target)
        return
    from shadowserve_tools.bench.parts import gpu_triton

    count, lanes = symbols.shape
    programs = (lanes + _LANES - 1) // _LANES
    gpu_triton.decompress[(programs,)](symbols, states, target, count, lanes, TABLE_SIZE - 1, LANES=_LANES)


def _decompress_torch(symbols: Any, states: Any, target: Any) -> None:
    state = torch.zeros(symbols.shape[1], dtype=torch.int32, device=symbols.device)
    for symbol, elements in zip(symbols, target, strict=True):
        state = states[((state ^ symbol) & (TABLE_SIZE - 1)).long()] + (state >> 8)
        elements.copy_(state & 0xFF)
