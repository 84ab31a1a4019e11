"""A checksum of weights in an accelerator's memory, computed with torch."""

from typing import Any, Final

import torch

_BATCH_BYTES: Final = 4 << 20


def weighted_sum(memory: Any, begin: int = 0) -> Any:
    """Return the sum, modulo 2^64, of 4-byte words times a factor that depends on the word's position.

    Trailing bytes count as words. The factors are odd, so that every change of a single word changes the sum. They are
    mixed like splitmix64, so that changes of several words do not cancel out.

    Args:
        begin: First byte, a multiple of 4.
    """
    total = torch.zeros((), dtype=torch.int64, device=memory.device)
    for first in range(begin, memory.numel(), _BATCH_BYTES):
        batch = memory[first : first + _BATCH_BYTES]
        whole = batch.numel() // 4 * 4
        for words, position in ((batch[:whole].view(torch.int32), first // 4), (batch[whole:], (first + whole) // 4)):
            positions = torch.arange(position, position + words.numel(), dtype=torch.int64, device=memory.device)
            factor = positions * -7046029254386353131
            factor = (factor ^ (factor >> 29)) * -4658895280553007687
            factor ^= factor >> 32
            total += (words.to(torch.int64) * (factor | 1)).sum()
    return total
