"""So that tests find what they are made of."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # pytest imports by path, so that folders need no __init__.py
