"""ShadowServe's exceptions.

The tree::

    ShadowServeError
    +-- ConfigurationError       a configured value cannot be used; the message names the key and valid values
    +-- RecordError              bytes are not a valid stored record
    |   +-- NotARecordError      no record, or a record of an unknown version
    |   +-- CorruptRecordError   a checksum or a length is wrong: a miss, and a quarantine
    |   +-- MismatchError        a valid record of another key, namespace, shape or dtype
    +-- ProtocolError            the peer broke a wire protocol
    |   +-- ForeignProtocolError the peer speaks another protocol
    +-- NativeError              the C core returned a failure; ``result`` holds its code
    +-- DataPlaneError           a call to the data plane failed; ``outcome`` holds the reason
    +-- NotInstalledError        a required library or package is missing; ``remedy`` says how to install it
    +-- DeviceError              a block device cannot be opened or does not answer; ``errno`` holds the cause
    +-- BusyError                too many operations are in flight: try again when some have ended
    +-- StorageError             the storage server is unreachable, or refused a command
        +-- StorageUnavailableError
        +-- StorageRefusedError

A message says which operation failed on what, why, and what to do. On the serving path each of these errors becomes a
miss with a reason: a cache must not fail a request.
"""

import errno
from typing import Any, Final

_NOT_BEGUN: Final = frozenset({errno.EAGAIN, errno.EINTR, errno.EBUSY})
_PASSING: Final = _NOT_BEGUN | {errno.ENOMEM, errno.ENOBUFS, errno.EMFILE, errno.ENFILE, errno.ETIMEDOUT}


def is_passing(error: BaseException, *, flushing: bool = False) -> bool:
    """Return True if an error is transient: the system lacked a resource, or a device was busy.

    The operation can be tried again. A flush (``flushing``) can be tried again only if it had not begun: a failed flush
    may have dropped the data that it should have made durable.
    """
    number = errno.ENOMEM if isinstance(error, MemoryError) else getattr(error, "errno", None)
    return number in (_NOT_BEGUN if flushing else _PASSING)


class ShadowServeError(Exception):
    """Base class of all errors. Engines send errors between processes, with their fields."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuilt, (type(self), self.args, vars(self))


def _rebuilt(kind: type[ShadowServeError], args: tuple[Any, ...], fields: dict[str, Any]) -> ShadowServeError:
    error = kind.__new__(kind, *args)
    vars(error).update(fields)
    return error


class ConfigurationError(ShadowServeError):
    """A configuration value, file or flag cannot be used."""


class RecordError(ShadowServeError):
    """Bytes are not a valid stored record."""


class NotARecordError(RecordError):
    """The bytes are not a record, or have a version that this build does not know."""


class CorruptRecordError(RecordError):
    """A checksum or a length in a record is wrong."""


class MismatchError(RecordError):
    """A valid record, but not of the requested key, namespace, shape or dtype."""


class ProtocolError(ShadowServeError):
    """The peer sent bytes that violate its protocol or a limit."""


class ForeignProtocolError(ProtocolError):
    """The peer speaks another protocol."""

    def __init__(self, protocol: str) -> None:
        super().__init__(f"Protocol error: the client speaks {protocol}, this server does not")
        self.protocol = protocol  # name of that protocol: ``HTTP``, ``TLS``


class NativeError(ShadowServeError):
    """A call into the C core failed."""

    def __init__(self, message: str, result: int) -> None:
        super().__init__(message)
        self.result = result  # value of ``enum ss_result``


class DataPlaneError(ShadowServeError):
    """A call to the data plane failed."""

    def __init__(self, message: str, outcome: str) -> None:
        super().__init__(message)
        self.outcome = outcome  # name of the ``Outcome`` in lower case without its prefix, such as ``"unknown_memory"``


class NotInstalledError(ShadowServeError, ImportError):
    """A required shared library or Python package is missing."""

    def __init__(self, missing: str, remedy: str) -> None:
        super().__init__(f"{missing}; {remedy}")
        self.missing = missing  # the missing library or package, and the feature that needs it
        self.remedy = remedy  # how to install it


class DeviceError(ShadowServeError):
    """A block device cannot be opened or does not answer."""

    def __init__(self, message: str, errno: int = 0) -> None:
        super().__init__(message)
        self.errno = errno  # the system's error number; 0 if unknown


class BusyError(ShadowServeError):
    """Too many operations are in flight. Nothing was done; try again when some have ended."""


class StorageError(ShadowServeError):
    """An operation on the storage server failed."""


class StorageUnavailableError(StorageError):
    """The storage server is unreachable, or the connection broke."""


class StorageRefusedError(StorageError):
    """The storage server answered with an error: no authentication, full, busy."""
