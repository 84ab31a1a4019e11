"""Every exception that ShadowServe raises on purpose.

The tree::

    ShadowServeError
    +-- ConfigurationError       what the user configured cannot be used; the message says which key and what would do
    +-- RecordError              bytes that should be a stored record are not
    |   +-- NotARecordError      no record at all, or one of an unknown version
    |   +-- CorruptRecordError   a checksum or a length is wrong: a miss, to be quarantined
    |   +-- MismatchError        a sound record, but of another key, namespace, shape or dtype
    +-- ProtocolError            the peer broke a wire protocol
    |   +-- ForeignProtocolError it speaks another one
    +-- NativeError              the C core returned a failure; ``result`` holds its code
    +-- DataPlaneError           the daemon could not do what was asked; ``outcome`` holds the reason
    +-- NotInstalledError        a library or a package that this needs is not here; ``remedy`` says how to install it
    +-- DeviceError              a block device cannot be opened, or does not answer; ``errno`` holds the cause
    +-- BusyError                too much is under way: wait until some of it has ended, then try again
    +-- StorageError             the storage server could not be reached, or refused
        +-- StorageUnavailableError
        +-- StorageRefusedError

Messages say which operation on what failed, why, and what to do about it. A cache must not fail a request: on the
serving path every one of these ends as a miss with a reason.
"""

import errno
from typing import Final

__all__ = [
    "BusyError",
    "ConfigurationError",
    "CorruptRecordError",
    "DataPlaneError",
    "DeviceError",
    "ForeignProtocolError",
    "MismatchError",
    "NativeError",
    "NotARecordError",
    "NotInstalledError",
    "ProtocolError",
    "RecordError",
    "ShadowServeError",
    "StorageError",
    "StorageRefusedError",
    "StorageUnavailableError",
    "is_passing",
]

_NOT_BEGUN: Final = frozenset({errno.EAGAIN, errno.EINTR, errno.EBUSY})
_PASSING: Final = _NOT_BEGUN | {errno.ENOMEM, errno.ENOBUFS, errno.EMFILE, errno.ENFILE, errno.ETIMEDOUT}


def is_passing(error: BaseException, *, flushing: bool = False) -> bool:
    """Return whether an error says only that the system was short of something, or a device busy, at that moment.

    Nothing follows from it for what was to be read or written: it can be tried again. A flush (``flushing``) only where
    it has not begun, since one that failed may have dropped what it was to make durable.
    """
    number = errno.ENOMEM if isinstance(error, MemoryError) else getattr(error, "errno", None)
    return number in (_NOT_BEGUN if flushing else _PASSING)


class ShadowServeError(Exception):
    """Base of all."""


class ConfigurationError(ShadowServeError):
    """A configuration value, file or flag cannot be used."""


class RecordError(ShadowServeError):
    """Bytes that should be a stored record are not."""


class NotARecordError(RecordError):
    """The bytes are no record, or one of a version that this build does not know."""


class CorruptRecordError(RecordError):
    """A checksum or a length in a record is wrong."""


class MismatchError(RecordError):
    """A sound record, but not of the key, namespace, shape or dtype that was asked for."""


class ProtocolError(ShadowServeError):
    """The peer sent bytes that its protocol does not allow, or more than the limits do."""


class ForeignProtocolError(ProtocolError):
    """The peer speaks another protocol.

    Attributes:
        protocol: which one: ``HTTP``, ``TLS``.
    """

    def __init__(self, protocol: str) -> None:
        super().__init__(f"Protocol error: the client speaks {protocol}, this server does not")
        self.protocol = protocol


class NativeError(ShadowServeError):
    """A call into the C core failed.

    Attributes:
        result: the ``enum ss_result`` value.
    """

    def __init__(self, message: str, result: int) -> None:
        super().__init__(message)
        self.result = result

    def __reduce__(self) -> tuple[type["NativeError"], tuple[str, int]]:
        return type(self), (str(self), self.result)


class DataPlaneError(ShadowServeError):
    """The data plane could not do what was asked.

    Attributes:
        outcome: the reason, an ``Outcome`` name in lower case without its prefix, such as ``"unknown_memory"``.
    """

    def __init__(self, message: str, outcome: str) -> None:
        super().__init__(message)
        self.outcome = outcome

    def __reduce__(self) -> tuple[type["DataPlaneError"], tuple[str, str]]:
        return type(self), (str(self), self.outcome)


class NotInstalledError(ShadowServeError, ImportError):
    """A shared library or a Python package that this needs is not on this machine.

    Attributes:
        missing: what is not there, and what needs it.
        remedy: how to install it.
    """

    def __init__(self, missing: str, remedy: str) -> None:
        super().__init__(f"{missing}; {remedy}")
        self.missing = missing
        self.remedy = remedy

    def __reduce__(self) -> tuple[type["NotInstalledError"], tuple[str, str]]:
        return type(self), (self.missing, self.remedy)


class DeviceError(ShadowServeError):
    """A block device cannot be opened, or does not answer.

    Attributes:
        errno: why, as far as the system said so; else 0.
    """

    def __init__(self, message: str, errno: int = 0) -> None:
        super().__init__(message)
        self.errno = errno

    def __reduce__(self) -> tuple[type["DeviceError"], tuple[str, int]]:
        return type(self), (str(self), self.errno)


class BusyError(ShadowServeError):
    """Too much is under way. Nothing was done; it can be tried again when some of it has ended."""


class StorageError(ShadowServeError):
    """The storage server could not do what was asked."""


class StorageUnavailableError(StorageError):
    """The storage server cannot be reached, or the connection to it broke."""


class StorageRefusedError(StorageError):
    """The storage server answered an error: no authentication, full, busy."""
