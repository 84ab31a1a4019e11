"""Which objects are written to an SSD at all.

Much of what is stored is never asked for, and writing it wears SSDs out. With ``second_hit`` a new object stays in
memory alone until somebody asks for it, or stores it again soon after it had to go: then it gets its home on a device.
The price: what was stored once and not asked for is lost with a restart, and as memory runs out. So ``all`` is the
default.

What went is remembered by the index's ghost queue, as fingerprints of about as many keys as the pool may hold.
"""

from typing import Literal

from shadowserve.native import Index

AdmissionPolicy = Literal["all", "second_hit"]


class Admission:
    """Decides.

    Attributes:
        policy: what by.
        held_back: objects that were stored in memory alone.
        admitted_later: of these, those that got a home after all.
    """

    def __init__(self, policy: AdmissionPolicy, index: Index) -> None:
        self.policy: AdmissionPolicy = policy
        self._index = index
        self.held_back = 0
        self.admitted_later = 0

    def admits(self, tenant: int, key: bytes) -> bool:
        """Return whether an object that is being stored gets a home on a device at once."""
        if self.policy == "all" or self._index.ghost(tenant, key):
            return True
        self.held_back += 1
        return False
