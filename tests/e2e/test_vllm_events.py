"""KV events of the connector, sent by vLLM's own publisher and read as routers read them."""

from collections.abc import Callable, Iterator
from contextlib import closing
from types import SimpleNamespace
from typing import Any

import pytest
from kv_events import DECODER as decoder
from kv_events import AllBlocksCleared, BlockRemoved, BlockStored, Event, replayed
from machine import WAIT_MAX_S, wait_for

from shadowserve.keys import block_hash, prefix_chain, record_keys

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore")]
CHUNK = 256


@pytest.fixture(scope="module")
def publisher(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("zmq")
    return {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"ipc://{folder}/pub",
        "replay_endpoint": f"ipc://{folder}/replay",
        "topic": "kv@pod@model",
    }


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("host_control.vllm.events._LINGER_S", WAIT_MAX_S)


@pytest.fixture(scope="module")
def engine(plane: Any, make_engine: Callable[..., Any], publisher: dict[str, Any]) -> Iterator[Any]:
    with closing(make_engine(plane.address, kv_events_config=publisher)) as engine:
        yield engine


def events_of(publisher: dict[str, Any]) -> list[Event]:
    """Return all events of storage, and those that clear everything."""
    batches = [decoder.decode(payload) for _, payload in replayed(publisher["replay_endpoint"])]
    events = [event for batch in batches for event in batch.events]
    return [event for event in events if isinstance(event, AllBlocksCleared) or event.medium == "STORAGE"]


def wait_for_events(engine: Any, publisher: dict[str, Any], count: int) -> list[Event]:
    """Let the idle engine step, as its own loop would, until there are as many events."""

    def stepped() -> list[Event]:
        if engine.connector.has_pending_push_work():
            engine.llm.llm_engine.engine_core.get_output()
        found = events_of(publisher)
        return found if len(found) >= count else []

    return wait_for(stepped)


def test_events_tell_what_the_connector_stored_what_is_gone_and_what_no_longer_counts(
    engine: Any, plane: Any, prompt: Any, publisher: dict[str, Any]
) -> None:
    tokens = prompt(700)
    engine.outputs([tokens])
    stored = wait_for_events(engine, publisher, 2)
    engine.flush()
    assert len(stored) == 2 and all(isinstance(event, BlockStored) for event in stored)
    first, second = stored
    assert {*first.block_hashes, *second.block_hashes} == {block_hash(key) for key in plane.records}
    assert first.parent_block_hash is None and second.parent_block_hash == first.block_hashes[0]
    assert first.token_ids + second.token_ids == tokens[: 2 * CHUNK]
    assert first.block_size == CHUNK and first.group_idx == 0 and first.kv_cache_spec_kind == "full_attention"

    index = engine.worker._engine_message.index  # what a data plane needs for queries of routers
    chain = prefix_chain(index.chain, tokens, chunk_tokens=CHUNK)
    assert set(record_keys(*index.namespaces, chain)) == set(plane.records) and not index.last_namespaces
    assert index.instance == engine.llm.llm_engine.vllm_config.kv_transfer_config.engine_id and index.model

    (gone,) = (key for key in plane.records if block_hash(key) == second.block_hashes[0])
    del plane.records[gone]
    engine.forget()
    engine.outputs([tokens])
    found = [event for event in wait_for_events(engine, publisher, 5) if not isinstance(event, AllBlocksCleared)]
    assert found[2] == BlockRemoved(block_hashes=second.block_hashes, medium="STORAGE", group_idx=0)
    assert found[3] == second

    salted = {"prompt_token_ids": prompt(300, 1), "cache_salt": "tenant"}
    engine.generate([prompt(40)])
    engine.llm.generate([salted], engine.llm.get_default_sampling_params(), use_tqdm=False)
    *_, last = wait_for_events(engine, publisher, 6)
    assert isinstance(last, BlockStored) and last.extra_keys == [["tenant"]]

    assert engine.llm.reset_prefix_cache(reset_connector=True)
    engine.outputs([prompt(40)])
    assert isinstance(events_of(publisher)[-1], AllBlocksCleared)
    assert engine.counters()["events"] >= 5 and not engine.counters().get("dropped_events")


def test_a_record_that_is_still_stored_is_not_removed() -> None:
    from host_control.vllm.events import StoreEvents
    from host_control.vllm.metadata import StoreOperation
    from host_control.vllm.metrics import Counts

    groups = SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=None)])
    made = StoreEvents(groups, CHUNK).begin({0: [b"n" * 32]}, Counts())
    request = SimpleNamespace(
        all_token_ids=range(CHUNK), lora_request=None, mm_features=[], cache_salt=None, prompt_embeds=None
    )
    keys = [b"k" * 32]
    hashes = [block_hash(key) for key in record_keys(b"n" * 32, keys)]

    def events_after_a_store(absent_seconds: float | None) -> list[str]:
        made.storing(request, keys, [StoreOperation("r", 0, keys, None, True, [1], 0, absent_seconds=absent_seconds)])
        return [type(event).__name__ for event in made.take()]

    assert events_after_a_store(0.0) == []
    made.stored(hashes)
    assert [type(event).__name__ for event in made.take()] == ["BlockStored"]
    assert events_after_a_store(3600.0) == [], "the lookup was before the store"
    assert events_after_a_store(None) == [], "no lookup answered"
    assert events_after_a_store(0.0) == ["BlockRemoved"]


def test_after_a_loss_of_events_nothing_counts_as_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.distributed.kv_events import AllBlocksCleared as Cleared

    from host_control.vllm import events
    from host_control.vllm.metrics import Counts

    monkeypatch.setattr(events, "EVENTS_MAX", 2)
    counts = Counts()
    made = events.StoreEvents(SimpleNamespace(kv_cache_groups=[]), CHUNK).begin({}, counts)
    for epoch in ("a", "b"):
        made.follow(epoch)
    assert made.take() == [Cleared()] * 2 and made.take() == []
    for epoch in ("c", "d", "e"):
        made.follow(epoch)
    assert made.take() == [Cleared()] * 3
    made.stored([1])  # it was never an event
    found = counts.take()
    assert found is not None and found.data == {"events": 4, "dropped_events": 1}
