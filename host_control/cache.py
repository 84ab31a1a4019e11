"""Where the host side remembers what it may forget: small files in the user's cache folder."""

import os
from pathlib import Path

__all__ = ["cache_file"]


def cache_file(configured: str, name: str) -> Path | None:
    """Return the file that a setting names.

    Args:
        configured: a path; ``none`` for none; empty for the file of that name in the user's cache folder.
        name: of the file.

    Returns:
        None where there is to be none, or the user has no such folder, as in some containers.
    """
    if configured:
        return None if configured == "none" else Path(configured)
    base = os.environ.get("XDG_CACHE_HOME", "")
    try:
        folder = Path(base) if base.startswith("/") else Path("~/.cache").expanduser()
    except RuntimeError:
        return None
    return folder / "shadowserve" / name
