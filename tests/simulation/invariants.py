"""Invariants of a store at every moment: quotas, budgets, and the order of eviction in a chain."""

from collections.abc import Callable

from reference_model import Model, Violation
from simulated_server import SimulatedServer
from world import World

from shadowserve.native import ANY, NO_PARENT
from shadowserve.pool.pool import Pool

_Chunk = tuple[int, bytes]
_Present = dict[_Chunk, tuple[object, _Chunk | None]]
"""Present chunks: an identity of the put, and the previous chunk."""


class Invariants:
    """Checks a server's store at intervals."""

    def __init__(
        self, world: World, model: Model, tenants: tuple[str, ...], wall: Callable[[], tuple[int, int]]
    ) -> None:
        """Create the checks; ``wall`` returns the least and the greatest time that the wall clock has shown."""
        self._world = world
        self._model = model
        self._tenants = tenants
        self._wall = wall
        self._server: SimulatedServer | None = None
        self._before: _Present = {}

    def check(self, server: SimulatedServer, *, loses: bool) -> None:
        """Raise Violation if an invariant is broken; ``loses``: devices fail, so chunks may be lost."""
        store = server.store
        self._check_bounds(server)
        present = _chunks(store)
        if server is self._server and not loses:
            for child, (put, parent) in present.items():
                if parent is None or parent in present or parent not in self._before:
                    continue
                if child in self._before and self._before[child][0] == put:
                    self._check_gone(store, parent, child)
        self._server, self._before = server, present

    def _check_bounds(self, server: SimulatedServer) -> None:
        found = server.store.statistics()
        if found.used_bytes > found.budget_bytes:
            raise Violation(f"budget: {found.used_bytes} bytes are used of {found.budget_bytes}")
        for name, limits in server.node.config.tenants.items():
            of = server.store.statistics(server.store.tenant(name))
            if limits.keys_max is not None and of.keys > limits.keys_max:
                raise Violation(f"quota: tenant {name} has {of.keys} keys of {limits.keys_max}")
            if limits.bytes_max is not None and of.used_bytes - of.held_bytes > limits.bytes_max:
                raise Violation(f"quota: tenant {name} has {of.used_bytes} bytes of {limits.bytes_max}")

    def _check_gone(self, store: Pool, parent: _Chunk, child: _Chunk) -> None:
        """Check an absent chunk whose successor is present: a client must have removed it."""
        names = {store.tenant(name): name for name in self._tenants}
        key = names[parent[0]], b"kv:" + parent[1].hex().encode()
        now = self._world.now_ns
        sure = self._model.surely_there(key, now, now, self._wall())
        if sure is not None:
            raise Violation(f"prefix: {key} was evicted before chunk {child[1].hex()} that follows it")


def _chunks(store: Pool) -> _Present:
    found: _Present = {}
    assert isinstance(store, Pool)
    for slot in store._index.scan(ANY, 0, 1 << 20, 1 << 20)[1]:
        entry = store._index.read(slot)
        if entry.header_length:
            parent = None if entry.parent == NO_PARENT else (entry.tenant, entry.parent)
            found[entry.tenant, entry.key] = entry.generation, parent
    return found
