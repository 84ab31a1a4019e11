"""Import path of ``record_forge``: pytest imports by path, so folders need no __init__.py."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
