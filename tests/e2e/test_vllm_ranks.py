"""Tensor parallelism: each rank has its own namespace, keys and memory. A hit needs the records of all ranks."""

from contextlib import AbstractContextManager, closing
from pathlib import Path
from typing import Any

import pytest
from machine import PATIENT, wait_for

from host_control.client import DataPlaneClient
from shadowserve_tools.processes import Child, start_data_plane, start_storage

SMALL = ("--decompression-buffer-bytes", "32MiB", "--store-buffer-bytes", "32MiB")

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(900)]


def test_two_ranks_store_load_and_recompute(
    make_engine: Any, data_plane: Any, reference: Any, prompt: Any, serve: Any, several_workers: None
) -> None:
    prompts = [prompt(length) for length in (300, 512, 700)]
    expected = reference(prompts)
    engine = make_engine(data_plane.address, tensor_parallel_size=2)
    try:
        assert engine.outputs(prompts) == expected
        wait_for(lambda: len(data_plane.records) == 2 * 2)  # the prompts share their first two chunks
        engine.forget()
        outputs = engine.generate(prompts)
        assert [list(output.outputs[0].token_ids) for output in outputs] == expected
        assert [output.num_cached_tokens for output in outputs] == [256, 511, 512]
        assert data_plane.registrations == 4

        # The second chunk of one rank is deleted between lookup and load: both ranks recompute it.
        data_plane.script.lookup_hits = lambda hits: [2, 2, *hits[2:]]
        data_plane.records.pop(data_plane.fetches[-1].keys[-1])
        engine.forget()
        data_plane.fetches.clear()
        serve(engine, 700)
        assert len(data_plane.fetches) == 2
    finally:
        engine.close()
    wait_for(lambda: data_plane.registrations == 0)


def test_each_rank_has_a_data_plane_of_its_own(
    make_engine: Any, reference: Any, prompt: Any, several_workers: None, tmp_path: Path
) -> None:
    prompts = [prompt(700)]
    expected = reference(prompts)

    def data_plane(rank: int, storage: Child) -> AbstractContextManager[Child]:
        logs = tmp_path / f"{rank}"
        logs.mkdir(exist_ok=True)
        return start_data_plane(logs, storage.address, "--listen", f"unix:{tmp_path}/dpu{rank}.sock", *PATIENT, *SMALL)

    with start_storage(tmp_path) as storage, data_plane(0, storage) as first:
        with data_plane(1, storage) as second:
            engine = make_engine(f"unix:{tmp_path}/dpu{{rank}}.sock", tensor_parallel_size=2)
            try:
                assert engine.outputs(prompts) == expected
                for plane in (first, second):
                    wait_for(lambda address=plane.address: statistics(address).store_outcomes.get("complete", 0) >= 1)
                wait_for(lambda: records(storage) == 4)  # two chunks, of two ranks
                engine.forget()
                assert cached(engine, prompts, expected) == [512]
                for plane in (first, second):
                    assert statistics(plane.address).fetch_outcomes["complete"] == 1, (
                        "each rank uses its own data plane"
                    )
                second.process.kill()
                second.process.wait()
                engine.forget()
                assert cached(engine, prompts, expected) == [0], "a hit needs all ranks"
                with data_plane(1, storage):

                    def found_again() -> bool:
                        engine.forget()
                        return cached(engine, prompts, expected) == [512]

                    wait_for(found_again)
            finally:
                engine.close()


def statistics(address: str) -> Any:
    with closing(DataPlaneClient(address, connect_timeout_s=30)) as client:
        return client.statistics()


def records(storage: Child) -> int:
    from redis import Redis

    host, port = storage.address.split(":")
    with Redis(host, int(port)) as client:
        return int(client.dbsize())


def cached(engine: Any, prompts: list[list[int]], expected: list[list[int]]) -> list[int]:
    """Check the outputs, and return the number of cached tokens of each prompt."""
    outputs = engine.generate(prompts)
    assert [list(output.outputs[0].token_ids) for output in outputs] == expected
    return [output.num_cached_tokens for output in outputs]
