"""The single tree of exceptions: as documented, complete, and with the fields that handlers need."""

import copy
import importlib
import inspect
import pkgutil
import re

import pytest

import shadowserve
from shadowserve import errors
from shadowserve.errors import DataPlaneError, NativeError, NotInstalledError, ShadowServeError


def drawn() -> dict[str, str]:
    """Return the base of each exception according to the drawing in the module's docstring."""
    parents: list[tuple[int, str]] = []
    bases = {}
    for indent, name in re.findall(r"^    ([ |+-]*)(\w*Error)\b", errors.__doc__ or "", re.MULTILINE):
        parents = [(depth, parent) for depth, parent in parents if depth < len(indent)]
        bases[name] = parents[-1][1] if parents else "Exception"
        parents.append((len(indent), name))
    return bases


def test_the_tree_is_as_drawn() -> None:
    defined = {
        name: kind.__bases__[0].__name__
        for name, kind in vars(errors).items()
        if inspect.isclass(kind) and issubclass(kind, BaseException)
    }
    assert drawn() == defined
    assert len(defined) > 10


def test_every_exception_says_what_it_means() -> None:
    for name in drawn():
        assert getattr(errors, name).__doc__, name


def test_failures_carry_what_handlers_decide_by() -> None:
    assert NativeError("text", 7).result == 7
    assert DataPlaneError("text", "deadline").outcome == "deadline"
    assert str(NativeError("text", 7)) == str(DataPlaneError("text", "deadline")) == "text"


@pytest.mark.parametrize(
    "error", [NativeError("text", 7), DataPlaneError("text", "deadline"), NotInstalledError("no x", "install x")]
)
def test_an_exception_can_be_rebuilt_elsewhere(error: ShadowServeError) -> None:
    # Engines send exceptions between processes. An exception that cannot be rebuilt there hides the cause.
    rebuilt = copy.copy(error)
    assert rebuilt is not error
    assert (type(rebuilt), str(rebuilt), vars(rebuilt)) == (type(error), str(error), vars(error))


def test_the_package_exports_its_version() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+(\.dev\d+|rc\d+)?", shadowserve.__version__)


def test_every_module_can_be_imported() -> None:
    for module in pkgutil.walk_packages(shadowserve.__path__, "shadowserve."):
        # The package's folder also has the shared libraries of the C core, which are not modules.
        if module.name.startswith("shadowserve.proto.") or module.name.endswith(
            ("__main__", "_cffi", "libshadowserve", "libdoca_emulator")
        ):
            continue
        try:
            importlib.import_module(module.name)
        except ModuleNotFoundError as error:
            if error.name == "triton":  # GPU kernels; CPU environments keep triton outside of vLLM's path
                continue
            raise
