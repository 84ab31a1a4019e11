"""Loads the stand-in for SGLang's kernels in every process of an engine."""

import sgl_kernel  # noqa: F401
