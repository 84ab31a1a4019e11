"""Engines with different shard layouts (numbers of ranks and stages) load each other's records.

All of them are configured for layer order, if they support it.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from machine import wait_for

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(900)]

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
        self._engine = self._make_engine(self._plane.address, extra=extra, max_num_batched_tokens=128, **topology)
        try:
            if topology == TWO_STAGES:
                self._engine.llm.collective_rpc(make_room)
            yield
        finally:
            self._engine.close()

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
            (output,) = self._engine.generate([prompt])
            assert [list(output.outputs[0].token_ids)] == self._reference([prompt]), named
            assert output.num_cached_tokens == HITS[len(prompt)], named
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
        over.find(OF_ONE)
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
        over.find(OF_RANKS)
        over.find(OF_STAGES)
