"""Tests with LMCache, which has an environment of its own: scripts/test-lmcache names its Python and runs them."""

import os

collect_ignore = [] if "PEERS_PYTHON" in os.environ else ["test_lmcache.py"]
