"""The digest of weights that a GPU computes: on a GPU if available, else in Triton's interpreter."""

import os
from typing import Any

import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it when the kernel is defined

from host_control.vllm.weighted_sum import weighted_sum  # noqa: E402


def changed_words() -> list[Any]:
    """Return some bytes, and after them one copy for each single change."""
    memory = torch.randint(0, 256, (4099,), generator=torch.Generator().manual_seed(1)).to(torch.uint8)
    memories = [memory.clone() for _ in range(8)]
    memories[1][4098] ^= 1
    memories[2][3] ^= 128
    memories[3][[3, 7, 11, 15]] ^= 128
    memories[4][:8] = memory[[4, 5, 6, 7, 0, 1, 2, 3]]
    memories[5][:4096] = memory[:4096].view(4, 1024).flip(0).reshape(-1)
    memories[6][3:4096:4] ^= 128
    memories[7][3:4096:8] ^= 128
    return memories


def test_weighted_sum_differs_for_each_change() -> None:
    sums = [int(weighted_sum(memory)) for memory in changed_words()]
    assert len(set(sums)) == len(sums)


def test_kernel_computes_the_weighted_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="Triton is not installed here")
    from host_control.vllm import digest_triton

    monkeypatch.setattr(digest_triton, "_SEGMENT_BYTES", 1024)  # several segments and several launches
    monkeypatch.setattr(digest_triton, "_LAUNCH_BYTES", 4096)
    memories = [*(memory.to(DEVICE) for memory in changed_words()), torch.ones(2, dtype=torch.uint8, device=DEVICE)]
    sums = torch.zeros(len(memories), dtype=torch.int64, device=DEVICE)
    digest_triton.launches(memories, sums)
    assert sums.tolist() == [int(weighted_sum(memory)) for memory in memories]
