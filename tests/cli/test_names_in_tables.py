"""Names in a table of 80 columns: those that differ stay different, and what all begin with is said once."""

import re
import time

from hypothesis import given
from hypothesis import strategies as st

from lsuv_cli import Report
from lsuv_cli.cli import display, terminal
from lsuv_cli.labels import distinct
from lsuv_cli.report import LayerReport, Status
from shell import MAXOUT, RELU, lsuv


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
    assert distinct(["conv1", "conv2"], 8) == ["conv1", "conv2"]


def test_one_sample_is_one_sample():
    done = lsuv("check", RELU, "--data", RELU.with_suffix(".npy"), "--limit", 1)
    assert "(1 sample; " in done.out


def test_names_that_differ_at_several_places_show_each_of_them():
    names = [f"text.blocks.{k}.attention_module.{x}_projection.linear" for k in range(3) for x in "qkvo"]
    names += [f"image.blocks.{k}.attention_module.{x}_projection.linear" for k in range(12) for x in "qkvo"]
    shown = distinct(names, 18)
    assert len(set(shown)) == len(names)
    assert max(map(len, shown)) == 18
    assert shown[0] == "text.…0.att…q_pro…"


PARTS = st.sampled_from(["encoder", "decoder", "mlp", "9", "10", "attention", "q", "k"])


@given(st.lists(st.lists(PARTS, min_size=2, max_size=7), min_size=2, max_size=20))
def test_any_names_stay_different_where_there_is_room(paths):
    names = [".".join(path) for path in paths]
    shown = distinct(names, 24)
    assert len(set(shown)) == len(set(names))
    assert max(map(len, shown)) <= 24


def test_names_of_thousands_of_characters_take_no_time():
    names = [f"{'A' * 2400}{k:03}{'A' * 2500}" for k in range(500)]
    begun = time.process_time()
    assert len(set(distinct(names, 30))) == 500
    assert time.process_time() - begun < 5


def test_a_name_of_blanks_is_seen(monkeypatch, capsys):
    shown = table(["  ", "fc"], monkeypatch, capsys)
    assert shown[1].startswith("'  ' ")


def test_every_command_says_which_files_it_wrote_and_how_many_stages_there_were(tmp_path):
    stages = []
    for command in ("init", "inspect", "check", "compare"):
        more = ("-o", tmp_path / "m.onnx") if command == "init" else ()
        page = tmp_path / f"{command}.html"
        done = lsuv(command, MAXOUT, "--data", MAXOUT.with_suffix(".npy"), "--limit", 2, "--html", page, *more)
        assert done.err.splitlines()[-1] == f"wrote {page}"
        stages.append(re.findall(r"; (\d+ stages?); ", done.out + done.err))
        assert f"<li>{stages[-1][0]}</li>" in page.read_text(encoding="utf-8")
    assert stages == [stages[0]] * 4
    assert len(stages[0]) == 1


def test_a_page_is_of_one_model(tmp_path):
    words = ("--data", "random", "--output-dir", tmp_path / "o", "--html", tmp_path / "p.html")
    done = lsuv("init", RELU, MAXOUT, *words)
    assert done.code == 2
    assert "--html is for one model, 2 were given; give one model at a time" in done.err
