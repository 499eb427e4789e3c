"""The first cases of the fuzzer (tests/fuzz.py), the same in every run."""

import os

import pytest

if not hasattr(os, "fork"):
    pytest.skip("the fuzzer forks", allow_module_level=True)

import fuzz

CASES = 200


def test_damaged_models_and_data_succeed_or_are_refused():
    findings = []
    counts = fuzz.run(iter(range(CASES)), 0, lambda number, case, verdict, printed: findings.append((number, verdict)))
    assert not [finding for finding in findings if finding[1] != "crash"]
    assert counts.total() == CASES
    # Damage that is all refused, or all accepted, would show little.
    assert counts["ok"] > CASES // 10
    assert counts["refused"] > CASES // 4


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        ("import os; os._exit(3)", "exit code 3"),
        ("raise RuntimeError('unforeseen')", "internal error"),
        ("open('m.onnx', 'wb').close()", "input changed"),
        ("open('.lsuv-left', 'wb').close()", "something left"),
        ("import sys; sys.stderr.write('one\\ntwo\\n')", "not one or two lines"),
        ("import sys; sys.stderr.write('\\x1b[2J')", "unprintable"),
    ],
)
def test_the_fuzzer_notices(damage, expected, monkeypatch, tmp_path):
    import lsuv_cli.api
    from lsuv_cli.errors import LsuvError

    def broken(*args, **kwargs):
        exec(damage)
        raise LsuvError("refused")

    monkeypatch.setattr(lsuv_cli.api, "initialize", broken)
    models = fuzz.seeds()
    one = next(c for c in (fuzz.case(k, 0, models) for k in range(100)) if c.words[0] == "init")
    assert fuzz.outcome(one, tmp_path)[0] == expected
