"""``shadowserve simulate``: predictions for hardware that is not here, from published measurements."""

import importlib
from typing import Final

import click

__all__ = ["SIMULATIONS", "simulate"]

SIMULATIONS: Final = ("bluefield",)


class _Simulations(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(SIMULATIONS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in SIMULATIONS:
            return None
        command: click.Command = getattr(importlib.import_module(f"shadowserve.cli.simulate.{cmd_name}"), cmd_name)
        return command


@click.group(cls=_Simulations)
def simulate() -> None:
    """Predict what hardware that is not here would do; docs/simulation.md has the method."""
