"""The table of execution providers: what a session is given, and why one cannot be had, for machines of every kind."""

import re
import sys
from pathlib import Path
from types import SimpleNamespace

import onnxruntime as ort
import pytest

from lsuv_cli.scaling import drivers, providers
from lsuv_cli.scaling.providers import PROVIDERS, Device

CUDA, WEBGPU = PROVIDERS["cuda"], PROVIDERS["webgpu"]


@pytest.fixture
def machine(monkeypatch):
    """A machine with a card: CUDA 13 in onnxruntime, a driver, all libraries; a test takes things away."""

    def has(built_for="13.0", available=("CUDAExecutionProvider",), packages=("onnxruntime-gpu",), absent=()):
        monkeypatch.setattr(ort, "cuda_version", built_for, raising=False)
        monkeypatch.setattr(ort, "get_available_providers", lambda: [*available, "CPUExecutionProvider"])
        monkeypatch.setattr(drivers, "package_version", lambda name: "1.2.3" if name in packages else "")
        monkeypatch.setattr(drivers, "load", lambda name: None if any(word in name for word in absent) else object())
        monkeypatch.setattr(ort, "preload_dlls", lambda: None, raising=False)

    has()
    return has


def test_names_are_those_of_onnxruntime():
    assert {row.key for row in providers.ROWS} <= set(ort.get_all_providers())
    assert [row.name for row in providers.ROWS] == ["cpu", "cuda", "webgpu"]
    assert [row.memory for row in providers.ROWS] == ["cpu", "cuda", "webgpu"]
    assert [row.name for row in providers.ROWS if row.automatic] == ["cuda"]


DOCS = Path(__file__).parent.parent.parent / "docs"


def test_help_and_documentation_name_the_devices_of_the_table():
    named = [row.name if row.memory == "cpu" else f"{row.name}[:N]" for row in providers.ROWS]
    (automatic,) = [row.title for row in providers.ROWS if row.automatic]
    sentence = f"auto, {', '.join(named[:-1])} or {named[-1]}; auto is {automatic}, else the CPU."
    assert sentence in (DOCS / "commands.md").read_text()  # which is made from --help
    page = (DOCS / "devices.md").read_text()
    assert re.findall(r"^\| `([^`]+)` \|", page.partition("\n\n`auto` takes")[0], flags=re.M) == ["--device", *named]


@pytest.mark.parametrize(
    ("device", "text", "is_host"),
    [
        (Device(PROVIDERS["cpu"], 0, 1), "CPU, 1 thread", True),
        (Device(PROVIDERS["cpu"], 0, 2), "CPU, 2 threads", True),
        (Device(CUDA, 1, 2), "CUDA device 1", False),
        (Device(WEBGPU, 0, 2), "WebGPU device 0", False),
    ],
)
def test_a_device_as_people_say_it(device, text, is_host):
    assert str(device) == text
    assert device.is_host == is_host
    assert device.kind == device.provider.name


def test_a_session_on_the_cpu_asks_for_the_cpu():
    row = PROVIDERS["cpu"]
    assert row.attach(None, 0) == {"providers": ["CPUExecutionProvider"]}
    assert (row.absent(0), row.explain("any", 0), row.free_memory(0), row.facts(0)) == ("", "", None, {})


def test_a_session_on_cuda_is_given_options_that_make_its_numbers_those_of_float32():
    ((name, options), other) = CUDA.attach(None, 2)["providers"]
    assert (name, other) == ("CUDAExecutionProvider", "CPUExecutionProvider")
    assert options == {
        "device_id": "2",
        "use_tf32": "0",
        "cudnn_conv_algo_search": "HEURISTIC",
        "arena_extend_strategy": "kSameAsRequested",
    }


@pytest.mark.parametrize(("built_for", "major"), [("12.8", 12), ("13.0", 13), ("", 0), (None, 0), ("n/a", 0)])
def test_the_cuda_that_onnxruntime_was_built_for(machine, built_for, major):
    machine(built_for)
    assert providers.cuda_major() == major


def test_no_cuda_in_this_onnxruntime(machine, monkeypatch):
    machine(available=(), packages=("onnxruntime",))
    assert CUDA.absent(0).startswith("this onnxruntime has no CUDA support")
    machine(available=(), packages=("onnxruntime", "onnxruntime-gpu"))
    assert "are both installed and hide each other" in CUDA.absent(0)
    monkeypatch.delattr(ort, "cuda_version")
    assert providers.cuda_major() == 0


def test_no_driver(machine):
    machine(absent=("libcuda.so", "nvcuda"))
    assert "install driver 580 or newer" in CUDA.absent(0)
    machine("12.8", absent=("libcuda.so", "nvcuda"))
    assert "install driver 525 or newer" in CUDA.absent(0)


def test_cudas_libraries_are_loaded_first_without_a_word(machine, monkeypatch, capsys):
    loaded = []
    monkeypatch.setattr(ort, "preload_dlls", lambda: loaded.append(1) or sys.stdout.write("loaded"))
    assert CUDA.absent(0) == ""
    assert loaded == [1]
    assert capsys.readouterr().out == ""

    def fails():
        raise OSError("no such library")

    monkeypatch.setattr(ort, "preload_dlls", fails)
    assert CUDA.absent(0) == ""
    monkeypatch.delattr(ort, "preload_dlls")  # as before onnxruntime 1.21
    assert CUDA.absent(0) == ""


def test_a_refusal_is_explained_by_its_text_or_by_missing_libraries(machine):
    assert CUDA.explain("something else", 0) == ""
    assert "finds no card" in CUDA.explain("CUDA failure 100", 0)
    machine(absent=("cudnn", "cublasLt"))
    assert CUDA.explain("something else", 0).startswith(
        "CUDA's libraries cannot be loaded (libcublasLt.so.13, libcudnn.so.9)"
    )


def test_the_facts_about_cuda(machine, monkeypatch):
    monkeypatch.setattr(drivers, "driver_version", lambda: "")
    machine(absent=("cudnn",))
    found = CUDA.facts(0)
    assert found["driver"] == "found"
    assert found["needs"] == "driver 580 or newer"
    assert found["libraries"] == (
        "libcudart.so.13 found, libcublas.so.13 found, libcublasLt.so.13 found, libcudnn.so.9 missing"
    )
    assert found["wheel"].endswith("for CUDA 13")
    assert (found["card"], found["capability"]) == ("", "")
    machine("", absent=("cuda",))
    found = CUDA.facts(0)
    assert found["driver"] == "none"
    assert (found["needs"], found["libraries"], found["wheel"]) == ("", "", "no CUDA in this onnxruntime")
    machine()
    monkeypatch.setattr(drivers, "driver_version", lambda: "580.1")
    monkeypatch.setattr(drivers, "cuda_card", lambda index: f"card {index}")
    monkeypatch.setattr(drivers, "cuda_capability", lambda major, index: (major - 4, index))
    found = CUDA.facts(2)
    assert (found["driver"], found["card"], found["capability"]) == ("580.1", "card 2", "9.2")


@pytest.fixture
def plugin(monkeypatch, machine):
    """WebGPU's plugin, with as many adapters as a test says, which are there once the plugin is registered."""
    registered: list[tuple[str, str]] = []
    adapters = [
        SimpleNamespace(ep_name="WebGpu", device=SimpleNamespace(vendor="ACME", device_id=0x1A2, type="Kind.GPU")),
        SimpleNamespace(ep_name="Other", device=None),
    ]
    fake = SimpleNamespace(get_ep_name=lambda: "WebGpu", get_library_path=lambda: "plugin.so")
    monkeypatch.setitem(sys.modules, "onnxruntime_ep_webgpu", fake)
    machine(packages=("onnxruntime-ep-webgpu",))
    monkeypatch.setattr(ort, "get_ep_devices", lambda: adapters if registered else adapters[1:], raising=False)

    def register(name, path):
        registered.append((name, path))

    monkeypatch.setattr(ort, "register_execution_provider_library", register, raising=False)
    return SimpleNamespace(adapters=adapters, registered=registered)


def test_the_webgpu_plugin_is_registered_once(plugin):
    assert WEBGPU.absent(0) == ""
    assert WEBGPU.absent(1) == "there is no WebGPU device 1; the last one is `device=webgpu:0`"
    assert plugin.registered == [("webgpu", "plugin.so")]
    given = []
    options = SimpleNamespace(add_provider_for_devices=lambda *more: given.append(more))
    assert WEBGPU.attach(options, 0) == {}
    assert given == [([plugin.adapters[0]], {})]
    assert WEBGPU.explain("any", 0) == ""
    assert WEBGPU.free_memory(0) is None


def test_the_facts_about_webgpu(plugin, machine):
    assert WEBGPU.facts(0) == {"plugin": "1.2.3", "libraries": "Vulkan loader found", "card": "ACME 0x01a2 (GPU)"}
    machine(packages=(), absent=("vulkan",))
    assert WEBGPU.facts(0) == {"plugin": "not installed", "libraries": "Vulkan loader missing"}


def test_no_webgpu(plugin, machine, monkeypatch):
    machine(packages=("onnxruntime",))
    assert WEBGPU.absent(0).startswith("WebGPU is not installed")
    plugin.adapters.clear()
    machine(packages=("onnxruntime-ep-webgpu",), absent=("vulkan",))
    assert "no Vulkan loader" in WEBGPU.absent(0)
    machine(packages=("onnxruntime-ep-webgpu",))
    assert "WebGPU finds no adapter" in WEBGPU.absent(0)
    monkeypatch.delattr(ort, "get_ep_devices")
    assert "knows no plugins" in WEBGPU.absent(0)
