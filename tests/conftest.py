"""Makes ``machine`` importable by all tests: pytest imports by path, so that folders need no __init__.py."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent))
