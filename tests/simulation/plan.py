"""The kind of a simulated run, chosen by its seed."""

from dataclasses import dataclass, fields

from world import World


@dataclass
class Plan:
    """The kind of a run.

    Attributes:
        tight: Evictions are necessary.
        crashes: The server ends abnormally and restarts.
        network: Links break or go silent.
        disks: Devices fail, lose bits and misdirect bytes.
        clocks: The wall clock jumps.
        quota: Some tenants have quotas.
        moves: Overwritten objects often go to another device.
        absent: Devices are missing at some starts.
        starts: Power and devices fail during starts and first snapshots.
        dataplane: A data plane reads the same records as other clients.
        volatile: Some values are only in memory.
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
