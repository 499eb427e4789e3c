"""Build the libraries that the CUDA provider of onnxruntime-gpu wants, without arithmetic.

`python cuda_libraries.py FOLDER` leaves them in FOLDER; with `LD_LIBRARY_PATH=FOLDER` onnxruntime finds them. The
headers come from PyPI, not into the environment, where onnxruntime would find the real runtime. What the provider
imports and the C files here do not define is a function that succeeds and does nothing.
"""

import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path

HERE = Path(__file__).parent
HEADERS = ("nvidia-cuda-runtime>=13,<14", "nvidia-cuda-crt>=13,<14")
MAJOR = "13"
SECONDS = 120


class NotBuildable(Exception):
    """Why the libraries cannot be built here."""


def provider() -> Path:
    """The CUDA provider of the onnxruntime-gpu that is installed."""
    found = find_spec("onnxruntime")
    if found is None or found.origin is None:
        raise NotBuildable("onnxruntime is not installed")
    library = Path(found.origin).parent / "capi" / "libonnxruntime_providers_cuda.so"
    if not library.exists():
        raise NotBuildable("this onnxruntime has no CUDA provider for Linux")
    return library


def build(folder: Path) -> Path:
    """Build all libraries in a folder. Returns the folder."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None or shutil.which("nm") is None:
        raise NotBuildable("there is no C compiler")
    imported = _imported(provider())
    include = _headers(folder / "headers")
    makes = {name: [symbol for symbol in imported if _library(symbol) == name] for name in LIBRARIES}
    makes["cudnn"] = _named_in(provider())
    for name, (file, source) in LIBRARIES.items():
        made = folder / file
        rest = folder / f"{name}.c"
        defined = _defined(compiler, HERE / source, include, folder) if source else set()
        rest.write_text(_stubs(symbol for symbol in makes[name] if symbol not in defined))
        versions = folder / f"{name}.map"
        versions.write_text(f"{file} {{ global: *; }};\n")
        sources = [HERE / source, rest] if source else [rest]
        _run(compiler, "-shared", "-fPIC", "-w", f"-I{include}", *sources, "-o", made, f"-Wl,-soname,{file}",
             f"-Wl,--version-script={versions}", "-lpthread")  # fmt: skip
    shutil.copy(folder / "libcudnn.so.9", folder / "libcudnn.so")
    return folder


# Library -> its file, and the C file here with what has to be right in it.
LIBRARIES = {
    "cudart": (f"libcudart.so.{MAJOR}", "runtime.c"),
    "cublas": (f"libcublas.so.{MAJOR}", "blas.c"),
    "cublasLt": (f"libcublasLt.so.{MAJOR}", ""),
    "curand": ("libcurand.so.10", ""),
    "cuda": ("libcuda.so.1", ""),
    "cudnn": ("libcudnn.so.9", "cudnn.c"),
}


def _library(symbol: str) -> str:
    for prefix, name in (("cublasLt", "cublasLt"), ("cublas", "cublas"), ("curand", "curand"), ("cudnn", "cudnn")):
        if symbol.startswith(prefix):
            return name
    return "cudart" if symbol.startswith(("cuda", "__cuda")) else "cuda"


def _imported(library: Path) -> list[str]:
    """The functions that the provider takes from CUDA's libraries."""
    lines = _run("nm", "-D", "--undefined-only", library).splitlines()
    symbols = {line.split()[-1].partition("@")[0] for line in lines}
    found = sorted(symbol for symbol in symbols if re.fullmatch(r"(__)?cu(da|blas|rand|dnn)?[A-Z]\w*", symbol))
    if not any(f"libcudart.so.{MAJOR}" in line for line in _run("objdump", "-p", library).splitlines()):
        raise NotBuildable(f"this onnxruntime-gpu is not for CUDA {MAJOR}")
    return found


def _named_in(library: Path) -> list[str]:
    """The functions of cuDNN, which the provider looks up by their names when it first needs one."""
    names = set(re.findall(rb"\bcudnn[A-Z]\w+\b", library.read_bytes()))
    return sorted(name.decode() for name in names)


def _defined(compiler: str, source: Path, include: Path, folder: Path) -> set[str]:
    made = folder / f"{source.stem}.o"
    _run(compiler, "-c", "-fPIC", "-w", f"-I{include}", source, "-o", made)
    return {line.split()[2] for line in _run("nm", made).splitlines() if " T " in line}


def _stubs(symbols: Iterable[str]) -> str:
    """Functions that succeed; those that make a handle make one."""
    lines = ["#include <stdlib.h>"]
    for symbol in symbols:
        if re.search(r"Create(?:\w*Descriptor)?$", symbol):
            lines.append(f"int {symbol}(void **made) {{ *made = calloc(1, 64); return 0; }}")
        else:
            lines.append(f"int {symbol}(void) {{ return 0; }}")
    return "\n".join(lines) + "\n"


def _headers(folder: Path) -> Path:
    """CUDA's headers from PyPI."""
    include = folder / "nvidia" / f"cu{MAJOR}" / "include"
    if not include.exists():
        pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(folder), *HEADERS]
        try:
            subprocess.run(pip, check=True, capture_output=True, timeout=SECONDS)
        except (OSError, subprocess.SubprocessError):
            raise NotBuildable("CUDA's headers cannot be had from PyPI") from None
    return include


def _run(*words: object) -> str:
    done = subprocess.run(list(map(str, words)), capture_output=True, text=True, timeout=SECONDS)
    if done.returncode:
        raise RuntimeError(f"{' '.join(map(str, words))}: {done.stderr}")
    return done.stdout


if __name__ == "__main__":
    build(Path(sys.argv[1]).absolute())
