"""Ray: a local one that is started for a request and ends with it, or an existing cluster that is joined."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lsuv_cli import interruption
from lsuv_cli.errors import LsuvError
from lsuv_cli.interruption import POLITE
from lsuv_cli.scaling import devices
from lsuv_cli.scaling.providers import ROWS, Provider
from lsuv_cli.scratch import PREFIX, Scratch
from lsuv_cli.settings import Settings
from lsuv_cli.workers import keeper

ATTEMPTS = 2  # to start Ray
REACH_SECONDS = 10.0  # for the first connection to a cluster
# More workers on one machine than this, or than this many for each core, take the memory and time of a process each.
LEAST_ALLOWED, WORKERS_PER_CORE = 16, 4
# Seconds for all workers to start, for the first one, and for one in a lost one's place; beyond them a cluster has no
# room. A local Ray has, but other work may have the cores.
START_SECONDS, FIRST_SECONDS, REPLACE_SECONDS = 60.0, 600.0, 30.0
# Bytes of a temporary directory: the path of a socket has at most 107, and with the largest process id this is the
# longest of them there.
LONGEST_SOCKET = ".lsuv-0123456789abcdef/session_2026-11-18_13-32-08_235914_4194304/sockets/plasma_store"
LONGEST_PLACE = 107 - len(f"/{LONGEST_SOCKET}")
# A local Ray listens on the loopback only (this is how Ray calls it on any system), and reports to nobody.
LOCAL_ENVIRONMENT = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_raylet_start_wait_time_s": "120",  # a busy machine needs more than Ray's 30
    "RAY_worker_niceness": "0",  # that of the driver; with Ray's 15, other work on the machine comes first
}


@dataclass(frozen=True)
class Slot:
    """Room for one worker: what it asks Ray for, and the threads it has."""

    threads: int
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Cluster:
    """A running Ray, and the room for workers in it."""

    ray: Any  # the module
    slots: Sequence[Slot]
    watch: Any  # called when processes were started
    beside: bool = True  # a worker can be called while it runs a stage; Ray's client cannot do that
    start_seconds: float = START_SECONDS
    replace_seconds: float = REPLACE_SECONDS

    @property
    def threads(self) -> int:
        """The threads of the first worker, which the driver has too, so that it computes the same bits."""
        return self.slots[0].threads


@contextlib.contextmanager
def opened(settings: Settings) -> Iterator[Cluster]:
    """The Ray that `workers` asks for, as long as the context lasts."""
    ray = _module(settings)
    with interruption.relying_on("Ray"), _running(ray, settings) as cluster:
        yield cluster


@contextlib.contextmanager
def _running(ray: Any, settings: Settings) -> Iterator[Cluster]:
    request = settings.workers
    if ray.is_initialized():  # by the caller, who also ends it
        yield _existing(ray, settings)
        return
    if isinstance(request, int):
        with _local(ray, settings) as cluster:
            yield cluster
        return
    assert isinstance(request, str)
    try:
        _join(ray, request)
    except Exception as problem:  # Ray raises ConnectionError, RuntimeError, ValueError and its own
        raise LsuvError(
            f"`workers={request!r}`: no Ray cluster could be joined ({_reason(problem)}); start one, or give a "
            "number of workers on this machine"
        ) from None
    try:
        yield _existing(ray, settings)
    finally:
        ray.shutdown()


def _reason(problem: BaseException) -> str:
    """Ray's words in one line; of a traceback that came from a server, what stands at its end."""
    text = str(problem).rstrip()
    if "Traceback (most recent call last)" in text:
        text = re.split(r"\n(?=\w)", text)[-1]
    return " ".join(text.split())[:200]


def _existing(ray: Any, settings: Settings) -> Cluster:
    """The cluster that this process has joined."""
    beside = not ray.util.client.ray.is_connected()
    return Cluster(ray, _slots(ray, settings), lambda: None, beside=beside, start_seconds=START_SECONDS)


def _join(ray: Any, request: str) -> None:
    """Join a cluster: `auto`, or ray://HOST:PORT."""
    if request != "auto":  # Ray would try for half a minute, and say less
        host, _, port = request.removeprefix("ray://").rpartition(":")
        socket.create_connection((host.strip("[]"), int(port)), REACH_SECONDS).close()
    _init(ray, address=_address_here() if request == "auto" else request)


def _address_here() -> str:
    """What `auto` means to Ray, which would also join the private Ray of another run, whose cores are taken."""
    found: dict[bool, set[str]] = {True: set(), False: set()}
    for words in map(_words, keeper.processes()):
        if words[0].endswith("/raylet"):
            is_private = any(f"/{PREFIX}" in word for word in words)
            found[is_private] |= {
                word.partition("=")[2] for word in words if word.lstrip("-").startswith("gcs-address=")
            }
    if os.environ.get("RAY_ADDRESS") or not found[True]:
        return "auto"
    if not found[False]:
        raise ConnectionError("only the private Ray of another run is here")
    return found[False].pop() if len(found[False]) == 1 else "auto"


def _words(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:  # it has just ended
        return [""]


def _module(settings: Settings) -> Any:
    """Ray, or one line with the way to it."""
    if isinstance(settings.workers, int):
        for name, value in LOCAL_ENVIRONMENT.items():  # read when Ray is imported
            os.environ.setdefault(name, value)
    try:
        import ray
    except ImportError:
        raise LsuvError("`workers` needs Ray: pip install 'lsuv-cli[ray]'") from None
    return ray


def _init(ray: Any, **how: Any) -> None:
    """Start or join Ray; its handler of SIGTERM, which would end the process with another exit code, is taken back."""
    is_main = threading.current_thread() is threading.main_thread()
    handlers = {number: signal.getsignal(number) for number in POLITE} if is_main else {}
    is_asked_to_stop = False
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # an error is told in one line
            ray.init(logging_level=logging.CRITICAL, log_to_driver=False, **how)
    except SystemExit:  # of Ray's handler
        is_asked_to_stop = True
    finally:
        for number, handler in handlers.items():
            if handler is not None:  # not set from Python, so it cannot be put back
                signal.signal(number, handler)
    if is_asked_to_stop:
        signal.raise_signal(signal.SIGTERM)
    # Ray tells of lost nodes and workers on standard output, which is for results; the crew warns of them itself.
    worker: Any = getattr(getattr(ray, "_private", None), "worker", None)
    if hasattr(worker, "print_to_stdstream"):
        worker.print_to_stdstream = lambda *_, **__: None


@contextlib.contextmanager
def _local(ray: Any, settings: Settings) -> Iterator[Cluster]:
    """A Ray of this machine alone, whose processes and files end with this process."""
    assert isinstance(settings.workers, int)
    count, gpus = settings.workers, _gpus(settings)
    if count > (most := max(LEAST_ALLOWED, WORKERS_PER_CORE * devices.available_threads())) and not gpus:
        raise LsuvError(
            f"`workers={count}`: this machine has {devices.available_threads()} cores; give {most} or fewer"
        )
    threads = settings.threads or max(1, devices.available_threads() // count)
    with Scratch(_short_place()) as scratch, _kept(scratch.path) as watch:
        how = {"num_cpus": count, "num_gpus": count if gpus else 0, "include_dashboard": False}
        for attempt in range(ATTEMPTS):  # a busy machine may need longer for a cold start than Ray waits
            try:
                _init(ray, address="local", _temp_dir=str(scratch.path), **how)
                break
            except Exception as problem:
                watch()
                ray.shutdown()
                if attempt == ATTEMPTS - 1:
                    raise LsuvError(f"Ray does not start here ({_reason(problem)}); leave out `workers`") from None
        watch()
        options = {"num_cpus": 1, "num_gpus": 1} if gpus else {"num_cpus": 1}
        try:
            slots = [Slot(threads, options)] * count
            yield Cluster(ray, slots, watch, start_seconds=FIRST_SECONDS, replace_seconds=FIRST_SECONDS)
        finally:
            ray.shutdown()


def _gpus(settings: Settings) -> bool:
    """Whether each worker is to have a device of its own, such as a CUDA device."""
    assert isinstance(settings.workers, int)
    row = next((row for row in _counted(settings.device) if not devices.unfit(row.name, 0)), None)
    if row is None:
        return False
    if reason := devices.unfit(row.name, settings.workers - 1):
        raise LsuvError(f"`workers={settings.workers}` wants a {row.title} device for each: {reason}")
    return True


def _counted(device: str) -> list[Provider]:
    """The providers that a request may mean and whose devices Ray counts; none if it names one device by its number."""
    asked = device.lower()
    return [row for row in ROWS if row.counted_by_ray and (asked == row.name or (asked == "auto" and row.automatic))]


def _slots(ray: Any, settings: Settings) -> list[Slot]:
    """The room in a cluster: a worker for each GPU; else for each `threads` cores of a node, all of them by default."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    slots: list[Slot] = []
    wants_gpus = bool(_counted(settings.device))
    for node in ray.nodes():
        has = node.get("Resources", {}) if node.get("Alive") else {}
        cores, gpus = int(has.get("CPU", 0)), int(has.get("GPU", 0)) if wants_gpus else 0
        threads = settings.threads or max(1, cores // (gpus or 1))
        here = {"scheduling_strategy": NodeAffinitySchedulingStrategy(node["NodeID"], soft=True)}
        asked = {"num_cpus": 1, "num_gpus": 1} if gpus else {"num_cpus": min(threads, cores)}
        slots += [Slot(threads, asked | here)] * (gpus or cores // max(threads, 1) or min(cores, 1))
    if isinstance(settings.workers, int):  # in a Ray that the caller started
        slots = [Slot(settings.threads or 1, {"num_cpus": 1})] * settings.workers
    if not slots:
        raise LsuvError(f"`workers={settings.workers!r}`: no node of the Ray cluster has a core or GPU for a worker")
    return slots


def _short_place() -> Path:
    """A temporary directory short enough for the paths of sockets."""
    place = Path(tempfile.gettempdir())
    short = Path("/tmp")
    return short if len(os.fsencode(place)) > LONGEST_PLACE and short.is_dir() else place


@contextlib.contextmanager
def _kept(directory: Path) -> Iterator[Any]:
    """A keeper of the processes that Ray starts. Yields a function that has it look for new ones."""
    words = [sys.executable, "-I", "-S", str(Path(keeper.__file__)), str(os.getpid()), str(directory)]
    process = subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    given, answered = process.stdin, process.stdout

    def watch() -> None:
        with contextlib.suppress(OSError):
            os.write(given.fileno(), b".")
            os.read(answered.fileno(), 1)

    try:
        yield watch
    finally:
        given.close()
        end = time.monotonic() + 10
        while process.poll() is None and time.monotonic() < end:
            time.sleep(0.02)
        answered.close()
