"""What holds for all tests."""

import os
import signal

# A shell starts its background jobs with SIGINT ignored, and so would be the commands that tests start and interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

if os.environ.get("LSUV_TEST_DEVICE"):
    import second_device

    second_device.install()
