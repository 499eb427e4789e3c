"""What `lsuv_` is given: networks of every making, and batches of which not all is fed. `pytest -m torch`."""

import dataclasses
import logging
import random
import re
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore")]

from test_torch_call import data, plain, random_states, same, state, variances  # noqa: E402
from torch import nn  # noqa: E402

from lsuv_cli.errors import LsuvError  # noqa: E402
from lsuv_cli.torch import lsuv_  # noqa: E402


def refused(net, given, **options):
    """The one line of the error."""
    with pytest.raises(LsuvError) as problem:
        lsuv_(net, given, **options)
    assert "\n" not in str(problem.value)
    return str(problem.value)


# Networks


@pytest.mark.parametrize("make", [torch.jit.script, lambda net: torch.jit.trace(net, data())])
def test_a_scripted_network_is_refused_with_the_way_out(make):
    net = make(plain())
    before = state(net)
    assert "initialize the module that it was scripted or traced from" in refused(net, data())
    assert same(state(net), before)


def test_a_scripted_module_inside_is_named():
    assert refused(nn.Sequential(nn.Linear(6, 6), torch.jit.script(plain())), data()).startswith("1 is a torch.jit")


@pytest.mark.parametrize("dynamo", [False, True])
def test_a_network_that_was_made_in_inference_mode(dynamo):
    with torch.inference_mode():
        net = plain()
    assert lsuv_(net, data(), dynamo=dynamo).exit_code == 0
    assert variances(net, data()) == pytest.approx([1, 1, 1], abs=1e-4)
    assert all(parameter.is_inference() for parameter in net.parameters())


def test_a_network_stays_one_that_can_be_trained_if_the_data_was_made_in_inference_mode():
    with torch.inference_mode():
        given = data()
    net = plain()
    assert lsuv_(net, given).exit_code == 0
    net(data()).sum().backward()
    assert all(parameter.grad is not None for parameter in net.parameters())


def compiled_inside():
    net = plain()
    net[0] = torch.compile(net[0])
    return net


def compiled_in_place():
    net = plain()
    net.compile()
    return net


@pytest.mark.parametrize("make", [lambda: torch.compile(plain()), compiled_inside, compiled_in_place])
def test_a_compiled_network_is_measured_without_being_compiled(make, capfd, caplog):
    net = make()
    report = lsuv_(net, data())
    assert report.exit_code == 0
    assert len(report.layers) == 3
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]  # of graph breaks
    assert capfd.readouterr() == ("", "")
    plain_one = getattr(net, "_orig_mod", net)
    with torch.compiler.set_stance("force_eager"):
        assert variances(plain_one, data()) == pytest.approx([1, 1, 1], abs=1e-4)


@pytest.mark.parametrize("wrap", [torch.compile, nn.DataParallel])
def test_a_wrapped_network_has_its_own_names(wrap):
    net = plain()
    report = lsuv_(wrap(net), (data(), torch.zeros(64)), exclude="2")
    assert [layer.module for layer in report.layers] == ["0", "2", "4"]
    assert [layer.status for layer in report.layers] == ["ok", "excluded", "ok"]
    assert variances(net, data())[0] == pytest.approx(1, abs=1e-4)


class Mapped(nn.Module):
    """Its layers see one sample at a time."""

    def __init__(self, bias):
        super().__init__()
        self.a, self.b = nn.Linear(6, 8, bias=bias), nn.Linear(8, 3, bias=bias)

    def forward(self, x):
        return torch.vmap(lambda one: self.b(torch.relu(self.a(one))))(x)


def test_layers_under_vmap_are_measured_over_all_samples():
    net = Mapped(bias=False)
    report = lsuv_(net, data())
    assert report.exit_code == 0
    one = data().double() @ net.a.weight.double().T
    two = torch.relu(one) @ net.b.weight.double().T
    wanted = [value.var(correction=0).item() for value in (one, two)]
    assert wanted == pytest.approx([1, 1], abs=1e-4)
    assert [layer.variance_home for layer in report.layers] == pytest.approx(wanted, abs=1e-5)


def test_a_bias_that_the_export_adds_elsewhere_makes_a_layer_not_ok():
    """Under vmap it comes behind a Squeeze, so the file's layer is the product alone."""
    torch.manual_seed(0)
    net = Mapped(bias=True)
    report = lsuv_(net, data())
    assert report.exit_code == 1
    assert any("computes something else than the network" in warning for warning in report.warnings)
    one = nn.functional.linear(data(), net.a.weight, net.a.bias).double().var(correction=0).item()
    assert report.layers[0].variance_home == pytest.approx(one, rel=1e-5)


def test_an_ensemble_under_vmap_is_told_in_one_line_or_judged():
    class Ensemble(nn.Module):
        def __init__(self):
            super().__init__()
            self.nets = nn.ModuleList([nn.Linear(6, 3) for _ in range(3)])

        def forward(self, x):
            weights, buffers = torch.func.stack_module_state(list(self.nets))

            def one(w, b):
                return torch.func.functional_call(self.nets[0], (w, b), (x,))

            return torch.vmap(one)(weights, buffers)

    assert lsuv_(Ensemble(), data()).exit_code == 1


def test_lazy_modules_get_their_shapes():
    net = nn.Sequential(nn.LazyLinear(8), nn.LazyBatchNorm1d(), nn.ReLU(), nn.LazyLinear(3))
    assert lsuv_(net, data()).exit_code == 0
    assert variances(net.eval(), data()) == pytest.approx([1, 1], abs=1e-4)
    assert net[1].num_batches_tracked == 0


def test_a_network_without_values_is_refused():
    assert refused(plain().to("meta"), data()).startswith("0.weight is on the meta device")


def test_a_network_without_layers_is_told_once():
    assert refused(nn.ReLU(), data()) == "ReLU has no layer that can be initialized; nothing was written"


@pytest.mark.parametrize("net", [3, None, nn.Linear, lambda x: x, {"a": 1}])
def test_what_is_no_network_is_refused(net):
    assert re.search(r"is no network: give a|is a class, not a network", refused(net, data()))


def test_an_error_of_the_network_itself_is_not_the_exporters():
    text = refused(plain(), data(width=5))
    assert text.startswith("the network fails on the first batch: RuntimeError: mat1 and mat2")


class Cache:
    """As transformers' DynamicCache: a class that no exporter knows."""

    def __init__(self, keys):
        self.keys = keys


@pytest.mark.parametrize("dynamo", [False, True])
def test_an_output_that_no_exporter_takes_is_left_out_of_the_export(dynamo):
    class Decoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 3)

        def forward(self, x):
            keys = self.a(x)
            return {"logits": self.b(torch.relu(keys)), "cache": Cache(keys), "hidden": (keys, None)}

    net = Decoder()
    assert lsuv_(net, data(), dynamo=dynamo).exit_code == 0
    assert variances(net, data()) == pytest.approx([1, 1], abs=1e-4)
    assert isinstance(net(data())["cache"], Cache)
    assert not net._forward_hooks


@dataclasses.dataclass
class Logits:
    values: Any


class Answer(nn.Linear):
    def __init__(self, kind):
        super().__init__(6, 8)
        self.kind = kind

    def forward(self, x):
        return self.kind(super().forward(x))


def test_an_output_that_is_a_dataclass():
    net = Answer(Logits)
    assert lsuv_(net, data()).exit_code == 0
    assert net(data()).values.double().var(correction=0).item() == pytest.approx(1, abs=1e-4)


@pytest.mark.parametrize("kind", [lambda y: None, Cache])
def test_a_network_that_returns_no_tensor_is_refused(kind):
    assert refused(Answer(kind), data()).startswith("the network's output has no tensor")


def test_dynamo_is_true_or_false():
    assert refused(plain(), data(), dynamo="yes") == "`dynamo` 'yes' is not True, False or None"


def test_a_weight_that_is_not_carried_is_read_while_the_export_is_there():
    """Large tensors stay in the exported file until they are read."""

    class Sum(nn.Module):
        def __init__(self):
            super().__init__()
            self.l = nn.Linear(600, 600)
            self.table = nn.Parameter(torch.randn(600, 600))
            self.shift = nn.Parameter(torch.randn(600, 600))

        def forward(self, x):
            return torch.relu(self.l(x)) @ torch.tanh(self.table + self.shift)

    report = lsuv_(Sum(), data(width=600), dynamo=False)
    assert [layer.status for layer in report.layers] == ["ok", "not-home"]


# Batches


class Optional(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(6, 8)

    def forward(self, x, mask=None, *, flag=None):
        y = self.a(x)
        return y if mask is None else y * mask


def test_an_item_that_forward_could_take_is_left_out_with_a_warning():
    report = lsuv_(Optional(), (data(), torch.ones(64, 8)))
    assert report.data == "item 0 of a batch without item 1"
    assert report.warnings == (
        "item 1 of the batch was left out as labels, though forward can take `mask`: to feed that, give a dict by name",
    )


def test_labels_that_forward_cannot_take_are_left_out_without_a_warning():
    report = lsuv_(plain(), (data(), torch.zeros(64), "a name"))
    assert report.data == "item 0 of a batch without item 1, item 2"
    assert report.warnings == ()


def test_a_dict_tells_what_was_fed():
    report = lsuv_(Optional(), {"index": torch.zeros(64), "mask": data(width=8), "x": data()})
    assert report.data == "x, mask of a batch without index"
    assert report.warnings == ()


def test_batches_that_are_no_dense_tensors_are_refused():
    nested = torch.nested.nested_tensor([data(3), data(4)])
    assert refused(plain(), data().to_sparse()).endswith("make it dense")
    assert refused(plain(), nested).endswith("make it dense")
    assert refused(plain(), data().numpy()).startswith("the type ndarray is no batch")


def test_a_list_of_images_is_no_input_and_its_backbone_is():
    class Detector(nn.Module):
        def __init__(self):
            super().__init__()
            self.backbone = plain()

        def forward(self, images, targets=None):
            return [self.backbone(image) for image in images]

    net = Detector()
    assert refused(net, ([data(), data()],)).endswith("such as net.backbone")
    assert lsuv_(net.backbone, data()).exit_code == 0
    assert variances(net, [data()]) == pytest.approx([1, 1, 1], abs=1e-4)


def test_the_random_states_are_restored_after_a_shuffled_loader_and_a_random_network():
    class Noisy(nn.Linear):
        def forward(self, x):
            random.random()
            np.random.rand()
            torch.rand(1)
            return super().forward(x)

    pairs = torch.utils.data.TensorDataset(data(), torch.zeros(64))
    loader = torch.utils.data.DataLoader(pairs, batch_size=32, shuffle=True)
    net = Noisy(6, 8)
    before = random_states()
    lsuv_(net, loader)
    assert random_states() == before
