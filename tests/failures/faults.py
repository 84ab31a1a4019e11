"""Faults within a process: false results of its disk operations and its clock (faults.c, preloaded)."""

import mmap
import os
import shutil
import struct
import subprocess
from pathlib import Path
from typing import Final

_SOURCE: Final = Path(__file__).with_name("faults.c")
_FIELDS: Final = {
    "clock_offset_ns": (0, "<q"),
    "read_error": (8, "<i"),
    "write_error": (12, "<i"),
    "flush_error": (16, "<i"),
    "one_in": (20, "<I"),
    "met": (24, "<Q"),
    "hold": (32, "<I"),
    "held": (36, "<I"),
}


class Faults:
    """Faults of one process and its successors with the same environment. They can change while the process runs."""

    def __init__(self, folder: Path, path: Path) -> None:
        """Create faults of operations on files whose path begins like ``path``. Initially there are no faults."""
        library = folder / "faults.so"
        compiler = shutil.which("cc") or shutil.which("gcc")
        assert compiler, "the failure matrix needs a C compiler"
        subprocess.run([compiler, "-std=gnu11", "-O1", "-shared", "-fPIC", "-o", library, _SOURCE], check=True)
        control = folder / "faults"
        control.write_bytes(bytes(4096))
        with open(control, "r+b") as file:
            self._map = mmap.mmap(file.fileno(), 4096)
        self.environment = {
            "LD_PRELOAD": str(library),
            "FAULTS_CONTROL": str(control),
            "FAULTS_PATH": str(path.resolve()),
        }

    def set(self, **values: int) -> None:
        """Set fields: errors as errno (0: none); ``clock_offset_ns``; ``one_in``: one of this number of operations
        fails; ``hold``: reads wait."""
        for name, value in values.items():
            offset, form = _FIELDS[name]
            struct.pack_into(form, self._map, offset, value)

    def clear(self) -> None:
        self.set(read_error=0, write_error=0, flush_error=0, one_in=0, clock_offset_ns=0, hold=0)

    @property
    def met(self) -> int:
        """Number of failed operations."""
        return self._get("met")

    @property
    def held(self) -> int:
        """Number of reads that wait now."""
        return self._get("held")

    def _get(self, name: str) -> int:
        offset, form = _FIELDS[name]
        return int(struct.unpack_from(form, self._map, offset)[0])

    def close(self) -> None:
        self._map.close()


def is_root() -> bool:
    return os.geteuid() == 0
