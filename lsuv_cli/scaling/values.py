"""The values themselves that layers put out, batch by batch, from unoptimized onnxruntime."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from numpy.typing import NDArray

from lsuv_cli.model.layers import Layer
from lsuv_cli.model.prepare import Look
from lsuv_cli.scaling import precision, runtime, stages
from lsuv_cli.scaling.model_builder import ModelBuilder, own_prefix
from lsuv_cli.scaling.precision import Retype
from lsuv_cli.scaling.runner import Pass, Runner
from lsuv_cli.scaling.runtime import Session
from lsuv_cli.scaling.translation import Unsupported

PIECE_BYTES = 256 << 20  # weights in one session


def layer_outputs(look: Look, layers: Sequence[Layer], needs: Pass) -> Iterator[tuple[Layer, NDArray[Any]]]:
    """(layer, its output for one batch): every batch of one piece of the model, then of the next piece.

    Half precision that the device cannot run is run in float32, each value rounded as it would be stored.
    """
    attempts: list[Retype] = [{}, precision.HALF, precision.ALL]
    for k, retype in enumerate(attempts):
        begun = False
        try:
            for found in _outputs(look, layers, needs, retype):
                begun = True
                yield found
            return
        except Unsupported:
            if begun or k == len(attempts) - 1:
                raise


def _outputs(look: Look, layers: Sequence[Layer], needs: Pass, retype: Retype) -> Iterator[tuple[Layer, NDArray[Any]]]:
    graph = look.graph
    plan = stages.in_pieces(graph, look.layers.layers, PIECE_BYTES)
    rounded = precision.stored_types(graph, needs.few, retype) if retype else {}
    runner = Runner(graph, plan, replace(needs, crew=None), retype)
    wanted = {layer.output: layer for layer in layers}
    try:
        for index, stage in enumerate(plan.stages):
            builder = ModelBuilder(graph, own_prefix(graph), runner.types(stage), retype, rounded)
            for name in stage.inputs:
                builder.take(name, name)
            for step in stage.steps:
                for name in graph.reads(step.node):
                    builder.need(name)
                builder.add(graph.nodes[step.node])
            names = [layer.output for layer in stage.layers if layer.output in wanted]
            model = builder.finish(list(dict.fromkeys([*stage.outputs, *names])), ())
            session = Session(model, needs.device, optimized=False)
            for number, batch in enumerate(needs.batches):
                kept, _ = session.run({name: runner.value(number, batch, name) for name in model.feeds})
                runner.frontier.put(number, {name: kept[name] for name in stage.outputs})
                for name in names:
                    yield wanted[name], runtime.to_numpy(kept[name])
            runner.forget(index)
    finally:
        runner.close()
