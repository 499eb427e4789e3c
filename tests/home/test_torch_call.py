"""`lsuv_(net, batch)`: what it takes, what it leaves as it was, and what it says. `pytest -m torch`."""

import copy
import random
import tempfile
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore")]

from torch import nn  # noqa: E402
from torch.nn.utils import parametrize  # noqa: E402

from lsuv_cli.errors import LsuvError  # noqa: E402
from lsuv_cli.report import Status  # noqa: E402
from lsuv_cli.torch import lsuv_  # noqa: E402


def plain(**options):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 12, **options), nn.ReLU(), nn.Linear(12, 12, **options), nn.ReLU(),
                         nn.Linear(12, 3, **options))  # fmt: skip


def data(count=64, width=6, **options):
    return torch.randn(count, width, generator=torch.Generator().manual_seed(1)).to(**options)


def variances(net, *given, **named):
    """By plain hooks on the linear layers, in the order of the calls."""
    found = []
    handles = [
        module.register_forward_hook(lambda _m, _i, out: found.append(out.double().var(correction=0).item()))
        for module in net.modules()
        if isinstance(module, nn.Linear)
    ]
    with torch.no_grad():
        net(*given, **named)
    for handle in handles:
        handle.remove()
    return found


def random_states():
    return torch.get_rng_state().tolist(), np.random.get_state(legacy=False)["state"]["key"].tolist(), random.getstate()


def state(net):
    return {name: value.clone() for name, value in net.state_dict().items()}


def same(one, other):
    return all(torch.equal(one[name], other[name]) for name in other)


@pytest.mark.parametrize("dynamo", [None, False, True])
def test_every_layer_has_variance_one_in_pytorch(dynamo):
    net = plain()
    report = lsuv_(net, data(), dynamo=dynamo)
    assert variances(net, data()) == pytest.approx([1, 1, 1], abs=1e-4)
    assert report.exit_code == 0
    assert report.model == "Sequential"
    assert report.samples == 64
    assert [layer.module for layer in report.layers] == ["0", "2", "4"]
    assert [layer.variance_home for layer in report.layers] == pytest.approx([1, 1, 1], abs=1e-4)
    assert report.carried.tensors == report.carried.total == 6
    assert not any(net[k].bias.any() for k in (0, 2, 4))


def test_modes_gradients_and_the_random_state_stay_as_they_were(capfd):
    net = plain()
    net[0].eval()
    net[2].weight.requires_grad_(False)
    modes = [module.training for module in net.modules()]
    places = [parameter.data_ptr() for parameter in net.parameters()]
    before, files = random_states(), set(Path(tempfile.gettempdir()).glob("lsuv-*"))
    lsuv_(net, data(), dynamo=True)
    lsuv_(net, data())
    assert [module.training for module in net.modules()] == modes
    assert [p.requires_grad for p in net.parameters()] == [True, True, False, True, True, True]
    assert [parameter.data_ptr() for parameter in net.parameters()] == places
    assert random_states() == before
    assert set(Path(tempfile.gettempdir()).glob("lsuv-*")) <= files
    assert capfd.readouterr() == ("", "")
    assert torch.backends.mha.get_fastpath_enabled()
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in net.modules())


@pytest.mark.parametrize(("dtype", "off"), [(torch.float64, 1e-6), (torch.float16, 1e-2), (torch.bfloat16, 1e-2)])
def test_types_stay_as_they_were(dtype, off):
    net = plain().to(dtype)
    report = lsuv_(net, data(dtype=dtype))
    assert report.exit_code == 0
    assert {parameter.dtype for parameter in net.parameters()} == {dtype}
    assert variances(net, data(dtype=dtype)) == pytest.approx([1, 1, 1], abs=off)


class Asking(nn.Module):
    """Takes a required input, and others as transformers does."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x, mask=None, labels=None):
        assert labels is None
        y = self.b(torch.relu(self.a(x)))
        return {"y": y if mask is None else y * mask}


def test_labels_are_left_out():
    x, labels = data(), torch.zeros(64, dtype=torch.int64)
    for batch in ((x, labels), [(x, labels)], [[x, labels]], {"x": x, "labels": labels}, [{"x": x, "labels": labels}]):
        net = Asking()
        assert lsuv_(net, batch).exit_code == 0
        assert variances(net, x) == pytest.approx([1, 1], abs=1e-4)


def test_keyword_arguments_go_by_name_in_any_order():
    net = Asking()
    lsuv_(net, {"mask": torch.ones(64, 3), "x": data(), "idx": torch.arange(64)})
    assert variances(net, data()) == pytest.approx([1, 1], abs=1e-4)


def test_two_inputs_of_a_tuple():
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(6, 8), nn.Linear(4, 8)

        def forward(self, x, y):
            return self.a(x) * self.b(y)

    net, batch = Both(), (data(), data(width=4), torch.zeros(64))
    lsuv_(net, batch)
    assert variances(net, *batch[:2]) == pytest.approx([1, 1], abs=1e-4)


def test_a_loader_is_taken_up_to_the_limit():
    torch.manual_seed(0)
    pairs = torch.utils.data.TensorDataset(3 * data(1000) + 1, torch.zeros(1000))
    loader = torch.utils.data.DataLoader(pairs, batch_size=50)
    net = plain()
    report = lsuv_(net, loader)
    assert report.samples == 250
    assert report.batches == 5
    assert report.exit_code == 0
    assert "1 of 6 batches have other shapes" in report.warnings[-1]
    assert variances(net, (3 * data(1000) + 1)[:250]) == pytest.approx([1, 1, 1], abs=1e-4)
    assert [x.variance_home for x in report.layers] == pytest.approx([1, 1, 1], abs=1e-4)
    report = lsuv_(net, loader, limit=20)
    assert report.samples == 20
    assert report.settings["limit"] == 20
    assert variances(net, (3 * data(1000) + 1)[:20]) == pytest.approx([1, 1, 1], abs=1e-4)


@pytest.mark.parametrize("given", [[], 3, "images/", [3], {"nothing": torch.zeros(2)}])
def test_what_is_no_batch_is_refused(given):
    net = plain()
    before = state(net)
    with pytest.raises(LsuvError):
        lsuv_(net, given)
    assert same(state(net), before)


def test_when_both_exporters_fail_there_is_one_error_with_both_reasons(capfd):
    class Bad(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(6, 6)

        def forward(self, x):
            return torch.linalg.eigvals(self.a(x)[:6]).real

    net = Bad().train()
    before = state(net)
    with pytest.raises(LsuvError, match=r"dynamo=False: PyTorch's exporter failed: .*; dynamo=True: ") as problem:
        lsuv_(net, data())
    assert "\n" not in str(problem.value)
    assert len(str(problem.value)) < 900
    assert same(state(net), before)
    assert net.training
    assert capfd.readouterr().out == ""


class Moody(nn.Module):
    """Calls its second layer with more and more, so that PyTorch does not do what the exported file does."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.calls = nn.Linear(6, 8), nn.Linear(8, 3), 0

    def forward(self, x):
        self.calls += 1
        return self.b(self.calls * torch.relu(self.a(x)))


def test_a_layer_that_is_not_right_in_pytorch_is_not_ok():
    net = Moody()
    report = lsuv_(net, data())
    first, second = report.layers
    assert first.status == "ok"
    assert first.variance_home == pytest.approx(1, abs=1e-4)
    assert second.status == "outside"
    assert second.variance == pytest.approx(1, abs=1e-4)
    net.calls -= 1
    assert second.variance_home == pytest.approx(variances(net, data())[1], rel=1e-4)
    assert "in PyTorch" in second.notes[-1]
    assert report.exit_code == 1


def test_when_the_measurement_fails_the_network_is_as_it_was(monkeypatch):
    from lsuv_cli.torch import calls

    def fail(*_):
        raise RuntimeError("out of memory")

    net = plain()
    before = state(net)
    monkeypatch.setattr(calls, "measure", fail)
    with pytest.raises(LsuvError, match=r"keeps the old ones: RuntimeError: out of memory$"):
        lsuv_(net, data())
    assert same(state(net), before)
    assert net.training


class Halved(nn.Module):
    def forward(self, weight):
        return weight / 2

    def right_inverse(self, weight):
        return weight * 2


class Rounded(nn.Module):
    """Gives back what it was given only for whole numbers."""

    def forward(self, weight):
        return torch.round(weight)

    def right_inverse(self, weight):
        return weight


def test_a_weight_is_assigned_through_its_parametrization():
    net = plain()
    parametrize.register_parametrization(net[2], "weight", Halved())
    report = lsuv_(net, data())
    assert report.exit_code == 0
    assert not report.carried.left
    assert variances(net, data()) == pytest.approx([1, 1, 1], abs=1e-4)


def test_a_parametrization_that_does_not_take_the_weight_is_told():
    net = plain()
    nn.init.constant_(net[2].weight, 1.0)
    parametrize.register_parametrization(net[2], "weight", Rounded())
    before = net[2].weight.detach().clone()
    report = lsuv_(net, data())
    assert report.exit_code == 1
    assert len(report.carried.left) == 1
    assert report.layers[1].status == "not-home"
    assert torch.equal(net[2].weight, before)


def test_settings_are_those_of_initialize():
    net = plain()
    before = state(net)
    report = lsuv_(net, data(), exclude="2", target_variance=4.0, seed=3)
    assert [layer.status for layer in report.layers] == ["ok", "excluded", "ok"]
    assert torch.equal(net[2].weight, before["2.weight"])
    found = variances(net, data())
    assert (found[0], found[2]) == pytest.approx((4, 4), abs=1e-3)
    with pytest.raises(TypeError, match="unknown settings"):
        lsuv_(net, data(), tolerance=0.1)  # type: ignore[call-arg]


def test_kept_biases_are_part_of_what_is_measured():
    net = plain()
    report = lsuv_(net, data(), bias="keep")
    assert report.exit_code == 0
    assert net[0].bias.any()
    assert variances(net, data()) == pytest.approx([1, 1, 1], abs=1e-4)


def test_statistics_are_reset_at_home_too():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    net[1].running_mean.uniform_()
    report = lsuv_(net, data(), reset_norm=True)
    assert report.exit_code == 0
    assert not net[1].running_mean.any()
    assert (net[1].running_var == 1).all()
    assert net[1].num_batches_tracked == 0


def test_a_module_that_asks_for_the_version_of_its_state():
    """torchvision's MNASNet does."""

    class Versioned(nn.Linear):
        _version = 2

        def _load_from_state_dict(self, state, prefix, metadata, *rest):
            assert metadata.get("version") == 2
            super()._load_from_state_dict(state, prefix, metadata, *rest)

    net = nn.Sequential(Versioned(6, 8), nn.ReLU(), nn.Linear(8, 3))
    assert lsuv_(net, data()).exit_code == 0


class Standardized(nn.Linear):
    def forward(self, x):
        centred = self.weight - self.weight.mean(1, keepdim=True)
        return nn.functional.linear(x, centred / centred.std(1, keepdim=True), self.bias)


@pytest.mark.parametrize("dynamo", [False, True])
def test_a_layer_that_cannot_be_carried_is_left_as_it_was_and_the_others_are_right(dynamo):
    net = plain()
    net[2] = Standardized(12, 12)
    before = state(net)
    report = lsuv_(net, data(), dynamo=dynamo)
    assert [layer.status for layer in report.layers] == ["ok", "not-home", "ok"]
    assert len(report.carried.left) == 1
    assert report.carried.tensors == report.carried.total - 1
    assert report.exit_code == 1
    assert same(
        {"2.weight": net[2].weight, "2.bias": net[2].bias}, {key: before[key] for key in ("2.weight", "2.bias")}
    )
    first, second, third = variances(net, data())
    assert (first, third) == pytest.approx((1, 1), abs=1e-4)
    assert report.layers[1].variance_home == pytest.approx(second, rel=1e-4)


def test_a_layer_that_is_not_measured_in_pytorch_is_counted():
    """A call that no function of PyTorch shows: the product is written out."""

    class Hidden(nn.Linear):
        def forward(self, x):
            if torch.onnx.is_in_onnx_export():
                return nn.functional.linear(x, self.weight)
            return (x[:, None] * self.weight).sum(-1)

    net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), Hidden(8, 3, bias=False))
    report = lsuv_(net, data(), dynamo=False)
    assert "not measured in PyTorch" in report.layers[1].notes
    assert any(warning.startswith("2: not measured in PyTorch") for warning in report.warnings)


def test_the_products_of_attention_are_measured():
    """nn.MultiheadAttention computes them in a function that no hook sees."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.attn = nn.MultiheadAttention(6, 2, batch_first=True)

        def forward(self, x, memory):
            return self.attn(x, memory, memory, need_weights=False)[0]

    torch.manual_seed(0)
    net, x, memory = Net(), data(64 * 5).reshape(64, 5, 6), 3 * data(64 * 4).reshape(64, 4, 6)
    report = lsuv_(net, (x, memory))
    weights = net.attn.in_proj_weight.detach().double()
    wanted = [(x.double() @ weights[:6].T).var(correction=0), (memory.double() @ weights[6:].T).var(correction=0)]
    assert [layer.variance_home for layer in report.layers][:2] == pytest.approx([v.item() for v in wanted], rel=1e-4)
    assert [layer.variance_home for layer in report.layers] == pytest.approx([1, 1, 1], abs=1e-3)


@pytest.mark.parametrize("dynamo", [False, True])
def test_modules_that_are_called_by_forward_have_their_names(dynamo):
    """Then the legacy exporter writes no scope for them, and only the weights' names tell the blocks apart."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(6, 6)

        def forward(self, x):
            return torch.relu(self.fc(x))

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList([Block(), Block()])

        def forward(self, x):
            for block in self.blocks:
                x = block.forward(x)
            return x

    report = lsuv_(Net(), data(), dynamo=dynamo)
    assert [layer.module for layer in report.layers] == ["blocks.0.fc", "blocks.1.fc"]
    assert report.exit_code == 0


def test_batches_that_take_different_paths_are_not_called_ok():
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.o = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)

        def forward(self, x):
            return self.o(torch.relu(self.a(x) if x.mean() > 0 else self.b(x)))

    report = lsuv_(Net(), [torch.randn(16, 8) + 1, torch.randn(16, 8) - 1])
    assert {layer.status for layer in report.layers} == {Status.OUTSIDE}
    assert "batches take different paths" in report.layers[0].notes[-1]


def test_a_buffer_that_equals_a_weight_by_chance_keeps_its_values():
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.l, self.o = nn.Linear(8, 8), nn.Linear(8, 8)
            nn.init.eye_(self.l.weight)
            self.register_buffer("identity", torch.eye(8))

        def forward(self, x):
            return self.o(torch.relu(self.l(x))) + self.identity[0]

    net = Net()
    report = lsuv_(net, torch.randn(64, 8))
    assert torch.equal(net.identity, torch.eye(8))
    assert torch.equal(net.l.weight, torch.eye(8))
    assert [layer.status for layer in report.layers] == [Status.NOT_HOME, Status.OK]


def test_a_copy_that_the_network_does_not_read_is_named():
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.online = nn.Linear(8, 8)
            self.target = copy.deepcopy(self.online)

        def forward(self, x):
            return self.online(x)

    report = lsuv_(Net(), torch.randn(64, 8))
    assert any("target.weight equals online.weight" in warning for warning in report.warnings)


def test_buffers_that_a_forward_pass_changes_are_put_back():
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.l = nn.Linear(8, 8)
            self.register_buffer("passes", torch.zeros(1))
            self.register_buffer("mean", torch.zeros(8))
            self.register_buffer("variance", torch.ones(8))

        def forward(self, x):
            self.passes += 1
            return nn.functional.batch_norm(self.l(x), self.mean, self.variance, training=True)

    net = Net()
    lsuv_(net, torch.randn(64, 8) + 3)
    assert not net.passes.any()
    assert not net.mean.any()
    assert torch.equal(net.variance, torch.ones(8))
