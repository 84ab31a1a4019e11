"""``shadowserve config``: the files of ``configs/``, which an installation has, too, though it has no checkout."""

from pathlib import Path

import click

from shadowserve.errors import ConfigurationError


def _folder() -> Path:
    """Return where the files are: in the checkout that this runs in, else in the installed package."""
    package = Path(__file__).parent
    checkout = package.parent
    return checkout / "configs" if (checkout / "pyproject.toml").is_file() else package / "configs"


def _files() -> dict[str, Path]:
    folder = _folder()
    return {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*.*"))}


@click.command()
@click.argument("name", required=False)
def config(name: str | None) -> None:
    """Print a configuration to begin with: every key, with its default and the reason for it.

    Without NAME, list what there is: configurations of the programs, Prometheus' alerts, Grafana's dashboards.

    \b
    For a storage node:
        shadowserve config storage.yaml > storage.yaml
        shadowserve storage --config storage.yaml
    """
    files = _files()
    if name is None:
        click.echo("\n".join(files))
    elif name in files:
        click.echo(files[name].read_text(encoding="utf-8"), nl=False)
    else:
        raise ConfigurationError(f"there is no configuration '{name}'; there are {', '.join(files)}")
