"""``shadowserve simulate``: predictions for hardware that is not here, from published measurements."""

from typing import Final

import click

from shadowserve_tools.lazy import LazyGroup

SIMULATIONS: Final = ("bluefield", "objectcache", "tiers", "ssd", "fleet")
_MODULES: Final = {name: f"shadowserve_tools.simulate.{name}:{name}" for name in SIMULATIONS}


@click.group(cls=LazyGroup, modules=_MODULES, context_settings={"show_default": True})
def simulate() -> None:
    """Predict what would be on hardware that is not here; docs/design/simulation.md has the method."""
