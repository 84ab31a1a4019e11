"""Inputs of the model of BlueField-3: each number with its source and its uncertainty.

``Given`` has numbers that were measured, published or, where the source says so, assumed. ``Fitted`` has those that
``shadowserve_tools.simulate.model.Model`` computes from them. The tables of docs/design/simulation.md are generated
from both. "Section", "figure" and "table" are the ShadowServe paper's.
"""

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final


def given(value: float, source: str, meaning: str, low: float | None = None, high: float | None = None) -> Any:
    """Return a dataclass field for a number with its source, its meaning and its range."""
    metadata = {"source": source, "meaning": meaning, "low": low, "high": high}
    return dataclasses.field(default=value, metadata=metadata)


@dataclass(frozen=True, kw_only=True)
class Given:
    """Inputs of the model. Gbps are 10^9 bits a second."""

    # The stages on the card.
    network_gbps: float = given(37.3, "figure 13a, section 6.3", "network stage alone, 2 cores, compressed bytes")
    deflate_gbps: float = given(280, "figure 13a, section 6.3", "Deflate engine alone, its output")
    dequantize_gbps: float = given(83.5, "figure 13a, section 6.3", "dequantization alone, 14 cores, its input")
    dma_gbps: float = given(230, "figure 13a, section 6.3", "DMA engine alone")
    deflate_reduction: float = given(0.27, "figure 13b, section 6.3", "what Deflate loses when all stages run")
    dma_reduction: float = given(0.24, "figure 13b, section 6.3", "what DMA loses when all stages run")
    network_together_gbps: float = given(20.6, "figure 13b, section 6.3", "network stage when all stages run")
    network_without_dequantization_gbps: float = given(
        30, 'section 6.3: "~30 Gbps"', "the same without dequantization's memory accesses", 29, 31
    )
    hand_over_us: float = given(
        20, "assumed: two polls of section 5's 10 us", "what each stage adds to a chunk; figure 13a's slope", 10, 100
    )
    tasks_in_flight: float = given(32, "assumed: common depth of a DMA queue", "hand-overs of slices that overlap")
    cores: float = given(14, "section 5", "Arm cores that dequantize")
    all_cores: float = given(16, "section 6.1", "Arm cores of the card")
    l3_mib: float = given(16, "sections 3 and 6.3", "last cache of the card")

    register_us_per_mib: float = given(
        128, "third parties, an x86 server: 49.2 + 11.8 s for 500 GB (kvcache-ai/Mooncake, pull request 855); 29 for "
        "4 MiB at a time in another's (minio/minio-rs, pull request 236)",
        "registering memory with a device, and undoing it",
    )  # fmt: skip

    # Fetched data.
    token_bytes: float = given(131_072, "Llama-3.1-8B: 2 x 32 layers x 8 heads x 128 x 2 bytes", "KV of a token")
    buffer_mib: float = given(512, "section 5", "DMA buffers, so the KV of a round")

    # End-to-end measurements of the paper, which the model is fitted to.
    ttft_20_ms: float = given(502.2, "section 6.2.1", "ShadowServe, unloaded TTFT at 20 Gbps")
    gain_10: float = given(1.38, "section 6.2.2", "CacheGen-Async over it, unloaded TTFT at 10 Gbps", 1.375, 1.385)
    loss_30: float = given(0.11, "section 6.2.2", "how much higher its TTFT is at 30 Gbps", 0.105, 0.115)
    loss_40: float = given(0.24, "section 6.2.2", "how much higher its TTFT is at 40 Gbps", 0.235, 0.245)
    cachegen_ttft_20_ms: float = given(600.5, "section 6.2.1", "CacheGen-Async, unloaded TTFT at 20 Gbps")
    throughput_20: float = given(1.78, "section 6.2.1", "ShadowServe, requests/s at 20 Gbps, 32 output tokens")
    tpot_10_ms: float = given(32.1, "figure 11a", "ShadowServe, loaded TPOT at 10 Gbps, 16 output tokens")
    tpot_40_ms: float = given(38.5, "figure 11a", "the same at 40 Gbps")
    cachegen_tpot_10_ms: float = given(36.5, "figure 11a", "CacheGen-Async, loaded TPOT at 10 Gbps, 16 output tokens")
    cachegen_tpot_40_ms: float = given(61.8, "figure 11a", "the same at 40 Gbps")

    # The GPU.
    decode_slows_decompression: float = given(
        0.30,
        "section 2.2, figure 3a: at least 30 % for one of the two",
        "what CacheGen-Async's decoder loses to decode",
    )
    weights_gb: float = given(16.06, "Llama-3.1-8B: 8.03e9 parameters x 2 bytes", "read in each decode step")
    gpu_gb_per_s: float = given(864, "NVIDIA's data sheet of the L40S", "memory bandwidth of the GPU")
    requests_in_memory: float = given(
        4, "fitted: TPOT of 1.06-1.09 at 128 output tokens (section 6.2.2)", "requests whose KV the GPU holds", 4, 13
    )

    # ShadowServe's changes.
    cached_share: float = given(
        0.5, "assumed: section 6.3 says engines bypass the caches, which would be 0", "of what fusion may save", 0, 1
    )
    huffman_size: float = given(
        0.904, "measured on a trained encoder's KV, 32 bins: 4.205 bits, zlib 6 has 4.65; its range: "
        "bench codecs, and a compressor that is as good",
        "Huffman-only over the paper's Deflate", 0.877, 1.0,
    )  # fmt: skip
    kvrans_size: float = given(
        0.936, "bench codecs: 3.66 bits, Deflate 3.91", "kvrans over Huffman-only Deflate", 0.904, 0.944
    )
    kvrans_instructions: float = given(
        87_768 / 16_384, "native/bench/instructions.json, gcc-12 aarch64, neon", "decoding a symbol"
    )
    dequantize_instructions: float = given(
        1_771 / 2_048, "native/bench/instructions.json, gcc-12 aarch64, neon", "dequantizing it to bfloat16"
    )
    instructions_per_cycle: float = given(2, "assumed; not measured on an A78", "of a core in both", 1, 3)
    clock_ghz: float = given(2.25, "third parties' figures for BlueField-3", "of an Arm core", 2.0, 2.5)


@dataclass(frozen=True, kw_only=True)
class Fitted:
    """Numbers that follow from ``Given``; each field names what it was fitted to."""

    stored_gbit: float = given(0, "gain_10", "compressed KV of a prompt of 14,000 tokens")
    rest_s: float = given(0, "ttft_20_ms", "TTFT that is not the card's pipeline: lookup, scheduling, first token")
    engines_s: float = given(0, "network_without_dequantization_gbps", "network's loss to a Gbit that engines move")
    cores_s: float = given(0, "network_together_gbps", "its loss to a Gbit that dequantization moves")
    gap_s: float = given(0, "throughput_20", "between two fetches under load, beyond unloaded TTFT")
    cachegen_gbit: float = given(0, "cachegen_ttft_20_ms, loss_30", "CacheGen-Async's TTFT over 1/bandwidth")
    cachegen_rest_s: float = given(0, "cachegen_ttft_20_ms, loss_30", "CacheGen-Async's TTFT that is not fetching")
    cachegen_decode_gbps: float = given(0, "loss_40", "CacheGen-Async's decompression on an idle GPU")
    gpu_share: float = given(0, "the four TPOT of figure 11a", "of the data sheet's bandwidth in a decode step")
    stolen_s: float = given(0, "the four TPOT of figure 11a", "decode's loss to one fetch of ShadowServe")


_BISECTIONS: Final = 60


def last(holds: Callable[[float], bool], most: float) -> float:
    """Return up to which number from 0 to ``most`` a condition holds, by bisection."""
    low, high = 0.0, most
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


PAPER_TOKENS: Final = 14_000
"""Of a prompt: NarrativeQA's median (section 6.1)."""


def described(kind: type[Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield name, and source, meaning, low and high, of each number of a dataclass."""
    for each in dataclasses.fields(kind):
        yield each.name, dict(each.metadata)


def rows(numbers: Any, **more: Any) -> list[dict[str, Any]]:
    """Return name, value, and what :func:`described` yields, of each number of an instance; and ``more``."""
    return [{"name": name, "value": getattr(numbers, name), **its, **more} for name, its in described(type(numbers))]
