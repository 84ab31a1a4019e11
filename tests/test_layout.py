"""The layout rules of docs/design/architecture.md: permitted imports, and the contents of a wheel."""

import ast
import graphlib
import re
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from machine import NEVER_S

REPOSITORY = Path(__file__).parents[1]
PROGRAMS = ("host_control", "dpu_dataplane", "storage_kv")
ROOF = "shadowserve_tools"
PACKAGES = ("shadowserve", *PROGRAMS, ROOF)


@cache
def imported(path: Path) -> list[tuple[int, str]]:
    """Return line and full name of each module that the file of a module imports in any way."""
    package = ".".join(path.relative_to(REPOSITORY).parts[:-1])
    return list(imported_by(path.read_text(encoding="utf-8"), package))


def imported_by(source: str, package: str) -> Iterator[tuple[int, str]]:
    """Yield line and full name of each module that ``source``, a module of ``package``, imports in any way."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package.rsplit(".", node.level - 1)[0] if node.level else ""
            module = ".".join(part for part in (base, node.module) if part)
            yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and called(node).endswith(("import_module", "__import__")):
            for argument in node.args[:1]:
                if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                    yield node.lineno, argument.value
                elif isinstance(argument, ast.JoinedStr) and isinstance(argument.values[0], ast.Constant):
                    yield node.lineno, str(argument.values[0].value)


def called(node: ast.Call) -> str:
    """Return the last part of the name that is called; empty for what is not a name."""
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


def modules(package: str) -> list[Path]:
    return [path for path in sorted((REPOSITORY / package).rglob("*.py")) if "_pb2" not in path.name]


def forbidden(path: Path, names: tuple[str, ...]) -> list[str]:
    return [
        f"{path.relative_to(REPOSITORY)}:{line} imports {name}"
        for line, name in imported(path)
        if any(f"{name}.".startswith(f"{other}.") for other in names)
    ]


@pytest.mark.parametrize("package", PACKAGES)
def test_arrows_point_down_from_the_roof_to_the_programs_to_the_ground_floor(package: str) -> None:
    below = {"shadowserve": {"shadowserve"}, ROOF: set(PACKAGES)}.get(package, {"shadowserve", package})
    others = (*(other for other in PACKAGES if other not in below), "tests")
    found = [line for path in modules(package) for line in forbidden(path, others)]
    assert modules(package) and not found, "\n".join(found)


def needs() -> dict[str, set[str]]:
    """Return the imports of each module, including those for types; a package is listed for imports from itself."""
    paths = {path.relative_to(REPOSITORY).with_suffix(""): path for package in PACKAGES for path in modules(package)}
    names = {".".join(path.parts).removesuffix(".__init__"): source for path, source in paths.items()}
    found: dict[str, set[str]] = {}
    for name, path in names.items():
        imports = [full for _, full in imported(path)]
        found[name] = {full if full in names else full.rpartition(".")[0] for full in imports} & names.keys() - {name}
    return found


def test_no_two_modules_need_each_other() -> None:
    graphlib.TopologicalSorter(needs()).prepare()  # raises CycleError, which lists the cycle


def test_no_configuration_reads_sizes_in_another_way() -> None:
    found = [
        line for package in PACKAGES for path in modules(package) for line in forbidden(path, ("pydantic.ByteSize",))
    ]
    assert not found, "\n".join(found)


def test_a_volume_knows_nothing_of_the_pool_that_it_is_part_of() -> None:
    pool = [path for path in modules("shadowserve/pool") if path.parent.name == "pool" and path.stem != "__init__"]
    above = tuple(f"shadowserve.pool.{path.stem}" for path in pool)
    volume = modules("shadowserve/pool/volume")
    found = [line for path in volume for line in forbidden(path, above)]
    assert above and volume and not found, "\n".join(found)


@pytest.mark.parametrize(
    ("package", "names"), [("storage_kv", ("grpc", "vllm", "torch")), ("dpu_dataplane", ("vllm", "torch"))]
)
def test_the_storage_node_knows_neither_grpc_nor_an_engine_and_the_data_plane_no_engine(
    package: str, names: tuple[str, ...]
) -> None:
    found = [line for path in modules(package) for line in forbidden(path, names)]
    assert not found, "\n".join(found)


def test_the_data_plane_knows_its_sources_by_their_seam_alone() -> None:
    names = ("resp", "tiers", "selection", "outage")
    rooms = tuple(f"dpu_dataplane.sources.{name}" for name in names)
    others = [path for path in modules("dpu_dataplane") if "sources" not in path.parts and path.name != "server.py"]
    found = [line for path in others for line in forbidden(path, rooms)]
    below = ("config", "interference", "jobs", "metrics", "plan", "shared_rate")
    above = tuple(f"dpu_dataplane.{path.stem}" for path in others if path.stem not in below)
    inside = [path for path in modules("dpu_dataplane") if "sources" in path.parts]
    found += [line for path in inside for line in forbidden(path, (*above, "dpu_dataplane.server"))]
    assert inside and not found, "\n".join(found)


@pytest.mark.parametrize("folder", ["proto", "native", "configs", "deploy", "scripts", "tests", "docs"])
def test_a_folder_without_code_of_ours_is_no_package(folder: str) -> None:
    # A proto/__init__.py would hide proto-plus, and a tests/__init__.py any other package called tests.
    assert not list((REPOSITORY / folder).rglob("__init__.py"))


def test_a_folder_of_the_c_core_needs_only_those_above_it_in_its_readme() -> None:
    source = REPOSITORY / "native" / "src"
    _, table = (REPOSITORY / "native" / "README.md").read_text().split("| in `src/` |")
    folders = list(dict.fromkeys(re.findall(r"^\| `(\w+)/", table.partition("\n\n")[0], re.MULTILINE)))
    assert sorted(folders) == sorted(path.name for path in source.iterdir())
    for path in source.rglob("*.[ch]"):
        own = path.relative_to(source).parts[0]
        for needed in re.findall(r'^#include "(.+)"', path.read_text(), re.MULTILINE):
            assert (source / needed).exists() or (source.parent / "include" / needed).exists(), f"{path}: {needed}"
            if "/" in needed:
                above = needed.partition("/")[0]
                assert folders.index(above) <= folders.index(own), f"{path} needs {needed}, of a folder below its own"


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_is_one_on_disk(package: str) -> None:
    folders = {path.parent for path in modules(package)}
    assert (REPOSITORY / package / "__init__.py").exists()
    without = [str(folder.relative_to(REPOSITORY)) for folder in folders if not (folder / "__init__.py").exists()]
    assert not without, f"no __init__.py in {without}"


def test_the_distribution_lists_the_packages() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
    assert set(project["tool"]["scikit-build"]["wheel"]["packages"]) == set(PACKAGES)


def test_a_wheel_holds_the_packages_and_nothing_else(tmp_path: Path) -> None:
    # Without the C core, which takes the longest and adds two files to shadowserve/.
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", str(REPOSITORY), "--quiet"]
    command += ["--no-deps", "--no-build-isolation", "--wheel-dir", str(tmp_path)]
    command += ["--config-settings=wheel.cmake=false", f"--config-settings=build-dir={tmp_path / 'build'}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=NEVER_S)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = tmp_path.glob("shadowserve-*.whl")
    names = [Path(name) for name in zipfile.ZipFile(wheel).namelist()]
    top = {name.parts[0] for name in names}
    assert {name for name in top if not name.endswith(".dist-info")} == set(PACKAGES)
    folder = REPOSITORY / "configs"
    configs = {f"{ROOF}/configs/{path.relative_to(folder)}" for path in folder.rglob("*") if path.is_file()}
    assert {str(name) for name in names if "configs" in name.parts} == configs
    packed = {name for name in names if name.suffix == ".py"}
    on_disk = {path.relative_to(REPOSITORY) for package in PACKAGES for path in (REPOSITORY / package).rglob("*.py")}
    generated = {path for path in on_disk if path.name == "_cffi.py" or "_pb2" in path.name}  # generated by the build
    assert packed == on_disk - generated
    assert any(name.name == "LICENSE" for name in names) and Path("shadowserve/web/page.html") in names
    entry_points = zipfile.ZipFile(wheel).read(next(str(n) for n in names if n.name == "entry_points.txt")).decode()
    assert "shadowserve=shadowserve_tools:main" in entry_points.replace(" ", "")
    assert "shadowserve=host_control.vllm:register" in entry_points.replace(" ", "")


def test_what_runs_at_night_only_finds_what_it_imports() -> None:
    load = "import runpy; runpy.run_path('scripts/fetch_through_arm.py')"
    done = subprocess.run([sys.executable, "-c", load], cwd=REPOSITORY, capture_output=True, text=True, timeout=NEVER_S)
    assert done.returncode == 0, done.stderr
