"""Scratch directories: removed when left by the dead, never when held by the living or made by somebody else."""

import os
import subprocess
import sys

import pytest

from lsuv_cli import scratch
from lsuv_cli.scratch import MARK, Scratch

NAME = ".lsuv-0123456789abcdef"


def test_what_is_not_ours_stays(tmp_path):
    mine = {".lsuv-mine/lock": b"", ".lsuv-0123456789abcdeg/lock": MARK, f"{NAME}0/lock": MARK,
            ".lsuv-00000000000000aa/lock": b"my own", ".lsuv-00000000000000bb/lock": b"",
            ".lsuv-00000000000000bb/more": b"", ".lsuv-00000000000000cc/other": b""}  # fmt: skip
    for name, content in mine.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "lock").write_bytes(MARK)
    if os.name != "nt":
        (tmp_path / NAME).symlink_to("elsewhere")
        (tmp_path / ".lsuv-00000000000000dd").mkdir()
        os.mkfifo(tmp_path / ".lsuv-00000000000000dd" / "lock")
    scratch.sweep(tmp_path)
    assert all((tmp_path / name).read_bytes() == content for name, content in mine.items())
    assert (tmp_path / "elsewhere" / "lock").exists()


@pytest.mark.parametrize("content", [None, b"", MARK])
def test_a_run_killed_at_any_step_of_making_it_is_swept(tmp_path, content):
    left = tmp_path / NAME
    left.mkdir()
    if content is not None:
        (left / "lock").write_bytes(content)
    if content == MARK:
        (left / "o.onnx").write_bytes(b"half")
    with Scratch(tmp_path):
        assert not left.exists()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("step", ["mkdir", "open", "lock"])
def test_one_that_is_swept_while_it_is_made_is_made_again(tmp_path, monkeypatch, step):
    """The window between making a directory and holding its lock, in which another run may come by."""
    come_by = [True]

    def sweeping():
        if come_by.pop() if come_by else False:
            code = (
                "import sys; from pathlib import Path; from lsuv_cli import scratch; scratch.sweep(Path(sys.argv[1]))"
            )
            subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True)

    if step == "mkdir":
        claimed = scratch._claimed
        monkeypatch.setattr(scratch, "_claimed", lambda lock: (sweeping(), claimed(lock))[1])
    elif step == "open":
        hold = scratch._hold
        monkeypatch.setattr(scratch, "_hold", lambda file: (sweeping(), hold(file))[1])
    else:
        there = scratch._is_there
        monkeypatch.setattr(scratch, "_is_there", lambda path, file: (sweeping(), there(path, file))[1])
    with Scratch(tmp_path) as made:
        assert not come_by
        assert [path.name for path in made.path.iterdir()] == ["lock"]
        assert (made.path / "lock").read_bytes() == MARK
        scratch.sweep(tmp_path)
        assert made.path.exists()
    assert not list(tmp_path.iterdir())


def test_many_at_once(tmp_path):
    """Processes that make, use and remove scratch directories in one place as fast as they can."""
    code = """
import sys
from pathlib import Path
from lsuv_cli.scratch import Scratch
for _ in range(200):
    with Scratch(Path(sys.argv[1])) as made:
        (made.path / "x").write_bytes(b"1")
        assert (made.path / "x").read_bytes() == b"1"
"""
    runs = [subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stderr=subprocess.PIPE) for _ in range(4)]
    assert [run.communicate(timeout=120)[1] for run in runs] == [b""] * 4
    assert not list(tmp_path.iterdir())
