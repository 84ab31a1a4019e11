"""Sessions: which devices took part in what was changed, so that one that was away is known for it."""

import hashlib
from collections.abc import Callable, Sequence

from shadowserve.pool.disk import Disk


class Sessions:
    """A pool's sessions, on its devices as soon as these are there."""

    def __init__(self, clock_ms: Callable[[], int], disks: Sequence[Disk]) -> None:
        self._clock_ms = clock_ms
        self._disks = disks

    def begin(self) -> None:
        """Begin a new session on all devices that are there.

        A device that was away, or was given up, does not hear of what is removed or replaced meanwhile. When it comes
        back, its log knows another session than the others': what is on it may be stale, and is dropped. A session is
        a number and a digest of who takes part when, so that two that went on without each other are told apart; and
        who takes part, since a loss of power may come when only some logs know of it. The number is the time where it
        can be: of two sessions that knew nothing of each other, the later one counts.
        """
        present = [disk for disk in self._disks if disk.gone is None]
        newest = max((disk.session for disk in self._disks), default=b"")
        members = b"".join(member for disk in present for member in disk.memberships)
        parts = hashlib.sha256(self._clock_ms().to_bytes(8, "big", signed=True) + members)
        number = max(int.from_bytes(newest[:8], "big") + 1, self._clock_ms())
        for disk in present:
            disk.enter_session(number.to_bytes(8, "big") + parts.digest()[:8] + members)
