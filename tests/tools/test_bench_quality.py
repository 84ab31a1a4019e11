# SPDX-License-Identifier: Apache-2.0
"""``shadowserve bench quality``: what comes back, what is counted, and how it is compared."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shadowserve_tools.bench.parts.kv_codecs import BASELINES
from shadowserve_tools.bench.parts.needles import contexts
from shadowserve_tools.bench.parts.real_model import RealModel
from shadowserve_tools.bench.parts.weighted import Weighted
from shadowserve_tools.bench.quality import interval
from shadowserve_tools.calibrate.steps import Measured

ASSETS = Path(__file__).resolve().parents[1] / "assets"
TOKENS = 512


@pytest.fixture(scope="module")
def model() -> RealModel:
    return RealModel(ASSETS / "model")


@pytest.fixture(scope="module")
def window(model: RealModel) -> list[int]:
    lines = (ASSETS / "heldout.jsonl").read_text(encoding="utf-8").splitlines()
    return model.tokens(json.loads(lines[1])["text"])[: TOKENS + 64]


@pytest.fixture(scope="module")
def stored(model: RealModel, window: list[int]) -> tuple[Any, dict[str, dict[str, tuple[float, float]]]]:
    """KV, and the bits and the error of each treatment."""
    with torch.no_grad():
        kv = model.prefill(window[:TOKENS])
        found: dict[str, dict[str, tuple[float, float]]] = {}
        for family, treatments in BASELINES.items():
            for name, store in treatments.items():
                back = store(kv, model)
                error = float((back.kv - kv).square().mean())
                found.setdefault(family, {})[name] = float(back.bits.sum()) / kv.numel(), error
    return kv, found


def test_lossless_changes_nothing_and_fewer_bits_cost_more_error(stored: Any) -> None:
    _, found = stored
    assert found["lossless"]["lossless"][1] == 0
    assert found["fp8 cache"]["E4M3"][0] == 8
    for family in set(found) - {"lossless", "fp8 cache"}:
        bits, errors = zip(*found[family].values(), strict=True)
        assert sorted(bits, reverse=True) == list(bits) and 1 < bits[-1] < bits[0] < 8, family
        assert 0 < errors[0] and sorted(errors) == list(errors), family


@torch.no_grad()
def test_keys_before_rope_come_back_and_do_not_depend_on_the_position(model: RealModel, stored: Any) -> None:
    kv, _ = stored
    plain = model.plain(kv)
    assert torch.equal(plain[:, 1], kv[:, 1])
    assert not torch.allclose(plain[:, 0, 1:], kv[:, 0, 1:], atol=0.1)
    torch.testing.assert_close(model.rotated(plain), kv, atol=1e-4, rtol=1e-4)
    repeated = model.plain(model.prefill([65] * 9))[0, 0]  # in the first layer, equal tokens have equal keys
    torch.testing.assert_close(repeated[8], repeated[0], atol=0.05, rtol=0.05)


def test_weighted_keeps_first_tokens_and_outliers_exactly(model: RealModel, window: list[int], stored: Any) -> None:
    kv, found = stored
    measured = Measured(torch.ones(*kv.shape[:2], kv[0, 0, 0].numel()), model.plain(kv).flatten(3))
    store = Weighted(measured, measured.for_bits(3.0))
    changed = kv.clone()
    changed[2, 1, 300, 0, 5] = 1000.0
    with torch.no_grad():
        back, plain = store(changed, model), store(kv, model)
    assert back.kv[2, 1, 300, 0, 5] == 1000.0
    assert torch.equal(back.kv[:, :, :4], changed[:, :, :4])
    assert back.bits[2, 1] > plain.bits[2, 1] + 16
    assert 3 < plain.bits.sum() / kv.numel() < 3.6
    lossy = found["rotation (TurboQuant)"]["3/2 bits"]
    assert 0 < float((plain.kv - kv).square().mean()) < lossy[1]


@pytest.mark.parametrize("task", [0, 1, 2])
def test_prompts_hide_what_questions_ask_for(model: RealModel, window: list[int], task: int) -> None:
    for length in (512, 1024):
        made = list(contexts(model, window * 8, length, 1))
        _, prompt, questions = made[task]
        assert len(prompt) == length
        for question in questions:
            answer = bytes(question.tokens[-question.answer :]).strip()
            assert answer.isdigit() and answer in bytes(prompt)


def test_intervals_hold_the_mean_and_shrink_with_more_windows() -> None:
    chance = np.random.default_rng(2)
    few, many = ([chance.exponential(1, 256) for _ in range(count)] for count in (3, 48))
    for windows in (few, many):
        low, middle, high = interval(windows)
        assert low < middle < high
    assert interval(many)[2] - interval(many)[0] < 0.5 * (interval(few)[2] - interval(few)[0])
    assert interval(many, [2 * window for window in many]) == pytest.approx((0.5, 0.5, 0.5))
