"""Turn the headers of native/include/ into shadowserve/_cffi.py (cffi's out-of-line ABI mode).

Run by CMake: ``cffi_build.py OUTPUT HEADER...``. ABI mode needs no Python.h, so one library serves every Python
version; out of line, the declarations are parsed at build time, not at every start.
"""

import re
import sys

from cffi import FFI, recompiler


def declarations(header: str) -> str:
    """Return the text between the two cffi markers, without SS_API."""
    match = re.search(r"/\* cffi:begin \*/(.*)/\* cffi:end \*/", header, re.DOTALL)
    if match is None:
        raise SystemExit("cffi_build.py: the header has no cffi:begin and cffi:end markers")
    return match.group(1).replace("SS_API ", "")


def main(output_path: str, *header_paths: str) -> None:
    """Write the generated module."""
    ffi = FFI()
    for path in header_paths:
        with open(path, encoding="utf-8") as file:
            ffi.cdef(declarations(file.read()))
    recompiler.make_py_source(ffi, "shadowserve._cffi", output_path)


if __name__ == "__main__":
    main(*sys.argv[1:])
