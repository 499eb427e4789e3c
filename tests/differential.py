# mypy: disable-error-code="arg-type"
"""Random models through lsuv, judged by unoptimized onnxruntime and float64 numpy: what differs is a finding.

    python tests/differential.py --seconds 600 [--seed S]
    python tests/differential.py --seed S --only NUMBER [--keep FOLDER]
    python tests/differential.py --seed 1000    # from 1000 on: with bias=center, scale=channel, residual=bounded

Each case is a random model with random data and settings (random_models.py, random_steps.py, disguises.py). lsuv
initializes it, and what it reports is compared with what the written file does: judgement.py lists what can be found.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import json
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import onnx

import disguises
from judgement import Finding, Judge

SECONDS = 60  # of CPU time for one case: a busy machine makes no finding
HANGING = 20 * SECONDS  # without using the CPU
OPTIONS_FROM = 1000  # seeds from here on are for cases with options
OPTIONS: tuple[dict[str, str], ...] = (
    {"bias": "center"},
    {"scale": "channel"},
    {"bias": "center", "scale": "channel"},
    {"residual": "bounded"},
    {"residual": "bounded", "bias": "center", "scale": "channel"},
)


def examine(seed: int, number: int, counts: collections.Counter[str], phase: Callable[[str], None]) -> list[Finding]:
    """One case: draw, initialize, judge."""
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        phase("drawing")
        judge = Judge(drawn(seed, number), seed, number, counts, phase)
        try:
            return judge.run()
        except Exception as problem:
            judge.find("the tester failed", "", f"{type(problem).__name__}: {problem}")
            return judge.findings


def drawn(seed: int, number: int) -> disguises.Case:
    """A case; with a seed of OPTIONS_FROM or more, the same case with options beside the paper's."""
    case = disguises.draw(seed % OPTIONS_FROM, number)
    if seed < OPTIONS_FROM:
        return case
    rng = np.random.default_rng([seed, number])
    return dataclasses.replace(case, settings={**case.settings, **OPTIONS[int(rng.integers(len(OPTIONS)))]})


def work(seed: int, first: int, end: float) -> None:
    """Go through cases and tell of each as lines of JSON; a crash of onnxruntime ends this process alone."""
    number = first
    while number == first or time.time() < end:
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
        signal.alarm(HANGING)
        counts: collections.Counter[str] = collections.Counter()

        def phase(name: str, case: int = number) -> None:
            print(json.dumps({"case": case, "phase": name}), flush=True)

        told = examine(seed, number, counts, phase)
        print(json.dumps({"case": number, "done": [dataclasses.asdict(f) for f in told], "counts": counts}), flush=True)
        number += 1


def run(seed: int, first: int, end: float, last: int | None = None) -> Iterator[tuple[list[Finding], dict[str, int]]]:
    """The findings and counts of each case until a time or a number, from processes of their own."""
    number = first
    while time.time() < end and (last is None or number <= last):
        command = [sys.executable, __file__, "--seed", str(seed), "--work", str(number), "--until", str(end)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as child:
            assert child.stdout
            phase = "drawing"
            for line in child.stdout:
                told = json.loads(line)
                phase = told.get("phase", "")
                if "done" not in told:
                    number = told["case"]
                    continue
                number = told["case"] + 1
                yield [Finding(**f) for f in told["done"]], told["counts"]
                if last is not None and number > last:
                    child.kill()
                    return
        if child.returncode == 0:
            return
        if child.returncode in {-signal.SIGPROF, -signal.SIGALRM}:
            yield [Finding(seed, number, "slow", "", f"more than {SECONDS} s, in the phase {phase}")], {"cases": 1}
        elif phase == "lsuv":
            yield [Finding(seed, number, "crash", "", f"exit code {child.returncode}")], {"cases": 1}
        else:
            yield [], {"cases that crash onnxruntime without lsuv": 1}
        number += 1


def show(seed: int, number: int, keep: Path | None) -> None:
    """One case as text, and its files if asked for."""
    case = drawn(seed, number)
    print(onnx.printer.to_text(case.model))
    print({k: [b[k].shape for b in case.batches] for k in case.batches[0]}, case.settings, sorted(case.features))
    if keep:
        keep.mkdir(parents=True, exist_ok=True)
        onnx.save(case.model, keep / f"{seed}-{number}.onnx")
        for k, batch in enumerate(case.batches):
            np.savez(keep / f"{seed}-{number}-{k}.npz", **batch)


def main() -> None:
    parser = argparse.ArgumentParser(description="Random models, judged by unoptimized onnxruntime.")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="the number of the first case")
    parser.add_argument("--only", type=int, help="the number of one case, which is shown as text")
    parser.add_argument("--keep", type=Path, help="a folder for the model and batches of --only")
    parser.add_argument("--work", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--until", type=float, default=0.0, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.work is not None:
        work(asked.seed, asked.work, asked.until)
        return
    if asked.only is not None:
        show(asked.seed, asked.only, asked.keep)
    counts: collections.Counter[str] = collections.Counter()
    kinds: collections.Counter[str] = collections.Counter()
    first = asked.first if asked.only is None else asked.only
    for findings, seen in run(asked.seed, first, time.time() + asked.seconds, asked.only):
        counts.update(seen)
        for finding in findings:
            kinds[finding.kind] += 1
            print(finding, flush=True)
    for name, count in [*sorted(counts.items()), *((f"found: {k}", n) for k, n in kinds.most_common())]:
        print(f"{count:7} {name}")
    sys.exit(bool(kinds))


if __name__ == "__main__":
    main()
