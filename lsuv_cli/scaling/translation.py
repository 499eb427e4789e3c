"""onnxruntime's exceptions as errors of this tool: one line, what happened and what to do."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

from lsuv_cli.errors import ModelError
from lsuv_cli.scaling.providers import Device

LONGEST_MESSAGE = 2000  # characters of an onnxruntime message that are read
LONGEST_REASON = 300  # characters of it that are shown

# A session with one provider names the missing implementation; with two, it says that no provider took the node.
MISSING_KERNEL = re.compile(r"Could not find an implementation|Provider type for .{0,500} is not set")
# Memory that ran out: in onnxruntime's arenas, in its check before a large request, in the CUDA runtime, in cuBLAS and
# cuDNN, which allocate their own, in Vulkan, and in C++.
OUT_OF_MEMORY = re.compile(
    r"Failed to allocate memory|Available memory of .{0,100} is smaller than requested|CUDA failure 2:|"
    r"(?:CUBLAS|CUDNN)_STATUS_(?:INTERNAL_ERROR_)?ALLOC_FAILED|CUDA_ERROR_OUT_OF_MEMORY|cudaErrorMemoryAllocation|"
    r"VK_ERROR_OUT_OF_(?:DEVICE|HOST)_MEMORY|bad_alloc|out of memory",
    re.IGNORECASE,
)
# A value that WebGPU has no buffer for, or needs more buffers for than a shader may have (128 MiB each with Mesa 25's
# software driver, 16 of them, those of all inputs and outputs together).
TOO_LARGE = re.compile(
    r"Failed to create GPU buffer|exceeds the max buffer size limit|Too many storage buffers in shader"
)


class Unsupported(ModelError):
    """The device has no kernel for an operator with these types."""


class UnknownOperator(ModelError):
    """The model has an operator that onnxruntime does not know: one of the user's own, or a misspelt one."""


class OutOfMemory(ModelError):
    """A device ran out of memory, or has no place for a value so large."""


@contextlib.contextmanager
def translated(what: str = "onnxruntime cannot run the model", device: Device | None = None) -> Iterator[None]:
    """Turn onnxruntime's exceptions into `ModelError` and its subclasses; `device` is the one that is at work."""
    try:
        yield
    except (MemoryError, ModelError):
        raise
    except Exception as problem:  # onnxruntime's exceptions have no common class of their own
        text = str(problem)[:LONGEST_MESSAGE]
        if MISSING_KERNEL.search(text):
            raise Unsupported(f"onnxruntime cannot run the model here: {one_line(problem)}") from problem
        if OUT_OF_MEMORY.search(text):
            raise OutOfMemory(_out_of_memory(device)) from problem
        if device is not None and TOO_LARGE.search(text):
            raise OutOfMemory(
                f"a value of this batch is too large for {device}; use a smaller `batch_size`, or `device=cpu`"
            ) from problem
        kind_of_error = UnknownOperator if "is not a registered function/op" in text else ModelError
        raise kind_of_error(f"{what}: {one_line(problem)}") from problem


def _out_of_memory(device: Device | None) -> str:
    """What helps: a smaller batch; on the host, where values wait, also fewer of those; for a device also the host."""
    if device is None or device.is_host:
        return "onnxruntime ran out of memory; use a smaller `batch_size`, fewer samples (`limit`) or `memory`"
    return f"{device} ran out of memory; use a smaller `batch_size`, or `device=cpu`"


def one_line(problem: BaseException) -> str:
    """An onnxruntime message without its preamble, source paths and line breaks."""
    # The regular expressions below take time quadratic in the length of a name, and a hostile model can have a very
    # long one; text beyond the first characters would not be shown anyway.
    text = " ".join(str(problem)[:LONGEST_MESSAGE].split())
    text = re.sub(r"\[ONNXRuntimeError\] : \d+ : \w+ : ", "", text)
    # A failure of CUDA's libraries stands between a C++ signature and the host's name, a file, and a graph in JSON.
    text = re.sub(r" ; GPU=-?\d.*", "", text)
    text = re.sub(r"std::conditional_t<[^>]*> onnxruntime::CudaCall\([^)]*\)", "", text)
    text = re.sub(r"/\S+\.(?:cc|h)[:\d]*( \S+\([^)]*\))?", "", text)
    text = re.sub(r"(?:[\w:&*]+ )?onnxruntime::(?:[\w:~]|<[^<>]*>)+\((?:[^()]|\([^()]*\))*\)(?: const)?\s*", "", text)
    text = re.sub(r"\[with [^\]]*\]\s*", "", text)
    return " ".join(text.split())[:LONGEST_REASON]
