"""Devices: what is taken and why, what goes in and out of a session, and what is said when a device fails.

LSUV_TEST_DEVICE=webgpu runs the tests of sessions on that device (tests/webgpu.sh).
"""

import gc
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper

from helpers import exposed, model, normal, tensor, values
from lsuv_cli import doctor, examination, initialize
from lsuv_cli.errors import DeviceError, LsuvError
from lsuv_cli.scaling import devices, drivers, frontier, fused, providers, runtime, translation
from lsuv_cli.scaling.frontier import Frontier
from lsuv_cli.scaling.model_builder import StageModel
from lsuv_cli.scaling.providers import PROVIDERS, Device
from lsuv_cli.scaling.runtime import Session, host_value

DEVICE = os.environ.get("LSUV_TEST_DEVICE", "cpu")
CPU = Device(PROVIDERS["cpu"], 0, 1)


def session(proto, *fetches, device=None):
    feeds = {i.name: i.name for i in proto.graph.input}
    whole = exposed(proto, fetches)
    del whole.graph.output[:]
    whole.graph.output.extend(onnx.ValueInfoProto(name=name) for name in fetches)
    return Session(StageModel(whole, {}, feeds, fetches, ()), device or devices.open_device(DEVICE))


TANHS = "g (float[N,8] x) => (y) { a = MatMul(x, u) b = Tanh(a) c = MatMul(b, v) d = Tanh(c) y = MatMul(d, w) }"


def tanhs():
    return model(TANHS, u=normal(8, 8), v=normal(8, 8, seed=1), w=normal(8, 8, seed=2))


# What goes in and out of a session


def resident():
    """The bytes of this process that are in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
def test_a_value_that_waits_keeps_neither_its_session_nor_the_inputs():
    """64 MiB of input, 64 MiB of weight in the session, 4 bytes of output."""
    proto = model(
        "g (float[N,1024] x) => (y) { m = ReduceMax<keepdims=0>(x) r = ReduceMin<keepdims=0>(w) y = Add(m, r) }"
    )
    weight = normal(2**14, 2**10)
    held = proto.graph.initializer.add(name="w", dims=weight.shape, data_type=TensorProto.FLOAT)
    held.data_location = TensorProto.EXTERNAL
    held.external_data.add(key="location", value="in-memory")
    before = resident()
    made = Session(StageModel(proto, {"w": weight.copy()}, {"x": "x"}, ("y",), ()), CPU, optimized=False)
    kept, _ = made.run({"x": host_value(weight + 1)})
    assert resident() - before > 100 * 2**20
    del made
    gc.collect()
    assert kept["y"].shape() == []
    assert resident() - before < 30 * 2**20


def test_values_that_wait_are_on_the_host():
    kept, _ = session(tanhs(), "b").run({"x": host_value(normal(4, 8))})
    assert kept["b"].device_name().lower() == "cpu"


def test_values_that_wait_in_a_file_change_nothing():
    data = normal(12, 8, seed=3)
    plain, spilled = (initialize(tanhs(), data, device=DEVICE, batch_size=4, memory=m).model for m in (None, 1))
    for name in "uvw":
        assert np.allclose(tensor(plain, name), tensor(spilled, name), rtol=1e-5, atol=0)


def test_strings_between_stages():
    proto = model(
        """<ir_version: 9, opset_import: ["" : 20]>
        g (float[N,8] x, string[N] s) => (y, t) {
            a = MatMul(x, u) b = Tanh(a) i = Identity(s) y = MatMul(b, v) t = StringConcat(i, i) }""",
        u=normal(8, 8),
        v=normal(8, 8, seed=1),
    )
    words = np.array(["one", "two", "three", "four"], object)
    kept, _ = session(proto, "b", "i").run({"x": host_value(normal(4, 8)), "s": host_value(words)})
    assert list(runtime.to_numpy(kept["i"])) == list(words)
    data = {"x": normal(4, 8), "s": words}
    assert all(layer.status == "ok" for layer in initialize(proto, data, device=DEVICE).report.layers)


def test_half_precision_that_the_device_cannot_run_is_run_in_float32():
    before = model(
        """g (bfloat16[N,3,8,8] x) => (y) {
            a = Conv(x, w) p = MaxPool<kernel_shape=[2,2]>(a) t = Tanh(p) y = Conv(t, v) }""",
        opset=22,
        ir=10,
    )
    bfloat16 = helper.tensor_dtype_to_np_dtype(TensorProto.BFLOAT16)
    for name, shape in (("w", (4, 3, 3, 3)), ("v", (4, 4, 3, 3))):
        before.graph.initializer.append(onnx.numpy_helper.from_array(normal(*shape).astype(bfloat16), name))
    report = initialize(before, normal(16, 3, 8, 8), device=DEVICE, tol=0.05).report
    assert [layer.status for layer in report.layers] == ["ok", "ok"]


# What is taken, and why


def test_auto_says_why_it_did_not_take_cuda(monkeypatch):
    monkeypatch.setattr(devices, "unfit", lambda name, index: "" if name == "cpu" else "no card")
    device = devices.open_device("auto", threads=1)
    assert device.kind == "cpu"
    assert device.reason == "CUDA cannot be used: no card"


def test_auto_takes_cuda_and_never_webgpu(monkeypatch):
    tried = []
    monkeypatch.setattr(devices, "unfit", lambda name, index: tried.append(name) or "")
    device = devices.open_device("auto", threads=1)
    assert str(device) == "CUDA device 0"
    assert "CUDA" in device.reason
    assert tried == ["cuda"]


@pytest.mark.parametrize("request_", ["tpu", "cuda:", "cuda:x", "cpu:1", "webgpu:12345", "auto:1", ""])
def test_a_device_that_does_not_exist(request_):
    with pytest.raises(DeviceError, match=r"is not one of auto, cpu, cuda\[:N\], webgpu\[:N\]"):
        devices.open_device(request_)


def test_a_new_device_is_a_new_row(monkeypatch):
    row = replace(PROVIDERS["cpu"], name="twin", title="Twin")
    monkeypatch.setattr(devices, "PROVIDERS", {**PROVIDERS, "twin": row})
    report = initialize(tanhs(), normal(12, 8), device="twin", threads=1).report
    assert report.device == "Twin, 1 thread"
    assert report.device_reason == "as asked"
    assert report.exit_code == 0


# A device that does not take a stage


def test_a_stage_that_the_device_does_not_take_runs_on_the_host(picky):
    data = normal(12, 8, seed=3)
    there, here = (initialize(tanhs(), data, device=name, threads=1) for name in ("picky", "cpu"))
    for name in "uvw":
        assert np.array_equal(tensor(there.model, name), tensor(here.model, name))
    assert there.report.exit_code == 0
    (warning,) = there.report.warnings
    assert warning == (
        f"a stage ran on the CPU, because Picky device 0 does not take it: onnxruntime cannot run the model: {picky[0]}"
    )
    assert here.report.warnings == ()


def test_a_device_that_runs_out_of_memory_is_not_replaced_by_the_host(picky):
    picky[0] = OUT_OF_MEMORY[2]
    with pytest.raises(translation.OutOfMemory):
        initialize(tanhs(), normal(12, 8), device="picky")


def test_the_probe_takes_no_session_on_the_host():
    row = replace(PROVIDERS["cpu"], memory="other", attach=lambda options, index: {"providers": options.of_none})
    told = devices.probe(row, 0)
    assert "of_none" in told
    assert told.endswith("; update the driver of CPU device 0, or use `device=cpu`")


def test_the_doctor_notices_that_a_stage_ran_on_the_host(monkeypatch, picky):
    monkeypatch.setattr(examination, "TYPES", {"float32": "float"})
    found = doctor(device="picky", threads=1)
    assert found.exit_code == 1
    assert "a stage ran on the CPU" in found.cases[0].problem


# The probe


def test_the_probe_passes_where_the_numbers_are_those_of_the_cpu():
    assert devices.probe(PROVIDERS["cpu"], 0) == ""


def test_the_probe_notices_wrong_numbers(monkeypatch):
    monkeypatch.setattr(devices, "value_on", lambda device, array: host_value(array * np.float32(1.01)))
    assert "Conv on CPU, 1 thread is off by 0.01" in devices.probe(PROVIDERS["cpu"], 0)


def test_the_probe_notices_that_a_session_took_another_provider():
    row = replace(PROVIDERS["cpu"], key="GoneExecutionProvider", title="Gone")
    assert "onnxruntime gives no session on Gone, 1 thread; use `device=cpu`" in devices.probe(row, 0)


def test_the_probe_tells_what_a_failure_inside_a_node_means(monkeypatch):
    row = replace(PROVIDERS["cpu"], explain=lambda problem, index: drivers.why_no_cuda(problem, 13, index))

    def lacks_cudnn(*given):
        raise RuntimeError(MESSAGES["no cuDNN"])

    monkeypatch.setattr(ort.InferenceSession, "run_with_ort_values", lacks_cudnn)
    assert devices.probe(row, 0) == "cuDNN 9 cannot be loaded; pip install 'lsuv-cli[cuda]' brings it"


def test_every_session_is_made_without_a_fallback(monkeypatch):
    """onnxruntime's fallback prints on standard output, and hides the reason."""
    given = []
    real = ort.InferenceSession
    monkeypatch.setattr(ort, "InferenceSession", lambda *a, **k: given.append(k) or real(*a, **k))
    session(tanhs(), "y", device=CPU)
    assert [k["enable_fallback"] for k in given] == [0]


# onnxruntime's words (1.31, with a CUDA runtime that fails) and ours

MESSAGES = {
    "old driver": "device_id: CUDA failure 35: CUDA driver version is insufficient for CUDA runtime version ; GPU=-1",
    "no card": "device_id: CUDA failure 100: no CUDA-capable device is detected ; GPU=-1 ; hostname=h",
    "no such device": "operator() Invalid device ID: 3, must be between 0 (inclusive) and 1 (exclusive).",
    "no cuDNN": "running Conv node. RequireCudnnHandle(cudnnHandle_t) NOT_IMPLEMENTED : cuDNN is unavailable or "
    "disabled for CUDA Execution Provider: dlopen failed for libcudnn.so: cannot open shared object file",
    "old card": "CUDA failure 209: no kernel image is available for execution on the device ; GPU=0 ; hostname=h",
}
WAYS_OUT = {
    "old driver": "driver 580 or newer",
    "no card": "nvidia-smi",
    "no such device": "`device=cuda:0`",
    "no cuDNN": "pip install 'lsuv-cli[cuda]'",
    "old card": "`device=cpu`",
}


@pytest.mark.parametrize("name", MESSAGES)
def test_each_way_to_have_no_cuda_has_its_way_out(name):
    told = drivers.why_no_cuda(MESSAGES[name], 13, 3)
    assert told
    assert WAYS_OUT[name] in told
    assert "\n" not in told


def test_the_ways_to_have_no_cuda_are_told_apart():
    assert len({drivers.why_no_cuda(text, 13, 3) for text in MESSAGES.values()}) == len(MESSAGES)


CARDS = {
    (6, 1): "(compute capability 6.1) is too old",
    (12, 0): "(compute capability 12.0) is too new",
    None: "is too old",
}


@pytest.mark.parametrize("capability", CARDS)
def test_a_card_without_kernels_is_too_old_or_too_new(monkeypatch, capability):
    """onnxruntime 1.31's words at the launch of a kernel, when CUDA gives error 209."""
    monkeypatch.setattr(drivers, "cuda_capability", lambda major, index: capability)
    text = "running Neg node. Status Message: CUDA error cudaErrorNoKernelImageForDevice:no kernel image is available"
    told = drivers.why_no_cuda(text, 13, 0)
    assert CARDS[capability] in told
    assert ("<1.27" in told) == (capability != (12, 0))
    assert "<1.27" not in drivers.why_no_cuda(text, 12, 0)


def test_the_capability_of_a_card_that_cuda_13_left_behind_explains_any_failure(monkeypatch):
    monkeypatch.setattr(drivers, "cuda_capability", lambda major, index: (7, 0))
    assert "is too old" in drivers.why_no_cuda("CUDNN_FE failure 6: GRAPH_EXECUTION_PLAN_CREATION_FAILED", 13, 0)
    assert drivers.why_no_cuda("CUDNN_FE failure 6: GRAPH_EXECUTION_PLAN_CREATION_FAILED", 12, 0) == ""
    monkeypatch.setattr(drivers, "cuda_capability", lambda major, index: (7, 5))
    assert drivers.why_no_cuda("CUDNN_FE failure 6: GRAPH_EXECUTION_PLAN_CREATION_FAILED", 13, 0) == ""


def test_a_failure_of_cudas_libraries_is_told_without_signature_host_and_graph():
    """onnxruntime 1.31's words for a convolution that cuDNN has no engine for."""
    signature = (
        "/onnxruntime_src/onnxruntime/core/providers/cuda/cudnn_fe_call.cc:117 std::conditional_t<THRW, void, "
        "onnxruntime::common::Status> onnxruntime::CudaCall(ERRTYPE, const char*, const char*, SUCCTYPE, const char*, "
        "const char*, int) [with ERRTYPE = cudnn_frontend::error_object; bool THRW = true; SUCCTYPE = "
        "cudnn_frontend::error_code_t; std::conditional_t<THRW, void, common::Status> = void] "
    )
    text = (
        "[ONNXRuntimeError] : 11 : EP_FAIL : Non-zero status code returned while running Conv node. Name:'' Status "
        f"Message: OP not supported by CUDNN Frontend: {signature}{signature}CUDNN_FE failure 6: "
        "GRAPH_EXECUTION_PLAN_CREATION_FAILED ; GPU=0 ; hostname=secret ; file=/onnxruntime_src/conv.cc ; line=248 ; "
        'expr=check_support(handle); \n\n with the cudnn frontend json:\n{"context":{}}'
    )
    assert translation.one_line(RuntimeError(text)) == (
        "Non-zero status code returned while running Conv node. Name:'' Status Message: OP not supported by CUDNN "
        "Frontend: CUDNN_FE failure 6: GRAPH_EXECUTION_PLAN_CREATION_FAILED"
    )


def test_cuda_12_is_offered_only_where_the_wheel_is_for_cuda_13():
    assert "<1.27" in drivers.why_no_cuda(MESSAGES["old driver"], 13, 0)
    assert "<1.27" not in drivers.why_no_cuda(MESSAGES["old driver"], 12, 0)


def test_a_machine_without_a_driver(monkeypatch):
    if "CUDAExecutionProvider" not in ort.get_available_providers():
        pytest.skip("this onnxruntime has no CUDA")
    monkeypatch.setattr(drivers, "load", lambda name: None)
    assert "no NVIDIA driver" in providers.PROVIDERS["cuda"].absent(0)


OUT_OF_MEMORY = [
    "bfc_arena.cc:360 Failed to allocate memory for requested buffer of size 512",
    "Available memory of 1000 is smaller than requested bytes of 33554432",
    "CUDA failure 2: out of memory ; GPU=0 ; hostname=h ; file=cuda_allocator.cc",
    "CUBLAS failure 3: CUBLAS_STATUS_ALLOC_FAILED ; GPU=0",
    "CUDNN failure 4002: CUDNN_STATUS_INTERNAL_ERROR_ALLOC_FAILED",
    "CUDNN failure 2: CUDNN_STATUS_ALLOC_FAILED",
    "vkAllocateMemory failed with VK_ERROR_OUT_OF_DEVICE_MEMORY",
    "std::bad_alloc",
]


@pytest.mark.parametrize("text", OUT_OF_MEMORY)
@pytest.mark.parametrize("name", ["cpu", "cuda", "webgpu"])
def test_out_of_memory_in_every_form_names_an_option_that_helps(text, name):
    with (
        pytest.raises(translation.OutOfMemory, match="`batch_size`") as told,
        translation.translated(device=Device(PROVIDERS[name], 0, 1)),
    ):
        raise RuntimeError(text)
    assert ("`memory`" in str(told.value)) == (name == "cpu")
    assert ("`device=cpu`" in str(told.value)) == (name != "cpu")


TOO_LARGE = [
    "Non-zero status code returned while running Mul node. Name:'' Status Message: numbers_storage_buffers_ <= "
    "limits_.maxStorageBuffersPerShaderStage was false. Too many storage buffers in shader. Current: 18, Max is 16",
    "Failed to create GPU buffer: size=4294967296",
    "Buffer size (4294967296) exceeds the max buffer size limit (1073741824).",
]


@pytest.mark.parametrize("text", TOO_LARGE)
def test_a_value_that_is_too_large_for_the_device_names_an_option_that_helps(text):
    """onnxruntime-ep-webgpu 0.4.0's words; the first as it came with a value of 700 MiB."""
    device = Device(PROVIDERS["webgpu"], 0, 1)
    says = "^a value of this batch is too large for WebGPU device 0; use a smaller `batch_size`, or `device=cpu`$"
    with pytest.raises(translation.OutOfMemory, match=says), translation.translated(device=device):
        raise RuntimeError(text)


def test_the_probe_on_a_device_whose_memory_is_full(monkeypatch):
    def full(device, array):
        raise translation.OutOfMemory("")

    monkeypatch.setattr(devices, "value_on", full)
    assert devices.probe(PROVIDERS["cpu"], 0) == "the memory of CPU, 1 thread is full; end other work on it"


@pytest.mark.parametrize("step", ["run", "out", "in", "spill", "get"])
def test_out_of_memory_is_recognized_at_every_step(step, monkeypatch):
    proto = model("g (float[N,8] x) => (y) { y = Relu(x) }")
    made, held = session(proto, "y", device=CPU), host_value(normal(4, 8))
    waiting = Frontier(0)
    waiting.put(0, made.run({"x": held})[0])

    def full(*given, **more):
        raise RuntimeError(OUT_OF_MEMORY[1])

    places = {
        "run": (ort.InferenceSession, "run_with_ort_values", lambda: made.run({"x": held})),
        "out": (ort.OrtValue, "numpy", lambda: runtime.to_numpy(held)),
        "in": (ort.OrtValue, "ortvalue_from_numpy", lambda: host_value(normal(4, 8))),
        "spill": (ort.OrtValue, "numpy", lambda: waiting.put(0, {"z": held})),
        "get": (ort.OrtValue, "ortvalue_from_numpy", lambda: waiting.get(0, "y")),
    }
    owner, name, act = places[step]
    assert isinstance(waiting.kept[0]["y"], frontier.Spilled)
    monkeypatch.setattr(owner, name, full)
    with pytest.raises(LsuvError, match="ran out of memory"):
        act()
    waiting.close()


def test_a_kernel_that_no_provider_has_is_recognized():
    """With one provider and with two; the second as onnxruntime 1.31 says it for bfloat16."""
    one = "Could not find an implementation for MaxPool(12) node with name ''"
    two = "Provider type for MaxPool node with name '' is not set."
    for text in (one, two):
        with pytest.raises(translation.Unsupported), translation.translated():
            raise RuntimeError(text)


# Convolutions with an activation inside


@pytest.mark.parametrize("opset", [10, 18])
@pytest.mark.parametrize("kind", ["Tanh", "Sigmoid", "HardSigmoid", "LeakyRelu", "Clip"])
def test_a_fused_convolution_taken_apart_computes_the_same(kind, opset):
    numbers = {"LeakyRelu": "0.1", "HardSigmoid": "0.2, 0.5", "Clip": "-0.5, 1.0"}.get(kind)
    extra = f", activation_params=[{numbers}]" if numbers else ""
    proto = model(
        f"""g (float[N,3,8,8] x) => (y) {{
            z = Conv<pads=[1,1,1,1]>(x, w)
            a = com.microsoft.FusedConv<activation="{kind}"{extra}, pads=[1,1,1,1]>(x, w, b, z)
            y = com.microsoft.FusedConv<activation="{kind}"{extra}>(a, w) }}""",
        opset=opset,
        microsoft=True,
        w=normal(3, 3, 3, 3),
        b=normal(3),
    )
    apart = fused.split(proto, PROVIDERS["cuda"].splits)
    assert not [node for node in apart.graph.node if node.op_type == "FusedConv"]
    feeds = {"x": normal(2, 3, 8, 8, seed=1)}
    expected, found = (values(p, feeds, ["a", "y"]) for p in (proto, apart))
    for name in ("a", "y"):
        assert np.allclose(found[name], expected[name], rtol=1e-4, atol=1e-5)


def test_a_fused_convolution_that_the_device_has_stays_whole():
    proto = model(
        'g (float[N,3,8,8] x) => (y) { y = com.microsoft.FusedConv<activation="Relu">(x, w) }',
        microsoft=True,
        w=normal(3, 3, 3, 3),
    )
    assert fused.split(proto, PROVIDERS["cuda"].splits) is proto


@pytest.mark.parametrize(
    ("request_", "name", "index"),
    [("cpu", "cpu", 0), ("CPU", "cpu", 0), ("cuda", "cuda", 0), ("cuda:0", "cuda", 0), ("cuda:3", "cuda", 3),
     ("webgpu:1234", "webgpu", 1234), ("auto", None, 0)],
)  # fmt: skip
def test_what_a_request_names(request_, name, index):
    provider, found = devices.requested(request_)
    assert (provider and provider.name) == name
    assert found == index


def test_a_device_is_tried_only_if_nothing_is_known_against_it(monkeypatch):
    tried = []
    monkeypatch.setattr(devices, "probe", lambda provider, index: tried.append((provider.name, index)) or "off")
    rows = {
        "absent": replace(PROVIDERS["cuda"], name="absent", absent=lambda index: "no card"),
        "there": replace(PROVIDERS["cuda"], name="there", absent=lambda index: ""),
        "host": replace(PROVIDERS["cpu"], name="host"),
    }
    monkeypatch.setattr(devices, "PROVIDERS", rows)
    assert [devices.unfit(name, 1) for name in rows] == ["no card", "off", ""]
    assert tried == [("there", 1)]
    devices.unfit.cache_clear()


def test_the_threads_are_the_cores_that_the_process_may_use(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 2, 5}, raising=False)
    assert devices.available_threads() == 3
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 7)
    assert devices.available_threads() == 7
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert devices.available_threads() == 1
