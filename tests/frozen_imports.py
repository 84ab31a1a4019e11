"""Run this last in a process that engines are forked from: their starts and ends leave out its imports.

Each garbage collection would look at half a million objects, and copy their memory. Each engine would search all
modules for the kernels that it replaces.
"""

import gc
import sys

if "vllm" in sys.modules:
    from vllm.platforms import current_platform
    from vllm.triton_utils import dispatcher

    current_platform.register_triton_kernel_overrides()
    dispatcher.register_kernels = lambda _: None

gc.freeze()
gc.freeze = gc.unfreeze = lambda: None  # type: ignore[assignment]
