"""Bytes in files and in memory: read whole, as values or in pieces, and files that became shorter or changed."""

import numpy as np
import pytest

from lsuv_cli.errors import ModelError
from lsuv_cli.model import places
from lsuv_cli.model.places import Held, Range, stamp_of

NUMBERS = np.arange(10, dtype=np.float32)
WAYS = {
    "read": lambda place: place.read(),
    "array": lambda place: place.array(np.dtype(np.float32)).tobytes(),
    "chunks": lambda place: b"".join(place.chunks()),
}


@pytest.fixture
def path(tmp_path):
    (tmp_path / "d.bin").write_bytes(NUMBERS.tobytes())
    return tmp_path / "d.bin"


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("chunk", [1 << 22, 5, 8])
def test_a_range_of_a_file(path, way, chunk, monkeypatch):
    monkeypatch.setattr(places, "CHUNK", chunk)
    assert WAYS[way](Range(path, 8, 16)) == NUMBERS[2:6].tobytes()
    assert WAYS[way](Range(path, 8, 0)) == b""
    assert WAYS[way](Held(memoryview(NUMBERS[2:6].tobytes()))) == NUMBERS[2:6].tobytes()


@pytest.mark.parametrize("way", WAYS)
def test_a_file_that_became_shorter(path, way):
    with pytest.raises(ModelError, match="became shorter"):
        WAYS[way](Range(path, 8, 40))


@pytest.mark.parametrize("way", [*WAYS, "check"])
def test_a_file_that_changed_or_is_gone(path, way):
    act = WAYS.get(way, lambda place: place.check())
    stamped = Range(path, 0, 8, stamp_of(path.stat()))
    act(stamped)
    path.write_bytes(NUMBERS[::-1].tobytes() + b"more")
    with pytest.raises(ModelError, match="was changed during the run"):
        act(stamped)
    act(Range(path, 0, 8))
    path.unlink()
    with pytest.raises(ModelError, match="keep it as it is during the run"):
        act(stamped)


def test_bytes_in_memory_are_not_to_be_written_to():
    held = Held(memoryview(NUMBERS.tobytes()))
    assert held.length == 40
    assert not held.array(np.dtype(np.float32)).flags.writeable
