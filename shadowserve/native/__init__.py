"""The C core (native/), loaded once per process.

Everything in ``native/include/shadowserve.h`` has its Python face here, and this is the one place that turns its result
codes into exceptions. Calls release the GIL and block; callers that must not block use threads.

Set ``SHADOWSERVE_NATIVE_LIBRARY`` to load another build of the library, such as one made with sanitizers.
"""

from shadowserve.native._kernels import (
    codec_implementations,
    compress,
    compress_bound,
    crc32,
    decode,
    decompress,
    decompress_into,
    decompress_many,
    dequantize,
    isa_active,
    isa_available,
    isa_force,
    quantize,
)
from shadowserve.native._library import (
    ABI_VERSION,
    Codec,
    DType,
    Isa,
    Quantizer,
    Result,
    Stage,
    library_path,
    result_text,
)
from shadowserve.native._pipeline import (
    CHUNK_DTYPE,
    KEY_SIZE_MAX,
    SLICE_DTYPE,
    TRACE_DTYPE,
    Pipeline,
    Round,
    StageStatistics,
)

__all__ = [
    "ABI_VERSION",
    "CHUNK_DTYPE",
    "KEY_SIZE_MAX",
    "SLICE_DTYPE",
    "TRACE_DTYPE",
    "Codec",
    "DType",
    "Isa",
    "Pipeline",
    "Quantizer",
    "Result",
    "Round",
    "Stage",
    "StageStatistics",
    "codec_implementations",
    "compress",
    "compress_bound",
    "crc32",
    "decode",
    "decompress",
    "decompress_into",
    "decompress_many",
    "dequantize",
    "isa_active",
    "isa_available",
    "isa_force",
    "library_path",
    "quantize",
    "result_text",
]
