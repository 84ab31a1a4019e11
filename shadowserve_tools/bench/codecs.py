"""Measures size and speed of every codec, on one core.

Method: slices of 256 tokens are encoded and decoded with each codec, in each instruction set that has own kernels.
The data are synthetic, in Llama-3.1-8B's shape with the channel structure of real KV (their speeds count), and real
KV of SmolLM2-135M (its sizes count). Quantization has 16 to 256 bins, or is lossless in bfloat16,
float32 and float8_e4m3. Speeds are from memory to memory, in CPU time; "to bf16" includes dequantization. Codecs
whose ratio is reported take turns of their own, a fifth of a second each, in both orders; a pair is of one turn. Bits
are stored bits for each element, scales included. "zlib + numpy" is a straightforward implementation on the streams
of ``deflate``. ``near_lossless`` is the calibrated quantizer with kvrans; its limit is kvrans, which decodes the same
symbols into a cache. Vectors of 128 are one KV head of 128.

Prediction: kvrans decodes 8.5 GB/s of symbols; with dequantization in registers ``kvrans_over_zstd`` is 3.9 and
``kvrans_over_memcpy`` 0.85. AVX2 has a fifth of the speed of AVX-512. ``kvrans_bytes_over_deflate`` 0.944,
``deflate_over_zlib_numpy`` 9, ``lossless_over_memcpy`` 1. float32 is as fast in bytes as bfloat16, float8 half as
fast. ``near_lossless`` 5 to 6 GB/s for keys and 7 for values, with AVX2 2 to 4; of one head lossless 0.9 of memcpy.
"""

import dataclasses
import functools
import importlib
import statistics
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from shadowserve import native, record
from shadowserve.chunk import DType
from shadowserve.errors import ShadowServeError
from shadowserve.keys import DEFAULT_CHUNK_TOKENS
from shadowserve_tools.bench.parts.kernels import Run, Slices, Treated, memcpy, nothing, speeds_in_turns
from shadowserve_tools.bench.parts.options import benchmark, repeats_option, whole
from shadowserve_tools.bench.parts.workload import made_up_slices, near_lossless
from shadowserve_tools.charts import Chart
from shadowserve_tools.processes import Programs
from shadowserve_tools.report import Report, over

REAL_KV: Final = Path(__file__).parents[2] / "tests" / "assets" / "kv.bin"
BINS: Final = 32
"""Bins of the comparison that counts."""
OTHER_BINS: Final = (16, 64, 256)
OURS: Final = ("kvrans", "deflate", "zstd")
"""Codecs that are shown in every treatment. All others are shown with 32 bins only."""
COMPARED_MORE: Final = 5
"""Turns of the codecs in ratios, for each turn of all."""
LLAMA, SMALL, REAL = "llama-8b", "synthetic, vectors of 128", "real"
TITLES: Final = {LLAMA: "Llama-8B's shape", REAL: "Real KV, SmolLM2-135M"}
RAW: Final = -zlib.MAX_WBITS
"""Deflate without a header."""
Patterns = npt.NDArray[np.uint16]


@benchmark(
    "data", "treatment", "codec", "isa", "bits", "ratio", "encode_MB_per_s", "decode_GB_per_s", "to_bf16_GB_per_s"
)
@whole("--layers", 4, "Layers of Llama-8B's shape.", most=32)
@whole("--mebibytes", 64, "Elements in a run.", most=1024)
@repeats_option(9, "Number of turns.", 100)
def codecs(report: Report, programs: Programs, layers: int, mebibytes: int, repeats: int) -> None:
    """Measure size and speed of every codec and instruction set, on one core."""
    found: dict[tuple[str, int], _Subjects] = {}
    llama, small, real = made_up_slices(layers, 1024), made_up_slices(layers, 128), real_kv()
    for data, elements in ((LLAMA, llama), (SMALL, small), (REAL, real)):
        for bins in (BINS, 0) if data == SMALL else (BINS, *OTHER_BINS, 0):
            treated = Treated(elements, bins, mebibytes << 20)
            full, isas = bins == BINS and data != SMALL, bins in (BINS, 0) and data != SMALL
            subjects = _subjects(treated, full=full, isas=isas)
            compared = COMPARED_MORE * repeats if data == LLAMA and isas else 0
            more = _limit(treated) if data == SMALL and not bins else None
            found[data, bins] = _measured(report, data, _name(bins), treated, subjects, repeats, compared, more)
    _other_dtypes(report, llama, mebibytes << 20, repeats)
    _near_lossless(report, layers, mebibytes << 20, repeats)
    _ratios(report, found)
    _narrow(report, "lossless_128", found[SMALL, 0])
    float8 = Treated(_float8(small), 0, mebibytes << 20, DType.FLOAT8_E4M3)
    subjects = _subjects(float8, full=False, isas=False)
    narrow = _measured(report, SMALL, "lossless float8_e4m3", float8, subjects, repeats, more=_limit(float8))
    _narrow(report, "lossless_float8_128", narrow)
    for data, bins in ((LLAMA, BINS), (REAL, BINS), (LLAMA, 0)):
        report.charts.append(_chart(f"{TITLES[data]}, {_name(bins)}", found[data, bins]))


def _name(bins: int) -> str:
    return f"{bins} bins" if bins else "lossless"


@dataclass
class _Subject:
    """One codec in one instruction set, and its speeds in every turn, GB/s.

    Speeds are of symbols, except ``to_bf16`` and ``compared``, the same in the short turns of the codecs in ratios.
    """

    label: str
    isa: str
    bits: float
    stream_bytes: int
    runs: dict[str, Run]
    speeds: dict[str, list[float]]

    @property
    def name(self) -> str:
        return f"{self.label} {self.isa}".rstrip()


_Subjects = dict[str, _Subject]
"""Measured subjects by their names, kvrans in the best instruction set first among its kind."""


def real_kv() -> Patterns:
    """Return slices of real KV of SmolLM2-135M, bfloat16: vectors of 192 elements."""
    if not REAL_KV.exists():
        raise ShadowServeError(f"{REAL_KV} is not there: 'bench codecs' runs from the project's repository")
    data, chunks = REAL_KV.read_bytes(), []
    while data:
        head = record.parse_header(data)
        chunk = record.decode(data[: head.record_length], head.key, head.layout)
        chunks.append(np.frombuffer(chunk, np.uint16).reshape(-1, head.layout.tokens, head.layout.vector_length))
        data = data[head.record_length :]
    return np.concatenate(chunks)


def _subjects(treated: Treated, full: bool, isas: bool) -> list[_Subject]:
    """Return the codecs to measure: all, or those of OURS; kvrans in every instruction set, or in the best."""
    available = [isa for isa in reversed(native.Isa) if native.isa_available(isa)]
    subjects = []
    for codec in native.codec_implementations():
        name = codec.name.lower()
        if full or name in OURS:
            slices = Slices(treated, codec)
            # Libraries choose their instruction set.
            chosen = (available if isas else [native.isa_active()]) if name == "kvrans" else [None]
            subjects += [_subject(treated, name if name != "none" else "stored", slices, isa) for isa in chosen]
    return subjects + (_peers(treated) if full else [])


def _subject(treated: Treated, label: str, slices: Slices, isa: native.Isa | None) -> _Subject:
    runs = {"encode": slices.encode(), "decode": slices.decompress(), "to_bf16": slices.decode()}
    if label == "kvrans":
        runs["symbols"] = slices.decompress(cached=True)
    runs = {what: dataclasses.replace(run, isa=isa) for what, run in runs.items()}
    name = isa.name.lower() if isa is not None else ""
    return _Subject(label, name, slices.bits + treated.scale_bits, sum(slices.stream_bytes), runs, {})


def _peers(treated: Treated) -> list[_Subject]:
    """Return the installed libraries; zlib with numpy, the reference, is always there."""
    subjects = [_reference(treated)]
    for label, module in (("zlib 6", "zlib"), ("zlib-ng 6", "zlib_ng.zlib_ng")):
        try:
            library: Any = importlib.import_module(module)
        except ImportError:
            continue

        def compress(symbols: bytes, library: Any = library) -> bytes:
            encoder = library.compressobj(6, zlib.DEFLATED, RAW)
            return bytes(encoder.compress(symbols) + encoder.flush())

        slices = Slices(treated, native.Codec.DEFLATE, compress)
        subject = _subject(treated, label, slices, None)
        subject.runs["encode"] = _in_python(treated, compress)
        subject.runs["decode"] = _inflate(treated, slices, functools.partial(library.decompress, wbits=RAW))
        del subject.runs["to_bf16"]  # the C core decodes such streams with the library of its Deflate
        subjects.append(subject)
    return subjects


def _in_python(treated: Treated, compress: Callable[[bytes], bytes]) -> Run:
    sources = treated.sources

    def run() -> None:
        for symbols in sources:
            compress(symbols)

    return Run(len(sources) * treated.symbol_bytes, run, nothing)


def _inflate(treated: Treated, slices: Slices, decompress: Callable[..., bytes]) -> Run:
    streams = [stream.tobytes() for stream in slices.streams]
    size = treated.symbol_bytes

    def run() -> None:
        for stream in streams:
            decompress(stream, bufsize=size)

    if decompress(streams[0], bufsize=size) != treated.sources[0]:
        raise ShadowServeError("a peer did not decode what it encoded")
    return Run(len(streams) * size, run, nothing)


def _reference(treated: Treated) -> _Subject:
    """Return the straightforward implementation: zlib on the streams of ShadowServe's Deflate, and numpy."""
    slices = Slices(treated, native.Codec.DEFLATE)
    streams = [stream.tobytes() for stream in slices.streams]
    targets = treated.target.view(np.uint16).reshape(treated.count, treated.vectors, treated.vector_length)

    def run() -> None:
        for stream, scales, target in zip(streams, treated.scales, targets, strict=True):
            symbols = zlib.decompress(stream, RAW, treated.symbol_bytes)
            vectors = np.frombuffer(symbols, np.int8).reshape(target.shape)
            bits = (vectors.astype(np.float32) * scales[:, None]).view(np.uint32)
            target[:] = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16

    run()
    treated.verify("zlib with numpy")
    runs = {
        "decode": _inflate(treated, slices, functools.partial(zlib.decompress, wbits=RAW)),
        "to_bf16": Run(len(treated.target), run, nothing),
    }
    return _Subject("zlib + numpy", "", slices.bits + treated.scale_bits, sum(slices.stream_bytes), runs, {})


def _measured(
    report: Report,
    data: str,
    treatment: str,
    treated: Treated,
    subjects: Sequence[_Subject],
    repeats: int,
    compared: int = 0,
    more: dict[str, Run] | None = None,
) -> _Subjects:
    """Measure all subjects in turns with memcpy, dequantization and ``more``; add their rows; return them by name.

    A turn of all takes many seconds, in which a shared machine changes. So the codecs in ratios then take ``compared``
    more turns, of a fifth of a second each.
    """
    raw_bits = 8 * treated.raw_bytes / treated.elements_each
    beside = {"memcpy": memcpy(len(treated.target), treated.raw_bytes)}
    beside |= {"dequantize": Slices(treated, native.Codec.NONE).dequantize(), **(more or {})}
    keys = [(subject, what) for subject in subjects for what in subject.runs]
    runs = [*beside.values(), *(subject.runs[what] for subject, what in keys)]
    speeds = speeds_in_turns(runs, repeats, f"{data}, {treatment}")
    found = {
        name: _Subject(f"({name})", "", raw_bits, 0, {}, {"to_bf16": own})
        for name, own in zip(beside, speeds, strict=False)
    }
    for (subject, what), own in zip(keys, speeds[len(beside) :], strict=True):
        subject.speeds[what] = own
    found |= {subject.name: subject for subject in subjects}
    if compared:
        close = {name: beside.get(name) or found[name].runs["to_bf16"] for name in _compared(found)}
        again = speeds_in_turns([*close.values()], compared, f"{data}, {treatment}, ratios")
        for name, own in zip(close, again, strict=True):
            found[name].speeds["compared"] = own
    for subject in subjects:
        subject.runs.clear()  # releases their memory
    for subject in found.values():
        median = {what: statistics.median(own) for what, own in subject.speeds.items()}
        report.row(
            data=data,
            treatment=treatment,
            codec=subject.label,
            isa=subject.isa,
            bits=subject.bits if subject.stream_bytes else "",
            ratio=raw_bits / subject.bits if subject.stream_bytes else "",
            encode_MB_per_s=median["encode"] * 1000 if "encode" in median else "",
            decode_GB_per_s=median.get("decode", ""),
            to_bf16_GB_per_s=median.get("to_bf16", ""),
        )
    return found


def _compared(found: _Subjects) -> list[str]:
    """Return the names of the subjects in ratios, which have similar speeds."""
    names = ("memcpy", "dequantize", "bfloat16", "zstd", _best(found) or "", "kvrans avx2")
    return [name for name in dict.fromkeys(names) if name in found]


def _other_dtypes(report: Report, elements: Patterns, size: int, repeats: int) -> None:
    """Add lossless float32 and float8_e4m3, in turns with the decoder of lossless bfloat16, and their ratios."""
    bfloat16 = Treated(elements, 0, size)
    for dtype, bits in ((DType.FLOAT32, _float32(elements)), (DType.FLOAT8_E4M3, _float8(elements))):
        name, treated = dtype.name.lower(), Treated(bits, 0, size, dtype)
        beside = Slices(bfloat16, native.Codec.KVRANS).decode()
        subjects = _subjects(treated, full=False, isas=True)
        treatment, compared = f"lossless {name}", COMPARED_MORE * repeats
        found = _measured(report, LLAMA, treatment, treated, subjects, repeats, compared, {"bfloat16": beside})
        _compare(
            report,
            found,
            f"lossless_{name}",
            {"memcpy": "none", "bfloat16": "none; bytes out a second", "zstd": "none"},
        )


def _near_lossless(report: Report, layers: int, size: int, repeats: int) -> None:
    """Add keys and values of ``near_lossless``, with kvrans in every instruction set, and the speeds that they reach.

    A record has as many keys as values. The limits are the speeds at which kvrans decodes symbols alone, into a cache.
    """
    whole: dict[str, list[tuple[list[float], list[float]]]] = {}  # by instruction set: of keys, then of values
    tokens = DEFAULT_CHUNK_TOKENS
    slices = made_up_slices(layers, 1024, 2 * tokens)
    channels = near_lossless(slices.reshape(layers, 2, *slices.shape[1:])).channels(tokens)
    for kind, what in enumerate(("keys", "values")):
        elements = np.ascontiguousarray(slices[kind::2, tokens:])  # of the first ones, some are exact
        places = [native.Place(channels, 2 * layer + kind, tokens) for layer in range(layers)]
        treated = Treated(elements, 0, size, places=places)
        subjects = [each for each in _subjects(treated, full=False, isas=True) if each.label == "kvrans"]
        _measured(report, LLAMA, f"near_lossless {what}", treated, subjects, repeats)
        name = f"near_lossless_{what}"
        for subject in subjects:
            speeds, limits = subject.speeds["to_bf16"], [2 * speed for speed in subject.speeds["symbols"]]
            report.ratio(f"{name}_{subject.isa}_GB_per_s", speeds, "none; a half of each record", limits)
            whole.setdefault(subject.isa, []).append((speeds, limits))
        encode = Slices(treated, native.Codec.KVRANS).weigh_and_encode(elements)
        [speeds] = speeds_in_turns([encode], repeats)
        report.ratio(f"{name}_encode_GB_per_s", speeds, "at least 1; quantized and encoded")
    for isa, (keys, values) in whole.items():
        goal = {"avx512": "at least 8", "avx2": "at least 3.5"}.get(isa, "none")
        speeds, limits = map(_harmonic_means, keys, values)
        report.ratio(f"near_lossless_{isa}_GB_per_s", speeds, f"{goal}; keys and values", limits)


def _harmonic_means(keys: list[float], values: list[float]) -> list[float]:
    """Return the speed of decoding as many bytes of keys as of values, for each turn."""
    return list(map(statistics.harmonic_mean, zip(keys, values, strict=True)))


def _limit(treated: Treated) -> dict[str, Run]:
    return {"first_planes": Slices(treated, native.Codec.KVRANS).first_planes()}


def _narrow(report: Report, name: str, found: _Subjects) -> None:
    """Compare kvrans with memcpy for vectors of one KV head.

    The limit is decoding the coded byte plane alone, into a cache.
    """
    if best := _best(found):
        limits = _pairs(found, "first_planes", "memcpy")
        report.ratio(f"{name}_over_memcpy", _pairs(found, best, "memcpy"), "at least 0.8; one KV head", limits)


def _float32(elements: Patterns) -> npt.NDArray[np.uint32]:
    """Return bit patterns of float32 values that round to these in bfloat16, or to their neighbours."""
    patterns = elements.astype(np.uint32)
    patterns <<= 16
    patterns |= np.random.default_rng(9).integers(0, 1 << 16, elements.shape, np.uint32)
    return patterns


def _float8(elements: Patterns) -> npt.NDArray[np.uint8]:
    """Return the values as float8_e4m3, rounded to the nearest, without a scale."""
    codes = np.arange(0x7F)  # 0x7F is no number
    exponents, mantissas = codes >> 3, codes & 7
    values = np.where(exponents > 0, np.ldexp(8.0 + mantissas, exponents - 10), np.ldexp(mantissas, -9))
    found = (elements.astype(np.uint32) << 16).view(np.float32)
    nearest = np.searchsorted((values[1:] + values[:-1]) / 2, np.abs(found))
    return np.where(found < 0, nearest | 0x80, nearest).astype(np.uint8)


def _ratios(report: Report, found: dict[tuple[str, int], _Subjects]) -> None:
    """Add ratios of 32 bins and lossless: speeds with Llama-8B's shape, bytes with real KV."""
    llama, real, small, lossless = (found[each] for each in ((LLAMA, BINS), (REAL, BINS), (SMALL, BINS), (LLAMA, 0)))
    if best := _best(llama):
        medians = [statistics.median(each[_best(small) or ""].speeds["to_bf16"]) for each in (real, small)]
        report.ratio("kvrans_real_over_made_up", over(medians[:1], medians[1:]), "none; both of vectors of 128")
        _compare(report, llama, "kvrans", {"zstd": "at least 3", "memcpy": "at least 0.5"}, "at least 1.5")
        fewer = real[best].stream_bytes / real["deflate"].stream_bytes
        report.ratio("kvrans_bytes_over_deflate", [fewer], "at most 0.95, on real KV, scales not counted")
        report.ratio("kvrans_encode_GB_per_s", llama[best].speeds["encode"], "at least 1")
    report.ratio("deflate_over_zlib_numpy", _pairs(llama, "deflate", "zlib + numpy"), "at least 4")
    report.ratio("deflate_encode_GB_per_s", llama["deflate"].speeds["encode"], "at least 0.3")
    report.ratio("dequantize_over_memcpy", _pairs(llama, "dequantize", "memcpy"), "at least 0.9")
    if best := _best(lossless):
        _compare(report, lossless, "lossless", {"memcpy": "at least 0.8", "zstd": "at least 4"}, "at least 1.8")
        report.ratio("lossless_encode_GB_per_s", lossless[best].speeds["encode"], "at least 2")


def _compare(report: Report, found: _Subjects, name: str, goals: dict[str, str], avx2: str = "") -> None:
    """Compare kvrans in the best instruction set with others, and in AVX2 with zstd."""
    best = _best(found)
    for other, goal in goals.items():
        if best and other in found:
            report.ratio(f"{name}_over_{other}", _pairs(found, best, other), goal)
    if avx2 and {"kvrans avx2", "zstd"} <= found.keys():
        report.ratio(f"{name}_avx2_over_zstd", _pairs(found, "kvrans avx2", "zstd"), avx2)


def _best(subjects: _Subjects) -> str | None:
    """Return the name of kvrans in the best instruction set; None if it is missing."""
    return next((name for name in subjects if name.startswith("kvrans")), None)


def _pairs(subjects: _Subjects, one: str, other: str) -> list[float]:
    """Return the speed of ``one`` over that of ``other``, to bfloat16, turn by turn."""
    both = (subjects[one].speeds, subjects[other].speeds)
    what = "compared" if all("compared" in each for each in both) else "to_bf16"
    return over(*(each[what] for each in both))


def _chart(title: str, subjects: _Subjects) -> Chart:
    rank = {label: position for position, label in enumerate(OURS)}
    points = {
        subject.name: [(subject.bits, statistics.median(subject.speeds["to_bf16"]))]
        for subject in sorted(subjects.values(), key=lambda subject: rank.get(subject.label, len(rank)))
        if subject.stream_bytes and "to_bf16" in subject.speeds
    }
    limits = {"memcpy": statistics.median(subjects["memcpy"].speeds["to_bf16"])}
    x, y = "stored bits for each element", "decoded to bfloat16, GB/s of one core"
    return Chart(title, x=x, y=y, series=points, limits=limits, kind="points", y_log=True)
