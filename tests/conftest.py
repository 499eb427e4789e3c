"""What holds for all tests."""

import os
import signal
from dataclasses import replace

import pytest

# A shell starts its background jobs with SIGINT ignored, and so would be the commands that tests start and interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

if os.environ.get("LSUV_TEST_DEVICE"):
    import second_device

    second_device.install()


@pytest.fixture
def picky(monkeypatch):
    """`device="picky"` takes no session; what it says, which can be changed."""
    from lsuv_cli.scaling import devices
    from lsuv_cli.scaling.providers import PROVIDERS

    says = ["Exception during initialization: Training mode does not support BN opset 14 (or higher) yet."]

    def attach(options, index):
        raise RuntimeError(says[0])

    row = replace(PROVIDERS["cpu"], name="picky", title="Picky", memory="picky", attach=attach)
    monkeypatch.setattr(devices, "PROVIDERS", {**PROVIDERS, "picky": row})
    monkeypatch.setattr(devices, "probe", lambda provider, index: "")
    return says
