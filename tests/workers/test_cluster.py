"""Which Ray `--workers auto` joins: processes with the command lines of Ray's servers stand for them."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lsuv_cli.errors import LsuvError
from lsuv_cli.scaling import devices
from lsuv_cli.settings import Settings
from lsuv_cli.workers import cluster, keeper

pytestmark = pytest.mark.skipif(not Path("/proc/self/cmdline").exists(), reason="processes are looked up in /proc")
SLEEP = ["-c", "import time; time.sleep(60)"]
PRIVATE, OTHER = "/tmp/.lsuv-0123456789abcdef/session", "/tmp/ray/session"


@contextlib.contextmanager
def running(monkeypatch: pytest.MonkeyPatch, *servers: tuple[str, str]) -> Iterator[None]:
    """Servers (address, directory), as if no others ran here."""
    with contextlib.ExitStack() as stack:
        started = []
        for address, directory in servers:
            words = ["/ray/raylet", *SLEEP, f"--gcs-address={address}", f"--log_dir={directory}"]
            process = stack.enter_context(subprocess.Popen(words, executable=sys.executable))
            stack.callback(process.kill)
            while not Path(f"/proc/{process.pid}/cmdline").read_bytes():  # a process that begins has no words yet
                pass
            started.append(process.pid)
        monkeypatch.setattr(keeper, "processes", lambda: dict.fromkeys(started, (1, 1)))
        monkeypatch.delenv("RAY_ADDRESS", raising=False)
        yield


def test_the_private_ray_of_another_run_is_not_joined(monkeypatch):
    with running(monkeypatch, ("127.0.0.1:7", PRIVATE)), pytest.raises(ConnectionError, match="another run"):
        cluster._address_here()


def test_a_cluster_is_joined_beside_a_private_ray(monkeypatch):
    with running(monkeypatch, ("127.0.0.1:7", PRIVATE), ("10.0.0.1:6379", OTHER)):
        assert cluster._address_here() == "10.0.0.1:6379"


def test_without_a_private_ray_the_choice_is_rays(monkeypatch):
    with running(monkeypatch, ("10.0.0.1:6379", OTHER)):
        assert cluster._address_here() == "auto"


def test_an_address_in_the_environment_goes_first(monkeypatch):
    with running(monkeypatch, ("127.0.0.1:7", PRIVATE)):
        monkeypatch.setenv("RAY_ADDRESS", "10.0.0.2:6379")
        assert cluster._address_here() == "auto"


class RayThatIsAskedToStop:
    """Ray's own handler of SIGTERM ends the process by SystemExit, and the request comes before `init` is done."""

    @staticmethod
    def init(**_: object) -> None:
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(number))
        signal.raise_signal(signal.SIGTERM)


def test_a_request_to_stop_while_ray_starts_is_carried_out_by_our_handler() -> None:
    seen: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: seen.append(number))
    try:
        cluster._init(RayThatIsAskedToStop)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert seen == [signal.SIGTERM]


@pytest.mark.parametrize(
    ("device", "cards", "each_has_one"),
    [("auto", 2, True), ("CUDA", 2, True), ("cuda:0", 2, False), ("auto", 0, False), ("cuda", 0, False),
     ("cpu", 2, False), ("webgpu", 2, False)],
)  # fmt: skip
def test_each_worker_has_a_cuda_device_of_its_own_where_there_are_some(monkeypatch, device, cards, each_has_one):
    """As many workers as cards; one that is asked for by its number is shared."""
    monkeypatch.setattr(devices, "unfit", lambda name, index: "" if index < cards else f"no device {index}")
    assert cluster._gpus(Settings(device=device, workers=2)) == each_has_one


def test_more_workers_than_a_machine_can_hold_are_refused_before_ray_starts(monkeypatch):
    monkeypatch.setattr(devices, "available_threads", lambda: 2)
    monkeypatch.setattr(cluster, "_module", lambda settings: RayWithoutRoom)  # its `init` fails
    few = pytest.raises(LsuvError, match="`workers=1000`: this machine has 2 cores; give 16 or fewer")
    with few, cluster.opened(Settings(device="cpu", workers=1000)):
        pass


def test_more_workers_than_cuda_devices(monkeypatch):
    monkeypatch.setattr(devices, "unfit", lambda name, index: "" if index < 2 else f"no device {index}")
    with pytest.raises(LsuvError, match="`workers=3` wants a CUDA device for each: no device 2"):
        cluster._gpus(Settings(device="auto", workers=3))


TRACEBACK = """Initialization failure from server:
Traceback (most recent call last):
  File "proxier.py", line 772, in Datapath
    raise RuntimeError(
RuntimeError: Starting Ray client server failed. See ray_client_server_23000.err for detailed logs.
"""


class RayWithoutRoom:
    @staticmethod
    def is_initialized() -> bool:
        return False

    @staticmethod
    def init(**_: object) -> None:
        raise ConnectionAbortedError(TRACEBACK)


def test_of_a_servers_traceback_the_end_is_told(monkeypatch):
    monkeypatch.setattr(cluster, "_module", lambda settings: RayWithoutRoom)
    monkeypatch.setattr(cluster, "_address_here", lambda: "auto")
    with pytest.raises(LsuvError) as problem, cluster.opened(Settings(workers="auto")):
        pass
    assert "(RuntimeError: Starting Ray client server failed. See ray_client_server_23000.err" in str(problem.value)
    assert "Traceback" not in str(problem.value)
