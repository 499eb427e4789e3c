"""LSUV initialization for ONNX models: `initialize` and `measure`, and the types of what they give."""

from lsuv_cli.version import __version__

TYPE_CHECKING = False  # as type checkers know it; the command begins here, and typing takes time to import
if TYPE_CHECKING:
    from typing import Any

    from lsuv_cli.api import compare, initialize, inspect, measure
    from lsuv_cli.pipeline import Initialized
    from lsuv_cli.report import LayerReport, Report, Status
    from lsuv_cli.settings import Settings

__all__ = [
    "Initialized",
    "LayerReport",
    "Report",
    "Settings",
    "Status",
    "__version__",
    "compare",
    "initialize",
    "inspect",
    "measure",
]


def __getattr__(name: str) -> "Any":
    """Import numpy, onnx and onnxruntime only when they are needed: `lsuv --help` must not wait for them."""
    if name in __all__:
        from lsuv_cli import api, report, settings

        home = next(module for module in (api, report, settings) if hasattr(module, name))
        return getattr(home, name)
    raise AttributeError(f"module 'lsuv_cli' has no attribute {name!r}")
