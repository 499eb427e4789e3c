"""A run whose stages are small, with two workers or none; prints the peak of the driver's own memory, in bytes.

Its own is what no other process shares: the object store, which the driver has mapped, is not in it.
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any

STAGE_BYTES = 4 << 20


def private() -> int:
    return 1024 * int(Path("/proc/self/status").read_text().partition("RssAnon:")[2].split()[0])


def main() -> None:
    from lsuv_cli import initialize
    from lsuv_cli.scaling import stages, verification

    stages.STAGE_BYTES = STAGE_BYTES
    verification.VERIFY_BYTES = 2 * STAGE_BYTES  # pieces of half as many
    peak, ended = [private()], threading.Event()

    def sample() -> None:
        while not ended.wait(0.002):
            peak.append(max(peak.pop(), private()))

    watching = threading.Thread(target=sample)
    watching.start()
    how: Any = {"device": "cpu", "threads": 1, "batch_size": 8, "output": "out.onnx", "pre_init": "msra"}
    how |= {"workers": 2} if sys.argv[3] == "workers" else {}
    report = initialize(sys.argv[1], sys.argv[2], **how).report
    ended.set()
    watching.join()
    sys.stdout.write(f"{report.stages} {peak[0]}\n")


if __name__ == "__main__":
    main()
