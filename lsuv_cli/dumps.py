"""Layers' values as a directory of .npy files, which appears whole or not at all.

`000-conv1.npy` has the output of the first layer, all samples along the first axis; `layers.json` says which file is
which layer's. Where samples of several shapes cannot be joined, a further file begins, `000-conv1-2.npy`.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lsuv_cli import outputs
from lsuv_cli.errors import OutputError
from lsuv_cli.scratch import Scratch

Array = NDArray[Any]

HEADER = 256  # bytes, whatever the shape: the header is written last, when the number of samples is known
LONGEST = 80  # characters of a layer's name in a file's name


def check(directory: str | os.PathLike[str], others: Mapping[str, str | os.PathLike[str]]) -> Path:
    """The directory to be made; it must not exist, or be empty, or be one of the other files to be written."""
    path = Path(directory)
    for option, other in others.items():
        if outputs.is_same(path, Path(other)):
            raise OutputError(f"`dump` and {option} are the same path ({path}); choose another for one of them")
    try:
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise OutputError(f"{path} exists and is no empty directory; choose another `dump`")
        if not path.absolute().parent.is_dir():
            raise OutputError(f"`dump` {path}: {path.absolute().parent} is not a directory; make it first")
    except (OSError, ValueError) as problem:
        raise OutputError(f"`dump` {path}: {getattr(problem, 'strerror', None) or problem}; choose another") from None
    return path


def write(directory: Path, names: Iterable[str], values: Iterable[tuple[str, str, Array]]) -> None:
    """Write (layer's name, value's name, array of one batch) for layers in the order of `names`."""
    numbers = {name: number for number, name in enumerate(names)}
    try:
        with Scratch(directory.absolute().parent) as scratch:
            made = scratch.path / "dump"
            made.mkdir()
            dump = _Dump(made, numbers)
            for layer, value, array in values:
                dump.add(layer, value, array)
            dump.finish()
            made.rename(directory.absolute())
    except OSError as problem:
        raise OutputError(f"`dump` {directory} cannot be written: {problem.strerror or problem}") from None


class _File:
    """An .npy file that grows along its first axis."""

    def __init__(self, path: Path, layer: str, value: str, array: Array) -> None:
        self.path, self.layer, self.value = path, layer, value
        self.dtype, self.sample, self.rows = array.dtype, array.shape[1:], 0
        self.scalar = not array.shape
        path.write_bytes(bytes(HEADER))

    def fits(self, array: Array) -> bool:
        return not self.scalar and array.dtype == self.dtype and array.shape[1:] == self.sample

    def add(self, array: Array) -> None:
        with self.path.open("ab") as stream:  # opened each time: there may be more layers than open files
            stream.write(np.ascontiguousarray(array).tobytes())
        self.rows += 1 if self.scalar else array.shape[0]

    @property
    def shape(self) -> tuple[int, ...]:
        return () if self.scalar else (self.rows, *self.sample)

    def finish(self) -> None:
        """Write the header."""
        text = repr({"descr": np.lib.format.dtype_to_descr(self.dtype), "fortran_order": False, "shape": self.shape})
        start = b"\x93NUMPY\x01\x00" + (HEADER - 10).to_bytes(2, "little")
        with self.path.open("r+b") as stream:
            stream.write(start + text.encode("latin1").ljust(HEADER - 11) + b"\n")


class _Dump:
    def __init__(self, folder: Path, numbers: dict[str, int]) -> None:
        self.folder, self.numbers = folder, numbers
        self.open: dict[str, _File] = {}
        self.files: list[_File] = []

    def add(self, layer: str, value: str, array: Array) -> None:
        if array.dtype.kind not in "fiub":  # bfloat16, which numpy's format does not have
            array = array.astype(np.float32)
        current = self.open.get(layer)
        if current is None or not current.fits(array):
            count = sum(file.layer == layer for file in self.files)
            safe = re.sub(r"[^A-Za-z0-9._-]+", "_", layer)[:LONGEST]
            name = f"{self.numbers[layer]:03d}-{safe}{f'-{count + 1}' if count else ''}.npy"
            current = self.open[layer] = _File(self.folder / name, layer, value, array)
            self.files.append(current)
        current.add(array)

    def finish(self) -> None:
        """Write all headers, and the list of the files."""
        for file in self.files:
            file.finish()
        entries = [
            {"file": f.path.name, "layer": f.layer, "value": f.value, "shape": list(f.shape), "dtype": f.dtype.name}
            for f in sorted(self.files, key=lambda f: self.numbers[f.layer])
        ]
        (self.folder / "layers.json").write_text(json.dumps(entries, indent=2) + "\n", encoding="utf-8")
