"""Exceptions have the fields that handlers need, also in other processes; every module can be imported."""

import copy
import importlib
import pkgutil
import re

import pytest

import shadowserve
from shadowserve.errors import DataPlaneError, DeviceError, NativeError, NotInstalledError, ShadowServeError


def test_failures_carry_what_handlers_decide_by() -> None:
    assert NativeError("text", 7).result == 7
    assert DataPlaneError("text", "deadline").outcome == "deadline"
    assert str(NativeError("text", 7)) == str(DataPlaneError("text", "deadline")) == "text"


@pytest.mark.parametrize(
    "error",
    [
        *(NativeError("text", 7), DataPlaneError("text", "deadline"), NotInstalledError("no x", "install x")),
        DeviceError("text", 5),
    ],
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
