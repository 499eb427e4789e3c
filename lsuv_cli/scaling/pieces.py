"""The model as it stands in pieces (stages.in_pieces), and a run of one piece without onnxruntime's optimizers."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import TypeProto

from lsuv_cli.model.graph import Graph
from lsuv_cli.model.layers import Layer
from lsuv_cli.scaling.model_builder import ModelBuilder
from lsuv_cli.scaling.precision import Retype
from lsuv_cli.scaling.runner import Runner
from lsuv_cli.scaling.runtime import Session
from lsuv_cli.scaling.shares import Batch
from lsuv_cli.scaling.stages import Plan, Stage

Array = NDArray[Any]


@dataclass(frozen=True)
class Pieces:
    """A graph cut into pieces, the types in which they run, and the values to be rounded to narrower types."""

    graph: Graph
    layers: Sequence[Layer]
    plan: Plan
    retype: Retype
    rounded: Mapping[str, int]
    prefix: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "prefix", _prefix(self.graph))

    def builder(self, stage: Stage, types: Mapping[str, TypeProto]) -> ModelBuilder:
        """A builder with a piece's inputs, nodes and constants."""
        builder = ModelBuilder(self.graph, self.prefix, types, self.retype, self.rounded)
        for name in stage.inputs:
            builder.take(name, name)
        for step in stage.steps:
            for name in self.graph.reads(step.node):
                builder.need(name)
            builder.add(self.graph.nodes[step.node])
        return builder

    def run(
        self,
        stage: Stage,
        names: Sequence[str],
        runner: Runner,
        input_type: Callable[[str], TypeProto] | None = None,
        factor: float = 1.0,
    ) -> dict[str, Any]:
        """Run a piece unoptimized over a runner's first batch, with data and layers' weights multiplied by a factor.

        Returns the named values, and puts those that later pieces read into the runner's frontier.
        """
        fetched = list(dict.fromkeys([*stage.outputs, *names]))
        builder = self.builder(stage, runner.types(stage))
        for name in fetched:
            builder.pull(name, input_type or runner.input_type)
        batch: Batch = runner.needs.batches[0]
        if factor != 1.0:
            batch = {name: times(array, factor) for name, array in batch.items()}
            for base in {x.weight.base for x in self.layers if x.weight.place != "folded"} & builder.known:
                builder.constant(base, times(self.graph.array(base), factor))
        model = builder.finish(fetched, ())
        session = Session(model, runner.needs.device, optimized=False)
        kept, _ = session.run({name: runner.value(0, batch, name) for name in model.feeds})
        runner.frontier.put(0, {name: kept[name] for name in stage.outputs})
        return {name: kept[name] for name in names}


def times(array: Array, factor: float) -> Array:
    """An array of floats times a number; any other array as it is."""
    is_float = array.dtype.kind == "f" or str(array.dtype) == "bfloat16"
    return np.asarray(array * array.dtype.type(factor)) if is_float else array


def _prefix(graph: Graph) -> str:
    """The beginning of names that gauges may take: found in the bytes of no node, and in no other name of the graph.

    Calibration looks for its own (model_builder.py); a mistake there would not be seen here if both did it alike.
    """
    names = "\n".join([*graph.inputs, *graph.tensors, *graph.sparse])
    nodes = [node.SerializeToString() for node in graph.nodes]
    free = (f"gauge{number}:" for number in itertools.count())
    return next(p for p in free if p not in names and not any(p.encode() in node for node in nodes))
