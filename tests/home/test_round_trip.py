"""Every network of networks.py there and back, five ways: what is called right is right at home. `pytest -m torch`.

Needs `pip install '.[torch,weights]' torchvision timm transformers`. The table is printed by round_trip.py.
"""

import os
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore")]

from networks import HUGGING, TIMM, TORCHVISION  # noqa: E402  they need torch
from odd_networks import LIBRARY_OF, NETWORKS  # noqa: E402
from round_trip import EXPORTERS, by_call, save, ways  # noqa: E402

LIBRARIES = {
    **dict.fromkeys(TORCHVISION, "torchvision"),
    **dict.fromkeys(TIMM, "timm"),
    **dict.fromkeys([*HUGGING, "Whisper encoder"], "transformers"),
    **LIBRARY_OF,
}
HAND_WRITTEN = [name for name in NETWORKS if name not in LIBRARIES]
# What no way home can do, and says so.
REFUSED = {
    "orthogonal parametrization": "linalg_householder_product",  # neither exporter knows it
}
# Weights computed from others, in a way that cannot be undone.
TOLD = {
    "spectral_norm", "timm NF-ResNet", "weight standardization", "masked weights", "tensors outside the state dict",
}  # fmt: skip
RESULTS = os.environ.get("LSUV_ROUND_TRIP")  # a file for the rows, from which round_trip.py prints the table


def keep(name, found):
    if RESULTS:
        save(Path(RESULTS), name, found)


def needed(name):
    if name in LIBRARIES:
        pytest.importorskip(LIBRARIES[name])


def test_there_are_enough_of_them():
    assert len(NETWORKS) >= 40


@pytest.mark.parametrize("name", NETWORKS)
def test_the_one_call(name):
    needed(name)
    outcome = by_call(name)
    keep(name, {"one call": outcome})
    assert not outcome.wrong
    if name in REFUSED:
        assert outcome.words == "refused"
        assert REFUSED[name] in outcome.reason
    elif name in TOLD:
        assert outcome.words.startswith("told")
    else:
        assert outcome.words[0].isdigit(), (outcome.words, outcome.reason)


@pytest.mark.parametrize("exporter", EXPORTERS)
@pytest.mark.parametrize("name", NETWORKS)
def test_through_a_file(name, exporter, tmp_path):
    """Nothing comes home wrong with exit code 0, by value or by name."""
    needed(name)
    found = {f"{exporter} {way}": outcome for way, outcome in ways(name, exporter, tmp_path)}
    keep(name, found)
    assert not {way: outcome.wrong for way, outcome in found.items() if outcome.wrong}


@pytest.mark.parametrize("exporter", EXPORTERS)
@pytest.mark.parametrize("name", HAND_WRITTEN)
def test_through_a_file_as_exporters_write_it_by_default(name, exporter, tmp_path):
    """With BatchNorm folded, equal tensors merged and weights transposed: right, or told."""
    for way, outcome in ways(name, exporter, tmp_path, folded=True):
        assert not outcome.wrong, way
