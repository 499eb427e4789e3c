"""A pytest plugin: every stage model that a test opens is kept in the folder that LSUV_STAGE_MODELS names.

Equal models are kept once. Of tensors that are handed to the session beside the model only shapes and types are kept,
so the folder stays small; what a session makes of a model does not depend on their values.
"""

import hashlib
import os
import pickle
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx

from lsuv_cli.scaling import runtime
from lsuv_cli.scaling.model_builder import StageModel
from lsuv_cli.scaling.providers import Device
from lsuv_cli.scaling.translation import Unsupported


@dataclass(frozen=True)
class Kept:
    """A stage model without the values of its tensors, the test that opened it, and what the CPU said to it."""

    proto: bytes
    tensors: dict[str, tuple[tuple[int, ...], np.dtype]]
    optimized: bool
    test: str
    on_the_cpu: str  # loads, unsupported or refused

    def model(self) -> StageModel:
        tensors = {name: np.zeros(shape, kind) for name, (shape, kind) in self.tensors.items()}
        return StageModel(onnx.ModelProto.FromString(self.proto), tensors, {}, (), ())


opened = runtime.Session.__init__


def kept(
    self: runtime.Session, model: StageModel, device: Device, *, optimized: bool = True, strict: bool = False
) -> None:
    verdict = "refused"
    try:
        opened(self, model, device, optimized=optimized, strict=strict)
        verdict = "loads"
    except Unsupported:
        verdict = "unsupported"  # the tool then runs the stage in float32, which makes another stage model
        raise
    finally:
        if device.is_host:
            _keep(model, optimized, verdict)


def _keep(model: StageModel, optimized: bool, verdict: str) -> None:
    proto = model.proto.SerializeToString(deterministic=True)
    tensors = {name: (array.shape, array.dtype) for name, array in model.tensors.items()}
    test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" (")[0]
    name = hashlib.sha256(proto + repr((sorted(tensors.items()), optimized)).encode()).hexdigest()[:24]
    place = Path(os.environ["LSUV_STAGE_MODELS"]) / name
    if not place.exists():
        half = place.with_suffix(f".{os.getpid()}")
        half.write_bytes(pickle.dumps(Kept(proto, tensors, optimized, test, verdict)))
        half.rename(place)


runtime.Session.__init__ = kept  # type: ignore[method-assign]
