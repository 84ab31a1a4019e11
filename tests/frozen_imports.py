"""Import this last in a process that engines are forked from: their garbage collections leave out its imports.

Each collection would look at half a million objects, and copy their memory.
"""

import gc

gc.freeze()
gc.freeze = gc.unfreeze = lambda: None  # type: ignore[assignment]
