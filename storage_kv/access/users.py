"""The users of a storage node, their passwords, and the log of denials.

Passwords are compared in constant time, against a random hash where there is no such user. So the time of an answer
shows neither whether a user exists nor how much of a password is right.
"""

import hmac
import logging
import os
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from shadowserve.errors import ConfigurationError
from storage_kv.access.rules import Described, RuleError, User, check_name, hash_password, parse_line
from storage_kv.config import StorageConfig

DEFAULT_USER: Final = b"default"

_log = logging.getLogger(__name__)

_DENIALS_MAX: Final = 128  # as Redis' acllog-max-len
_SAME_DENIAL_S: Final = 60.0  # as Redis
_FILE_BYTES_MAX: Final = 16 << 20

_NO_PASSWORD: Final = (b"~", b"%", b"&", b"+", b"-", b"(", b"tenant=")
"""Beginnings of rules that are shown in messages."""
_FRESH_DEFAULT: Final = (b"on", b"nopass", b"~*", b"&*", b"+@all")


def read_users(path: str, commands: Mapping[str, Described]) -> dict[bytes, User]:
    """Read a users file; the message of a ConfigurationError lists all invalid lines."""
    try:
        with open(path, "rb") as file:
            content = file.read(_FILE_BYTES_MAX + 1)
    except OSError as error:
        raise ConfigurationError(f"users_file: cannot read {path}: {error.strerror}") from error
    if len(content) > _FILE_BYTES_MAX:
        raise ConfigurationError(f"users_file: {path} is larger than {_FILE_BYTES_MAX >> 20} MiB")
    found: dict[bytes, User] = {}
    errors = []
    for number, line in enumerate(content.split(b"\n"), 1):
        try:
            if (user := _user_of(line, commands)) is not None:
                if user.name in found:
                    raise RuleError("Duplicate user found. A user can only be defined once in config files")
                found[user.name] = user
        except RuleError as error:
            errors.append(f"{path}:{number}: {error}")
    if errors:
        raise ConfigurationError("; ".join(errors))
    absent: set[str] = set().union(*(user.names_beyond(commands) for user in found.values()))
    if absent:
        _log.warning("users_file_names_commands_of_redis file=%s absent_here=%r", path, " ".join(sorted(absent)))
    return found


def _user_of(line: bytes, commands: Mapping[str, Described]) -> User | None:
    parsed = parse_line(line)
    if parsed is None:
        return None
    name, rules = parsed
    user = User(name)
    for number, rule in enumerate(rules, 1):
        try:
            user.apply(rule, commands)
        except RuleError as error:
            # A password must not appear in messages and logs, not even with a wrong sign, without one, or with a space.
            shown = rule if rule.lower().startswith(_NO_PASSWORD) else rule[:1] + b"..."
            where = b"in rule %d ('%s') of user %s" % (number, shown, name)
            raise RuleError(f"{where.decode('utf-8', 'backslashreplace')}: {error}") from None
    return user


class Users:
    """All users. Needs the node's lock."""

    def __init__(self, config: StorageConfig, commands: Mapping[str, Described]) -> None:
        """Create the configured users; ``commands`` are all commands by full name."""
        self._config = config
        self._commands = commands
        self._no_password_hash = hash_password(secrets.token_bytes(32))
        self.denials: deque[Denial] = deque(maxlen=_DENIALS_MAX)  # entries of ACL LOG, the newest first
        self.default = User(DEFAULT_USER)  # user of new connections if it needs no password
        self.by_name: dict[bytes, User] = {DEFAULT_USER: self.default}  # users by name, the default user included
        self._default_from_configuration = self._configured_default()
        self.default.become(self._default_from_configuration)
        if config.users_file:
            self.load()

    def _configured_default(self) -> User:
        """Return the default user if no file defines it.

        With a users file it is off unless it has a password: a file that lists the users must not let in others.
        """
        password = self._config.password.get_secret_value().encode()
        user = User(DEFAULT_USER)
        for rule in _FRESH_DEFAULT:
            user.apply(rule, self._commands)
        if password:
            user.apply(b">" + password, self._commands)
        elif self._config.users_file:
            for rule in (b"reset", b"resetchannels"):
                user.apply(rule, self._commands)
        return user

    @property
    def file(self) -> str:
        return self._config.users_file

    @property
    def anyone_enters(self) -> bool:
        """True if new connections belong to the default user without a password."""
        return self.default.enabled and self.default.no_password

    def authenticate(self, name: bytes, password: bytes) -> User | None:
        """Return the user of a name and password, or None; takes the same time for unknown users."""
        user = self.by_name.get(name)
        given = hash_password(password)
        accepted = user is not None and user.no_password
        for known in (user.passwords if user is not None else None) or (self._no_password_hash,):
            accepted |= hmac.compare_digest(given, known)
        return user if user is not None and user.enabled and accepted else None

    def set_user(self, name: bytes, rules: Iterable[bytes]) -> bool:
        """Apply all rules to a new or existing user or, on an error, none; return True if its tenant has changed.

        The arguments of a RuleError are the reason and the rule.
        """
        check_name(name)
        present = self.by_name.get(name)
        changed = present.copy() if present is not None else User(name)
        for rule in rules:
            try:
                changed.apply(rule, self._commands)
            except RuleError as error:
                raise RuleError(str(error), rule) from None
        if present is None:
            self.by_name[name] = changed
            return False
        moved = present.tenant != changed.tenant
        present.become(changed)
        return moved

    def remove(self, name: bytes) -> User | None:
        return self.by_name.pop(name, None)

    def load(self) -> list[User]:
        """Read the users file again; existing users are changed in place. A ConfigurationError has changed nothing.

        Returns:
            Users whose sessions must end: those that are removed or belong to another tenant now.
        """
        found = read_users(self.file, self._commands)
        found.setdefault(DEFAULT_USER, self._default_from_configuration)
        ended = [user for name, user in self.by_name.items() if name not in found]
        ended += [user for name, user in self.by_name.items() if name in found and user.tenant != found[name].tenant]
        for name, user in found.items():
            present = self.by_name.setdefault(name, user)
            if present is not user:
                present.become(user)
        for user in ended:
            if user.name not in found:
                del self.by_name[user.name]
        return ended

    def describe(self) -> list[bytes]:
        """Return all users in the order of their names as lines of a users file."""
        return [self.by_name[name].describe() for name in sorted(self.by_name)]

    def deny(self, denial: "Denial") -> None:
        """Add an entry to ACL LOG; a repeated denial is counted in its entry."""
        for entry in self.denials:
            if entry.is_same(denial) and denial.at_s - entry.at_s < _SAME_DENIAL_S:
                denial.count += entry.count
                self.denials.remove(entry)
                break
        self.denials.appendleft(denial)

    def saving(self) -> Callable[[], None]:
        """Return a function that writes the present users to the file atomically, in any thread."""
        path, lines = self.file, self.describe()

        def save() -> None:
            made = f"{path}.{secrets.token_hex(4)}.new"
            try:
                with open(os.open(made, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                    file.write(b"\n".join([*lines, b""]))
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(made, path)
            except OSError:
                if os.path.exists(made):
                    os.unlink(made)
                raise

        return save


@dataclass(slots=True)
class Denial:
    """An entry of ACL LOG."""

    reason: str  # ``auth``, ``command`` or ``key``
    object: bytes  # the command or the key
    user: bytes
    client: bytes  # line of CLIENT INFO
    context: str = "toplevel"  # ``toplevel``, or ``multi`` within a transaction
    count: int = 1
    at_s: float = field(default_factory=time.monotonic)

    def is_same(self, other: "Denial") -> bool:
        same = self.reason == other.reason and self.object == other.object
        return same and self.user == other.user and self.context == other.context
