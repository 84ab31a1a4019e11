"""Memory and SSDs of this machine as a source: a pool within the daemon, alone or above another source.

``tiers.py`` has the pool, ``supplies.py`` brings what it has into batches, ``keeping.py`` what others have into it;
``alone.py`` and ``above.py`` are the two sources that are made of these.
"""

__all__: list[str] = []
