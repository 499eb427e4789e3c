"""LSUV initialization for ONNX models: its functions, and the types of their arguments, results and errors."""

from lsuv_cli.version import __version__

TYPE_CHECKING = False  # type checkers know this name; importing it from typing would slow the command's start
if TYPE_CHECKING:
    from typing import Any

    from lsuv_cli.api import (
        Diagnosis,
        Exposed,
        Initialized,
        Stripped,
        compare,
        doctor,
        expose,
        initialize,
        inspect,
        measure,
        strip,
    )
    from lsuv_cli.errors import DataError, DeviceError, ExitCode, LsuvError, ModelError, OutputError
    from lsuv_cli.report import Comparison, LayerReport, Report, Status
    from lsuv_cli.settings import Bias, PreInit, Residual, Scale, Settings, SettingsDict, Tied

__all__ = [
    "Bias",
    "Comparison",
    "DataError",
    "DeviceError",
    "Diagnosis",
    "ExitCode",
    "Exposed",
    "Initialized",
    "LayerReport",
    "LsuvError",
    "ModelError",
    "OutputError",
    "PreInit",
    "Report",
    "Residual",
    "Scale",
    "Settings",
    "SettingsDict",
    "Status",
    "Stripped",
    "Tied",
    "__version__",
    "compare",
    "doctor",
    "expose",
    "initialize",
    "inspect",
    "measure",
    "strip",
]


def __getattr__(name: str) -> "Any":
    """Import numpy, onnx and onnxruntime only when they are needed: `lsuv --help` must not wait for them."""
    if name in __all__:
        import importlib

        for room in ("errors", "report", "settings", "api"):  # lightest first: importing api takes time
            module = importlib.import_module(f"lsuv_cli.{room}")
            if hasattr(module, name):
                return getattr(module, name)
    raise AttributeError(f"module 'lsuv_cli' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
