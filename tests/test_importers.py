"""Initialized models in other software that imports ONNX: wherever it took the original. `pytest -m interop`.

docs/importers.md says how to install the importers; those that are not installed are skipped.
"""

import pytest

from importers import IMPORTERS, NETWORKS, TOLERANCE, agrees, outcome

pytestmark = [pytest.mark.interop, pytest.mark.filterwarnings("ignore")]


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("title", IMPORTERS)
def test_initialized_file(title, network):
    if not IMPORTERS[title].versions():
        pytest.skip(f"{title} is not installed")
    found = outcome(title, network)
    before, after = found["original"], found["initialized"]
    if not agrees(before):
        pytest.skip(f"{title} has trouble with the original too: {before}")
    assert not isinstance(after, str), after
    assert after <= TOLERANCE
