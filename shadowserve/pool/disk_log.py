"""Log of the pool on one device, and its durable part.

Records wait here while the device's log is full. A *session* is a period in which the same devices belong to the pool.
Each device logs the sessions that it belongs to, so that a start finds out which devices have missed changes.
"""

from collections import deque
from collections.abc import Callable
from typing import Final

from shadowserve.native import RecordFlag, RecordKind
from shadowserve.pool.types import ENTRIES_PER_HOLD
from shadowserve.pool.volume.format import pack_record
from shadowserve.pool.volume.tickets import BusyError, Ticket, when_settled
from shadowserve.pool.volume.volume import Volume

_SESSION_NOTE: Final = b"session"
_SESSION_BYTES: Final = 16
_ALL_KEYS: Final = b""
_ALL_TENANTS: Final = -1

Key = tuple[int, bytes]


class DiskLog:
    """Changes of one device's log.

    Attributes:
        session: Newest session that was written to the log. A device with an older one has missed changes.
    """

    def __init__(self, volume: Volume, wake: Callable[[], None]) -> None:
        """``wake`` makes the pool call :meth:`write_waiting` and :meth:`step` soon."""
        self._volume = volume
        self._wake = wake
        self._closed = False
        self._waiting: deque[bytes] = deque()
        self._removals: set[Key] = set()  # not durable, and no barrier awaits them
        self._awaited_removals: set[Key] = set()  # not durable, and a barrier awaits them
        self.session = volume.notes.get(_SESSION_NOTE, b"")
        self._session_wanted = self.session
        self._session_durable = b""
        self._sessions = [self.session]  # the newest durable one and all later ones: a crash keeps one of these

    def close(self) -> None:
        """Drop the waiting records and take no new ones: the device is gone."""
        self._closed = True
        self._waiting.clear()

    @property
    def is_full(self) -> bool:
        """True while records wait for room in the log."""
        return bool(self._waiting)

    @property
    def is_pending(self) -> bool:
        """True while changes of a working device are not even in its log."""
        return not self._closed and (self.is_full or self.session != self._session_wanted)

    def barrier(self) -> Ticket | None:
        """Return a ticket that settles when the log is durable. None: it is durable, or the device is gone."""
        return None if self._closed else self._volume.barrier()

    def write_waiting(self) -> None:
        for _ in range(min(len(self._waiting), ENTRIES_PER_HOLD)):
            if not self._append(self._waiting[0]):
                break
            self._waiting.popleft()
            self._wake()

    def step(self) -> None:
        """Log a new session, and await the removals that no barrier awaits yet."""
        if self.session != self._session_wanted:
            self._log_session()
        if self._removals and not self._awaited_removals and not self._waiting:
            self._awaited_removals, self._removals = self._removals, set()
            when_settled(self._volume.barrier(), self._on_removals_durable)

    # ---- Records

    def remove(self, tenant: int, key: bytes) -> None:
        if not self._closed:
            self._removals.add((tenant, key))
            self._log(pack_record(RecordKind.REMOVE, tenant, key))

    def clear(self, tenant: int | None) -> None:
        """Log the removal of all objects of a tenant, or of all tenants."""
        if not self._closed:
            self._removals.add((_ALL_TENANTS if tenant is None else tenant, _ALL_KEYS))
            flags = RecordFlag.EVERY_TENANT if tenant is None else 0
            self._log(pack_record(RecordKind.CLEAR, tenant or 0, b"", flags=flags))

    def expire(self, tenant: int, key: bytes, expires_at_ms: int) -> None:
        self._log(pack_record(RecordKind.EXPIRE, tenant, key, expires_at_ms=expires_at_ms))

    def pin(self, tenant: int, key: bytes, until_s: int) -> None:
        self._log(pack_record(RecordKind.PIN, tenant, key, pinned_until_s=until_s))

    def name_tenant(self, tenant: int, name: str) -> None:
        if not self._closed:
            self._volume.name_tenant(tenant, name.encode(errors="surrogateescape"))
            self._wake()

    def _log(self, record: bytes) -> None:
        # Records keep their order: a new one does not overtake waiting ones.
        if self._waiting or not self._append(record):
            self._waiting.append(record)
        self._wake()

    def _append(self, record: bytes) -> bool:
        try:
            self._volume.log(record)
        except BusyError:
            self._volume.snapshot()
            return False
        return True

    # ---- Durability

    def is_durable(self, tenant: int, key: bytes, *, own: bool) -> bool:
        """Return whether a power cut now cannot make the log bring back an older value of a key.

        Nor may the next start take the device for one that has missed nothing of this session. ``own``: the log also
        has the new value, behind the removal of the older one.
        """
        if self._closed:
            return True
        if self._session_durable != self._session_wanted:
            return False
        if own or not (self._removals or self._awaited_removals):
            return True
        keys = ((tenant, key), (tenant, _ALL_KEYS), (_ALL_TENANTS, _ALL_KEYS))
        return not any(each in self._removals or each in self._awaited_removals for each in keys)

    def _on_removals_durable(self, error: Exception | None) -> None:
        if error is None:  # otherwise the device is given up
            self._awaited_removals = set()

    # ---- Sessions

    def enter_session(self, session: bytes) -> None:
        self._session_wanted = session
        self._log_session()
        self._wake()

    def _log_session(self) -> None:
        session = self._session_wanted
        if self.session == session or self._closed:
            return
        try:
            self._volume.note(_SESSION_NOTE, session)
        except BusyError:
            return
        self.session = session
        self._sessions.append(session)
        when_settled(self._volume.barrier(), lambda error: self._on_session_durable(session, error))

    def _on_session_durable(self, session: bytes, error: Exception | None) -> None:
        if error is None:
            self._sessions = self._sessions[self._sessions.index(session) :]
            self._session_durable = session

    @property
    def memberships(self) -> list[bytes]:
        """This device's id with each session that its log may have after a crash."""
        return [self._membership(session) for session in self._sessions]

    def took_part(self, session: bytes) -> bool:
        """Return whether this device has missed no change of a session, as far as its log shows."""
        members = session[_SESSION_BYTES:]
        own = self._membership(self.session)
        listed = any(members.startswith(own, at) for at in range(0, len(members), len(own)))
        return self.session == session or listed

    def _membership(self, session: bytes) -> bytes:
        return self._volume.superblock.volume_id + session[:_SESSION_BYTES].ljust(_SESSION_BYTES, b"\0")

    def log_recovered(self, newer_elsewhere: list[Key], *, stale: bool) -> None:
        """Log what opening the pool has changed.

        ``newer_elsewhere``: keys of which another device has a later value. ``stale``: the device has missed changes,
        and its objects were dropped; until its log says so, it belongs to no session.
        """
        if stale:
            self._sessions.clear()
            self.clear(None)
        for key in newer_elsewhere:
            self.remove(*key)
