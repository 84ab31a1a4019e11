"""Computing times, the slowdown by transfers, and the file that stores both."""

import json
import logging
import random
from pathlib import Path
from typing import Any

import pytest

from host_control.cache import KeptLearning, engine_name
from host_control.interference.slowdown import Interference
from host_control.interference.table import ComputeTable, LayerTimes, attention_pairs

TOKEN_S, PAIR_S, STEP_S = 3e-4, 2e-8, 2e-3
NAME = engine_name(b"model", "machine")
DECODED_S = 0.02
BUDGET = 0.02
LINK = 4e9
"""Bytes per second without a limit."""


def seconds(new: int, cached: int) -> float:
    return STEP_S + TOKEN_S * new + PAIR_S * attention_pairs(cached, new)


def filled(lengths: tuple[tuple[int, int], ...] = ((256, 0), (512, 0), (300, 2000), (1024, 700))) -> ComputeTable:
    table = ComputeTable()
    for new, cached in lengths:
        table.observe("prompts", new, attention_pairs(cached, new), seconds(new, cached))
        table.observe("layer", new, attention_pairs(cached, new), seconds(new, cached) / 32)
    return table


# ---------------------------------------------------------------------------------------------------- the table


@pytest.mark.parametrize(("new", "cached"), [(512, 1000), (100, 4000), (2048, 0)])
def test_unobserved_lengths_are_predicted(new: int, cached: int) -> None:
    table, pairs = filled(), attention_pairs(cached, new)
    assert table.predict("prompts", new, pairs) == pytest.approx(seconds(new, cached), rel=0.05)
    assert table.predict("layer", new, pairs) == pytest.approx(seconds(new, cached) / 32, rel=0.05)


@pytest.mark.parametrize("waits_s", [0.0, 5.0])
def test_layer_times_exclude_waits(waits_s: float) -> None:
    times, now_s = LayerTimes(), 100.0
    assert times.take() == 0
    times.waited(now_s, now_s + 1)
    assert times.take() == 0, "one layer has no measurement, so the next one has no start time"
    for _ in range(24):
        times.waited(now_s, now_s + waits_s)
        now_s += waits_s + 0.2
    assert times.take() == pytest.approx(0.2)
    assert times.take() == 0


# ---------------------------------------------------------------------------------------------------- interference


def decode(policy: Interference, cost: float, steps: int, deviation: float = 0.02, seed: int = 1) -> tuple[float, int]:
    """Decode with transfers during every other ten steps; return their mean slowdown in the second half, and the rate.

    Args:
        policy: Policy that sets the rate.
        cost: Real slowdown for each GB/s.
        steps: Number of steps.
        deviation: Standard deviation of a step's time, as a fraction.
        seed: Seed of the deviations.
    """
    chance, slowdowns = random.Random(seed), []
    for number in range(steps):
        rate = min(policy.rate or LINK, LINK) if number // 10 % 2 else 0.0
        slowdown = cost * rate / 1e9
        policy.decoded(DECODED_S, DECODED_S * (1 + slowdown) * max(0.5, 1 + chance.gauss(0, deviation)), rate)
        if rate and number > steps // 2:
            slowdowns.append(slowdown)
    return sum(slowdowns) / len(slowdowns), policy.rate


@pytest.mark.parametrize("cost", [0.05, 0.4])
@pytest.mark.parametrize("deviation", [0.02, 0.1])
def test_the_slowdown_stays_within_the_budget(cost: float, deviation: float) -> None:
    slowdown, rate = decode(Interference(BUDGET), cost, 8000, deviation)
    assert slowdown < 1.1 * BUDGET
    assert rate > BUDGET / cost * 1e9 / 3, "and not far below the limit"


def test_transfers_without_cost_are_not_limited() -> None:
    assert decode(Interference(BUDGET), 0.0, 2000)[1] > LINK


def test_the_rate_follows_a_changing_cost() -> None:
    policy = Interference(BUDGET)
    decode(policy, 0.0, 2000)
    assert decode(policy, 0.2, 8000)[0] < 1.3 * BUDGET
    assert decode(policy, 0.0, 12000)[1] > LINK


def test_the_first_rate_is_low_but_not_zero() -> None:
    policy = Interference(BUDGET)
    assert 16 << 20 <= policy.rate < LINK / 4
    for _ in range(1000):
        policy.decoded(DECODED_S, 1.9 * DECODED_S, 16 << 20)
    assert 16 << 20 <= policy.rate < 32 << 20


@pytest.mark.parametrize("seed", range(8))
def test_noise_alone_does_not_lower_the_rate_below_the_first_one(seed: int) -> None:
    """Steps vary by a fifth, and lower rates would show even less of the cost."""
    policy = Interference(BUDGET)
    first = policy.rate
    assert decode(policy, 0.1, 400, deviation=0.2, seed=seed)[1] > first / 2


@pytest.mark.parametrize("seed", range(8))
def test_wrong_first_predictions_do_not_count_as_a_slowdown(seed: int) -> None:
    """The first predictions are 40 % too long: afterwards, all steps seem to be slower than usual."""
    policy = Interference(BUDGET)
    chance = random.Random(seed)
    for _ in range(60):
        policy.decoded(1.4 * DECODED_S, DECODED_S * chance.gauss(1, 0.1), 0.0)
    first = policy.rate
    for _ in range(100):
        for rate in (0.0, 0.0, 0.0, 0.05e9):
            policy.decoded(DECODED_S, DECODED_S * chance.gauss(1, 0.1), rate)
    assert policy.rate > first / 2


def test_outlier_steps_are_limited() -> None:
    held, longer = Interference(BUDGET), Interference(BUDGET)
    held.decoded(DECODED_S, 300 * DECODED_S, 1e9)
    longer.decoded(DECODED_S, 1.25 * DECODED_S, 1e9)
    assert longer.rate == pytest.approx(held.rate)
    assert held.rate < Interference(BUDGET).rate


# ---------------------------------------------------------------------------------------------------- the file


def kept(path: Path | None, name: str = NAME, caplog: Any = None) -> tuple[ComputeTable, Interference, KeptLearning]:
    table, policy = ComputeTable(), Interference(BUDGET)
    learning = KeptLearning(path, name, {"table": table, "interference": policy}, logging.getLogger("kept"))
    learning.load()
    return table, policy, learning


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Return a file with the measurements of an engine, in a new folder."""
    path = tmp_path / "cache" / "computing.json"
    table, policy, learning = kept(path)
    table.restore(filled().pack())
    decode(policy, 0.0, 2000)
    learning.save()
    return path


def test_a_start_continues_from_the_file(file: Path) -> None:
    table, policy, learning = kept(file)
    assert table.predict("prompts", 512, 1e5) == filled().predict("prompts", 512, 1e5)
    assert policy.rate > LINK
    table.observe("prompts", 512, 1e5, 1.0)
    learning.save()
    assert kept(file)[0].predict("prompts", 512, 1e5) != filled().predict("prompts", 512, 1e5)
    assert file.stat().st_mode & 0o077 == 0 and [path.name for path in file.parent.iterdir()] == [file.name]


@pytest.mark.parametrize("other", [(b"another model", "machine"), (b"model", "another machine")])
def test_engines_have_separate_entries(file: Path, other: tuple[bytes, str]) -> None:
    table, policy, learning = kept(file, engine_name(*other))
    assert table.predict("prompts", 512, 1e5) is None and policy.rate < LINK
    learning.save()
    assert kept(file)[0].predict("prompts", 512, 1e5) is not None


def test_entries_that_were_not_learnt_are_kept(file: Path) -> None:
    table = ComputeTable()
    without = KeptLearning(file, NAME, {"table": table}, logging.getLogger("kept"))
    without.load()
    without.save()
    assert kept(file)[1].rate > LINK


def _changed(file: Path, change: Any) -> bytes:
    described = json.loads(file.read_bytes())
    change(described["engines"][NAME])
    return json.dumps(described).encode()


ROTTEN: dict[str, Any] = {
    "cut": lambda file: file.read_bytes()[:-40],
    "no JSON": lambda file: b"\x80\x04N.",
    "deep": lambda file: b"[" * 100_000,
    "long": lambda file: b" " * (17 << 20) + file.read_bytes(),
    "another version": lambda file: file.read_bytes().replace(b'"version": 2', b'"version": 3'),
    "no engines": lambda file: b'{"version": 2, "engines": 3}',
    "no engine": lambda file: json.dumps({"version": 2, "engines": {NAME: [1]}}).encode(),
    "a row less": lambda file: _changed(file, lambda engine: engine["table"].pop("layer")),
    "a term less": lambda file: _changed(file, lambda engine: engine["table"]["prompts"]["targets"].pop()),
    "a text": lambda file: _changed(file, lambda engine: engine["table"]["prompts"].update(weight="x")),
    "below zero": lambda file: _changed(file, lambda engine: engine["table"]["prompts"].update(weight=-1)),
    "no number": lambda file: _changed(file, lambda engine: engine["table"]["prompts"].update(weight=float("nan"))),
    "a list": lambda file: _changed(file, lambda engine: engine.update(table=[], interference=[1])),
    "sums of nothing": lambda file: _changed(file, lambda engine: engine["interference"].update(spread=[0, 0])),
}


@pytest.mark.parametrize("how", ROTTEN)
def test_an_invalid_file_is_logged_and_replaced(file: Path, how: str, caplog: pytest.LogCaptureFixture) -> None:
    file.write_bytes(ROTTEN[how](file))
    table, policy, learning = kept(file)
    table.predict("prompts", 512, 1e5)
    assert policy.rate > 0
    if how != "no engine":
        assert "(computing_cache)" in caplog.text
    for row in ("prompts", "decoding", "layer"):
        for _ in range(3):
            table.observe(row, 512, 1e5, 0.5)
    learning.save()
    caplog.clear()
    assert kept(file)[0].predict("decoding", 512, 1e5) == pytest.approx(0.5)
    assert not caplog.text


def test_a_failed_write_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    kept(tmp_path / "file" / "computing.json")[2].save()
    assert "cannot be written" in caplog.text
    kept(None)[2].save()


def test_a_symbolic_link_is_not_followed(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    link = file.with_name("link")
    link.symlink_to(file)
    assert kept(link)[0].predict("prompts", 512, 1e5) is None
    assert "cannot be read" in caplog.text
