"""Hints of requests: pin or release their KV, prefetch it for the session's next turn, limit how long it is stored.

They are in ``kv_transfer_params``, entry :data:`ENTRY`. Callers of the engine in Python may use vLLM's ``kv_hints``
instead. Hints are applied when their request ends. A hint that cannot be applied costs a counted reason, and nothing
else.
"""

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from host_control.config import HostConfig
from host_control.lookup import PrefixLookup, RecordKeys
from host_control.vllm.metrics import SlowerPaths
from host_control.waiting import WaitingQueue

ENTRY: Final = "shadowserve_hints"
_DAYS: Final = 86_400.0
_SECONDS_MAX: Final = {"pin_s": 30 * _DAYS, "ttl_s": 30 * _DAYS, "prefetch_s": 3600.0}
_ACTIONS: Final = {"pin": "pin_s", "retain": "pin_s", "ttl": "ttl_s", "prefetch": "prefetch_s", "release": "release"}
"""Types of vLLM's actions. Their payload has ``seconds``."""
_HINTS_MAX: Final = 8


@dataclass(frozen=True)
class Hints:
    """Hints of one request.

    Attributes:
        pin_s: Seconds after its end for which its KV is not evicted; 0: no pin.
        ttl_s: Lifetime of the chunks that it stores; 0: no end.
        prefetch_s: Seconds after its end when the session's next turn will come; None: not known.
        release: End the session's pins.
        session: Digest of the session's name; empty without one.
    """

    pin_s: float = 0.0
    ttl_s: float = 0.0
    prefetch_s: float | None = None
    release: bool = False
    session: bytes = b""


def hints_of(request: Any, config: HostConfig, slower: SlowerPaths) -> Hints:
    """Return a request's hints; none of them, and a counted reason, where one is invalid."""
    if not config.hints:
        return Hints()
    session = getattr(request, "session_id", None)
    try:
        given = dict(_checked(name, value) for name, value in _given(request))
        if given.get("release") and "pin_s" in given:
            raise ValueError("'pin_s' and 'release' exclude each other")
    except (ValueError, TypeError, AttributeError) as error:  # also of objects that are no hints of vLLM
        slower.add("hint_invalid", f"hints of a request are ignored: {error}; see docs/guides/tiers.md")
        given = {}
    session = given.pop("session", session)
    return Hints(**given, session=_digest(session) if isinstance(session, str) else b"")


def _given(request: Any) -> Iterator[tuple[object, object]]:
    params = request.kv_transfer_params
    hints = params.get(ENTRY, {}) if isinstance(params, Mapping) else {}
    actions = getattr(getattr(request, "kv_hints", None), "actions", ())
    if not isinstance(hints, Mapping):
        raise ValueError(f"{ENTRY} is not an object")
    if len(hints) + len(actions) > _HINTS_MAX:
        raise ValueError(f"a request has more than {_HINTS_MAX}")
    yield from hints.items()
    for action in actions:
        name = _ACTIONS.get(action.action_type, action.action_type)
        yield name, True if name == "release" else action.payload.get("seconds")


def _checked(name: object, value: object) -> tuple[str, Any]:
    if name in _SECONDS_MAX:
        most = _SECONDS_MAX[str(name)]
        if isinstance(value, int | float) and value is not True and 0 < value <= most:
            return str(name), float(value)
        raise ValueError(f"'{name}' is not a number of seconds, above 0 and up to {most:.0f}")
    if name in ("release", "session"):
        if isinstance(value, bool if name == "release" else str):
            return str(name), value
        raise ValueError(f"'{name}' has another type")
    raise ValueError(f"{str(name)[:32]!r} is not a hint")


def _digest(session: str) -> bytes:
    return hashlib.blake2b(session.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def apply(
    request_id: str, hints: Hints, lookup: PrefixLookup, waiting: WaitingQueue | None, slower: SlowerPaths
) -> None:
    """Apply the hints of a request that has ended, before its lookup is forgotten."""
    expects = hints.prefetch_s is not None and waiting is not None and not waiting.unused
    if hints.prefetch_s is not None and not expects:
        slower.add("prefetch_unused", "a session's next turn is not prefetched: the data plane has no local tiers")

    if hints.release and not hints.session:
        slower.add("release_without_session", "a request releases no pins: it names no session, and pins have one")
    name = hints.session or _digest(request_id)
    pins = bool(hints.pin_s or (hints.release and hints.session))

    def ignored(reason: str, detail: str) -> None:
        slower.add(reason, f"KV is not pinned as a request's hint asks: {detail}")

    def send(records: RecordKeys) -> None:
        for client, chains in records.items() if pins else ():
            client.pin([key for _, keys in chains for key in keys], hints.pin_s, name, ignored)
        if expects and waiting is not None and hints.prefetch_s is not None:
            waiting.expect_turn(name, records, hints.prefetch_s)

    if pins or expects:
        lookup.name_records(request_id, send, needed=not hints.release)
