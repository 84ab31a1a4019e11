"""Quantizers with a calibration in real vLLM: made by ``shadowserve calibrate``, stored, loaded, and kept apart."""

import json
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from kit import spoil
from machine import PATIENT, free_port, wait_for
from redis import Redis
from stack import Process

from shadowserve import calibration, record
from shadowserve.calibration import Calibration
from shadowserve.chunk import Quantizer
from shadowserve.keys import storage_key
from shadowserve.native import Codec
from shadowserve_tools import main

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(900)]

CHUNKS = 2


@pytest.fixture(scope="module")
def file(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model's calibration, made by the command."""
    path = tmp_path_factory.mktemp("calibration") / "model.calibration"
    made = CliRunner().invoke(main, ["calibrate", str(model), "--output", str(path)], catch_exceptions=False)
    assert made.exit_code == 0, made.output
    return path


@pytest.fixture
def store(storage: Process) -> Iterator[Redis]:
    """A client of the storage node, which is empty."""
    with Redis.from_url(f"redis://{storage.address}") as client:
        client.flushall()
        yield client


def records(store: Redis) -> list[bytes]:
    return [store.get(key) for key in store.keys()]


def outputs(engine: Any, text: list[int], cached: int) -> list[int]:
    """Return the output of a prompt of which this many tokens are loaded."""
    engine.forget()
    spoil(engine)
    output, loaded = engine.served(text)
    assert loaded == cached
    return output


def decoded(data: bytes, preset: calibration.Steps | None = None) -> bytes:
    header = record.parse_header(data)
    assert header.layout.quantizer is (Quantizer.LOSSLESS if preset is None else Quantizer.WEIGHTED)
    channels = None if preset is None else preset.channels(header.layout.tokens)
    return bytes(record.decode(data, header.key, header.layout, channels=channels))


def by_chunk(found: list[bytes]) -> list[bytes]:
    """Return the records of two chunks in the order of their prompt."""
    ordered = sorted(found, key=lambda data: record.parse_header(data).parent != b"")
    assert len(ordered) == CHUNKS
    return ordered


def test_an_engine_loads_what_a_preset_stored_within_half_a_step(
    daemon: Process, make_engine: Any, prompt: Any, reference: Any, file: Path, store: Redis, several_workers: None
) -> None:
    text, steps = prompt(700), calibration.read(file).preset("small")
    with closing(make_engine(daemon.address)) as engine:
        assert engine.outputs([text]) == reference([text])
        engine.flush()
    exact = by_chunk(records(store))
    small = {"quantizer": "small", "calibration": str(file)}
    with closing(make_engine(daemon.address, extra=small)) as engine:
        assert engine.served(text)[1] == 0, "records of another quantizer were loaded"
        engine.flush()
        lossy = by_chunk([data for data in records(store) if data not in exact])
        loaded = outputs(engine, text, 512)
    assert 2 * sum(map(len, lossy)) < sum(map(len, exact))
    layers, kinds, heads, size = steps.steps.shape
    for index, (one, other) in enumerate(zip(exact, lossy, strict=True)):
        kv = [np.frombuffer(each, np.float32) for each in (decoded(one), decoded(other, steps))]
        error = np.abs(kv[0] - kv[1]).reshape(layers, kinds, 256, heads, size)
        assert (error[:, 1] <= 0.504 * steps.steps[:, 1, None] + 1e-5).all(), "values"
        assert 0 < error[:, 0].max() <= 0.504 * 2**0.5 * steps.steps.max() + 1e-5, "keys"
        assert error[:, :, :4].any() == (index > 0), "the first tokens of a prompt are exact"
    # An exact engine that loads the rounded values gives the expected output.
    for one, other in zip(exact, lossy, strict=True):
        header = record.parse_header(one)
        data = record.encode(
            header.key, Codec(header.codec), header.layout, decoded(other, steps), parent=header.parent
        )
        store.delete(storage_key(header.key))
        store.set(storage_key(header.key), data)
    with closing(make_engine(daemon.address)) as engine:
        assert outputs(engine, text, 512) == loaded != reference([text])[0]
    # Two ranks load the records of one.
    with closing(make_engine(daemon.address, extra=small, tensor_parallel_size=2)) as engine:
        assert engine.served(text) == (loaded, 512)


def test_exact_copies_stay_in_local_tiers_and_are_preferred(
    storage: Process, make_engine: Any, prompt: Any, reference: Any, file: Path, store: Redis
) -> None:
    text = prompt(700)
    tiers = json.dumps({"memory_budget_bytes": "64MiB"})
    address = f"127.0.0.1:{free_port()}"
    plane = Process("dpu", "--listen", address, "--storage", storage.address, "--tiers", tiers, *PATIENT)
    extra = {"quantizer": "small", "calibration": str(file), "exact_copies": True}
    try:
        with closing(make_engine(plane.address, extra=extra)) as engine:
            assert engine.outputs([text]) == reference([text])
            engine.flush()
            found = by_chunk(records(store))
            assert all(record.parse_header(data).layout.quantizer is Quantizer.WEIGHTED for data in found)
            assert outputs(engine, text, 512) == reference([text])[0], "exact values were loaded"
            counted = engine.counters()
            assert counted["exact_copies"] == 2 and counted["tier_hit_tokens/memory"] == 512
            plane.kill()
            plane.restart()  # its memory is empty

            def loads() -> bool:
                engine.forget()
                return bool(engine.served(text)[1])

            wait_for(loads)
            assert outputs(engine, text, 512) != reference([text])[0], "rounded values were loaded"
    finally:
        plane.stop()


def test_exact_copies_without_local_tiers_are_counted(
    daemon: Process, make_engine: Any, prompt: Any, file: Path, store: Redis
) -> None:
    extra = {"quantizer": "small", "calibration": str(file), "exact_copies": True}
    with closing(make_engine(daemon.address, extra=extra)) as engine:
        engine.generate([prompt(300)])
        engine.flush()
        engine.generate([prompt(31)])  # vLLM collects counters in a step
        assert engine.counters()["dropped_copies/storage_refused"] == 1
    assert len(records(store)) == 1


def test_exact_records_far_away_are_no_reason_to_move_more_bytes(
    daemon: Process, make_engine: Any, prompt: Any, reference: Any, file: Path, store: Redis
) -> None:
    """Symptom: an engine with exact copies loaded another engine's exact records from storage, not its smaller ones."""
    text, small = prompt(700), {"quantizer": "small", "calibration": str(file), "exact_copies": True}
    for extra in (small, {}):
        with closing(make_engine(daemon.address, extra=extra)) as engine:
            assert engine.outputs([text]) == reference([text])
            engine.flush()
    assert len(records(store)) == 2 * CHUNKS
    with closing(make_engine(daemon.address, extra=small)) as engine:
        assert outputs(engine, text, 512) != reference([text])[0]


def test_engines_with_other_calibrations_share_nothing(
    daemon: Process, make_engine: Any, prompt: Any, file: Path, store: Redis, tmp_path: Path
) -> None:
    made = calibration.read(file)
    coarser = {preset: steps * np.float32(1.5) for preset, steps in made.steps.items()}
    other = tmp_path / "other.calibration"
    replace(made, steps=coarser).write(other)
    for path, cached in ((file, 0), (other, 0), (other, 256)):
        with closing(make_engine(daemon.address, extra={"quantizer": "small", "calibration": str(path)})) as engine:
            assert engine.served(prompt(300))[1] == cached
            engine.flush()
    assert len(records(store)) == 2


def test_a_calibration_of_another_model_ends_the_start(
    daemon: Process, make_engine: Any, file: Path, tmp_path: Path
) -> None:
    made: Calibration = calibration.read(file)
    layers = {preset: steps[:-1] for preset, steps in made.steps.items()}
    rows: list[tuple[dict[str, Any], str]] = [
        ({"steps": layers, "centres": made.centres[:-1]}, f"{made.layers - 1} layers instead of {made.layers}"),
        ({"architecture": "GPTNeoXForCausalLM"}, "architecture GPTNeoXForCausalLM instead of LlamaForCausalLM"),
        ({"rope": '{"rope_theta": 77.0, "rope_type": "default"}'}, "rope_theta 77.0 of the rotary embedding"),
    ]
    for changes, reason in rows:
        wrong = tmp_path / "wrong.calibration"
        replace(made, **changes).write(wrong)
        with pytest.raises(Exception, match=reason):
            make_engine(daemon.address, extra={"quantizer": "tiny", "calibration": str(wrong)})
    for extra, reason in (
        ({"quantizer": "tiny"}, "needs a calibration of the model"),
        ({"calibration": str(file)}, "calibration is set"),
        ({"exact_copies": True}, "needs a lossy quantizer"),
        ({"quantizer": "tiny", "calibration": str(tmp_path / "none")}, "No such file"),
    ):
        with pytest.raises(Exception, match=reason):
            make_engine(daemon.address, extra=extra)
