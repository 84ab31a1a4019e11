"""``shadowserve verify``: checks that devices hold what was stored on them."""

import json
from contextlib import closing
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from shadowserve.errors import ShadowServeError
from shadowserve.native import BlockDevice
from shadowserve.pool.volume.verification import Finding, Verification, verify_volume

EXIT_CODES = """
\b
Exit codes:
  0  all devices are sound
  1  there are findings; each is printed in the words of a server that would refuse to start with it
  2  the command line is invalid, or a device cannot be opened; results of the other devices are printed
"""


@click.command(epilog=EXIT_CODES)
@click.argument("paths", metavar="PATH...", nargs=-1, required=True, type=click.Path(exists=True))
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
@click.option(
    "--no-objects", is_flag=True, help="Check superblocks, log and snapshots only: seconds instead of minutes."
)
@click.pass_context
def verify(context: click.Context, paths: tuple[str, ...], as_json: bool, no_objects: bool) -> None:
    """Check devices of a pool that no server uses: superblocks, log, snapshots, every object and record.

    Nothing is changed. Damage that a server would repair at start (one of two copies) is also a finding.
    """
    results, unopened = [], 0
    for path in paths:
        try:
            results.append(_verify(path, objects=not no_objects, quiet=as_json))
        except ShadowServeError as error:
            results.append(_result(path, Verification(findings=[Finding("device", "", str(error))]), objects=False))
            unopened += 1
    if as_json:
        click.echo(json.dumps(results, indent=2))
    else:
        for result in results:
            _print(result)
    sound = all(result["sound"] for result in results)
    context.exit(2 if unopened else 0 if sound else 1)


def _verify(path: str, *, objects: bool, quiet: bool) -> dict[str, Any]:
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    console = Console(stderr=True)
    quiet = quiet or not console.is_terminal
    shown = Progress(*columns, TimeRemainingColumn(), console=console, transient=True, disable=quiet)
    with closing(BlockDevice(path)) as device, shown as bar:
        task = bar.add_task(path, total=None)
        found = verify_volume(
            device, objects=objects, progress=lambda done, total: bar.update(task, completed=done, total=total)
        )
    return _result(path, found, objects=objects)


def _result(path: str, found: Verification, *, objects: bool) -> dict[str, Any]:
    superblock = found.superblock
    return {
        "path": path,
        "sound": found.sound,
        "volume": superblock.volume_id.hex() if superblock else None,
        "pool": superblock.pool_id.hex() if superblock else None,
        "objects": found.objects,
        "object_bytes": found.object_bytes,
        "objects_read": objects,
        "snapshot": found.snapshot_generation,
        "log_blocks": found.log_blocks_used,
        "findings": [{"part": each.part, "where": each.where, "what": each.what} for each in found.findings],
    }


def _print(result: dict[str, Any]) -> None:
    read = "" if result["objects_read"] else ", not read"
    count = len(result["findings"])
    state = "sound" if result["sound"] else f"{count} finding{'s' if count > 1 else ''}"
    click.echo(f"{result['path']}: {state}; {result['objects']:,} objects, {result['object_bytes']:,} bytes{read}")
    for finding in result["findings"]:
        where = f" {finding['where']}" if finding["where"] else ""
        click.echo(f"  {finding['part']}{where}: {finding['what']}")
