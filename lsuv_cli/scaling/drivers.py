"""What the system has for a device: NVIDIA's driver and CUDA's libraries, the Vulkan loader; asked by ctypes.

Nothing here needs onnxruntime, so that a missing driver is told before a session is tried.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.metadata
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence

# Major version of CUDA -> the oldest driver for it, as NVIDIA states it for Linux.
OLDEST_DRIVER = {12: "525", 13: "580"}
# onnxruntime-gpu 1.23 to 1.26 is built for CUDA 12, from this version on for CUDA 13.
FIRST_FOR_CUDA_13 = "1.27"
CUDNN = 9  # the major version that both want
# The compute capability of the oldest card that CUDA 13 has kernels for: Turing.
OLDEST_CARD = (7, 5)
CAPABILITY = (75, 76)  # the numbers of cudaDevAttrComputeCapabilityMajor and ...Minor
FOR_CUDA_12 = f"pip install 'onnxruntime-gpu[cuda,cudnn]<{FIRST_FOR_CUDA_13}' for CUDA 12"
# CUDA's and cuDNN's words for a card that none of their kernels was built for.
NO_KERNEL = re.compile(r"no kernel image|NoKernelImage|CUDA failure (?:209|222)|ARCH_MISMATCH|unsupported toolchain")
WINDOWS = sys.platform == "win32"


def load(name: str) -> ctypes.CDLL | None:
    """A shared library by the name that the system's loader knows; None if it is not there."""
    try:
        return ctypes.CDLL(name)
    except OSError:
        return None


def _nvidia_driver() -> ctypes.CDLL | None:
    return load("nvcuda.dll" if WINDOWS else "libcuda.so.1")


def nvidia_driver() -> bool:
    """Whether NVIDIA's driver is installed."""
    return _nvidia_driver() is not None


def vulkan_loader() -> bool:
    """Whether there is a Vulkan loader, which WebGPU needs on Linux; elsewhere it uses what the system brings."""
    return sys.platform != "linux" or load("libvulkan.so.1") is not None


def cuda_libraries(major: int) -> dict[str, bool]:
    """CUDA's libraries that onnxruntime opens -> whether they can be loaded."""
    if WINDOWS:
        names = [f"cudart64_{major}.dll", f"cublas64_{major}.dll", f"cublasLt64_{major}.dll", f"cudnn64_{CUDNN}.dll"]
    else:
        names = [f"libcudart.so.{major}", f"libcublas.so.{major}", f"libcublasLt.so.{major}", f"libcudnn.so.{CUDNN}"]
    return {name: load(name) is not None for name in names}


def _cuda_runtime(major: int) -> ctypes.CDLL | None:
    return load(f"cudart64_{major}.dll" if WINDOWS else f"libcudart.so.{major}")


def cuda_free_memory(major: int, index: int) -> tuple[int, int] | None:
    """The bytes of a CUDA device that are free, and all it has; None where CUDA does not tell."""
    runtime = _cuda_runtime(major)
    if runtime is None:
        return None
    before, free, total = ctypes.c_int(0), ctypes.c_size_t(0), ctypes.c_size_t(0)
    with contextlib.suppress(AttributeError):
        runtime.cudaGetDevice(ctypes.byref(before))
        if runtime.cudaSetDevice(ctypes.c_int(index)) == 0:
            failed = runtime.cudaMemGetInfo(ctypes.byref(free), ctypes.byref(total))
            runtime.cudaSetDevice(before)
            if not failed:
                return int(free.value), int(total.value)
    return None


def cuda_capability(major: int, index: int) -> tuple[int, int] | None:
    """A card's compute capability, such as (8, 6); None where CUDA does not tell."""
    runtime = _cuda_runtime(major)
    found = [ctypes.c_int(0), ctypes.c_int(0)]
    with contextlib.suppress(AttributeError):  # of a library that is no CUDA runtime, or of none
        for number, attribute in zip(found, CAPABILITY, strict=True):
            if runtime.cudaDeviceGetAttribute(ctypes.byref(number), attribute, ctypes.c_int(index)):  # type: ignore[union-attr]
                return None
        return found[0].value, found[1].value
    return None


def cuda_card(index: int) -> str:
    """A card's name, by NVIDIA's driver; empty where it does not tell.

    Not by nvidia-smi, which counts the cards in another order, and those that CUDA_VISIBLE_DEVICES hides as well.
    """
    driver, device, name = _nvidia_driver(), ctypes.c_int(0), ctypes.create_string_buffer(256)
    with contextlib.suppress(AttributeError):  # of a library that is no driver, or of none
        failed = (
            driver.cuInit(0)  # type: ignore[union-attr]
            or driver.cuDeviceGet(ctypes.byref(device), ctypes.c_int(index))  # type: ignore[union-attr]
            or driver.cuDeviceGetName(name, len(name), device)  # type: ignore[union-attr]
        )
        return "" if failed else name.value.decode(errors="replace").strip()
    return ""


def driver_version() -> str:
    """The version of NVIDIA's driver, by nvidia-smi; empty where there is none."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return ""
    first = done.stdout.strip().partition("\n")[0].strip()  # a line for each card, all with the same driver
    return first if re.fullmatch(r"\d+(\.\d+)*", first) else ""


def package_version(name: str) -> str:
    """The version of an installed package; empty if it is not installed."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(name)
    return ""


def why_no_cuda(problem: str, major: int, index: int) -> str:
    """What onnxruntime's refusal of a CUDA device means, with the way out; empty if it means nothing known."""
    if "CUDA failure 35" in problem or "driver version is insufficient" in problem:
        need = OLDEST_DRIVER.get(major, "a newer one")
        way_out = f"install driver {need} or newer" + (f", or {FOR_CUDA_12}" if major > 12 else "")
        return f"the NVIDIA driver is too old for CUDA {major}, which this onnxruntime-gpu needs; {way_out}"
    if "CUDA failure 100" in problem or "no CUDA-capable device" in problem:
        return "the NVIDIA driver finds no card; look at nvidia-smi, and at CUDA_VISIBLE_DEVICES if it is set"
    if match := re.search(r"Invalid device ID: \d+, must be between 0 \(inclusive\) and (\d+)", problem):
        most = int(match[1]) - 1
        return f"there is no CUDA device {index}; the last one is `device=cuda:{most}`"
    if re.search("cudnn( is unavailable|.*(cannot open|not found|failed to load))", problem, re.IGNORECASE):
        return f"cuDNN {CUDNN} cannot be loaded; pip install 'lsuv-cli[cuda]' brings it"
    capability = cuda_capability(major, index)
    if NO_KERNEL.search(problem) or (major > 12 and capability is not None and capability < OLDEST_CARD):
        return _no_kernels(major, capability)
    return ""


def _no_kernels(major: int, capability: tuple[int, int] | None) -> str:
    """A card that this onnxruntime-gpu has no kernels for: older than all that it was built for, or newer."""
    elsewhere = "use `device=cpu` or `device=webgpu`"
    known = f" (compute capability {capability[0]}.{capability[1]})" if capability else ""
    if capability is not None and capability >= OLDEST_CARD:
        newer = f"pip install -U 'onnxruntime-gpu[cuda,cudnn]>={FIRST_FOR_CUDA_13}'"
        return (
            f"the card{known} is too new for this onnxruntime-gpu, which has no kernels for it; {newer}, or {elsewhere}"
        )
    older = f", or {FOR_CUDA_12}, which runs on older cards" if major > 12 else ""
    return f"the card{known} is too old for this onnxruntime-gpu, which has no kernels for it; {elsewhere}{older}"


def missing(libraries: Mapping[str, bool]) -> Sequence[str]:
    return [name for name, there in libraries.items() if not there]
