"""Two machines for real, as far as one can be two: two Ray nodes in two network namespaces, the model on one of them.

    sudo python tests/workers/two_nodes.py [bytes] [list] [auto] [ray] [lost]

Each machine has its own network namespace, host name and /tmp; a virtual cable joins them, and nothing else. The
directory with the model and the data is hidden on the second one. Each machine has two workers. The script runs one
process, then both machines by `--workers auto`, then by `--workers ray://`; counts the bytes on the cable for a model
of large weights; initializes a list of models; then kills the second machine in the middle of a run. It compares all
files, and needs root on Linux, and Ray. It prints what it did and exits with 1 if anything differs. Names of parts
on the command line leave out the others.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parent.parent
sys.path[:0] = [str(TESTS.parent), str(TESTS), str(TESTS / "workers")]

LSUV = [sys.executable, "-c", "from lsuv_cli.cli import main; main()"]
RAY = [sys.executable, "-m", "ray.scripts.scripts"]  # the command `ray`, of this Python
ADDRESSES = {"one": "10.77.0.1", "two": "10.77.0.2"}
PARTS = ["auto", "ray", "bytes", "list", "lost"]
ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": str(TESTS.parent),
    "OMP_NUM_THREADS": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_raylet_start_wait_time_s": "120",
    "RAY_CLIENT_SERVER_CHECK_CHANNEL_TIMEOUT_S": "300",  # and more than the 30 for a server of ray://
    "RAY_worker_niceness": "0",
    "RAY_AUTH_MODE": "disabled",  # nobody else is in this network
}


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def call(*words: object) -> None:
    subprocess.run(list(map(str, words)), check=True, capture_output=True)


@dataclass(frozen=True)
class Machine:
    """A network namespace, with a mount namespace and a host name of its own, held by a process."""

    name: str
    holder: subprocess.Popen[bytes]

    def inside(self, *words: object) -> list[str]:
        return ["nsenter", "-t", str(self.holder.pid), "-n", "-m", "-u", "--", *map(str, words)]

    def start(self, *words: object, **more: Any) -> subprocess.Popen[str]:
        return subprocess.Popen(self.inside(*words), text=True, env=ENVIRONMENT, **more)

    def run(self, *words: object) -> subprocess.CompletedProcess[str]:
        return subprocess.run(self.inside(*words), text=True, env=ENVIRONMENT, capture_output=True, check=False)

    def pids(self) -> list[int]:
        """The processes in the machine's network, but for its holder."""
        found = []
        wanted = Path(f"/proc/{self.holder.pid}/ns/net").readlink()
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if entry.name.isdecimal() and (entry / "ns/net").readlink() == wanted:
                    found.append(int(entry.name))
        return [pid for pid in found if pid != self.holder.pid]

    def received(self) -> int:
        """Bytes that have come over the cable."""
        end = {"one": "lsuv1", "two": "lsuv2"}[self.name]
        return int(self.run("cat", f"/sys/class/net/{end}/statistics/rx_bytes").stdout)

    def end(self) -> None:
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@contextlib.contextmanager
def machines(hidden: Path) -> Iterator[dict[str, Machine]]:
    """Two machines that are joined; the directory is not to be seen on the second one."""
    made: dict[str, Machine] = {}
    hosts = hidden.with_suffix(".hosts")  # Ray finds a node's address by its host name
    names = "".join(f"{address} machine-{name}\n" for name, address in ADDRESSES.items())
    hosts.write_text(f"127.0.0.1 localhost\n{names}")
    with contextlib.ExitStack() as stack:
        stack.callback(hosts.unlink)
        for name in ADDRESSES:
            call("ip", "netns", "add", f"lsuv-{name}")
            stack.callback(call, "ip", "netns", "del", f"lsuv-{name}")
        call("ip", "link", "add", "lsuv1", "netns", "lsuv-one", "type", "veth", "peer", "lsuv2", "netns", "lsuv-two")
        for (name, address), end in zip(ADDRESSES.items(), ("lsuv1", "lsuv2"), strict=True):
            ip = ["ip", "-n", f"lsuv-{name}"]
            call(*ip, "addr", "add", f"{address}/24", "dev", end)
            call(*ip, "link", "set", end, "up")
            call(*ip, "link", "set", "lo", "up")
            steps = f"mount -t tmpfs none /tmp; hostname machine-{name}; mount --bind {hosts} /etc/hosts; "
            steps += f"mount -t tmpfs none {hidden}; " if name == "two" else ""
            words = [
                "ip",
                "netns",
                "exec",
                f"lsuv-{name}",
                "unshare",
                "-m",
                "-u",
                "sh",
                "-c",
                f"{steps} exec sleep 9999",
            ]
            made[name] = Machine(name, subprocess.Popen(words))
        time.sleep(1.0)
        try:
            yield made
        finally:
            for machine in made.values():
                machine.end()
                machine.holder.kill()
                machine.holder.wait()


def start_ray(made: dict[str, Machine]) -> None:
    common = ["--num-gpus=0", "--object-store-memory=200000000", "--disable-usage-stats"]
    head = ["--head", "--port=6379", "--include-dashboard=false", f"--node-ip-address={ADDRESSES['one']}"]
    other = [f"--address={ADDRESSES['one']}:6379", f"--node-ip-address={ADDRESSES['two']}"]
    for machine, own in ((made["one"], [*head, "--num-cpus=2"]), (made["two"], [*other, "--num-cpus=2"])):
        done = machine.run(*RAY, "start", *own, *common)
        assert done.returncode == 0, done.stdout + done.stderr


class Differs(Exception):
    """A run did not do what it should."""


def compared(machine: Machine, place: Path, reference: bytes, *words: object) -> dict[str, Any]:
    """Run the command, compare its output with that of one process; its report."""
    output = place / "several.onnx"
    output.unlink(missing_ok=True)
    begun = time.monotonic()
    done = machine.run(*LSUV, *words, "-o", output, "--json")
    if done.returncode or output.read_bytes() != reference:
        raise Differs(f"exit code {done.returncode}: {done.stderr}")
    report: dict[str, Any] = json.loads(done.stdout)
    say(f"  the same bits, after {time.monotonic() - begun:.1f} s, of them {report['seconds']['total']:.1f} s at work")
    tell(report)
    return report


def tell(report: dict[str, Any]) -> None:
    for w in report["workers"]:
        say(f"  {w['host']} ({w['address']}), {w['device']}: {w['batches']} batches {w['data']}")
    for warning in report["warnings"]:
        say(f"  warning: {warning}")


def main(parts: list[str]) -> int:
    import numpy as np
    import onnx

    from helpers import normal
    from stories import tanhs

    place = Path(tempfile.mkdtemp(prefix="lsuv-two-nodes-", dir="/var/tmp"))
    try:
        onnx.save(tanhs(6, 256), place / "m.onnx")
        np.save(place / "c.npy", normal(8192, 256))
        words = ["init", place / "m.onnx", "--data", place / "c.npy", "--device", "cpu", "--threads", 1]
        words += ["--batch-size", 32, "-f"]
        with machines(place) as made:
            one, two = made["one"], made["two"]
            say(f"on machine-two, ls {place}: {two.run('ls', place).stdout!r}")
            done = one.run(*LSUV, *words, "-o", place / "one.onnx", "--json")
            reference = (place / "one.onnx").read_bytes()
            say(f"one process on machine-one: {json.loads(done.stdout)['seconds']['total']:.1f} s")
            start_ray(made)
            if "auto" in parts:
                say("--workers auto, from machine-one")
                compared(one, place, reference, *words, "--workers", "auto")
            if "ray" in parts:
                say("--workers ray://10.77.0.1:10001, from machine-one")
                compared(one, place, reference, *words, "--workers", "ray://10.77.0.1:10001")
            if "bytes" in parts:
                count_bytes(one, two, place)
            if "list" in parts:
                several_models(one, place)
            if "lost" in parts:
                say("--workers auto, and machine-two is lost (all its processes are killed) in the middle of a stage")
                lose_in_a_stage(one, two, place, reference, words)
    except (Differs, AssertionError) as problem:
        say(f"FAILED: {problem}")
        return 1
    finally:
        shutil.rmtree(place, ignore_errors=True)
    say("all the same")
    return 0


def count_bytes(one: Machine, two: Machine, place: Path) -> None:
    """What crosses the cable for a model of four weights of 16 MiB, with two workers on the other side of it."""
    import numpy as np
    import onnx

    from helpers import normal
    from stories import tanhs

    size, depth = 2048, 4
    onnx.save(tanhs(depth, size), place / "wide.onnx")
    np.save(place / "wide.npy", normal(64, size))
    words = ["init", place / "wide.onnx", "--data", place / "wide.npy", "--device", "cpu", "--threads", 1]
    words += ["--batch-size", 8, "-f"]
    one.run(*LSUV, *words, "-o", place / "one.onnx")
    weights = depth * size * size * 4
    say(f"--workers auto, {depth} stages and one piece of verification with {weights / 1e6:.1f} MB of weights in all")
    begun = two.received(), one.received()
    compared(one, place, (place / "one.onnx").read_bytes(), *words, "--workers", "auto")
    there, back = two.received() - begun[0], one.received() - begun[1]
    say(f"  over the cable to machine-two {there / 1e6:.1f} MB, {there / weights:.2f} times the weights: 2 if each")
    say("  stage's go there once and the verified file's once, 4 if once for each of the two workers")
    say(f"  back {back / 1e6:.1f} MB: the weights that were drawn there, and sums")
    if not 1.9 < there / weights < 2.4:
        raise Differs("the weights crossed more often than once for each stage, or were not sent")


def several_models(one: Machine, place: Path) -> None:
    """A list of models that only machine-one sees, one with its weights in another file, one damaged."""
    import onnx

    from stories import tanhs

    names = [f"list{k}.onnx" for k in range(5)]
    for k, name in enumerate(names[:4]):
        more: dict[str, Any] = {"save_as_external_data": True, "location": "list3.bin"} if k == 3 else {}
        onnx.save(tanhs(3 + k, 256), place / name, **more)
    (place / names[4]).write_bytes(b"no model")
    words = ["init", *(place / name for name in names), "--data", place / "c.npy", "--device", "cpu", "--threads", 1]
    done = one.run(*LSUV, *words, "--output-dir", place / "one-by-one")
    several = one.run(*LSUV, *words, "--output-dir", place / "several", "--workers", "auto", "--json")
    say(f"a list of {len(names)} models, one of them damaged, --workers auto")
    files = {path.name: path.read_bytes() for path in (place / "one-by-one").iterdir()}
    if (several.returncode, done.returncode) != (2, 2) or len(files) != 5:
        raise Differs(f"exit codes {done.returncode}, {several.returncode}: {several.stderr}")
    if {path.name: path.read_bytes() for path in (place / "several").iterdir()} != files:
        raise Differs(f"other files: {several.stderr}")
    for report in json.loads(several.stdout):
        where = [f"{w['host']}, {w['batches']} batches {w['data']}" for w in report.get("workers", [])]
        say(f"  {Path(report['model']).name}: {where[0] if where else report['error'].replace(str(place), 'PLACE')}")
    if "machine-two" not in several.stdout:
        raise Differs("machine-two had none of the models")
    say("  the same bits")


def lose_in_a_stage(one: Machine, two: Machine, place: Path, reference: bytes, words: list[object]) -> None:
    output = place / "lost.onnx"
    command = [*LSUV, *words, "-o", output, "--json", "--workers", "auto"]
    process = one.start(*command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    end = time.monotonic() + 120
    while time.monotonic() < end and process.poll() is None:
        titles = [Path(f"/proc/{pid}/cmdline") for pid in two.pids()]
        if any(path.exists() and b"Worker.run" in path.read_bytes() for path in titles):
            break
        time.sleep(0.02)
    begun = time.monotonic()
    two.end()
    out, err = process.communicate(timeout=300)
    if process.returncode or output.read_bytes() != reference:
        raise Differs(f"exit code {process.returncode}: {err}")
    report = json.loads(out)
    say(f"  the same bits, {time.monotonic() - begun:.1f} s after the loss")
    tell(report)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or PARTS))
