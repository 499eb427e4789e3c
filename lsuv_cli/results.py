"""What the Python functions give for a model that was made: the model itself, and what was done to it."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import onnx
from numpy.typing import NDArray

from lsuv_cli.errors import LsuvError
from lsuv_cli.model.file import ModelFile
from lsuv_cli.report import Report

Array = NDArray[Any]


@dataclass(frozen=True)
class _Made:
    """A model that was made. It is in the output, and is read from there when it is asked for."""

    _file: ModelFile | None = field(default=None, kw_only=True)

    @functools.cached_property
    def model(self) -> onnx.ModelProto | None:
        """The model, read from the output when it is asked for; None if its weights are in a file beside the output."""
        return None if self._file is None else self._file.embedded()

    def chunks(self) -> Iterator[bytes | memoryview]:
        """The model as the bytes of an ONNX file, a few megabytes at a time."""
        if self._file is None:
            raise LsuvError("the model's weights are in a file beside the output; read it from there")
        return self._file.chunks()

    def to_bytes(self) -> bytes:
        """The model as the bytes of an ONNX file."""
        return b"".join(self.chunks())


@dataclass(frozen=True)
class Initialized(_Made):
    """What `initialize` gives: the model (None if its weights are in a file beside the output), and the report.

    With `like`, `weights` is that checkpoint with the initialized values.
    """

    report: Report
    weights: dict[str, Array] | None = None


@dataclass(frozen=True)
class Exposed(_Made):
    """What `expose` gives: the model (None if its weights are in a file beside the output), and its new outputs."""

    outputs: Mapping[str, str]  # layer -> the output that has its value, in the order of execution
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Stripped(_Made):
    """What `strip` gives: the model, each stripped tensor's role, their bytes, and the float tensors that were kept."""

    roles: Mapping[str, str]
    bytes: int
    kept: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
