"""Import path of the modules beside this file, and of those of the storage tests."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
for folder in (HERE, HERE.parent / "pool", HERE.parent / "storage", HERE.parent):
    sys.path.insert(0, str(folder))
