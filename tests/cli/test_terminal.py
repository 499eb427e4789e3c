"""The command among other programs: colours, widths, pipes that close, pagers, and the shell's completion."""

import json
import os
import re
import shutil
import subprocess
import sys

import numpy as np
import onnx
import pytest
from rich.cells import cell_len

from helpers import model, normal
from lsuv_cli.cli import display, tables
from lsuv_cli.cli.tables import Column
from lsuv_cli.report import Carried, NotCarried
from shell import LSUV, MAXOUT, lsuv, on_a_terminal

DATA = MAXOUT.with_suffix(".npy")
ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def shell(line, **env):
    """A line for bash in which $lsuv is the command."""
    command = " ".join(f"'{word}'" for word in LSUV)
    return subprocess.run(
        ["bash", "-c", f'lsuv() {{ {command} "$@"; }}; {line}'],
        capture_output=True,
        text=True,
        env={**os.environ, **env},
        timeout=60,
        check=False,
    )


@pytest.fixture
def long(tmp_path):
    """Sixty layers with names that no terminal has room for."""
    lines, tensors = [], {}
    for k in range(60):
        lines.append(f"y{k} = MatMul({f'y{k - 1}' if k else 'x'}, W{k})")
        tensors[f"W{k}"] = normal(4, 4, seed=k)
    proto = model(f"g (float[N,4] x) => (float[N,4] y59) {{ {' '.join(lines)} }}", **tensors)
    for k, node in enumerate(proto.graph.node):
        node.name = f"/encoder/transformer/layers.{k}/attention/self/query_projection/MatMul"
    onnx.save(proto, tmp_path / "long.onnx")
    np.save(tmp_path / "d.npy", normal(16, 4))
    return tmp_path


def test_colours_and_bars_are_for_a_terminal():
    code, text = on_a_terminal("check", MAXOUT, "--data", DATA, "--limit", 4)
    assert code == 1
    assert "\x1b[31m" in text  # red
    assert "████│" in text
    plain = lsuv("check", MAXOUT, "--data", DATA, "--limit", 4)
    assert "\x1b" not in plain.out
    assert "█" not in plain.out


def test_no_color_is_respected():
    _, text = on_a_terminal("check", MAXOUT, "--data", DATA, "--limit", 4, NO_COLOR="1")
    assert not re.search(r"\x1b\[[0-9;]*3[0-7]m", text)
    assert "████│" in text


@pytest.mark.parametrize("command", ["init", "inspect", "check", "compare"])
def test_long_names_and_many_layers_fit_80_columns(long, command):
    more = ("-o", long / "out.onnx", "--before") if command == "init" else ("-v",) if command == "check" else ()
    code, text = on_a_terminal(command, long / "long.onnx", "--data", long / "d.npy", *more)
    assert code == (command == "check")
    lines = [ESCAPE.sub("", line).rstrip("\r").split("\r")[-1] for line in text.split("\n")]
    assert "all names begin with encoder.transformer.layers." in lines  # the module, not the node
    rows = [line for line in lines if re.match(r"\d+\.atten", line)]
    assert len(rows) >= 60
    assert len({line.split()[0] for line in rows}) >= 60
    assert max(cell_len(line) for line in rows) <= 80
    # Where names are cut, numbers are not.
    assert not any("…" in cell for line in rows for cell in line.split()[1:])


def test_without_any_terminal_nothing_is_cut(long, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    done = lsuv("inspect", long / "long.onnx")
    assert "/encoder/transformer/layers.59/attention/self/query_projection/MatMul" in done.out
    monkeypatch.setenv("COLUMNS", "60")
    done = lsuv("inspect", long / "long.onnx")
    assert max(map(len, done.out.splitlines()[:-1])) <= 60


def test_columns_leave_in_their_order_and_names_are_cut_in_the_middle():
    names = ["encoder.layers.0.attention.query.weight", "ip1"]
    columns = [
        Column("op", ["MatMul", "Gemm"], left=True, rank=1),
        Column("weight", ["16x16", "4x4"], left=True, rank=2),
        Column("variance", ["1.0000", "1.0e-10"]),
        Column("empty", ["", ""]),
    ]
    assert [line.plain for line in tables.lines(names, columns, 80)] == [
        "layer                                    op      weight  variance",
        "encoder.layers.0.attention.query.weight  MatMul  16x16     1.0000",
        "ip1                                      Gemm    4x4      1.0e-10",
    ]
    assert [line.plain for line in tables.lines(names, columns, 42)] == [
        "layer                      weight variance",
        "encoder.laye….query.weight 16x16    1.0000",
        "ip1                        4x4     1.0e-10",
    ]
    assert [line.plain for line in tables.lines(names, columns, 24)] == [
        "layer           variance",
        "encoder….weight   1.0000",
        "ip1              1.0e-10",
    ]


def test_a_reason_for_tensors_that_stay_is_said_once():
    left = (*(NotCarried(f"W{k}", "folded") for k in range(5)), NotCarried("V", "computed"))
    text = display.carried(Carried(2, 8, left))
    assert text == "carried 2 of 8 tensors; 6 could not be carried: W0, W1, W2 and 2 more (folded); V (computed)"


def test_modules_take_the_place_of_nodes_where_there_is_no_room_for_both():
    nodes = [f"node_MatMul_{k}" for k in range(2)]
    modules = [f"bert.encoder.layer.{k}.attention.self.query" for k in range(2)]
    columns = [Column("module", modules, left=True, rank=2, names=True), Column("variance", ["1.0000", "0.5000"])]
    wide = [line.plain for line in tables.lines(nodes, columns, 80)]
    assert wide[1] == "node_MatMul_0  bert.encoder.layer.0.attention.self.query    1.0000"
    # The cut leaves the number, by which the two differ.
    assert [line.plain for line in tables.lines(nodes, columns, 40)] == [
        "all names begin with bert.encoder.layer.",
        "layer                  variance",
        "0.attention.self.query   1.0000",
        "1.attention.self.query   0.5000",
    ]


def test_names_of_wide_characters_take_their_place():
    lines = [line.plain for line in tables.lines(["畳み込み層一番目の長い名前", "a"], [Column("v", ["1", "2"])], 16)]
    assert {cell_len(line) for line in lines} == {16}


@pytest.mark.parametrize("words", ["inspect", "inspect --json", "inspect --csv", "compare --data random --limit 2"])
def test_a_reader_that_has_seen_enough_is_no_error(long, words):
    command, *more = words.split()
    done = shell(f"lsuv {command} {long}/long.onnx {' '.join(more)} | head -n 1; echo ${{PIPESTATUS[0]}}")
    assert done.stdout.splitlines()[1:] == ["0"]
    assert done.stderr == ""


def test_a_verdict_that_nobody_reads_is_still_the_exit_code():
    done = shell(f"lsuv check {MAXOUT} --data random --limit 2 -v | true; echo ${{PIPESTATUS[0]}}")
    assert (done.stdout, done.stderr) == ("1\n", "")


def test_a_closed_stderr_does_not_stop_the_work(tmp_path):
    done = shell(f"lsuv init {MAXOUT} --data random --limit 2 -o {tmp_path}/m.onnx 2>&1 >/dev/null | true; "
                 f"echo ${{PIPESTATUS[0]}}")  # fmt: skip
    assert done.stdout == "0\n"
    assert (tmp_path / "m.onnx").exists()


def test_a_model_that_nobody_reads_is_an_error():
    done = shell(f"lsuv init {MAXOUT} --data random --limit 2 -q -o - | true; echo ${{PIPESTATUS[0]}}")
    assert done.stdout == "2\n"
    assert done.stderr.count("\n") == 1
    assert "closed it before the model was written" in done.stderr


@pytest.mark.parametrize(
    "words",
    ["init -o {out} --data random", "inspect", "check --data random", "compare --data random --inits lsuv,keep"],
)
def test_json_is_valid_and_all_there_is_on_stdout(tmp_path, words):
    command, *more = words.format(out=tmp_path / "m.onnx").split()
    done = lsuv(command, MAXOUT, *more, *(["--limit", "2"] if more else []), "--json")
    assert json.loads(done.out)["schema"].startswith("lsuv-")


def test_help_is_quick_readable_and_fits_80_columns():
    for words in (["--help"], *([command, "--help"] for command in ("init", "inspect", "check", "compare"))):
        done = lsuv(*words)
        assert done.code == 0
        assert max(map(len, done.out.splitlines())) <= 80
    assert "Method:" in lsuv("init", "-h").out


def test_no_words_at_all_show_the_help():
    done = lsuv()
    assert (done.code, done.out) == (2, "")
    assert "Commands:" in done.err


HEAVY = ("numpy", "onnx", "onnxruntime", "matplotlib", "PIL")


@pytest.mark.parametrize(
    ("typed", "expected"),
    {
        "lsuv ": {"init", "inspect", "check", "compare"},
        "lsuv in": {"init", "inspect"},
        "lsuv init --pre": {"--pre-init"},
        "lsuv init --pre-init ": {"orthonormal", "gaussian", "xavier", "msra", "orthonormal-msra", "keep"},
        "lsuv check --t": {"--tol", "--target-variance", "--threads"},
    }.items(),
)
@pytest.mark.parametrize("kind", ["bash", "zsh"])
def test_completion(typed, expected, kind):
    env = {"_LSUV_COMPLETE": f"complete_{kind}"}
    if kind == "bash":
        env |= {"COMP_WORDS": typed, "COMP_CWORD": str(len(typed.split(" ")) - 1)}
    else:
        env |= {"_TYPER_COMPLETE_ARGS": typed}
    code = (
        "import atexit, sys\n"
        f"atexit.register(lambda: print([m for m in {HEAVY} if m in sys.modules], file=sys.stderr))\n"
        "from lsuv_cli.cli import main; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, **env}, check=False
    )
    found = set(done.stdout.split()) if kind == "bash" else set(re.findall(r'"([-\w]+)"', done.stdout))
    assert expected <= found, done.stdout
    if typed.endswith(("in", "--pre", "--t")):
        described = set(re.findall(r'"([-\w]+)":', done.stdout)) if kind == "zsh" else found
        assert described == expected, done.stdout
    assert set(done.stderr.split()) == {"[]"}  # told by the command and by the process that does its work


@pytest.mark.skipif(not shutil.which("bash"), reason="needs bash")
def test_completion_installs_itself_into_bash_and_works_there(tmp_path):
    """As a user does it: install, start a new interactive shell, press Tab twice."""
    (tmp_path / "bin").mkdir()
    launcher = tmp_path / "bin" / "lsuv"
    launcher.write_text(f"#!{sys.executable}\nfrom lsuv_cli.cli import main\nmain()\n")
    launcher.chmod(0o755)
    env = {**os.environ, "HOME": str(tmp_path), "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
    # The shell is recognised by the process that started the command.
    installed = subprocess.run(
        ["bash", "-c", "lsuv --install-completion; true"], capture_output=True, text=True, env=env, check=False
    )
    assert "bash completion installed" in installed.stdout, installed
    script = """
        source ~/.bashrc
        complete -p lsuv
        COMP_LINE='lsuv in' COMP_WORDS=(lsuv in) COMP_CWORD=1
        $(complete -p lsuv | sed 's/.*-F \\([^ ]*\\).*/\\1/') lsuv in lsuv
        echo "${COMPREPLY[@]}"
    """
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, env=env, check=False)
    assert done.stdout.splitlines()[-1].split() == ["init", "inspect"], done


@pytest.mark.parametrize(("name", "hook"), [("bash", "complete -o default -F"), ("zsh", "compdef")])
def test_there_is_a_completion_script_for_each_shell(name, hook):
    env = {**os.environ, "_LSUV_COMPLETE": f"source_{name}"}
    done = subprocess.run(LSUV, capture_output=True, text=True, env=env, check=False)
    assert hook in done.stdout
    assert "lsuv" in done.stdout
