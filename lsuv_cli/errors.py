"""What can go wrong, and the exit code that tells a script about it.

How a message names an argument: as Python writes it, in backticks. "leave out `batch_size=4`" is what a Python caller
reads; the command shows "leave out --batch-size 4" (cli/wording.py). This holds for the warnings and notes of a report
too. A test sees that every argument named so exists, and that no message outside the command speaks of `--options`.
"""

from enum import IntEnum


class ExitCode(IntEnum):
    """The process's exit codes; part of the command's interface."""

    DONE = 0
    OUTSIDE_TOLERANCE = 1
    BAD_REQUEST = 2
    INTERRUPTED = 130


class LsuvError(Exception):
    """The request or an input is wrong; the message says what, where, and what to do next."""

    exit_code = ExitCode.BAD_REQUEST


class ModelError(LsuvError):
    """The model file cannot be read, understood or run."""


class DataError(LsuvError):
    """The calibration data cannot be read or does not fit the model's inputs."""


class DeviceError(LsuvError):
    """The device that was asked for is not there."""


class OutputError(LsuvError):
    """The result cannot be written where it was asked for."""
