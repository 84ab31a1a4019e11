"""Short simulations of the storage node, one for each seed. scripts/test-nightly and soaks run more of them.

A failure prints its seed and the command that replays it.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from scenario import plan_of, simulate

_BATCH = 50
_SIMULATE = Path(__file__).with_name("simulate.py")


@pytest.mark.parametrize("first", range(1, 151, _BATCH))
def test_seeds(first: int) -> None:
    reads = 0
    for seed in range(first, first + _BATCH):
        reads += simulate(seed).reads
    assert reads > _BATCH, "most stored values must be read"


@pytest.mark.parametrize("seed", [4, 6, 12])
def test_a_seed_replays_exactly(seed: int) -> None:
    """The trace is also the same in another process, with another hash seed and other addresses."""
    here = simulate(seed)
    assert simulate(seed).trace == here.trace
    command = [sys.executable, _SIMULATE, str(seed)]
    environment = {**os.environ, "PYTHONHASHSEED": "7"}
    found = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert here.trace in found.stdout


def test_the_seeds_differ_in_what_they_do() -> None:
    profiles = {str(plan_of(seed)) for seed in range(1, 25)}
    assert len(profiles) > 12
    assert any("memory" in profile for profile in profiles)
