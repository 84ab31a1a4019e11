# SPDX-License-Identifier: Apache-2.0
"""scripts/measure_quality.py: the effect of a stored KV cache on the model's outputs, for a small sample."""

import json
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shadowserve.chunk import DType, Quantizer
from shadowserve.native import Codec

REPOSITORY = Path(__file__).resolve().parents[2]
ASSETS = REPOSITORY / "tests" / "assets"

sys.path.insert(0, str(REPOSITORY / "scripts"))

import measure_quality  # noqa: E402

SOME = (
    *measure_quality.TREATMENTS[:6],
    measure_quality.Treatment(bins=64, value_bins=16),
    measure_quality.Treatment(bins=64, value_bins=16, scale_tokens=16),
    measure_quality.Treatment(dtype=DType.FLOAT8_E4M3, bins=64, value_bins=16),
)
Outcomes = tuple[float, dict[tuple[str, str], measure_quality.Outcome]]


@pytest.fixture(scope="module")
def outcomes() -> Outcomes:
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(ASSETS / "model", dtype=torch.float32).eval()
    texts = list(measure_quality.windows(measure_quality.load_documents(ASSETS / "heldout.jsonl"), 768))[:2]
    baseline, rows = measure_quality.measure(model, texts, 512, treatments=SOME)
    return baseline, {(row.dtype, row.treatment): row for row in rows}


def random_cache(tokens: int) -> measure_quality.KVCache:
    generator = torch.Generator().manual_seed(5)
    return [tuple(torch.randn(1, 2, tokens, 32, generator=generator) for _ in range(2)) for _ in range(3)]  # type: ignore[misc]


def test_lossless_records_change_nothing(outcomes: Outcomes) -> None:
    baseline, rows = outcomes
    lossless = rows["float32", "lossless"]
    assert lossless.bits_per_byte == baseline
    assert (lossless.change, lossless.error, lossless.divergence, lossless.agreement) == (0.0, 0.0, 0.0, 1.0)
    assert lossless.bits_per_element["deflate"] < 32 / 1.05


def test_more_bins_cost_less_quality_and_more_bits(outcomes: Outcomes) -> None:
    binned = [outcomes[1]["bfloat16", f"binned {bins}"] for bins in (16, 32, 64, 256)]
    for coarse, fine in pairwise(binned):
        assert coarse.error > fine.error > 0
        assert coarse.divergence > fine.divergence > 0
        for name in ("deflate", "entropy"):
            assert coarse.bits_per_element[name] < fine.bits_per_element[name]
    assert abs(binned[-1].change) < 0.01
    assert binned[0].agreement < binned[-1].agreement


def test_more_bins_for_keys_than_values_lower_the_divergence_at_equal_size(outcomes: Outcomes) -> None:
    same, apart = outcomes[1]["bfloat16", "binned 32"], outcomes[1]["bfloat16", "binned 64/16"]
    assert apart.bits_per_element["deflate"] < 1.02 * same.bits_per_element["deflate"]
    assert apart.divergence < 0.8 * same.divergence


def test_shared_scales_save_their_bytes(outcomes: Outcomes) -> None:
    alone, shared = (outcomes[1]["bfloat16", f"binned 64/16{rest}"] for rest in ("", ", 16 tokens a scale"))
    assert shared.bits_per_element["deflate"] < alone.bits_per_element["deflate"] - 0.9 * 32 / 128


def test_column_entropy_is_that_of_the_distributions() -> None:
    rng = np.random.default_rng(1)
    wide = rng.integers(-8, 8, (256, 64))
    narrow = rng.integers(-1, 1, (256, 64))
    size = measure_quality.column_entropy(np.concatenate([wide, narrow], axis=1).astype(np.int8))
    assert 256 * 64 * (4 + 1) / 8 <= size + 60 <= 256 * 64 * 5 / 8 + 300  # counts are a sample: their entropy is lower


def test_main_writes_the_plot_and_the_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(measure_quality, "TREATMENTS", SOME[2:4] + SOME[6:8])
    files = {name: tmp_path / name for name in ("quality.json", "quality.svg")}
    arguments = ["--prefix", "512", "--scored", "64", "--windows", "1"]
    arguments += ["--json", str(files["quality.json"]), "--plot", str(files["quality.svg"])]
    monkeypatch.setattr(sys, "argv", ["measure_quality.py", *arguments])
    assert measure_quality.main() == 0
    report = json.loads(files["quality.json"].read_text())
    assert [row["treatment"] for row in report["rows"]] == [item.label for item in SOME[2:4] + SOME[6:8]]
    assert "<svg" in files["quality.svg"].read_text() and "| bfloat16 | binned 64/16 |" in capsys.readouterr().out


def test_lossless_records_restore_the_cache_bit_by_bit() -> None:
    cache = random_cache(512)
    treatment = measure_quality.Treatment(quantizer=Quantizer.LOSSLESS, dtype=DType.FLOAT32)
    loaded, sizes = measure_quality.stored_and_loaded(cache, treatment, [Codec.NONE])
    for layer, layer_loaded in zip(cache, loaded, strict=True):
        for tensor, tensor_loaded in zip(layer, layer_loaded, strict=True):
            assert torch.equal(tensor, tensor_loaded)
    assert sizes["none"] > 3 * 2 * 2 * 512 * 32 * 4


def test_kv_bytes_have_the_layout_of_records() -> None:
    cache = random_cache(300)
    data = torch.frombuffer(bytearray(measure_quality.kv_bytes(cache, DType.FLOAT32, 256, 44)), dtype=torch.float32)
    data = data.view(3, 2, 44, 2, 32)
    assert torch.equal(data[2, 1, 7, 0], cache[2][1][0, 0, 263])
    assert torch.equal(data[0, 0, 43, 1], cache[0][0][0, 1, 299])


def test_windows_do_not_overlap_and_skip_short_documents() -> None:
    documents = [b"abcdefghij", b"xy"]
    assert [bytes(window) for window in measure_quality.windows(documents, 4)] == [b"abcd", b"efgh"]


def test_a_prefix_must_be_a_multiple_of_a_chunk(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["measure_quality.py", "--prefix", "300"])
    with pytest.raises(SystemExit) as refusal:
        measure_quality.main()
    assert refusal.value.code == 2
    assert "multiple of 256" in capsys.readouterr().err
