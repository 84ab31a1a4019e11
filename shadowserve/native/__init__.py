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
    MemoryKind,
    Quantizer,
    Result,
    Stage,
    library_path,
    result_text,
)
from shadowserve.native._memory import Destination, Export, Region
from shadowserve.native._pipeline import (
    BACKENDS,
    CHUNK_DTYPE,
    KEY_SIZE_MAX,
    SLICE_DTYPE,
    TRACE_DTYPE,
    Backend,
    Pipeline,
    Round,
    StageStatistics,
    backends,
)

__all__ = [
    "ABI_VERSION",
    "BACKENDS",
    "CHUNK_DTYPE",
    "KEY_SIZE_MAX",
    "SLICE_DTYPE",
    "TRACE_DTYPE",
    "Backend",
    "Codec",
    "DType",
    "Destination",
    "Export",
    "Isa",
    "MemoryKind",
    "Pipeline",
    "Quantizer",
    "Region",
    "Result",
    "Round",
    "Stage",
    "StageStatistics",
    "backends",
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
