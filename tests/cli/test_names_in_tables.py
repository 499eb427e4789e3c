"""Names in a table of 80 columns: those that differ stay different, and what all begin with is said once."""

from lsuv_cli import Report
from lsuv_cli.cli import display, terminal
from lsuv_cli.cli.tables import distinct
from lsuv_cli.report import LayerReport, Status
from shell import RELU, lsuv


def table(names, monkeypatch, capsys, show=display.show):
    layers = tuple(
        LayerReport(name, "MatMul", Status.OUTSIDE, stage=1, shape=(4096, 11008), variance_at_turn=0.5, scale=1.4,
                    variance=10.0**-k, weight_std=0.1)
        for k, name in enumerate(names)
    )  # fmt: skip
    monkeypatch.setenv("COLUMNS", "80")
    show(
        Report("init", "0", "m.onnx", layers, settings={"target_variance": 1.0}, samples=1),
        terminal.console(stderr=False),
    )
    return capsys.readouterr().out.splitlines()


def test_what_all_names_begin_with_is_dropped_once_and_said(monkeypatch, capsys):
    start = "/model/backbone/encoder/decoder/transformer/"
    names = [f"{start}layers.{k}/self_attn/{x}_proj/MatMul" for k in range(12) for x in "qkv"]
    said, _, *rows = table(names, monkeypatch, capsys)
    assert said == f"all names begin with {start}layers."
    shown = [row.split()[0] for row in rows[: len(names)]]
    assert len(set(shown)) == len(names)
    assert all(len(row) <= 80 for row in rows)


def test_names_that_differ_in_the_middle_only_stay_different(monkeypatch, capsys):
    names = [f"encoder_{'x' * 30}_{k:03}_{'y' * 40}_projection" for k in range(7)]
    shown = [row.split()[0] for row in table(names, monkeypatch, capsys)[1:8]]
    assert len(set(shown)) == 7
    assert ["003" in name for name in shown] == [k == 3 for k in range(7)]


def test_the_worst_layers_of_check_are_told_apart(monkeypatch, capsys):
    names = [f"encoder_{'x' * 30}_{k:03}_{'y' * 40}_projection" for k in range(7)]
    lines = table(names, monkeypatch, capsys, display.show_verdict)
    assert len({line.split()[0] for line in lines[1:6]}) == 5


def test_short_names_are_as_they_were():
    assert distinct(["conv1", "conv2"], 8) == ["conv1   ", "conv2   "]


def test_one_sample_is_one_sample():
    done = lsuv("check", RELU, "--data", RELU.with_suffix(".npy"), "--limit", 1)
    assert "(1 sample; " in done.out
