# mypy: disable-error-code="attr-defined"
"""The first cases of the differential tester (tests/differential.py), the same in every run."""

import collections
import dataclasses
import re
import time
from pathlib import Path
from typing import Any

import onnx
import pytest
from onnx import numpy_helper

import calls
import differential
import judgement
from disguises import Case
from helpers import model, normal
from lsuv_cli.errors import LsuvError

CASES = 120
SECONDS = 300  # a busy machine stops earlier

# What is known to be wrong, by the finding's line; an entry goes when its cause is mended.
KNOWN: dict[str, str] = {}


# Cases in which something was found once: lsuv's fault, or the tester's. With other versions of onnx, onnxruntime and
# numpy they are other models.
FOUND_ONCE = [
    *((14, number) for number in (67, 578, 594, 776, 1148, 1914, 1939, 1958)),
    *((21, number) for number in (134, 195, 893, 1355, 1684, 1973, 2205)),
]


@pytest.mark.parametrize(("seed", "number"), FOUND_ONCE)
def test_what_was_found_once_is_not_found_again(seed, number):
    told = differential.examine(seed, number, collections.Counter(), lambda phase: None)
    assert not told, "\n".join(map(str, told))


def test_random_models_come_out_as_reported():
    counts: collections.Counter[str] = collections.Counter()
    unknown = []
    drawn = 0
    for findings, seen in differential.run(0, 0, time.time() + SECONDS, CASES - 1):
        drawn += 1
        counts.update(seen)
        unknown += [str(f) for f in findings if not any(re.search(line, str(f)) for line in KNOWN)]
    assert not unknown, "\n".join(unknown)
    # Cases that are all refused, or cannot run, would show little.
    assert counts["cases"] > drawn / 2
    assert counts["layers ok"] > drawn


def scale_a_weight(written: onnx.ModelProto) -> None:
    _edit(written, "w", 1.1)


def change_a_constant(written: onnx.ModelProto) -> None:
    _edit(written, "c", 2.0)


def rename_an_output(written: onnx.ModelProto) -> None:
    written.graph.output[0].name = "nowhere"


def drop_a_description(written: onnx.ModelProto) -> None:
    written.graph.input[0].type.tensor_type.shape.dim[0].dim_param = "M"


def _edit(written: onnx.ModelProto, name: str, factor: float) -> None:
    for tensor in written.graph.initializer:
        if tensor.name == name:
            tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor) * tensor_type(factor), name))


def tensor_type(number: float) -> Any:
    return normal(1).dtype.type(number)


def case(**settings: Any) -> Case:
    text = "g (float[N,6] x) => (float[N,3] z) { y = MatMul(x, w) r = Relu(y) s = Mul(r, c) z = Gemm(s, v, b) }"
    tensors = {"w": normal(6, 5), "c": tensor_type(0.5), "v": normal(5, 3), "b": normal(3)}
    return Case(model(text, **tensors), [{"x": normal(16, 6, seed=1)}, {"x": normal(9, 6, seed=2)}], settings)


def kinds(one: Case, number: int = 1) -> set[str]:
    found = judgement.Judge(one, 0, number, collections.Counter(), lambda phase: None).run()
    return {finding.kind for finding in found}


def test_nothing_is_found_where_nothing_is_wrong():
    assert not kinds(case(batch_size=16, bias="keep"), number=0)  # by the command, and by the reference evaluator too
    assert not kinds(case())
    assert not kinds(case(bias="keep", tol=0.001))
    assert not kinds(case(exclude=["y"]))


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (scale_a_weight, {"wrong"}),
        (change_a_constant, {"wrong", "changed"}),
        (rename_an_output, {"unloadable"}),
        (drop_a_description, {"changed"}),
    ],
)
def test_the_tester_notices_what_is_wrong_with_a_file(damage, expected, monkeypatch):
    real = calls.initialize

    def broken(path: Path, data: Any, output: Path, **settings: Any) -> Any:
        done = real(path, data, output=output, **settings)
        written = onnx.load(output)
        damage(written)
        onnx.save(written, output)
        return done

    monkeypatch.setattr(calls, "initialize", broken)
    assert kinds(case()) == expected


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"variance": 2.0, "status": "outside"}, {"misreported", "outside"}),
        ({"status": "dead"}, {"not dead", "scaled"}),
        ({"status": "non-finite"}, {"finite"}),
        ({"status": "unreachable"}, {"reachable"}),
        ({"status": "skipped", "notes": ("no reason",)}, {"left alone", "changed"}),
        ({"op": "Conv"}, {"missing"}),
    ],
)
def test_the_tester_notices_what_is_wrong_with_a_report(change, expected, monkeypatch):
    real = calls.initialize

    def broken(*args: Any, **settings: Any) -> Any:
        done = real(*args, **settings)
        entries = tuple(dataclasses.replace(entry, **change) for entry in done.report.layers)
        return dataclasses.replace(done, report=dataclasses.replace(done.report, layers=entries))

    monkeypatch.setattr(calls, "initialize", broken)
    assert kinds(case()) == expected


@pytest.mark.parametrize(
    ("problem", "expected"),
    [(RuntimeError("unforeseen"), {"internal error"}), (LsuvError("no layer fits"), {"refused"})],
)
def test_the_tester_notices_that_there_is_no_result(problem, expected, monkeypatch, tmp_path):
    def broken(path: Path, *args: Any, **settings: Any) -> Any:
        (path.parent / ".left").touch()
        raise problem

    monkeypatch.setattr(calls, "initialize", broken)
    assert kinds(case()) == {*expected, "left behind"}
