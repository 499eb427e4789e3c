"""A process that sees to it that no process of a local Ray outlives the driver, however the driver ends.

Ray's own servers end with the driver, and its workers soon after; its agents may go on for a minute. The keeper is
started before Ray, with the driver's process id and Ray's directory. Twice a second, and at every byte on standard
input, it notes the processes below the driver that belong to that directory. At the end of standard input the driver
has ended: it kills those that are left, and removes the directory. It is run as a script and imports only what starts
at once.
"""

import os
import select
import shutil
import signal
import sys
import time

POLL = 0.5  # seconds
GRACE = 0.3  # seconds for processes that end by themselves


def processes() -> dict[int, tuple[int, int]]:
    """Process -> its parent, and the tick at which it began."""
    found = {}
    for name in os.listdir("/proc") if os.path.isdir("/proc") else ():  # noqa: PTH112, PTH208  no pathlib: slow to import
        if name.isdecimal():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:  # noqa: PTH123
                    fields = file.read().rpartition(b")")[2].split()
                found[int(name)] = int(fields[1]), int(fields[19])
            except (OSError, IndexError):  # it has just ended
                continue
    return found


def below(driver: int, directory: str) -> dict[int, int]:
    """The processes that Ray started for a directory -> the tick at which each began."""
    known = processes()
    wanted = {
        pid for pid, (parent, _) in known.items() if parent == driver and pid != os.getpid() and _names(pid, directory)
    }
    while more := {pid for pid, (parent, _) in known.items() if parent in wanted} - wanted:
        wanted |= more
    return {pid: known[pid][1] for pid in wanted}


def _names(pid: int, directory: str) -> bool:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:  # noqa: PTH123
            return directory.encode() in file.read()
    except OSError:
        return False


def main() -> None:
    driver, directory = int(sys.argv[1]), sys.argv[2]
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    kept: dict[int, int] = {}
    asked = b"."
    while asked:
        kept |= below(driver, directory)
        ready, _, _ = select.select([0], [], [], POLL)  # the driver may end while Ray starts
        asked = os.read(0, 1) if ready else b"."
        if ready and asked:
            kept |= below(driver, directory)
            os.write(1, b".")
    end = time.monotonic() + GRACE
    while kept.items() & {pid: begun for pid, (_, begun) in processes().items()}.items():
        if time.monotonic() > end:
            for pid in [pid for pid, (_, begun) in processes().items() if kept.get(pid) == begun]:
                try:  # noqa: SIM105  contextlib takes time to import
                    os.kill(pid, signal.SIGKILL)
                except OSError:
                    pass
        time.sleep(0.05)
    shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    main()
