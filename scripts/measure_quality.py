#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Measure what each treatment of the KV cache costs the project's own model, and what it saves.

Windows are cut from tests/assets/heldout.jsonl. The model reads the first part of a window; its keys and values become
real records (256-token chunks, quantized and compressed by the C core) and are decoded again; then the rest of the
window is scored on top of them. The cost is how much the predictions differ from those on the cache that was never
stored: their divergence, and the change in bits per byte.

    python scripts/measure_quality.py --json quality.json --plot quality.svg
"""

import argparse
import json
import math
import platform
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from shadowserve import native, record
from shadowserve.chunk import ChunkLayout, DType, Quantizer
from shadowserve_tools.charts import Chart
from shadowserve_tools.charts import draw as draw_charts

CHUNK_TOKENS = 256
ASSETS = Path(__file__).resolve().parents[1] / "tests" / "assets"
KEY = bytes(32)  # a record needs some key and namespace; nothing here depends on which
TORCH_DTYPES = {
    DType.BFLOAT16: torch.bfloat16,
    DType.FLOAT32: torch.float32,
    DType.FLOAT8_E4M3: torch.float8_e4m3fn,
}
SHOWN_CODECS = ("deflate", "zstd", "kvrans")
ENTROPY = "entropy"
COLUMN_KINDS = 8  # tables of "entropy" in each slice
TABLE_ENTRY_BITS = 5  # what each symbol that occurs costs in a table

KVCache = list[tuple[torch.Tensor, torch.Tensor]]
"""Keys and values of each layer: (1, KV heads, tokens, head size)."""


@dataclass(frozen=True, kw_only=True)
class Treatment:
    """Way of storing chunks; see ChunkLayout."""

    quantizer: Quantizer = Quantizer.BINNED
    dtype: DType = DType.BFLOAT16
    bins: int = 0
    value_bins: int = 0
    scale_tokens: int = 1

    @property
    def label(self) -> str:
        """Name in the table."""
        if self.quantizer is not Quantizer.BINNED:
            return self.quantizer.name.lower()
        bins = f"binned {self.bins}" + (f"/{self.value_bins}" if self.value_bins else "")
        shared = f", {self.scale_tokens} tokens a scale" if self.scale_tokens > 1 else ""
        return bins + shared


SPLIT_BINS = ((32, 8), (48, 12), (64, 16), (96, 24), (128, 32))
"""Bins of keys and values, four to one: what the search on other windows found best (docs/guides/quality.md)."""

TREATMENTS = (
    Treatment(quantizer=Quantizer.LOSSLESS, dtype=DType.FLOAT32),
    Treatment(quantizer=Quantizer.LOSSLESS),
    *(Treatment(bins=bins) for bins in (16, 32, 64, 256)),
    *(Treatment(bins=bins, value_bins=value_bins) for bins, value_bins in SPLIT_BINS),
    *(Treatment(bins=bins, value_bins=value_bins, scale_tokens=16) for bins, value_bins in SPLIT_BINS),
    Treatment(dtype=DType.FLOAT8_E4M3, quantizer=Quantizer.PASSTHROUGH),
    Treatment(dtype=DType.FLOAT8_E4M3, bins=64, value_bins=16),
)


@dataclass(kw_only=True)
class Outcome:
    """One row of the table; means over windows.

    Attributes:
        family: Curve of the plot.
        bits_per_element: Stored bits by codec, scales and headers included; ``"entropy"`` is the bound of a coder
            with a table for each of eight kinds of columns (binned only).
        error: Root mean square of the change in K and V, over that of K and V.
        divergence: Kullback-Leibler divergence of the predictions from those on the kept cache, in bits per byte.
        change: Change of bits_per_byte against the float32 cache without storing; ``change_error`` is standard.
        agreement: Share of positions with the same most likely next byte.
    """

    treatment: str
    dtype: str
    family: str
    bits_per_element: dict[str, float]
    error: float
    divergence: float
    bits_per_byte: float
    change: float
    change_error: float
    agreement: float


def load_documents(path: Path) -> list[bytes]:
    """Return the texts of a file that has a JSON object with ``text`` on each line."""
    return [json.loads(line)["text"].encode() for line in path.read_text(encoding="utf-8").splitlines()]


def windows(documents: Sequence[bytes], size: int) -> Iterator[list[int]]:
    """Yield windows of ``size`` tokens (bytes) from the starts of ``documents`` on, without overlap."""
    for data in documents:
        for start in range(0, len(data) - size + 1, size):
            yield list(data[start : start + size])


def kv_bytes(cache: KVCache, dtype: DType, first: int, tokens: int) -> bytes:
    """Return ``tokens`` tokens of ``cache`` in the record's decoded layout: layer, kind, token, head, dimension."""
    parts = [
        tensor[0, :, first : first + tokens].transpose(0, 1).to(TORCH_DTYPES[dtype]).contiguous()
        for layer in cache
        for tensor in layer
    ]
    return b"".join(part.view(torch.uint8).numpy().tobytes() for part in parts)


def _layout(cache: KVCache, treatment: Treatment) -> ChunkLayout:
    _, heads, _, head_size = cache[0][0].shape
    return ChunkLayout(
        namespace=bytes(32),
        dtype=treatment.dtype,
        layers=len(cache),
        kinds=2,
        vector_length=heads * head_size,
        tokens=CHUNK_TOKENS,
        quantizer=treatment.quantizer,
        bins=treatment.bins,
        value_bins=treatment.value_bins,
        scale_tokens=treatment.scale_tokens,
    )


def stored_and_loaded(
    cache: KVCache, treatment: Treatment, codecs: Sequence[native.Codec]
) -> tuple[KVCache, dict[str, int]]:
    """Return ``cache`` after its chunks went into records and came back, and the records' bytes with each codec.

    The tokens of ``cache`` must be a multiple of 256.
    """
    _, heads, tokens, head_size = cache[0][0].shape
    layout = _layout(cache, treatment)
    chunks: list[torch.Tensor] = []
    stored = {codec.name.lower(): 0 for codec in codecs}
    if treatment.quantizer is Quantizer.BINNED:
        stored[ENTROPY] = 0
    for first in range(0, tokens, CHUNK_TOKENS):
        kv = kv_bytes(cache, treatment.dtype, first, CHUNK_TOKENS)
        for codec in codecs:
            data = record.encode(KEY, codec, layout, kv)
            stored[codec.name.lower()] += len(data)
        if ENTROPY in stored:
            plain = record.encode(KEY, native.Codec.NONE, layout, kv)
            stored[ENTROPY] += len(plain) - sum(
                symbols.size - column_entropy(symbols) for symbols in _symbols(record.parse_header(plain), plain)
            )
        decoded = torch.from_numpy(np.frombuffer(record.decode(data, KEY, layout), np.uint8).copy())
        elements = decoded.view(TORCH_DTYPES[treatment.dtype]).float()
        chunks.append(elements.view(len(cache), 2, CHUNK_TOKENS, heads, head_size))
    joined = torch.cat(chunks, dim=2).transpose(2, 3)
    return [(layer[0:1].contiguous(), layer[1:2].contiguous()) for layer in joined], stored


def _symbols(head: record.Header, data: bytes) -> Iterator[npt.NDArray[np.int8]]:
    """Yield each slice's symbols, a row for each token, of a record without a codec."""
    for entry in head.slices:
        begin = int(entry["offset"]) + int(entry["scales_length"])
        symbols = np.frombuffer(data, np.int8, int(entry["encoded_length"]), begin)
        yield symbols.reshape(int(entry["tokens"]), -1)


def column_entropy(symbols: npt.NDArray[np.int8]) -> int:
    """Return the bytes of an order-0 coder with a table for each of a few kinds of columns, tables included.

    Columns with similar distributions share a table: they are sorted by spread into classes of equal size, then moved
    to the class that codes them best, a few times. ``symbols`` of a slice have a row for each token.
    """
    columns = symbols.shape[1]
    places = np.arange(columns) * 256
    counts = np.bincount((symbols.astype(np.int64) + 128 + places).ravel(), minlength=columns * 256)
    counts = counts.reshape(columns, 256)
    kinds = np.empty(columns, np.int64)
    kinds[symbols.std(axis=0).argsort()] = np.arange(columns) * COLUMN_KINDS // columns
    for _ in range(4):
        tables = np.stack([counts[kinds == kind].sum(axis=0) for kind in range(COLUMN_KINDS)]) + 1e-3
        kinds = (counts @ np.log2(tables / tables.sum(axis=1, keepdims=True)).T).argmax(axis=1)
    bits = 0.0
    for kind in range(COLUMN_KINDS):
        table = counts[kinds == kind].sum(axis=0)
        table = table[table > 0]
        bits += float(-(table * np.log2(table / max(1, table.sum()))).sum()) + TABLE_ENTRY_BITS * len(table)
    size: int = math.ceil((bits + math.log2(COLUMN_KINDS) * columns) / 8)
    return size


def prefill(model: Any, tokens: list[int]) -> KVCache:
    """Return the cache of ``tokens``."""
    with torch.no_grad():
        cache = model(torch.tensor([tokens]), use_cache=True).past_key_values
    return [(layer.keys, layer.values) for layer in cache.layers]


def score(model: Any, cache: KVCache, tokens: list[int]) -> tuple[float, torch.Tensor]:
    """Return bits per byte of ``tokens`` after the first, on top of ``cache``, and the predictions' logarithms."""
    from transformers import DynamicCache

    copies = DynamicCache([(keys.clone(), values.clone()) for keys, values in cache])
    window = torch.tensor([tokens])
    with torch.no_grad():
        logits = model(window[:, :-1], past_key_values=copies).logits[0].float()
    loss = torch.nn.functional.cross_entropy(logits, window[0, 1:])
    return float(loss) / math.log(2), logits.log_softmax(dim=-1)


def _divergence(kept: torch.Tensor, other: torch.Tensor) -> float:
    return float((kept.exp() * (kept - other)).sum(dim=-1).mean()) / math.log(2)


def _relative_error(cache: KVCache, other: KVCache) -> float:
    difference = sum(
        float((a - b).square().sum()) for x, y in zip(cache, other, strict=True) for a, b in zip(x, y, strict=True)
    )
    magnitude = sum(float(a.square().sum()) for layer in cache for a in layer)
    return math.sqrt(difference / magnitude)


def _outcome(treatment: Treatment, windows: list[dict[str, float]], stored: list[dict[str, float]]) -> Outcome:
    """Return the row of a treatment from its results, and the bytes of an element by codec, in each window."""
    changes = [window["change"] for window in windows]
    spread = statistics.stdev(changes) if len(changes) > 1 else 0.0
    return Outcome(
        treatment=treatment.label,
        dtype=treatment.dtype.label,
        family=_family(treatment),
        bits_per_element={name: statistics.fmean(sizes[name] for sizes in stored) for name in stored[0]},
        change_error=spread / math.sqrt(len(changes)),
        **{name: statistics.fmean(window[name] for window in windows) for name in windows[0]},
    )


def _family(treatment: Treatment) -> str:
    if treatment.dtype is not DType.BFLOAT16 or treatment.quantizer is not Quantizer.BINNED:
        return f"{treatment.dtype.label} {treatment.quantizer.name.lower()}"
    if treatment.scale_tokens > 1:
        return f"a quarter of the bins for V, {treatment.scale_tokens} tokens a scale"
    return "a quarter of the bins for V" if treatment.value_bins else "same bins for K and V"


def measure(
    model: Any,
    texts: Sequence[list[int]],
    prefix: int,
    codecs: Sequence[native.Codec] = (native.Codec.DEFLATE,),
    treatments: Sequence[Treatment] = TREATMENTS,
) -> tuple[float, list[Outcome]]:
    """Return the bits per byte without storing, and one Outcome for each of ``treatments``.

    ``texts`` are windows of tokens. ``prefix`` of each, a multiple of 256 and less than all, are prefilled and stored.
    """
    baseline: list[float] = []
    results: dict[Treatment, list[dict[str, float]]] = {treatment: [] for treatment in treatments}
    sizes: dict[Treatment, list[dict[str, float]]] = {treatment: [] for treatment in treatments}
    for tokens in texts:
        cache = prefill(model, tokens[:prefix])
        elements = sum(tensor.numel() for layer in cache for tensor in layer)
        plain, kept = score(model, cache, tokens[prefix:])
        baseline.append(plain)
        for treatment in treatments:
            loaded, stored = stored_and_loaded(cache, treatment, codecs)
            bits, predicted = score(model, loaded, tokens[prefix:])
            sizes[treatment].append({name: 8 * size / elements for name, size in stored.items()})
            results[treatment].append(
                {
                    "bits_per_byte": bits,
                    "change": bits - plain,
                    "divergence": _divergence(kept, predicted),
                    "agreement": float((predicted.argmax(-1) == kept.argmax(-1)).float().mean()),
                    "error": _relative_error(cache, loaded),
                }
            )
    return statistics.fmean(baseline), [_outcome(each, results[each], sizes[each]) for each in treatments]


def _table(outcomes: Sequence[Outcome], codecs: Sequence[native.Codec]) -> str:
    names = [codec.name.lower() for codec in codecs] + [ENTROPY]
    lines = [
        f"| cache | stored as | {' | '.join(names)} | error of K and V | divergence | change in bits/byte | "
        "same next byte |",
        "|---|---" + "|---" * len(names) + "|---|---|---|---|",
    ]
    for row in outcomes:
        sizes = " | ".join(
            f"{row.bits_per_element[name]:.2f}" if name in row.bits_per_element else "" for name in names
        )
        lines.append(
            f"| {row.dtype} | {row.treatment} | {sizes} | {row.error:.4f} | {row.divergence:.4f} | "
            f"{row.change:+.4f} ± {row.change_error:.4f} | {row.agreement:.2%} |"
        )
    return "\n".join(lines)


def draw(outcomes: Sequence[Outcome], codecs: Sequence[native.Codec], path: Path) -> None:
    """Draw quality against size with the last codec: a curve for each family of treatments."""
    name = codecs[-1].name.lower()
    binned = [row for row in outcomes if "binned" in row.treatment]
    divergence: dict[str, list[tuple[float, float]]] = {row.family: [] for row in binned}
    change: dict[str, list[tuple[float, float]]] = {row.family: [] for row in binned}
    errors: dict[str, list[tuple[float, float]]] = {row.family: [] for row in binned}
    for row in sorted(binned, key=lambda row: row.bits_per_element[name]):
        bits = row.bits_per_element[name]
        divergence[row.family].append((bits, row.divergence))
        change[row.family].append((bits, row.change))
        errors[row.family].append((row.change - row.change_error, row.change + row.change_error))
    x = "stored bits per element (bfloat16: 16)"
    charts = [
        Chart("Predictions", x=x, y="divergence, bits/byte", series=divergence, y_log=True),
        Chart("Held-out text", x=x, y="change in bits/byte", series=change, errors=errors),
    ]
    draw_charts(f"Quality against size with {name}: lower left is better", charts, path)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=ASSETS / "model")
    parser.add_argument("--text", type=Path, default=ASSETS / "heldout.jsonl")
    parser.add_argument("--prefix", type=int, default=3072, help="tokens that are stored, a multiple of 256")
    parser.add_argument("--scored", type=int, default=1024, help="tokens that are scored after them")
    parser.add_argument("--windows", type=int, default=24, help="at most this many windows")
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    parser.add_argument("--plot", type=Path, help="also draw quality against size to this file (.svg or .png)")
    options = parser.parse_args()
    if options.prefix % CHUNK_TOKENS or options.prefix <= 0 or options.scored < 2 or options.windows < 1:
        parser.error("--prefix is a positive multiple of 256, --scored at least 2, --windows at least 1")
    return options


def main() -> int:
    """Measure, print the table, and write the files of the command line."""
    options = _arguments()
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).eval()
    texts = list(windows(load_documents(options.text), options.prefix + options.scored))[: options.windows]
    if not texts:
        print(f"measure_quality: no document in {options.text} is long enough", file=sys.stderr)
        return 1
    built_in = native.codec_implementations()
    codecs = [codec for codec in native.Codec if codec in built_in and codec.name.lower() in SHOWN_CODECS]
    baseline, outcomes = measure(model, texts, options.prefix, codecs, TREATMENTS)
    print(
        f"{len(texts)} windows: {options.prefix} tokens stored, {options.scored} scored; "
        f"{baseline:.4f} bits per byte with the float32 cache kept\n"
    )
    print(_table(outcomes, codecs))
    if options.json:
        report = {
            "bench": "quality",
            "machine": {"cpu": platform.machine(), "isa": native.isa_active().name.lower()},
            "settings": {"windows": len(texts), "prefix": options.prefix, "scored": options.scored},
            "baseline_bits_per_byte": baseline,
            "rows": [asdict(row) for row in outcomes],
        }
        options.json.write_text(json.dumps(report, indent=2) + "\n")
    if options.plot:
        draw(outcomes, codecs, options.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
