"""``shadowserve pool``: formats devices of a pool, and shows their contents."""

import json
import os
from contextlib import closing
from typing import Any, Final

import click

from shadowserve.errors import ShadowServeError
from shadowserve.native import BlockDevice
from shadowserve_tools.flags import Size

_OBJECT_BYTES: Final = 64 << 10
"""Assumed object size for the default of --objects-max: a million objects in 64 GiB."""
_OBJECTS_MIN: Final = 1024
EXIT_CODES: Final = """
\b
Exit codes:
  0  all volumes are sound
  1  a volume is damaged or missing, or its device cannot be opened; 'shadowserve verify' also reads the objects
  2  the command line is invalid
"""


@click.group()
def pool() -> None:
    """Format devices of the pool engine, and show their contents. No server may be using them."""


@pool.command(name="format")
@click.argument("paths", metavar="PATH...", nargs=-1, required=True, type=click.Path())
@click.option("--objects-max", type=click.IntRange(1, (1 << 32) - 1), help="Most objects on each  [default: by size].")
@click.option("--size", type=Size(), default=0, help="Make files of this size, such as 64GiB, with reserved blocks.")
@click.option(
    "--pool", "pool_hex", metavar="HEX", help="ID of the pool that they join, 32 digits  [default: a new one]."
)
@click.option("--force", is_flag=True, help="Format devices with contents, too. The contents are lost.")
def format_devices(
    paths: tuple[str, ...], objects_max: int | None, size: int, pool_hex: str | None, force: bool
) -> None:
    """Format devices, or files, as empty volumes of one pool. A device with contents is refused."""
    from shadowserve.pool.volume.volume import Volume

    pool_id = _pool_id(pool_hex)
    for path in paths:
        _keep_size(path, size)
        with closing(BlockDevice(path, size=size)) as device:
            if force:
                _report_dropped_contents(device)
            most = objects_max or max(device.capacity_bytes // _OBJECT_BYTES, _OBJECTS_MIN)
            superblock = Volume.format(device, pool_id=pool_id, objects_max=most, force=force)
        data_bytes = superblock.layout.data_blocks << 12
        click.echo(f"{path}: an empty volume of pool {pool_id.hex()}, {data_bytes:,} bytes for {most:,} objects")


def _keep_size(path: str, size: int) -> None:
    present = os.stat(path).st_size if os.path.isfile(path) else 0
    if size and present not in (0, size):
        raise click.BadParameter(
            f"{path} exists, with {present} bytes; omit --size to use it as it is, or remove the file",
            param_hint="'--size'",
        )


def _report_dropped_contents(device: BlockDevice) -> None:
    from shadowserve.pool.volume.signature_check import describe_content

    try:
        found = describe_content(device)
    except OSError as error:
        found = f"unreadable contents ({error})"
    if found is not None:
        click.echo(f"{device.name}: dropped: {found}")


def _pool_id(digits: str | None) -> bytes:
    if digits is None:
        return os.urandom(16)
    try:
        pool_id = bytes.fromhex(digits)
    except ValueError:
        pool_id = b""
    if len(pool_id) != 16:
        raise click.BadParameter(
            f"{digits!r} is not the ID of a pool: give 32 hexadecimal digits, as in 'shadowserve pool status'",
            param_hint="'--pool'",
        )
    return pool_id


@pool.command(epilog=EXIT_CODES)
@click.argument("paths", metavar="PATH...", nargs=-1, required=True, type=click.Path(exists=True))
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
@click.pass_context
def status(context: click.Context, paths: tuple[str, ...], as_json: bool) -> None:
    """Show the contents of devices: pool, objects, used space, log. Nothing is changed."""
    rows = [_status(path) for path in paths]
    if as_json:
        click.echo(json.dumps(rows, indent=2))
    else:
        click.echo("\n\n".join(map(_text, rows)))
    context.exit(0 if all(row["state"] == "sound" for row in rows) else 1)


def _text(row: dict[str, Any]) -> str:
    lines = [f"{row['path']}: {row['state']}"]
    if row["pool"] != "none":
        lines += [
            f"  pool     {row['pool']}",
            f"  volume   {row['volume']}",
            f"  objects  {row['objects']:,} of at most {row['objects_max']:,}",
            f"  bytes    {row['used_bytes']:,} of {row['data_bytes']:,}",
            f"  log      {row['log_used']:.1%} in use",
        ]
    return "\n".join(lines)


def _status(path: str) -> dict[str, Any]:
    from shadowserve.pool.volume.verification import verify_volume

    row: dict[str, Any] = {"path": path, "pool": "none", "volume": "none", "objects": 0, "objects_max": 0}
    row |= {"used_bytes": 0, "data_bytes": 0, "log_used": 0.0}
    try:
        with closing(BlockDevice(path)) as device:
            found = verify_volume(device, objects=False)
    except ShadowServeError as error:
        return row | {"state": str(error)}
    superblock = found.superblock
    row["state"] = "; ".join(each.what for each in found.findings)
    if superblock is not None:
        row |= {
            "pool": superblock.pool_id.hex(),
            "volume": superblock.volume_id.hex(),
            "objects": found.objects,
            "objects_max": superblock.layout.objects_max,
            "used_bytes": found.object_bytes,
            "data_bytes": superblock.layout.data_blocks << 12,
            "log_used": round(found.log_blocks_used / superblock.layout.log_blocks, 3),
            "state": row["state"] or "sound",
        }
    return row
