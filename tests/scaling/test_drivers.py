"""What a system has for a device: libraries by their names, what CUDA and nvidia-smi tell."""

import ctypes
import sys

import pytest

from lsuv_cli.scaling import drivers


@pytest.fixture
def asked(monkeypatch):
    """The names of the libraries that are looked for; none is there."""
    names: list[str] = []
    monkeypatch.setattr(drivers, "load", names.append)
    return names


def test_a_library_that_is_there_and_one_that_is_not():
    assert drivers.load("no-such-library.so.1") is None
    if sys.platform == "linux":
        assert isinstance(drivers.load("libc.so.6"), ctypes.CDLL)


@pytest.mark.parametrize(
    ("windows", "driver", "libraries"),
    [
        (False, "libcuda.so.1", ["libcudart.so.13", "libcublas.so.13", "libcublasLt.so.13", "libcudnn.so.9"]),
        (True, "nvcuda.dll", ["cudart64_13.dll", "cublas64_13.dll", "cublasLt64_13.dll", "cudnn64_9.dll"]),
    ],
)
def test_the_names_of_the_libraries(windows, driver, libraries, asked, monkeypatch):
    monkeypatch.setattr(drivers, "WINDOWS", windows)
    assert not drivers.nvidia_driver()
    assert drivers.missing(drivers.cuda_libraries(13)) == libraries
    assert drivers.cuda_free_memory(13, 0) is None
    assert asked == [driver, *libraries, libraries[0]]
    monkeypatch.setattr(drivers, "load", lambda name: object())
    assert drivers.nvidia_driver()
    assert drivers.missing(drivers.cuda_libraries(13)) == []


def test_vulkan_is_looked_for_on_linux_only(asked, monkeypatch):
    monkeypatch.setattr(sys, "platform", "linux")
    assert not drivers.vulkan_loader()
    monkeypatch.setattr(sys, "platform", "darwin")
    assert drivers.vulkan_loader()
    assert asked == ["libvulkan.so.1"]
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(drivers, "load", lambda name: object())
    assert drivers.vulkan_loader()


class Runtime:
    """CUDA's runtime with two devices, the second at work; 0 is success, as in CUDA."""

    def __init__(self, fails=0):
        self.current, self.fails = 1, fails

    def cudaGetDevice(self, place):  # noqa: N802
        place._obj.value = self.current
        return 0

    def cudaSetDevice(self, index):  # noqa: N802
        if index.value not in {0, 1}:
            return 101
        self.current = index.value
        return 0

    def cudaMemGetInfo(self, free, total):  # noqa: N802
        free._obj.value, total._obj.value = 100 + self.current, 1000 + self.current
        return self.fails


@pytest.mark.parametrize(
    ("index", "fails", "expected"), [(0, 0, (100, 1000)), (1, 0, (101, 1001)), (2, 0, None), (0, 2, None)]
)
def test_the_free_memory_of_a_card_leaves_the_current_device_as_it_was(index, fails, expected, monkeypatch):
    runtime = Runtime(fails)
    monkeypatch.setattr(drivers, "load", lambda name: runtime)
    assert drivers.cuda_free_memory(13, index) == expected
    assert runtime.current == 1


def test_a_runtime_without_such_functions_does_not_tell(monkeypatch):
    monkeypatch.setattr(drivers, "load", lambda name: object())
    assert drivers.cuda_free_memory(13, 0) is None


class Driver:
    """NVIDIA's driver with two cards."""

    def __init__(self, fails=0):
        self.fails = fails

    def cuInit(self, flags):  # noqa: N802
        assert flags == 0
        return self.fails

    def cuDeviceGet(self, place, index):  # noqa: N802
        place._obj.value = 70 + index.value
        return 0 if index.value in {0, 1} else 101

    def cuDeviceGetName(self, name, size, device):  # noqa: N802
        name.value = {70: b"ACME 9000", 71: b" ACME \xff "}[device.value]
        return 0 if size == len(name) else 1


@pytest.mark.parametrize(
    ("driver", "index", "expected"),
    [(Driver(), 0, "ACME 9000"), (Driver(), 1, "ACME \ufffd"), (Driver(), 2, ""), (Driver(100), 0, ""), (None, 0, ""),
     (object(), 0, "")],
)  # fmt: skip
def test_the_name_of_a_card_is_the_drivers(driver, index, expected, monkeypatch):
    monkeypatch.setattr(drivers, "load", lambda name: driver)
    assert drivers.cuda_card(index) == expected


@pytest.mark.skipif(sys.platform == "win32", reason="a shell script")
@pytest.mark.parametrize(
    ("does", "expected"),
    [
        ("echo 580.65.06; echo 580.65.06", "580.65.06"),
        ("echo ' 591.1'", "591.1"),
        ("echo 'No devices were found'", ""),
        ("echo 580.65; exit 6", ""),
        ("printf '\\377'", ""),
        (":", ""),
    ],
)
def test_the_version_of_the_driver_is_what_nvidia_smi_tells(does, expected, tmp_path, monkeypatch):
    script = tmp_path / "nvidia-smi"
    script.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/arguments\n{does}\n')
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert drivers.driver_version() == expected
    asked = (tmp_path / "arguments").read_text().split()
    assert asked == ["--query-gpu=driver_version", "--format=csv,noheader"]
    script.unlink()
    assert drivers.driver_version() == ""


def test_the_version_of_a_package():
    assert drivers.package_version("numpy")[0].isdigit()
    assert drivers.package_version("no-such-package") == ""


@pytest.mark.parametrize(
    ("problem", "told"),
    [
        ("CUDA failure 35", "too old for CUDA 13"),
        ("driver version is insufficient", "too old for CUDA 13"),
        ("CUDA failure 100", "finds no card"),
        ("no CUDA-capable device", "finds no card"),
        ("Invalid device ID: 5, must be between 0 (inclusive) and 2 (exclusive).", "the last one is `device=cuda:1`"),
        ("cuDNN is unavailable", "cuDNN 9 cannot be loaded"),
        ("libcudnn.so: cannot open shared object file", "cuDNN 9 cannot be loaded"),
        ("cudnn_graph not found", "cuDNN 9 cannot be loaded"),
        ("no kernel image is available", "the card is too old"),
        ("CUDA failure 222", "the card is too old"),
        ("CUDNN_STATUS_ARCH_MISMATCH", "the card is too old"),
    ],
)
def test_each_part_of_a_refusal_is_enough(problem, told):
    assert told in drivers.why_no_cuda(problem, 13, 5)


def test_cuda_12_is_offered_for_old_cards_only_where_the_wheel_is_for_cuda_13():
    assert "<1.27" in drivers.why_no_cuda("no kernel image", 13, 0)
    assert "<1.27" not in drivers.why_no_cuda("no kernel image", 12, 0)
    assert "install driver 525 or newer" in drivers.why_no_cuda("CUDA failure 35", 12, 0)
    assert drivers.why_no_cuda("another failure", 13, 0) == ""


class Card:
    """CUDA's runtime with one card, asked for cudaDevAttrComputeCapabilityMajor (75) and ...Minor (76)."""

    def __init__(self, capability):
        self.capability = capability

    def cudaDeviceGetAttribute(self, place, attribute, index):  # noqa: N802
        if index.value != 0:
            return 101
        place._obj.value = self.capability[{75: 0, 76: 1}[attribute]]
        return 0


def test_the_compute_capability_of_a_card(monkeypatch):
    monkeypatch.setattr(drivers, "load", lambda name: Card((8, 6)))
    assert drivers.cuda_capability(13, 0) == (8, 6)
    assert drivers.cuda_capability(13, 1) is None
    monkeypatch.setattr(drivers, "load", lambda name: None)
    assert drivers.cuda_capability(13, 0) is None


@pytest.mark.parametrize(
    ("capability", "told"), [((6, 1), "(compute capability 6.1) is too old"), ((7, 5), "too new"), ((12, 0), "too new")]
)
def test_a_card_without_kernels_is_too_old_before_turing_and_too_new_from_there_on(capability, told, monkeypatch):
    """CUDA 13 has kernels for compute capability 7.5 (Turing) and above."""
    monkeypatch.setattr(drivers, "load", lambda name: Card(capability))
    assert told in drivers.why_no_cuda("no kernel image", 13, 0)
    assert bool(drivers.why_no_cuda("another failure", 13, 0)) == (capability < (7, 5))
    assert drivers.why_no_cuda("another failure", 12, 0) == ""
