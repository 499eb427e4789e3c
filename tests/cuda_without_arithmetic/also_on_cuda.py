"""A pytest plugin: every stage model that the tests open on the CPU is opened on CUDA as well, and what fails is noted.

The file that LSUV_ALSO_ON_CUDA names gets a line for each model: `loads`, or the reason why not.
"""

import os
from pathlib import Path
from typing import Any

from lsuv_cli.scaling import runtime
from lsuv_cli.scaling.providers import PROVIDERS, Device
from lsuv_cli.scaling.translation import Unsupported

on_the_cpu = runtime.Session.__init__


def on_both(self: runtime.Session, model: Any, device: Device, *, optimized: bool = True) -> None:
    on_the_cpu(self, model, device, optimized=optimized)
    if not device.is_host:
        return
    verdict = "loads"
    try:
        on_the_cpu(object.__new__(runtime.Session), model, Device(PROVIDERS["cuda"], 0, 1), optimized=optimized)
    except Unsupported:
        verdict = "unsupported"  # then the tool runs the stage in float32
    except Exception as problem:
        operators = sorted({node.op_type for node in model.proto.graph.node})
        verdict = f"{problem} ({', '.join(operators)})"
    with Path(os.environ["LSUV_ALSO_ON_CUDA"]).open("a") as file:
        file.write(verdict.replace("\n", " ") + "\n")


runtime.Session.__init__ = on_both  # type: ignore[method-assign]
