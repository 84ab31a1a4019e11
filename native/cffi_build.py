"""Turn native/include/shadowserve.h into shadowserve/_cffi.py (cffi's out-of-line ABI mode).

Run by CMake: ``cffi_build.py HEADER OUTPUT``. ABI mode needs no Python.h, so one library serves every Python version;
out of line, the declarations are parsed at build time, not at every start.
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


def main(header_path: str, output_path: str) -> None:
    """Write the generated module."""
    with open(header_path, encoding="utf-8") as file:
        header = file.read()
    ffi = FFI()
    ffi.cdef(declarations(header))
    recompiler.make_py_source(ffi, "shadowserve._cffi", output_path)


if __name__ == "__main__":
    main(*sys.argv[1:])
