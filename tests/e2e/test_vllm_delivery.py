"""A real engine with memory that its worker exported. A DPU's DMA engine writes the KV into it. On the emulator."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from machine import PATIENT

from host_control.delivery import ExportedHostMemory
from shadowserve_tools.processes import start_data_plane, start_storage

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore")]


def test_an_engine_stores_from_and_loads_into_exported_memory(
    tmp_path: Path, make_engine: Callable[..., Any], prompt: Any, reference: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = prompt(700)
    with (
        start_storage(tmp_path) as storage,
        start_data_plane(tmp_path, storage.address, *PATIENT, "--backend", "doca") as data_plane,
    ):
        engine = make_engine(data_plane.address, extra={"delivery": "exported", "layer_order": True})
        try:
            assert engine.outputs([tokens]) == reference([tokens])
            engine.flush()
            streams, client = [], engine.worker._client
            start = client.start_fetch_layers
            monkeypatch.setattr(client, "start_fetch_layers", lambda *given: streams.append(given) or start(*given))
            for _ in range(2):
                engine.forget()
                for cache in engine.worker._shards.parts[0][0].layout._mover._views:
                    cache.fill_(3.0)  # otherwise blocks may still hold computed KV
                (output,) = engine.generate([tokens])
                assert [list(output.outputs[0].token_ids)] == reference([tokens])
                assert output.num_cached_tokens == 512
            assert len(streams) == 2, "layer by layer: a stream reports the progress, because there is no shared memory"
            engine.forget()
            with engine.awaiting_lookups():
                assert engine.outputs([prompt(31), tokens]) == reference([prompt(31), tokens])
            assert len(streams) == 2, "beside a running request, chunk by chunk"
            for part in (
                engine.worker._loads.managers[0],
                engine.worker._stores.queue,
            ):  # for fetches and for stores
                assert isinstance(part._registration.current, ExportedHostMemory)
        finally:
            engine.close()
        assert " bytes of exported_memory, " in data_plane.log.read_text()
