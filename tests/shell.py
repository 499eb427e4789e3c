"""The command in this process, and on a terminal of its own."""

import contextlib
import io
import os
import struct
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from lsuv_cli.cli import main

SAMPLES = Path(__file__).parent.parent / "sample_models"
RELU = SAMPLES / "fitnet1_relu.onnx"
MAXOUT = SAMPLES / "fitnet_mnist_maxout.onnx"
LSUV = [sys.executable, "-c", "from lsuv_cli.cli import main; main()"]


@dataclass
class Result:
    code: int
    out: str
    err: str


def lsuv(*words: object) -> Result:
    """Run the command without the price of a new process."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main([str(word) for word in words])
        except SystemExit as ended:
            code = ended.code
    assert isinstance(code, int)
    return Result(code, out.getvalue(), err.getvalue())


def on_a_terminal(*words: object, columns: int = 80, **env: str) -> tuple[int, str]:
    """Run the command in a terminal; its exit code, and all it wrote there."""
    import fcntl  # not on Windows
    import pty
    import termios

    screen, inside = pty.openpty()
    fcntl.ioctl(inside, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    kept = {k: v for k, v in os.environ.items() if k not in {"COLUMNS", "NO_COLOR", "FORCE_COLOR"}}
    process = subprocess.Popen(
        [*LSUV, *map(str, words)],
        stdin=inside,
        stdout=inside,
        stderr=inside,
        env={**kept, "TERM": "xterm-256color", **env},
        start_new_session=True,
    )
    os.close(inside)
    written = b""
    with contextlib.suppress(OSError):  # Linux says so when the other end is closed
        while part := os.read(screen, 65536):
            written += part
    os.close(screen)
    return process.wait(), written.decode()
