"""Which device a request means, and what onnxruntime's errors become; no device but the CPU is needed."""

import pytest

from lsuv_cli.errors import LsuvError, ModelError
from lsuv_cli.scaling import devices
from lsuv_cli.scaling.devices import open_device
from lsuv_cli.scaling.providers import PROVIDERS, Device
from lsuv_cli.scaling.translation import OutOfMemory, UnknownOperator, Unsupported, one_line, translated


@pytest.fixture
def fit(monkeypatch):
    """Names of the devices that can be used; others lack a driver."""
    names = {"cpu", "cuda", "webgpu"}
    monkeypatch.setattr(devices, "unfit", lambda name, index: "" if name in names else f"no driver for {name}:{index}")
    return names


@pytest.mark.parametrize(
    ("request_", "kind", "index"),
    [("cpu", "cpu", 0), ("CPU", "cpu", 0), ("cuda", "cuda", 0), ("cuda:1", "cuda", 1), ("webgpu:9999", "webgpu", 9999)],
)
def test_a_device_by_its_name(fit, request_, kind, index):
    found = open_device(request_, threads=3)
    assert (found.provider, found.index, found.threads, found.reason) == (PROVIDERS[kind], index, 3, "as asked")


@pytest.mark.parametrize(
    "request_", ["gpu", "", "cpu:0", "cuda:", "cuda:x", "cuda:-1", "cuda:10000", "auto:1", "cuda:1:1"]
)
def test_what_is_no_device(fit, request_):
    with pytest.raises(LsuvError, match="is not one of auto, "):
        open_device(request_)


def test_a_device_that_cannot_be_used(fit):
    fit.remove("cuda")
    with pytest.raises(LsuvError, match="`device='cuda:2'` cannot be used: no driver for cuda:2"):
        open_device("cuda:2")


def test_auto_takes_the_first_that_can_be_used(fit):
    assert open_device("auto").provider is PROVIDERS["cuda"]
    fit.remove("cuda")
    found = open_device()
    assert found.provider is PROVIDERS["cpu"]
    assert found.reason == "CUDA cannot be used: no driver for cuda:0"
    assert found.threads == devices.available_threads()


def test_the_cpu_computes_what_the_cpu_computes(monkeypatch):
    assert devices.probe(PROVIDERS["cpu"], 0) == ""
    real = devices._results
    for factor, told in ((1.0005, ""), (1.01, "is off by 0.01 of what the CPU computes")):
        calls: list[object] = []

        def off(session, value, calls=calls, factor=factor):
            calls.append(session)
            found = real(session, value)
            return {name: array * factor if len(calls) == 1 else array for name, array in found.items()}

        monkeypatch.setattr(devices, "_results", off)
        reason = devices.probe(PROVIDERS["cpu"], 0)
        assert told in reason
        assert bool(reason) == bool(told)


# Errors of onnxruntime


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("Could not find an implementation for Conv(11) node", Unsupported),
        ("Provider type for node 'a' is not set", Unsupported),
        ("Failed to allocate memory for requested buffer of size 8", OutOfMemory),
        ("CUDA failure 2: out of memory", OutOfMemory),
        ("CUBLAS_STATUS_ALLOC_FAILED", OutOfMemory),
        ("CUDNN_STATUS_INTERNAL_ERROR_ALLOC_FAILED", OutOfMemory),
        ("VK_ERROR_OUT_OF_DEVICE_MEMORY", OutOfMemory),
        ("std::bad_alloc", OutOfMemory),
        ("Mine is not a registered function/op", UnknownOperator),
        ("anything else", ModelError),
    ],
)
def test_kinds_of_errors(text, kind):
    with pytest.raises(ModelError) as caught, translated("it failed"):
        raise RuntimeError(text)
    assert type(caught.value) is kind


def test_errors_that_are_not_onnxruntime_s_pass():
    for problem in (MemoryError("m"), ModelError("ours")):
        with pytest.raises(type(problem)) as caught, translated():
            raise problem
        assert caught.value is problem


def test_memory_that_ran_out_on_a_device():
    cpu, cuda = (Device(PROVIDERS[name], 0, 1) for name in ("cpu", "cuda"))
    for device, told in ((None, "`memory`"), (cpu, "`memory`"), (cuda, "`device=cpu`")):
        with pytest.raises(OutOfMemory, match=told), translated(device=device):
            raise RuntimeError("bad_alloc")


def test_a_message_without_paths_and_preambles():
    text = """[ONNXRuntimeError] : 6 : RUNTIME_EXCEPTION : the shapes of
        /onnxruntime_src/onnxruntime/core/framework/op_kernel.cc:87 do not fit"""
    assert one_line(RuntimeError(text)).split() == ["the", "shapes", "of", "do", "not", "fit"]
    assert len(one_line(RuntimeError("word " * 5000))) == 300
