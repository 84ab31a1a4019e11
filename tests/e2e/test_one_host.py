"""Real vLLM on one host without a storage node: the data plane's tiers store KV, also across a restart."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from machine import PATIENT, WAIT_MAX_S, free_port
from stack import Process

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore")]

LENGTHS = (300, 700, 1000)


def test_the_tiers_keep_kv_across_a_restart_of_the_data_plane(
    make_engine: Callable[..., Any], prompt: Any, reference: Any, tmp_path: Path
) -> None:
    device = {"path": str(tmp_path / "tier"), "size": "64MiB"}
    tiers = json.dumps({"memory_budget_bytes": "64MiB", "devices": [device]})
    daemon = Process("dpu", "--listen", f"127.0.0.1:{free_port()}", "--tiers", tiers, *PATIENT)
    engine = None
    try:
        engine = make_engine(daemon.address)
        prompts = [prompt(length) for length in LENGTHS]
        assert engine.outputs(prompts) == reference(prompts)
        engine.flush()
        for restarts in (False, True):
            if restarts:
                daemon.stop()
                daemon.restart()
            ends = time.monotonic() + WAIT_MAX_S
            cached = 0
            while cached < 768:
                assert time.monotonic() < ends, "the engine found neither its data plane nor its chunks"
                engine.forget()
                (output,) = engine.generate([prompt(1000)])
                assert list(output.outputs[0].token_ids) == reference([prompt(1000)])[0]
                cached = output.num_cached_tokens
            engine.forget()
            assert engine.outputs(prompts) == reference(prompts)
    finally:
        if engine is not None:
            engine.close()
        daemon.stop()


SEEDS = range(11, 15)
GENERATED = 110


@pytest.mark.parametrize("killed", [False, True])
def test_preempted_requests_are_saved_in_the_tiers(
    make_engine: Callable[..., Any], prompt: Any, reference: Any, killed: bool
) -> None:
    """With ``killed``, the data plane restarts empty at the first preemption, and its chunks are computed."""
    tiers = json.dumps({"memory_budget_bytes": "64MiB"})
    daemon = Process("dpu", "--listen", f"127.0.0.1:{free_port()}", "--tiers", tiers, *PATIENT)
    engine = None
    try:
        engine = make_engine(
            daemon.address, enable_prefix_caching=False, num_gpu_blocks_override=45, max_model_len=1200
        )
        prompts = [prompt(300, seed) for seed in SEEDS]
        follow, held = engine.connector._scheduler._preemption.follow, []

        def followed(output: Any) -> Any:
            lost = follow(output)
            if lost and killed and not held:
                daemon.kill()
                daemon.restart()
            held.extend(lost)
            return lost

        engine.connector._scheduler._preemption.follow = followed
        assert engine.outputs(prompts, GENERATED) == reference(prompts, GENERATED)
        assert held, "the test needs preemptions"
        assert engine.free_blocks() == 44
        counted = engine.counters()
        # All tokens of a request, except for less than a block after its last chunk.
        tails = [each.tokens % 256 for each in held]
        assert counted["saved_tokens"] == sum(each.tokens for each in held) - sum(tail for tail in tails if tail < 32)
        if not killed:
            assert counted["restored_tokens"] == counted["saved_tokens"]
            beyond = counted["loaded_tokens"] - counted["restored_tokens"]  # loaded tokens are counted in whole blocks
            assert 0 <= beyond < 32 * len(held)
    finally:
        if engine is not None:
            engine.close()
        daemon.stop()
