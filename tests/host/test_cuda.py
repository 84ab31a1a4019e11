"""Calls of the CUDA driver, with the fake driver."""

import ctypes
import gc
import os
import threading
from pathlib import Path

import pytest
from gpu_support import tensor

from host_control import cuda
from host_control.cuda import CudaError, Device, Driver
from host_control.delivery import address_of

SIZE = 1 << 16


@pytest.fixture
def device(fake_driver: Path) -> Device:
    return Driver(str(fake_driver)).device(0)


def test_a_missing_driver_is_an_error_only_when_needed() -> None:
    with pytest.raises(CudaError, match="cannot load the CUDA driver .* install"):
        Driver("libno-such-driver.so.1")


def test_a_driver_numbers_its_gpus(fake_driver: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CudaError, match="install NVIDIA's driver 515 or newer"):
        Driver("libc.so.6")
    monkeypatch.setenv("FAKE_CUDA_DEVICES", "2")
    driver = Driver(str(fake_driver))
    assert driver.device(1).pci_address == "0000:01:00.0" and "fake" in driver.device(1).name
    with pytest.raises(CudaError, match="finding GPU 2: cuDeviceGet failed with 101"):
        driver.device(2)


def test_copies_are_complete_after_synchronize(device: Device) -> None:
    buffer, stream = device.allocate(SIZE), device.stream()
    source = memoryview(bytearray(b"kv" * (SIZE // 2)))
    unpin = device.pin(address_of(source), SIZE)
    stream.copy_to_device(buffer.address, address_of(source), SIZE)
    there = tensor(buffer)
    assert not there.any(), "from page-locked memory it is asynchronous"
    stream.synchronize()
    assert bytes(there.numpy()) == bytes(source)
    unpin()
    stream.copy_to_device(buffer.address + 8, address_of(source) + 1, 1)
    device.synchronize()
    assert there[8] == ord("v")


def test_any_thread_can_call(device: Device) -> None:
    """A context is current in one thread; calls in others would fail with CUDA_ERROR_INVALID_CONTEXT."""
    problems = []

    def use() -> None:
        try:
            stream, buffer, source = device.stream(), device.allocate(SIZE), memoryview(bytearray(8))
            stream.copy_to_device(buffer.address, address_of(source), 8)
            stream.synchronize()
        except CudaError as error:
            problems.append(error)

    thread = threading.Thread(target=use)
    thread.start()
    thread.join(30)
    assert not thread.is_alive() and not problems


def test_memory_is_freed_with_its_last_view(device: Device) -> None:
    def mapped() -> int:
        return Path("/proc/self/maps").read_text().count("fake GPU memory")

    gc.collect()
    before = mapped()
    view = tensor(device.allocate(SIZE))[8:16]
    gc.collect()
    assert mapped() == before + 1
    view += 1
    del view
    gc.collect()
    assert mapped() == before


def test_memory_is_locked_once_and_adjacent_memory_is_unlocked_separately(device: Device) -> None:
    memory = memoryview(bytearray(2 * SIZE))
    first, second, beside = (device.pin(address_of(memory) + begin, SIZE) for begin in (0, 0, SIZE))
    second()  # the first registration remains
    beside()
    first()
    with pytest.raises(CudaError, match="unlocking host memory on fake GPU 0"):
        first()


def test_errors_name_the_operation_and_the_reason(
    device: Device, fake_driver: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_CUDA_FAIL", "cuMemAlloc_v2:2=2")
    device = Driver(str(fake_driver)).device(0)
    device.allocate(SIZE)
    with pytest.raises(
        CudaError, match="allocating 3 MiB on fake GPU 0.*cuMemAlloc_v2 failed with 2, .*docs/guides/gpu"
    ) as error:
        device.allocate(3 << 20)
    assert error.value.code == 2
    monkeypatch.delenv("FAKE_CUDA_FAIL")
    Driver(str(fake_driver)).device(0).allocate(SIZE)


@pytest.mark.parametrize(("ordering", "flushes"), [("0", 1), ("100", 0), ("200", 0)])
def test_remote_writes_are_flushed_if_not_ordered(
    fake_driver: Path, monkeypatch: pytest.MonkeyPatch, ordering: str, flushes: int
) -> None:
    monkeypatch.setenv("FAKE_CUDA_ORDERING", ordering)
    driver = Driver(str(fake_driver))
    count = ctypes.CDLL(str(fake_driver)).fake_cuda_flushes
    before = count()
    driver.device(0).flush_remote_writes()
    assert count() - before == flushes


def test_a_platform_that_cannot_order_writes_is_refused(fake_driver: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_CUDA_ORDERING", "0")
    monkeypatch.setenv("FAKE_CUDA_FLUSH", "0")
    with pytest.raises(CudaError, match="could be read too early; set host.delivery"):
        Driver(str(fake_driver)).device(0).flush_remote_writes()


def test_memory_is_exported_as_a_dmabuf_if_supported(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = device.allocate(SIZE + 1)
    descriptor = buffer.dmabuf()
    assert os.fstat(descriptor).st_size == buffer.size == 2 * cuda.GPU_PAGE_BYTES
    os.close(descriptor)
    monkeypatch.setenv("FAKE_CUDA_DMABUF", "0")
    assert device.exports_dmabuf
    with pytest.raises(CudaError, match="exporting memory as a DMA-BUF on fake GPU 0.*801"):
        buffer.dmabuf()
