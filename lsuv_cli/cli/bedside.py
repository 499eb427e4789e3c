"""The doctor's diagnosis as one block of text, to be pasted into a report."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from lsuv_cli.examination import Case, Diagnosis
from lsuv_cli.memory import amount
from lsuv_cli.text import printable

INDENT = 12  # columns of the names at the left


def block(found: Diagnosis) -> str:
    """All that was found, a line each; ASCII only where the names are."""
    return "".join(f"{printable(line).rstrip()}\n" for line in _lines(found))


def _lines(found: Diagnosis) -> Iterator[str]:
    versions = ", ".join(f"{name} {version}" for name, version in found.versions.items() if name != "system")
    yield _line("lsuv", f"{found.version}; {versions}")
    yield _line("system", found.versions["system"])
    yield _line("device", f"{found.device} ({found.device_reason})" if found.device else "none")
    for name, value in found.facts.items():
        yield _line(name, value)
    yield _line("memory", _memory(found))
    for case in found.cases:
        yield _line(case.dtype, _case(case))
    if found.seconds:
        yield _line("speed", _speed(found.seconds))
    for problem in found.problems:
        yield _line("off", problem)
    if not found.problems:
        yield _line("verdict", "all is well: every type gives what the CPU gives")


def _speed(seconds: Mapping[str, float]) -> str:
    here, there = seconds["cpu"], seconds.get("device")
    if there is None:
        return f"{here:.2f} s for a network of three convolutions, second run"
    return f"{here / there:.2f} times the CPU's ({there:.2f} s there, {here:.2f} s on the CPU, second run)"


def _line(name: str, text: str) -> str:
    return f"{name:<{INDENT}}{text}"


def _case(case: Case) -> str:
    if case.worst is None:
        return f"{case.name}: {case.problem}"
    equal = "two runs equal" if case.equal else "two runs differ"
    verdict = "ok" if case.ok else "OFF"
    return f"{case.name}: worst difference {case.worst:.1e} ({case.tensor}), limit {case.limit:.1e}, {equal}, {verdict}"


def _memory(found: Diagnosis) -> str:
    sizes = {name: amount(size) for name, size in found.memory.items() if size is not None}
    parts = [f"host {sizes['host_free']} free"]
    if "host_peak" in sizes:
        parts.append(f"peak of this process {sizes['host_peak']}")
    if "device_free" in sizes:
        parts.append(f"device {sizes['device_free']} free of {sizes['device_total']}")
    if "device_peak" in sizes:
        parts.append(f"peak there {sizes['device_peak']}")
    return "; ".join(parts)
