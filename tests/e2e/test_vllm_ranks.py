"""Several ranks and stages: each has its own namespace, keys and memory, and a hit needs the records of all ranks.

Engines with different shard layouts (numbers of ranks and stages) load each other's records.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
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
    with closing(make_engine(data_plane.address, tensor_parallel_size=2)) as engine:
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
    wait_for(lambda: data_plane.registrations == 0)


def test_each_rank_has_a_data_plane_of_its_own(
    make_engine: Any, reference: Any, prompt: Any, several_workers: None, tmp_path: Path
) -> None:
    tokens = prompt(700)
    (expected,) = reference([tokens])

    def data_plane(rank: int, storage: Child) -> AbstractContextManager[Child]:
        logs = tmp_path / f"{rank}"
        logs.mkdir(exist_ok=True)
        return start_data_plane(logs, storage.address, "--listen", f"unix:{tmp_path}/dpu{rank}.sock", *PATIENT, *SMALL)

    with start_storage(tmp_path) as storage, data_plane(0, storage) as first:
        with data_plane(1, storage) as second:
            with closing(make_engine(f"unix:{tmp_path}/dpu{{rank}}.sock", tensor_parallel_size=2)) as engine:
                assert engine.outputs([tokens]) == [expected]
                for plane in (first, second):
                    wait_for(lambda address=plane.address: statistics(address).store_outcomes.get("complete", 0) >= 1)
                wait_for(lambda: records(storage) == 4)  # two chunks, of two ranks
                engine.forget()
                assert engine.served(tokens) == (expected, 512)
                for plane in (first, second):
                    fetched = statistics(plane.address).fetch_outcomes["complete"]
                    assert fetched == 1, "each rank uses its own data plane"
                second.process.kill()
                second.process.wait()
                engine.forget()
                assert engine.served(tokens) == (expected, 0), "a hit needs all ranks"
                with data_plane(1, storage):

                    def found_again() -> bool:
                        engine.forget()
                        output, cached = engine.served(tokens)
                        assert output == expected
                        return cached == 512

                    wait_for(found_again)
        with closing(make_engine(f"unix:{tmp_path}/dpu0.sock", extra={"layer_order": True})) as engine:
            assert engine.served(tokens) == (expected, 512), "one rank loads the records of both, layer by layer"
            assert engine.counters()["layerwise_loads"] == 1


def statistics(address: str) -> Any:
    with closing(DataPlaneClient(address, connect_timeout_s=30)) as client:
        return client.statistics()


def records(storage: Child) -> int:
    from redis import Redis

    with Redis.from_url(f"redis://{storage.address}") as client:
        return int(client.dbsize())


# ---- Other shard layouts; all engines are configured for layer order, if they support it -----------------------------

TWO_RANKS, TWO_STAGES = {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}
OF_ONE, OF_RANKS, OF_STAGES = ((300, 0), (512, 0), (700, 0)), ((600, 1),), ((600, 2),)
"""Prompts stored by one rank, by two ranks and by two stages: arguments of ``prompt``, with at most two chunks each."""
HITS = {300: 256, 512: 511, 600: 512, 700: 512}


def make_room(worker: Any) -> None:
    """Create buffers that vLLM needs in a stage's first step, and does not create on CPUs without a warm-up."""
    runner = worker.model_runner
    runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
        batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
    )


def spoil(_: Any) -> None:
    """Overwrite a worker's paged memory."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    for cache in get_kv_transfer_group()._worker._shards.parts[0][0].layout._mover._views:
        cache.fill_(3.0)


class Topologies:
    """Engines over one store, one after the other. Each stores prompts and loads those of earlier engines."""

    def __init__(
        self, make_engine: Any, plane: Any, prompt: Callable[..., list[int]], reference: Callable[..., Any]
    ) -> None:
        self._make_engine, self._plane, self._prompt, self._reference = make_engine, plane, prompt, reference

    @contextmanager
    def engine(self, **topology: int) -> Iterator[None]:
        # Engines with stages refuse layer order.
        extra = {"layer_order": topology != TWO_STAGES}
        options = {"extra": extra, "max_num_batched_tokens": 128, **topology}
        with closing(self._make_engine(self._plane.address, **options)) as self._engine:
            if topology == TWO_STAGES:
                self._engine.llm.collective_rpc(make_room)
            yield

    def store(self, named: Any, records: int) -> None:
        """Compute new prompts, and wait for the given number of new records."""
        prompts, before = [self._prompt(*arguments) for arguments in named], len(self._plane.records)
        assert self._engine.outputs(prompts) == self._reference(prompts)
        wait_for(lambda: len(self._plane.records) == before + records)

    def find(self, named: Any, layerwise: int = 0) -> None:
        """Load stored prompts, with the given number of calls in layer order."""
        stored, before = set(self._plane.records), self._plane.layerwise_calls
        for arguments in named:
            prompt = self._prompt(*arguments)
            self._engine.forget()
            self._engine.llm.collective_rpc(spoil)
            assert self._engine.served(prompt) == (self._reference([prompt])[0], HITS[len(prompt)]), named
        self._engine.flush()
        assert set(self._plane.records) == stored, "loaded chunks were stored again"
        assert self._plane.layerwise_calls == before + layerwise

    def lose(self, named: Any, layers: int) -> None:
        """Load prompts while one layer of the first chunk is damaged, for each layer."""
        for arguments in named:
            prompt = self._prompt(*arguments)
            for layer in range(layers):
                self._engine.forget()
                self._engine.llm.collective_rpc(spoil)
                script = self._plane.script
                script.fail_fetch_at, script.fail_layer = 0, layer
                before, missing = self._engine.counters(), "load_failures/corrupt"
                assert self._engine.outputs([prompt]) == self._reference([prompt]), (named, layer)
                assert self._engine.counters()[missing] > before.get(missing, 0)
                script.fail_fetch_at = script.fail_layer = None

    def lose_one(self, named: Any) -> None:
        """Load prompts after the first chunk of one rank was deleted between lookup and load."""
        for arguments in named:
            prompt = self._prompt(*arguments)
            self._engine.forget()
            self._engine.llm.collective_rpc(spoil)
            key = self._plane.fetches[-1].keys[0]
            lost = self._plane.records.pop(key)
            self._plane.script.lookup_hits = lambda hits: [2, 2, *hits[2:]]
            assert self._engine.outputs([prompt]) == self._reference([prompt]), named
            self._plane.script.lookup_hits = None
            self._engine.flush()
            stored = np.frombuffer(self._plane.records[key], np.float32)
            assert np.allclose(stored, np.frombuffer(lost, np.float32), rtol=1e-3, atol=1e-3)


def test_engines_with_other_numbers_of_ranks_and_stages_share_records(
    make_engine: Any, data_plane: Any, reference: Any, prompt: Any, several_workers: None
) -> None:
    over = Topologies(make_engine, data_plane, prompt, reference)
    with over.engine():
        over.store(OF_ONE, 2)
    with over.engine(**TWO_RANKS):
        over.find(OF_ONE, layerwise=3 * 2)
        over.store(OF_RANKS, 4)
        over.find(OF_RANKS, layerwise=2)
        over.lose(OF_RANKS, layers=2)
        over.lose_one(OF_RANKS)
    with over.engine(**TWO_STAGES):
        over.find(OF_ONE)
        over.find(OF_RANKS)
        over.store(OF_STAGES, 4)
        over.find(OF_STAGES)
        over.lose(OF_STAGES, layers=1)
    with over.engine():
        over.find(OF_RANKS, layerwise=1)  # one call for the records of both ranks
        over.find(OF_STAGES, layerwise=2)
        over.lose(OF_RANKS, layers=1)
        over.lose(OF_STAGES, layers=1)
