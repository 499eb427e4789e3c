"""The execution providers of onnxruntime that a session can have. A row is a provider; to add a device is to add a row.

A row says how `device` names the provider, how a session gets it, what its memory is called, its options, the packages
that bring it, and how to find out why it cannot be used. What it computes is tried by devices.py. Nothing else in the
code knows a device by name; the sentence of `--help` and the documentation do, and tests hold them to this table.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import onnxruntime as ort

from lsuv_cli.scaling import drivers

CPU = "CPUExecutionProvider"
# TF32 makes variances depend on the card. The exhaustive search would run again for every stage and shape. An arena
# that grows by what is asked for, not by powers of two, leaves more of the card to the values.
CUDA_OPTIONS = {
    "cudnn_conv_algo_search": "HEURISTIC",
    "use_tf32": "0",
    "arena_extend_strategy": "kSameAsRequested",
}
# onnxruntime's CUDA kernel of FusedConv has Relu only, and refuses the model otherwise.
CUDA_SPLITS = frozenset({"Tanh", "Sigmoid", "HardSigmoid", "LeakyRelu", "Clip"})


@dataclass(frozen=True)
class Provider:
    """A row of the table."""

    name: str  # as `device` says it
    title: str  # as people say it
    key: str  # as onnxruntime says it
    memory: str  # onnxruntime's name of its memory
    packages: tuple[str, ...]  # that bring it; the doctor tells their versions
    attach: Callable[[Any, int], dict[str, Any]]  # session options, index -> keywords of a session that has it
    absent: Callable[[int], str]  # index -> why no session can be tried; empty if one can
    explain: Callable[[str, int], str]  # onnxruntime's refusal -> its reason and the way out; empty if unknown
    free_memory: Callable[[int], tuple[int, int] | None]  # index -> bytes free, bytes in all; None if not known
    facts: Callable[[int], dict[str, str]]  # index -> driver, libraries, card, for the doctor
    automatic: bool = False  # whether `device=auto` may take it
    counted_by_ray: bool = False  # as GPUs, so that each worker has one of its own
    splits: frozenset[str] = field(default_factory=frozenset)  # activations that its fused convolution does not have


@dataclass(frozen=True)
class Device:
    """Where sessions run."""

    provider: Provider
    index: int
    threads: int
    reason: str = ""  # why this device, and why not another
    refused: list[str] = field(default_factory=list, compare=False)  # what it did not take, so that the host ran it

    @property
    def kind(self) -> str:
        return self.provider.name

    @property
    def host(self) -> Device:
        """The CPU, with as many threads."""
        return Device(PROVIDERS["cpu"], 0, self.threads)

    @property
    def is_host(self) -> bool:
        """Whether the device's memory is the host's."""
        return self.provider.memory == "cpu"

    def __str__(self) -> str:
        if self.is_host:
            return f"{self.provider.title}, {self.threads} thread{'s' if self.threads > 1 else ''}"
        return f"{self.provider.title} device {self.index}"


def cuda_major() -> int:
    """The major version of CUDA that this onnxruntime was built for; 0 if it was built for none."""
    version = str(getattr(ort, "cuda_version", "") or "")
    return int(version.partition(".")[0]) if version[:1].isdigit() else 0


def _no_cuda(index: int) -> str:
    if "CUDAExecutionProvider" not in ort.get_available_providers():
        installed = {name for name in ("onnxruntime", "onnxruntime-gpu") if drivers.package_version(name)}
        if len(installed) == 2:
            return (
                "onnxruntime and onnxruntime-gpu are both installed and hide each other; run "
                "pip uninstall onnxruntime onnxruntime-gpu, then pip install onnxruntime-gpu"
            )
        return "this onnxruntime has no CUDA support; pip install 'lsuv-cli[cuda]'"
    if not drivers.nvidia_driver():
        need = drivers.OLDEST_DRIVER.get(cuda_major(), "")
        return f"there is no NVIDIA driver here; on a machine with an NVIDIA card, install driver {need} or newer"
    if hasattr(ort, "preload_dlls"):
        # CUDA's libraries from PyPI have to be loaded first. preload_dlls prints its findings to stdout.
        with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(Exception):  # the probe tells
            ort.preload_dlls()
    return ""


def _explained_cuda(problem: str, index: int) -> str:
    if known := drivers.why_no_cuda(problem, cuda_major(), index):
        return known
    if absent := drivers.missing(drivers.cuda_libraries(cuda_major())):
        return f"CUDA's libraries cannot be loaded ({', '.join(absent)}); pip install 'lsuv-cli[cuda]' brings them"
    return ""


def _cuda_facts(index: int) -> dict[str, str]:
    major = cuda_major()
    libraries = drivers.cuda_libraries(major) if major else {}
    capability = drivers.cuda_capability(major, index) if major else None
    return {
        "driver": drivers.driver_version() or ("found" if drivers.nvidia_driver() else "none"),
        "needs": f"driver {drivers.OLDEST_DRIVER[major]} or newer" if major in drivers.OLDEST_DRIVER else "",
        "libraries": ", ".join(f"{name} {'found' if there else 'missing'}" for name, there in libraries.items()),
        "wheel": f"onnxruntime-gpu {ort.__version__} for CUDA {major}" if major else "no CUDA in this onnxruntime",
        "card": drivers.cuda_card(index),
        "capability": f"{capability[0]}.{capability[1]}" if capability else "",
    }


def _with_cuda(options: Any, index: int) -> dict[str, Any]:
    return {"providers": [("CUDAExecutionProvider", {"device_id": str(index), **CUDA_OPTIONS}), CPU]}


def _webgpu_devices() -> list[Any]:
    """The devices of the WebGPU plugin, which is registered at the first call."""
    import onnxruntime_ep_webgpu as plugin

    def found() -> list[Any]:
        return [device for device in ort.get_ep_devices() if device.ep_name == plugin.get_ep_name()]

    if not found():
        with contextlib.suppress(Exception):  # registered already, and no adapter was found
            ort.register_execution_provider_library("webgpu", plugin.get_library_path())
    return found()


def _no_webgpu(index: int) -> str:
    if not drivers.package_version("onnxruntime-ep-webgpu"):
        return "WebGPU is not installed; pip install 'lsuv-cli[webgpu]'"
    if not hasattr(ort, "get_ep_devices"):
        return f"onnxruntime {ort.__version__} knows no plugins; pip install -U 'onnxruntime-gpu>=1.24.4'"
    count = len(_webgpu_devices())
    if not count:
        if not drivers.vulkan_loader():
            return "there is no Vulkan loader (libvulkan.so.1); install it (Debian: libvulkan1, and the card's driver)"
        return (
            "WebGPU finds no adapter; install the card's driver, or a software driver with "
            "ORT_WEBGPU_EP_ALLOW_SOFTWARE_ADAPTER=1"
        )
    return "" if index < count else f"there is no WebGPU device {index}; the last one is `device=webgpu:{count - 1}`"


def _with_webgpu(options: Any, index: int) -> dict[str, Any]:
    options.add_provider_for_devices([_webgpu_devices()[index]], {})
    return {}


def _webgpu_facts(index: int) -> dict[str, str]:
    facts = {
        "plugin": drivers.package_version("onnxruntime-ep-webgpu") or "not installed",
        "libraries": f"Vulkan loader {'found' if drivers.vulkan_loader() else 'missing'}",
    }
    if not _no_webgpu(index):
        hardware = _webgpu_devices()[index].device
        kind = str(hardware.type).rpartition(".")[2]
        facts["card"] = f"{hardware.vendor} {hardware.device_id:#06x} ({kind})"
    return facts


def _nothing(index: int) -> str:
    return ""


ROWS = (
    Provider(
        name="cpu",
        title="CPU",
        key=CPU,
        memory="cpu",
        packages=("onnxruntime",),
        attach=lambda options, index: {"providers": [CPU]},
        absent=_nothing,
        explain=lambda problem, index: "",
        free_memory=lambda index: None,
        facts=lambda index: {},
    ),
    Provider(
        name="cuda",
        title="CUDA",
        key="CUDAExecutionProvider",
        memory="cuda",
        packages=("onnxruntime-gpu",),
        attach=_with_cuda,
        absent=_no_cuda,
        explain=_explained_cuda,
        free_memory=lambda index: drivers.cuda_free_memory(cuda_major(), index),
        facts=_cuda_facts,
        automatic=True,
        counted_by_ray=True,
        splits=CUDA_SPLITS,
    ),
    Provider(
        name="webgpu",
        title="WebGPU",
        key="WebGpuExecutionProvider",
        memory="webgpu",
        packages=("onnxruntime-ep-webgpu",),
        attach=_with_webgpu,
        absent=_no_webgpu,
        explain=lambda problem, index: "",
        free_memory=lambda index: None,
        facts=_webgpu_facts,
    ),
)
PROVIDERS: Mapping[str, Provider] = {row.name: row for row in ROWS}
