"""Data from a Python file of the user's own."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data_helpers import IDS, ROWS, fed, message
from helpers import model, normal
from lsuv_cli import LsuvError, compare, inspect
from lsuv_cli.data.batches import InputSpec
from lsuv_cli.data.reading import read
from shell import lsuv

HEAD = "import numpy as np\n"
RATE = InputSpec("sr", "int64", ())


def loader(folder: Path, text: str) -> str:
    (folder / "loader.py").write_text(HEAD + text)
    return str(folder / "loader.py")


def test_load_data_is_called_unless_another_function_is_named(tmp_path: Path) -> None:
    path = loader(
        tmp_path,
        """
def load_data():
    for k in range(3):
        yield {"x": np.full((2, 2), k, np.float32)}
def other():
    return [{"x": np.full((4, 2), 7, np.float32)}]
""",
    )
    assert fed(read([path], [ROWS]))[:, 0].tolist() == [0, 0, 1, 1, 2, 2]
    assert fed(read([f"{path}:other"], [ROWS])).shape == (4, 2)


def test_a_loader_finds_its_neighbours_and_prints_to_standard_error(tmp_path: Path, capfd: Any) -> None:
    (tmp_path / "my_tables.py").write_text("SIDE = 2\n")
    path = loader(
        tmp_path,
        """
def load_data():
    import my_tables
    print("reading")
    yield {"x": np.zeros((3, my_tables.SIDE), np.float32)}
""",
    )
    assert read([path], [ROWS]).samples == 3
    found = capfd.readouterr()
    assert found.out == ""
    assert found.err == "reading\n"


def test_an_endless_loader_is_stopped_by_the_limit(tmp_path: Path) -> None:
    path = loader(
        tmp_path,
        """
def load_data():
    while True:
        yield {"x": np.ones((2, 2), np.float32), "ids": np.ones((2, 5), np.int64)}
""",
    )
    assert read([path], [ROWS, IDS], limit=5).samples == 5


def test_an_endless_loader_without_a_limit_is_stopped_by_memory(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("lsuv_cli.data.batches.available_memory", lambda: 1000)
    path = loader(
        tmp_path,
        """
def load_data():
    while True:
        yield {"x": np.ones((2, 2), np.float32)}
""",
    )
    assert "more than half of the memory available" in message([path], ROWS)


def test_a_number_beside_a_loader(tmp_path: Path) -> None:
    path = loader(tmp_path, "def load_data():\n    yield {'x': np.zeros((3, 2), np.float32)}\n")
    (batch,) = read([path, "sr=8000"], [ROWS, RATE]).batches
    assert batch["sr"].item() == 8000


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("def load_data():\n    raise ValueError('no\\nfile')\n    yield\n",
         "loader.py:load_data: ValueError in line 3: no file;"),
        ("def load_data():\n    yield {'x': np.ones((2, 2))}\n    1 / 0\n",
         "ZeroDivisionError in line 4: division by zero"),
        ("def load_data():\n    raise SystemExit(3)\n", "SystemExit in line 3: 3"),
        ("def load_data(:\n", "SyntaxError in line 2"),
        ("import no_such_module\n", "ModuleNotFoundError in line 2"),
        ("def load_data():\n    return iter(())\n", "yields nothing"),
        ("def load_data():\n    return {'x': np.ones((2, 2))}\n", "gives a dict; let it yield dicts"),
        ("def load_data():\n    return None\n", "gives a NoneType"),
        ("def load_data():\n    yield 5\n", "batch 0 is a int"),
        ("def load_data():\n    yield {'x': np.ones((2, 3))}\n", "batch 0: input 'x' wants (N, 2) float32, got (2, 3)"),
        ("def load_data():\n    yield {'z': np.ones((2, 2)), 'y': 1}\n", "no data for input 'x'"),
        ("def batches():\n    yield\n", "has no function 'load_data'; name one as"),
        ("load_data = 5\n", "has no function 'load_data'"),
    ],
)  # fmt: skip
def test_what_goes_wrong_in_a_loader_is_one_line(tmp_path: Path, text: str, reason: str) -> None:
    assert reason in message([loader(tmp_path, text)], ROWS)


def test_a_loader_that_is_not_there(tmp_path: Path) -> None:
    assert "loader.py: no such file" in message([f"{tmp_path}/loader.py:f"], ROWS)


def test_a_file_of_another_kind_beside_a_loader_is_refused(tmp_path: Path) -> None:
    path = loader(tmp_path, "def load_data():\n    yield {'x': np.zeros((3, 2), np.float32)}\n")
    np.save(tmp_path / "ids.npy", np.ones((3, 5), int))
    assert "same in every run" in message([path, f"ids={tmp_path}/ids.npy"], ROWS, IDS)


NET = model("g (float[N,2] x) => (float[N,2] y) { y = MatMul(x, W) }", W=normal(2, 2))


def test_compare_runs_a_loader_once(tmp_path: Path) -> None:
    path = loader(
        tmp_path,
        f"""
def load_data():
    with open({str(tmp_path / "calls")!r}, "a") as calls:
        calls.write("x")
    yield {{"x": np.random.default_rng().standard_normal((30, 2), np.float32)}}
""",
    )
    compare(NET, path, "lsuv,keep,msra")
    assert (tmp_path / "calls").read_text() == "x"


def test_no_output_may_be_the_loader(tmp_path: Path) -> None:
    path = loader(tmp_path, "def load_data():\n    yield {'x': np.zeros((3, 2), np.float32)}\n")
    (tmp_path / "m.onnx").write_bytes(NET.SerializeToString())
    done = lsuv("init", tmp_path / "m.onnx", "--data", f"{path}:load_data", "-o", path, "--force")
    assert done.code == 2
    assert "is the input itself" in done.err


def test_a_loader_from_python(tmp_path: Path) -> None:
    path = loader(tmp_path, "def load_data():\n    yield np.ones((3, 2), np.float32)\n")
    assert inspect(NET, path).samples == 3
    with pytest.raises(LsuvError, match="has no function 'f'"):
        inspect(NET, f"{path}:f")
