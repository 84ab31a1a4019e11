"""Import path of the test helpers in this folder."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # pytest imports by path, so that folders need no __init__.py
