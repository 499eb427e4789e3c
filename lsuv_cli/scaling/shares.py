"""A share of the data: some of the batches, the values that wait for them between stages, and stages run over them.

In one process there is one share, and it has all batches. Where several workers do a pass, each has a share, and
only the sums of each batch and the types of waiting values leave it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from onnx import TypeProto

from lsuv_cli.scaling.frontier import Frontier
from lsuv_cli.scaling.model_builder import StageModel
from lsuv_cli.scaling.providers import Device
from lsuv_cli.scaling.runtime import Session, host_value

Array = NDArray[Any]
Batch = Mapping[str, Array]
Kinds = Mapping[str, np.dtype[Any] | None]
"""Input of the model -> the type in which it is fed; None for the type that the data has."""
Done = Callable[[int], None]  # how many batches a stage was run over


class Shares(Protocol):
    """All batches of a pass, in one share or in several."""

    @property
    def waiting(self) -> int:
        """The bytes of values that wait in memory."""

    def run(self, index: int, model: StageModel, inputs: Sequence[str], done: Done) -> Iterator[list[Any]]:
        """Run stage `index` of the pass over all batches: for each batch, in order, the sums of each measurement.

        A stage may be run again, until the next one is run.
        """

    def types(self, names: Sequence[str]) -> dict[str, TypeProto]:
        """The types of waiting values; a dimension is fixed where it is the same in all batches."""

    def keep_only(self, names: set[str]) -> None:
        """Free the waiting values, except those with these names."""

    def close(self) -> None:
        """Free everything."""


class Share:
    """Some batches of a pass, run one after another in this process."""

    def __init__(self, batches: Sequence[Batch], kinds: Kinds, device: Device, memory: int) -> None:
        self.batches, self.kinds, self.device = batches, kinds, device
        self.frontier = Frontier(memory)
        self.session: Session | None = None  # for the next run, if it is open already

    @property
    def waiting(self) -> int:
        return self.frontier.bytes

    def run(self, index: int, model: StageModel, inputs: Sequence[str], done: Done) -> Iterator[list[Any]]:
        opened, self.session = self.session, None
        session = opened if opened is not None and opened.model is model else Session(model, self.device)
        reads = any(name in self.kinds for name in inputs)
        for number in range(len(self.batches)):
            batch = self.batches[number] if reads else {}
            kept, fetched = session.run({name: self.value(number, batch, name) for name in inputs})
            self.frontier.put(number, kept)
            done(number + 1)
            yield [each.sums(numbers) for each, numbers in zip(model.measurements, fetched, strict=True)]

    def value(self, number: int, batch: Batch, name: str) -> Any:
        """An input of a stage for one batch: the user's data, or a value from the frontier."""
        if name not in self.kinds:
            return self.frontier.get(number, name)
        kind = self.kinds[name]
        return host_value(batch[name] if kind is None else np.asarray(batch[name], kind))

    def types(self, names: Sequence[str]) -> dict[str, TypeProto]:
        return self.frontier.types(names)

    def keep_only(self, names: set[str]) -> None:
        for number in range(len(self.batches)):
            self.frontier.keep_only(number, names)

    def close(self) -> None:
        self.session = None
        self.frontier.close()


def common_type(one: TypeProto, other: TypeProto) -> TypeProto:
    """A tensor's type with the dimensions that two types have in common; any other type as it is."""
    kind = TypeProto()
    kind.CopyFrom(one)
    if not one.tensor_type.HasField("shape"):
        return kind
    if not other.tensor_type.HasField("shape") or len(one.tensor_type.shape.dim) != len(other.tensor_type.shape.dim):
        kind.tensor_type.ClearField("shape")
        return kind
    for mine, theirs in zip(kind.tensor_type.shape.dim, other.tensor_type.shape.dim, strict=True):
        if mine != theirs:
            mine.Clear()
    return kind


def is_trusted(model: StageModel, sums: Sequence[Any]) -> bool:
    """Whether the first batch's sums alone let every layer be measured in this form."""
    for each, part in zip(model.measurements, sums, strict=True):
        meter = each.meter()
        meter.add(part)
        if not meter.result().trusted:
            return False
    return True
