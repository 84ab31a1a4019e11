"""The number that stands for a storage of weights on an accelerator."""

from typing import Any, Final

import torch

_PIECE_BYTES: Final = 4 << 20


def weighted_sum(memory: Any, begin: int = 0) -> Any:
    """Return the sum of a storage's words from byte ``begin`` on, each times an odd number of its position.

    Modulo 2^64. A word has 4 bytes; bytes behind the last one are words of their own. Odd, so that no change of one
    word goes unseen; mixed as splitmix64 does, so that changes of many words do not cancel each other out.
    """
    total = torch.zeros((), dtype=torch.int64, device=memory.device)
    for first in range(begin, memory.numel(), _PIECE_BYTES):
        piece = memory[first : first + _PIECE_BYTES]
        whole = piece.numel() // 4 * 4
        for words, position in ((piece[:whole].view(torch.int32), first // 4), (piece[whole:], (first + whole) // 4)):
            place = torch.arange(position, position + words.numel(), dtype=torch.int64, device=memory.device)
            factor = place * -7046029254386353131
            factor = (factor ^ (factor >> 29)) * -4658895280553007687
            factor ^= factor >> 32
            total += (words.to(torch.int64) * (factor | 1)).sum()
    return total
