"""``shadowserve config``: prints the files of ``configs/``, also in an installation without a checkout."""

from pathlib import Path

import click

from shadowserve.errors import ConfigurationError


def _folder() -> Path:
    """Return the folder of the files: in the checkout that this runs in, or in the installed package."""
    package = Path(__file__).parent
    checkout = package.parent
    return checkout / "configs" if (checkout / "pyproject.toml").is_file() else package / "configs"


def _files() -> dict[str, Path]:
    folder = _folder()
    return {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*.*"))}


@click.command()
@click.argument("name", required=False)
def config(name: str | None) -> None:
    """Print an example configuration: every key, with its default and the reason for it.

    Without NAME, list the files: configurations of the programs, alerts of Prometheus, dashboards of Grafana.

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
