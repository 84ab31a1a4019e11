"""Measures size and speed of every codec, on one core.

Method: slices of 256 tokens are encoded and decoded with each codec, in each instruction set that has own kernels.
The data are synthetic, in Llama-3.1-8B's shape with the channel structure of real KV (their speeds count), and real
KV of the project's own small model (its sizes count). Quantization has 16 to 256 bins, or is lossless in bfloat16,
float32 and float8_e4m3. Speeds are from memory to memory, in CPU time; "to bf16" includes dequantization. Codecs
whose ratio is reported take turns of their own, a fifth of a second each, in both orders; a pair is of one turn. Bits
are stored bits for each element, scales included. "zlib + numpy" is a straightforward implementation on the streams
of ``deflate``.

Prediction: kvrans decodes 8.5 GB/s of symbols; with dequantization in registers ``kvrans_over_zstd`` is 3.9 and
``kvrans_over_memcpy`` 0.85. AVX2 has a fifth of the speed of AVX-512. ``kvrans_bytes_over_deflate`` 0.944,
``deflate_over_zlib_numpy`` 9, ``lossless_over_memcpy`` 1. float32 is as fast in bytes as bfloat16, float8 half as
fast.
"""

import ctypes
import ctypes.util
import dataclasses
import functools
import importlib
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import click
import numpy as np
import numpy.typing as npt

from shadowserve import native, record
from shadowserve.chunk import ChunkLayout, DType, Quantizer
from shadowserve.errors import ShadowServeError
from shadowserve_tools.bench.parts.kernels import Run, Slices, Treated, in_turns, memcpy, nothing
from shadowserve_tools.bench.parts.workload import kv_patterns
from shadowserve_tools.charts import Chart
from shadowserve_tools.report import Output, Report, output_options

REAL_KV: Final = Path(__file__).parents[2] / "tests" / "assets" / "kv.bin"
BINS: Final = 32
"""Bins of the comparison that counts."""
OTHER_BINS: Final = (16, 64, 256)
OURS: Final = ("kvrans", "deflate", "zstd")
"""Codecs that are shown in every treatment. All others are shown with 32 bins only."""
COMPARED_MORE: Final = 5
"""Turns of the codecs in ratios, for each turn of all."""
LLAMA, SMALL, REAL = "llama-8b", "synthetic, vectors of 128", "real"
TITLES: Final = {LLAMA: "Llama-8B's shape", REAL: "Real KV, own model"}
Patterns = npt.NDArray[np.uint16]


@click.command()
@click.option("--layers", default=4, show_default=True, type=click.IntRange(1, 32), help="Layers of Llama-8B's shape.")
@click.option("--mebibytes", default=64, show_default=True, type=click.IntRange(1, 1024), help="Elements in a run.")
@click.option("--repeats", default=9, show_default=True, type=click.IntRange(1, 100), help="Number of turns.")
@output_options
def codecs(layers: int, mebibytes: int, repeats: int, output: Output) -> None:
    """Measure size and speed of every codec and instruction set, on one core."""
    columns = ["data", "treatment", "codec", "isa", "bits", "ratio", "encode_MB_per_s", "decode_GB_per_s"]
    report = Report("codecs", [*columns, "to_bf16_GB_per_s"])
    everything = {}
    small, real = _made_up(layers, 128), _real_kv()
    for data, elements in ((LLAMA, _made_up(layers, 1024)), (SMALL, small), (REAL, real)):
        for bins in (BINS, 0) if data == SMALL else (BINS, *OTHER_BINS, 0):
            treated = Treated(elements, bins, mebibytes << 20)
            full, isas = bins == BINS and data != SMALL, bins in (BINS, 0) and data != SMALL
            subjects = _subjects(treated, full=full, isas=isas)
            treatment = f"{bins} bins" if bins else "lossless"
            compared = COMPARED_MORE * repeats if data == LLAMA and isas else 0
            everything[data, bins] = _measured(report, data, treatment, treated, subjects, repeats, compared)
    _other_dtypes(report, _made_up(layers, 1024), mebibytes << 20, repeats)
    _sizes_by_repeats(report, real)
    _real_ratio(report, everything[REAL, BINS], everything[SMALL, BINS])
    _ratios(report, everything[LLAMA, BINS], everything[REAL, BINS])
    _lossless_ratios(report, everything[LLAMA, 0])
    for data, bins in ((LLAMA, BINS), (REAL, BINS), (LLAMA, 0)):
        report.charts.append(_chart(data, bins, everything[data, bins]))
    report.finish(output)


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


def _made_up(layers: int, vector_length: int) -> Patterns:
    layout = ChunkLayout(
        namespace=bytes(32),
        dtype=DType.BFLOAT16,
        layers=layers,
        kinds=2,
        vector_length=vector_length,
        tokens=256,
        quantizer=Quantizer.LOSSLESS,
        bins=0,
    )
    return kv_patterns(np.random.default_rng(8), layout).reshape(-1, layout.tokens, layout.vector_length)


def _real_kv() -> Patterns:
    """Return the recorded slices of the project's own model."""
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
    subjects = []
    for codec in native.codec_implementations():
        name = codec.name.lower()
        if not full and name not in OURS:
            continue
        slices = Slices(treated, codec)
        for isa in _isas(name, isas):
            subjects.append(_subject(treated, name if name != "none" else "stored", slices, isa))
    if full:
        subjects += _peers(treated)
    return subjects


def _isas(codec: str, every: bool) -> list[native.Isa | None]:
    """Return the instruction sets to show, the best first. Libraries choose theirs."""
    if codec != "kvrans":
        return [None]
    available = [isa for isa in reversed(native.Isa) if native.isa_available(isa)]
    return [*available] if every else [native.isa_active()]


def _subject(treated: Treated, label: str, slices: Slices, isa: native.Isa | None) -> _Subject:
    runs = {"encode": slices.encode(), "decode": slices.decompress(), "to_bf16": slices.decode()}
    runs = {what: dataclasses.replace(run, isa=isa) for what, run in runs.items()}
    name = isa.name.lower() if isa is not None else ""
    return _Subject(label, name, slices.bits + treated.scale_bits, sum(slices.stream_bytes), runs, {})


# ---- Peers: libraries that the C core does not use -------------------------------------------------------------------


def _peers(treated: Treated) -> list[_Subject]:
    """Return the installed libraries; zlib with numpy, the reference, is always there."""
    subjects = [_reference(treated)]
    raw = -zlib.MAX_WBITS
    for label, module, level in (
        ("zlib 6", "zlib", 6),
        ("zlib-ng 6", "zlib_ng.zlib_ng", 6),
        ("isa-l 1", "isal.isal_zlib", 1),
    ):
        try:
            library: Any = importlib.import_module(module)
        except ImportError:
            continue

        def compress(symbols: bytes, library: Any = library, level: int = level) -> bytes:
            encoder = library.compressobj(level, zlib.DEFLATED, raw)
            return bytes(encoder.compress(symbols) + encoder.flush())

        slices = Slices(treated, native.Codec.DEFLATE, compress)
        subject = _subject(treated, label, slices, None)
        subject.runs["encode"] = _in_python(treated, compress)
        subject.runs["decode"] = _inflate(treated, slices, functools.partial(library.decompress, wbits=raw))
        del subject.runs["to_bf16"]  # the C core decodes such streams with the library of its Deflate
        subjects.append(subject)
    if compress_3 := _zstd_compressor(3):
        subject = _subject(treated, "zstd 3", Slices(treated, native.Codec.ZSTD, compress_3), None)
        subject.runs["encode"] = _in_python(treated, compress_3)
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
            symbols = zlib.decompress(stream, -zlib.MAX_WBITS, treated.symbol_bytes)
            vectors = np.frombuffer(symbols, np.int8).reshape(target.shape)
            bits = (vectors.astype(np.float32) * scales[:, None]).view(np.uint32)
            target[:] = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16

    run()
    treated.verify("zlib with numpy")
    runs = {
        "decode": _inflate(treated, slices, functools.partial(zlib.decompress, wbits=-zlib.MAX_WBITS)),
        "to_bf16": Run(len(treated.target), run, nothing),
    }
    return _Subject("zlib + numpy", "", slices.bits + treated.scale_bits, sum(slices.stream_bytes), runs, {})


def _zstd_compressor(level: int) -> Callable[[bytes], bytes] | None:
    """Return libzstd's encoder at a level that the C core does not use; None if the library is missing."""
    path = ctypes.util.find_library("zstd")
    if path is None:
        return None
    library = ctypes.CDLL(path)
    size, pointer = ctypes.c_size_t, ctypes.c_void_p
    library.ZSTD_compressBound.restype = library.ZSTD_compressCCtx.restype = size
    library.ZSTD_compressBound.argtypes = [size]
    library.ZSTD_createCCtx.restype = pointer
    library.ZSTD_compressCCtx.argtypes = [pointer, pointer, size, ctypes.c_char_p, size, ctypes.c_int]
    context = library.ZSTD_createCCtx()

    def compress(symbols: bytes) -> bytes:
        bound = library.ZSTD_compressBound(len(symbols))
        target = ctypes.create_string_buffer(bound)
        written = library.ZSTD_compressCCtx(context, target, bound, symbols, len(symbols), level)
        if written > bound:
            raise ShadowServeError("libzstd could not compress")
        return target.raw[:written]

    return compress


# ---- Measuring and reporting ----------------------------------------------------------------------------------------


def _measured(
    report: Report,
    data: str,
    treatment: str,
    treated: Treated,
    subjects: Sequence[_Subject],
    repeats: int,
    compared: int,
    **more: Run,
) -> dict[str, _Subject]:
    """Measure all subjects in turns with memcpy, dequantization and ``more``; add their rows; return them by name.

    A turn of all takes many seconds, in which a shared machine changes. So the codecs in ratios then take ``compared``
    more turns, of a fifth of a second each.
    """
    raw_bits = 8 * treated.raw_bytes / treated.elements_each
    beside = {"memcpy": memcpy(len(treated.target), treated.raw_bytes)}
    beside |= {"dequantize": Slices(treated, native.Codec.NONE).dequantize(), **more}
    keys = [(subject, what) for subject in subjects for what in subject.runs]
    runs = [*beside.values(), *(subject.runs[what] for subject, what in keys)]
    speeds = in_turns(runs, repeats, f"{data}, {treatment}")
    found = {
        name: _Subject(f"({name})", "", raw_bits, 0, {}, {"to_bf16": own})
        for name, own in zip(beside, speeds, strict=False)
    }
    for (subject, what), own in zip(keys, speeds[len(beside) :], strict=True):
        subject.speeds[what] = own
    found |= {subject.name: subject for subject in subjects}
    if compared:
        close = {name: beside.get(name) or found[name].runs["to_bf16"] for name in _compared(found)}
        again = in_turns([*close.values()], compared, f"{data}, {treatment}, ratios")
        for name, own in zip(close, again, strict=True):
            found[name].speeds["compared"] = own
    for subject in subjects:
        subject.runs.clear()  # releases their memory
    for subject in found.values():
        median = {what: float(np.median(own)) for what, own in subject.speeds.items()}
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


def _compared(found: dict[str, _Subject]) -> list[str]:
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
        found = _measured(report, LLAMA, treatment, treated, subjects, repeats, compared, bfloat16=beside)
        if best := _best(found):
            report.ratio(f"lossless_{name}_over_memcpy", _pairs(found, best, "memcpy"), "none")
            report.ratio(f"lossless_{name}_over_bfloat16", _pairs(found, best, "bfloat16"), "none; bytes out a second")
            if "zstd" in found:
                report.ratio(f"lossless_{name}_over_zstd", _pairs(found, best, "zstd"), "none")


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


def _sizes_by_repeats(report: Report, elements: Patterns) -> None:
    """Add the sizes of slices with repeated vectors and of slices without."""
    again = np.array([len(np.unique(slice_, axis=0)) < len(slice_) for slice_ in elements])
    for data, chosen in (("real, no vector twice", ~again), ("real, vectors again", again)):
        for bins in (BINS, 0):
            treated = Treated(elements[chosen], bins, 0)
            for codec in (each for each in native.codec_implementations() if each.name.lower() in OURS):
                bits = Slices(treated, codec).bits + treated.scale_bits
                treatment = f"{bins} bins" if bins else "lossless"
                report.row(data=data, treatment=treatment, codec=codec.name.lower(), isa="", bits=bits, ratio=16 / bits)


def _real_ratio(report: Report, real: dict[str, _Subject], small: dict[str, _Subject]) -> None:
    names = [name for name in real if name in small and name.startswith("kvrans")]
    if names:
        medians = [float(np.median(found[names[0]].speeds["to_bf16"])) for found in (real, small)]
        report.ratio("kvrans_real_over_made_up", [medians[0] / medians[1]], "none; both of vectors of 128")


def _ratios(report: Report, llama: dict[str, _Subject], real: dict[str, _Subject]) -> None:
    """Add the ratios of 32 bins: speeds with Llama-8B's shape, bytes with real KV."""

    def pairs(one: str, other: str) -> list[float]:
        return _pairs(llama, one, other)

    best = _best(llama)
    if best:
        if "zstd" in llama:
            report.ratio("kvrans_over_zstd", pairs(best, "zstd"), "at least 3")
            if "kvrans avx2" in llama:
                report.ratio("kvrans_avx2_over_zstd", pairs("kvrans avx2", "zstd"), "at least 1.5")
        report.ratio("kvrans_over_memcpy", pairs(best, "memcpy"), "at least 0.5")
        fewer = real[best].stream_bytes / real["deflate"].stream_bytes
        report.ratio("kvrans_bytes_over_deflate", [fewer], "at most 0.95, on real KV, scales not counted")
        report.ratio("kvrans_encode_GB_per_s", llama[best].speeds["encode"], "at least 1")
    report.ratio("deflate_over_zlib_numpy", pairs("deflate", "zlib + numpy"), "at least 4")
    report.ratio("deflate_encode_GB_per_s", llama["deflate"].speeds["encode"], "at least 0.3")
    report.ratio("dequantize_over_memcpy", pairs("dequantize", "memcpy"), "at least 0.9")


def _best(subjects: dict[str, _Subject]) -> str | None:
    """Return the name of kvrans in the best instruction set; None if it is missing."""
    return next((name for name in subjects if name.startswith("kvrans")), None)


def _pairs(subjects: dict[str, _Subject], one: str, other: str) -> list[float]:
    """Return the speed of ``one`` over that of ``other``, to bfloat16, turn by turn."""
    both = (subjects[one].speeds, subjects[other].speeds)
    what = "compared" if all("compared" in each for each in both) else "to_bf16"
    speeds = (each[what] for each in both)
    return [a / b for a, b in zip(*speeds, strict=True)]


def _lossless_ratios(report: Report, llama: dict[str, _Subject]) -> None:
    """Add the ratios of lossless codecs with Llama-8B's shape, where symbols and elements have as many bytes."""
    best = _best(llama)
    if best is None:
        return
    report.ratio("lossless_over_memcpy", _pairs(llama, best, "memcpy"), "at least 0.8")
    if "zstd" in llama:
        report.ratio("lossless_over_zstd", _pairs(llama, best, "zstd"), "at least 4")
        if "kvrans avx2" in llama:
            report.ratio("lossless_avx2_over_zstd", _pairs(llama, "kvrans avx2", "zstd"), "at least 1.8")
    report.ratio("lossless_encode_GB_per_s", llama[best].speeds["encode"], "at least 2")


def _chart(data: str, bins: int, subjects: dict[str, _Subject]) -> Chart:
    limit = float(np.median(subjects["memcpy"].speeds["to_bf16"]))
    ordered = sorted(subjects.values(), key=lambda subject: subject.label not in OURS)
    points = {
        subject.name: [(subject.bits, float(np.median(subject.speeds["to_bf16"])))]
        for subject in sorted(ordered, key=lambda subject: subject.label != OURS[0])
        if subject.stream_bytes and "to_bf16" in subject.speeds
    }
    return Chart(
        f"{TITLES[data]}, {f'{bins} bins' if bins else 'lossless'}",
        x="stored bits for each element",
        y="decoded to bfloat16, GB/s of one core",
        series=points,
        limits={"memcpy": limit},
        kind="points",
        y_log=True,
    )
