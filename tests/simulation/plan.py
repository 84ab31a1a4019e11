"""What kind of run a seed makes."""

from dataclasses import dataclass, fields

from world import World


@dataclass
class Plan:
    """What kind of run this is.

    Attributes:
        engine: ``memory`` or ``pool``.
        tight: objects have to be evicted.
        crashes: the server dies, and comes back.
        network: links break, or go silent.
        disks: devices fail, rot and misdirect.
        clocks: the wall clock jumps.
        quota: some tenants may have only so much.
        moves: what is overwritten often goes to another device than what it replaces.
        absent: devices are missing at a start, and are there again at a later one.
        starts: power fails and devices fail while a server starts, and while it writes its first snapshot.
        dataplane: a data plane asks as well, for the same records as others.
        volatile: some values are kept in memory alone.
    """

    engine: str
    devices: int
    tight: bool
    crashes: bool
    network: bool
    disks: bool
    clocks: bool
    quota: bool
    moves: bool
    absent: bool
    starts: bool
    volatile: bool
    dataplane: bool

    @classmethod
    def of(cls, world: World) -> "Plan":
        chance = world.chance
        engine = "memory" if chance(0.2) else "pool"
        calm = chance(0.25)
        devices = 0 if engine == "memory" else world.random.choice((1, 1, 2, 2, 3, 5))
        crashes = not calm and chance(0.6)
        disks = not calm and engine == "pool" and chance(0.35)
        clocks = not calm and chance(0.15)
        return cls(
            engine=engine,
            devices=devices,
            tight=chance(0.4),
            crashes=crashes,
            network=not calm and chance(0.4),
            disks=disks,
            clocks=clocks,
            quota=chance(0.25),
            moves=devices > 1 and chance(0.5),
            absent=devices > 1 and crashes and not (disks or clocks) and chance(0.5),
            starts=devices > 0 and crashes and chance(0.4),
            volatile=devices > 0 and chance(0.15),
            dataplane=chance(0.25),
        )

    def __str__(self) -> str:
        marks = [each.name for each in fields(self) if getattr(self, each.name) is True]
        return " ".join([self.engine, *([str(self.devices)] if self.devices else []), *marks])
