"""The parts of vLLM that we use exist in each supported release. The test reads sources, and does not run vLLM."""

import ast
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY / "scripts"))

import vllm_interface  # noqa: E402
from vllm_interface import NOTES, OBJECTS, VERSIONS, Ours, Sources  # noqa: E402

OURS = Ours()


@pytest.mark.parametrize("version", VERSIONS)
def test_every_used_name_exists_in_each_release(version: str) -> None:
    missing = [
        f"{name}.{member}" if member else name
        for name, form in vllm_interface.recorded(version).items()
        for member, found in (form.items() if isinstance(form, dict) else [("", form)])
        if found is None
    ]
    assert not missing


@pytest.mark.parametrize("version", VERSIONS)
def test_the_record_has_exactly_the_used_names(version: str) -> None:
    """After a new import from vLLM, or a new base class from vLLM, both releases must be recorded again."""
    assert set(vllm_interface.recorded(version)) == OURS.imports | OURS.heirs.keys() | OBJECTS.keys()


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", sorted(OURS.heirs))
def test_an_override_accepts_the_calls_of_its_base(name: str, version: str) -> None:
    members = vllm_interface.recorded(version)[name]
    for heir in OURS.heirs[name]:
        own = {part.name: part for part in heir.body if isinstance(part, ast.FunctionDef)}
        lacking = [each for each, form in members.items() if form.startswith("abstractmethod") and each not in own]
        assert not lacking, f"{heir.name} does not have {lacking}"
        for each, part in own.items():
            if each in members and each != "__init__" and "(" in members[each]:
                assert takes(part, members[each]), f"{heir.name}.{each}, which is called as {members[each]}"


def takes(own: ast.FunctionDef, form: str) -> bool:
    """Return True if our method accepts the arguments of the method that it implements, by position and by name."""
    asked = parameters(form)
    mine = own.args
    names = [each.arg for each in [*mine.posonlyargs, *mine.args]]
    wanted = [each.arg for each in [*asked.posonlyargs, *asked.args]]
    places = names[: len(wanted)] == wanted or (mine.vararg is not None and wanted[: len(names)] == names)
    keywords = {each.arg for each in asked.kwonlyargs} <= {*names, *(each.arg for each in mine.kwonlyargs)}
    required = len(names) - len(mine.defaults) <= len(wanted) and all(mine.kw_defaults)
    return places and (keywords or mine.kwarg is not None) and required and bool(asked.kwarg) <= bool(mine.kwarg)


def parameters(form: str) -> ast.arguments:
    (function,) = ast.parse(f"def f{form[form.index('(') :]}: ...").body
    assert isinstance(function, ast.FunctionDef)
    return function.args


@pytest.mark.parametrize("name", sorted(OBJECTS))
def test_every_listed_attribute_of_an_object_is_used(name: str) -> None:
    sources = "".join(path.read_text() for path in (REPOSITORY / "host_control").rglob("*.py"))
    unread = [each for each in OBJECTS[name].split() if each not in sources]
    assert not unread


def test_every_difference_has_a_note() -> None:
    assert vllm_interface.differences().keys() == NOTES.keys()
    assert vllm_interface.DOCUMENT.read_text() == vllm_interface.document(), "run scripts/vllm_interface.py --record"


def test_the_installed_vllm_matches_its_record() -> None:
    run = subprocess.run([sys.executable, vllm_interface.__file__], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr


def tree(folder: Path, **files: str) -> Sources:
    for name, text in files.items():
        path = folder / "vllm" / f"{name.replace('__', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        (path.parent / "__init__.py").touch()
    return Sources(folder)


def test_names_are_found_through_reexports(tmp_path: Path) -> None:
    sources = tree(
        tmp_path,
        a="from .b import Thing as Other\n"
        "try:\n    from vllm.c__d import missing\nexcept ImportError:\n    x: int = 1\n",
        b="from vllm.sub.c import Base\nclass Thing(Base):\n    y: int\n    @property\n    def z(self) -> int: ...\n",
        sub__c="class Base:\n    def __init__(self, a: int) -> None:\n        self.kept = a\n"
        "    @abstractmethod\n    def todo(self, b: str = 'x', *, c=None): ...\n",
    )
    module, node = sources.find("vllm.a", "Other") or ("", None)
    assert module == "vllm.b" and isinstance(node, ast.ClassDef)
    assert sources.members(module, node) == {
        "__init__": "(self, a)",
        "kept": "attribute",
        "todo": "abstractmethod (self, b='x', *, c=None)",
        "y": "attribute",
        "z": "attribute",
    }
    assert sources.find("vllm.a", "x") and not sources.find("vllm.a", "missing") and not sources.find("vllm.q", "x")


def test_a_missing_name_is_a_difference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changed: dict[str, Any] = vllm_interface.recorded(VERSIONS[1])
    changed["vllm.v1.request.Request"]["cache_salt"] = None
    (tmp_path / f"{VERSIONS[1]}.json").write_text(json.dumps(changed))
    (tmp_path / f"{VERSIONS[0]}.json").write_text(json.dumps(vllm_interface.recorded(VERSIONS[0])))
    monkeypatch.setattr(vllm_interface, "RECORDED", tmp_path)
    assert vllm_interface.differences()["Request.cache_salt"] == ("attribute", None)
    with pytest.raises(AssertionError):
        test_every_used_name_exists_in_each_release(VERSIONS[1])
