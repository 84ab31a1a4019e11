"""The C core (native/), loaded once per process.

Everything in ``native/include/`` has its Python face here, but for element types and quantizers, which hosts without
the C core name, too (:mod:`shadowserve.chunk`). This is the one place that turns its result codes into exceptions.
Calls release the GIL and block; callers that must not block use threads.

Set ``SHADOWSERVE_NATIVE_LIBRARY`` to load another build of the library, such as one made with sanitizers.
"""

from shadowserve.native import _block, _index, _kernels, _memory, _pipeline, _tls
from shadowserve.native._block import *
from shadowserve.native._index import *
from shadowserve.native._kernels import *
from shadowserve.native._library import (
    ABI_VERSION,
    Codec,
    Isa,
    MemoryKind,
    Origin,
    Result,
    Stage,
    library_path,
    result_text,
)
from shadowserve.native._memory import *
from shadowserve.native._pipeline import *
from shadowserve.native._tls import *

__all__ = ["ABI_VERSION", "Codec", "Isa", "MemoryKind", "Origin", "Result", "Stage", "library_path", "result_text"]
__all__ += _block.__all__
__all__ += _index.__all__
__all__ += _kernels.__all__
__all__ += _memory.__all__
__all__ += _pipeline.__all__
__all__ += _tls.__all__
