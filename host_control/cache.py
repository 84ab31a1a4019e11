"""Small files of the host in the user's cache folder."""

import os
from pathlib import Path


def cache_file(configured: str, name: str) -> Path | None:
    """Return the path of a cache file.

    Args:
        configured: A path; ``none`` for no file; empty for the default, ``name`` in the user's cache folder.
        name: Name of the file.

    Returns:
        None where no file is wanted, or the user has no cache folder, as in some containers.
    """
    if configured:
        return None if configured == "none" else Path(configured)
    base = os.environ.get("XDG_CACHE_HOME", "")
    try:
        folder = Path(base) if base.startswith("/") else Path("~/.cache").expanduser()
    except RuntimeError:
        return None
    return folder / "shadowserve" / name
