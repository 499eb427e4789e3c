"""CUDA provider, no arithmetic: every stage model that the default tests open is loaded on CUDA as well.

    python tests/cuda_without_arithmetic/load_stage_models.py [--seconds N] [WORDS FOR PYTEST]

The tests run on the CPU, in a process of their own, and keep their stage models (keep_stage_models.py). Another process
then loads each on the CUDA provider of onnxruntime-gpu. A model that ends that process, or on which it stands still, is
noted, and the next process goes on behind it. What does not load is listed with its reason; the exit code is 1 if one
of the reasons is not among those that are known to be the provider's own.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
STILL = 60.0  # seconds without a verdict after which the process that loads is taken for stuck

# Reasons of the provider's own, and what is done about them.
KNOWN = {
    "Training mode does not support BN opset 14": "CUDA has no BatchNormalization in training mode; it runs on the CPU",
}


@dataclass(frozen=True)
class Verdict:
    """What became of a stage model on CUDA."""

    name: str
    says: str  # loads, unsupported, or why not
    on_the_cpu: str = ""
    test: str = ""
    operators: tuple[str, ...] = ()

    @property
    def kind(self) -> str:
        """One of four: what the summary counts."""
        if self.says == "loads":
            return "load"
        if self.on_the_cpu != "loads":
            return "are refused by the CPU too"
        return "do not load for a known reason" if self.known else "do not load"

    @property
    def known(self) -> str:
        return next((why for pattern, why in KNOWN.items() if re.search(pattern, self.says)), "")


def load(folder: Path, told: Path) -> None:
    """Load the models of a folder that have no verdict yet, and write one for each."""
    from keep_stage_models import Kept

    from lsuv_cli.scaling.providers import PROVIDERS, Device
    from lsuv_cli.scaling.runtime import Session
    from lsuv_cli.scaling.translation import Unsupported

    cuda = Device(PROVIDERS["cuda"], 0, 1)
    begun = {verdict.name for verdict in verdicts(told)}
    with told.open("a") as file:
        for place in sorted(path for path in folder.iterdir() if not path.suffix and path.name not in begun):
            kept: Kept = pickle.loads(place.read_bytes())
            model = kept.model()
            about = {
                "name": place.name,
                "on_the_cpu": kept.on_the_cpu,
                "test": kept.test,
                "operators": sorted({node.op_type for node in model.proto.graph.node}),
            }
            print(json.dumps({**about, "says": "the process ended or stood still"}), file=file, flush=True)
            says = "loads"
            try:
                session = Session(model, cuda, optimized=kept.optimized, strict=True)
                if PROVIDERS["cuda"].key not in session.providers:
                    says = "the session has no CUDA"
            except Unsupported as problem:
                says = f"unsupported: {problem}"
            except Exception as problem:
                says = str(problem)
            print(json.dumps({**about, "says": says}), file=file, flush=True)


def verdicts(told: Path) -> list[Verdict]:
    """The last verdict on each model."""
    lines = [json.loads(line) for line in told.read_text().splitlines()] if told.exists() else []
    return list({line["name"]: Verdict(**{**line, "operators": tuple(line["operators"])}) for line in lines}.values())


def environment(**more: str) -> dict[str, str]:
    paths = [str(HERE), str(HERE.parent.parent), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), **more}


def run_tests(folder: Path, words: list[str], seconds: float) -> int:
    """Run the tests, which leave their stage models in the folder; after so many seconds they are stopped."""
    command = [sys.executable, "-m", "pytest", "-p", "keep_stage_models", "-p", "no:cacheprovider", *words]
    process = subprocess.Popen(command, env=environment(LSUV_STAGE_MODELS=str(folder)), cwd=HERE.parent.parent)
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.terminate()
        process.wait()
        print(f"the tests were stopped after {seconds:.0f} s; what they had opened so far is loaded")
        return 0


def load_all(folder: Path, told: Path, libraries: Path, until: float) -> None:
    """Have all models loaded, by as many processes as it takes."""
    count = sum(not path.suffix for path in folder.iterdir())
    while len(verdicts(told)) < count and time.monotonic() < until:
        before = told.stat().st_size if told.exists() else 0
        process = subprocess.Popen(
            [sys.executable, __file__, "--load", str(folder), str(told)],
            env=environment(LD_LIBRARY_PATH=str(libraries)),
        )
        size, moved = before, time.monotonic()
        while process.poll() is None:
            time.sleep(0.2)
            now = told.stat().st_size if told.exists() else 0
            if now != size:
                size, moved = now, time.monotonic()
            if time.monotonic() > min(moved + STILL, until):
                process.kill()
                process.wait()
        if size == before:
            raise SystemExit("the process that loads the models ended before the first one")


def summary(found: list[Verdict], kept: int) -> Iterator[str]:
    counts = Counter(verdict.kind for verdict in found)
    yield f"{kept} different stage models; on the CUDA provider, without arithmetic: " + ", ".join(
        f"{count} {kind}" for kind, count in counts.items()
    )
    if len(found) < kept:
        yield f"{kept - len(found)} were not tried, because the time was over"
    reasons = Counter((v.kind, v.known or shortened(v.says)) for v in found if v.kind != "load")
    for (kind, reason), count in reasons.most_common():
        first = next(v for v in found if v.kind == kind and (v.known or shortened(v.says)) == reason)
        yield f"  {count} {kind}: {reason}"
        yield f"      first in {first.test} ({', '.join(first.operators)})"


def shortened(says: str) -> str:
    """A reason without the names that differ from model to model."""
    return re.sub(r"(node with name|[Nn]ode|name:|Name:)\s*\(?'[^']*'\)?", r"\1 ...", says)[:300]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3600.0, help="the most for all, half of it for the tests")
    parser.add_argument("--load", nargs=2, type=Path, help=argparse.SUPPRESS)
    options, words = parser.parse_known_args()
    if options.load:
        load(*options.load)
        return 0
    import cuda_libraries

    until = time.monotonic() + options.seconds
    with tempfile.TemporaryDirectory() as place:
        models, told, libraries = (Path(place) / name for name in ("models", "told", "libraries"))
        models.mkdir()
        libraries.mkdir()
        try:
            cuda_libraries.build(libraries)
        except cuda_libraries.NotBuildable as why:
            print(f"skipped: no CUDA provider without arithmetic: {why}")
            return 0
        code = run_tests(models, words, (until - time.monotonic()) / 2)
        load_all(models, told, libraries, until)
        found, kept = verdicts(told), sum(not path.suffix for path in models.iterdir())
    print(*summary(found, kept), sep="\n")
    return code or int(any(verdict.kind == "do not load" for verdict in found))


if __name__ == "__main__":
    raise SystemExit(main())
