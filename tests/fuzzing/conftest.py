"""Import path of the test helpers in this folder."""

import sys
from pathlib import Path

_TESTS = Path(__file__).parents[1]
sys.path[:0] = [
    str(Path(__file__).parent),
    *(str(_TESTS / name) for name in ("native", "shared", "pool", "pool/volume", "storage")),
]
