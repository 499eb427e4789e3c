"""Images as data: decoded, resized, cropped and normalized as the model's input wants them."""

import json

import numpy as np
import onnx
import pytest
from PIL import Image

from helpers import model, normal
from lsuv_cli import LsuvError, inspect
from shell import lsuv


def network(kind="float", shape="N,3,8,8"):
    """The mean of the images is the mean of the only layer's output: its weight is an identity."""
    last = shape.endswith((",3", ",1"))
    channels = 1 if shape.endswith(",1") or ",1," in shape else 3
    weight = np.eye(channels, dtype=np.float32).reshape(channels, channels, 1, 1)
    turned = "t = Transpose<perm=[0,3,1,2]>(f)" if last else "t = Identity(f)"
    return model(
        f"g ({kind}[{shape}] x) => (float[N,C,H,W] y) {{ f = Cast<to=1>(x) {turned} y = Conv(t, W) }}", W=weight
    )


def noise(*shape, seed=0):
    return np.random.default_rng(seed).integers(0, 256, shape, np.uint8)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "images").mkdir()
    return tmp_path / "images"


def measured(proto, folder, **settings):
    (layer,) = inspect(proto, [str(folder)], **settings).layers
    return layer.mean, layer.variance


def expect(found, array):
    assert found[0] == pytest.approx(array.mean(), rel=1e-4, abs=1e-6)
    assert found[1] == pytest.approx(array.var(), rel=1e-4)


def test_an_image_of_the_right_size_is_divided_by_255(folder):
    pixels = [noise(8, 8, 3, seed=k) for k in range(3)]
    for k, array in enumerate(pixels):
        Image.fromarray(array).save(folder / f"{k}.png")
    expect(measured(network(), folder), np.stack(pixels) / 255.0)


def test_mean_and_std_are_for_each_channel(folder):
    pixels = noise(8, 8, 3)
    Image.fromarray(pixels).save(folder / "a.png")
    mean, std = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])
    found = measured(network(), folder, mean=tuple(mean), std=tuple(std))
    expect(found, (pixels / 255.0 - mean) / std)


@pytest.mark.parametrize("shape", ["N,8,8,3", "N,3,8,8"])
def test_channels_go_where_the_input_has_them(folder, shape):
    """One bright channel: in the wrong place its pixels would spread over all channels."""
    pixels = np.zeros((8, 8, 3), np.uint8)
    pixels[..., 1] = 255
    Image.fromarray(pixels).save(folder / "a.png")
    proto = network(shape=shape)
    proto.graph.initializer[0].CopyFrom(
        onnx.numpy_helper.from_array(np.eye(3, dtype=np.float32)[1].reshape(1, 3, 1, 1), "W")
    )
    mean, variance = measured(proto, folder)
    assert (mean, variance) == (1.0, 0.0)


def test_a_grey_input_makes_images_grey(folder):
    pixels = noise(8, 8, 3)
    Image.fromarray(pixels).save(folder / "a.png")
    expect(measured(network(shape="N,1,8,8"), folder), np.asarray(Image.fromarray(pixels).convert("L")) / 255.0)


def test_transparent_palette_and_grey_images_are_read_too(folder):
    Image.fromarray(noise(8, 8, 4)).save(folder / "a.png")
    Image.fromarray(noise(8, 8)).save(folder / "b.png")
    Image.fromarray(noise(8, 8, 3)).convert("P").save(folder / "c.png")
    report = inspect(network(), [str(folder)])
    assert report.samples == 3


def test_an_integer_input_gets_the_bytes(folder):
    pixels = noise(8, 8, 3)
    Image.fromarray(pixels).save(folder / "a.png")
    expect(measured(network("uint8"), folder), pixels.astype(float))


def test_the_middle_is_cropped(folder):
    """A wide image: black at both ends, white in the middle."""
    pixels = np.zeros((8, 24, 3), np.uint8)
    pixels[:, 8:16] = 255
    Image.fromarray(pixels).save(folder / "a.png")
    assert measured(network(), folder)[0] == 1.0


def test_size_is_the_shorter_side_before_the_crop(folder):
    """White in the middle half of each side: with the shorter side at 16, the 8x8 crop sees nothing else."""
    pixels = np.zeros((64, 64, 3), np.uint8)
    pixels[16:48, 16:48] = 255
    Image.fromarray(pixels).save(folder / "a.png")
    assert measured(network(), folder)[0] == pytest.approx(0.25, abs=0.02)
    assert measured(network(), folder, size=16)[0] > 0.9


def test_a_size_below_that_of_the_input_is_refused(folder):
    Image.fromarray(noise(20, 30, 3)).save(folder / "a.png")
    done = lsuv("inspect", _saved(folder, network()), "--data", folder, "--size", 7)
    assert done.code == 2
    assert "--size 7 is below that of input 'x' (N, 3, 8, 8) float32; give at least 8" in done.err
    assert lsuv("inspect", folder.parent / "m.onnx", "--data", folder, "--size", 8).code == 0


@pytest.mark.parametrize("option", ["mean", "std"])
def test_whole_numbers_are_not_normalized(folder, option):
    """An input of uint8 gets pixels from 0 to 255; a mean that would be ignored is refused."""
    Image.fromarray(noise(8, 8, 3)).save(folder / "a.png")
    done = lsuv("inspect", _saved(folder, network("uint8")), "--data", folder, f"--{option}", "0.5")
    assert done.code == 2
    assert f"--{option} is for inputs of floats, and input 'x' (N, 3, 8, 8) uint8 takes pixels" in done.err
    assert lsuv("inspect", folder.parent / "m.onnx", "--data", folder).code == 0


def test_arrays_among_the_images_of_a_class_are_named(folder):
    for name in ("cats", "dogs"):
        (folder / "all" / name).mkdir(parents=True)
        Image.fromarray(noise(8, 8, 3)).save(folder / "all" / name / "a.png")
    assert inspect(network(), [str(folder / "all")]).samples == 2
    np.save(folder / "all" / "dogs" / "b.npy", np.zeros((1, 3, 8, 8), np.float32))
    with pytest.raises(LsuvError, match=r"all: holds images \(cats/a.png\) and arrays \(dogs/b.npy\); give one"):
        inspect(network(), [str(folder / "all")])


def test_an_open_size_is_given_with_size(folder):
    Image.fromarray(noise(20, 30, 3)).save(folder / "a.png")
    done = lsuv("inspect", _saved(folder, network(shape="N,3,H,W")), "--data", folder)
    assert (done.code, "give it with --size" in done.err) == (2, True)
    assert inspect(network(shape="N,3,H,W"), [str(folder)], size=12).samples == 1


def test_jpeg_and_png_in_the_order_of_their_names(folder):
    for k, name in enumerate(["b.jpg", "a.JPEG", "c.png"]):
        Image.fromarray(np.full((8, 8, 3), 50 * k, np.uint8)).save(folder / name, format="PNG" if k == 2 else "JPEG")
    (folder / "notes.txt").write_text("not an image")
    first = inspect(network(), [str(folder)], limit=1)
    assert first.samples == 1
    assert first.layers[0].mean == pytest.approx(50 / 255, abs=0.01)


def test_from_the_command_line(folder):
    for k in range(4):
        Image.fromarray(noise(40, 60, 3, seed=k)).save(folder / f"{k}.jpg")
    path = _saved(folder, network())
    options = ("--mean", "0.485,0.456,0.406", "--std", "0.229,0.224,0.225", "--size", "10")
    done = lsuv("init", path, "--data", folder, *options, "--json")
    report = json.loads(done.out)
    assert done.code == 0
    assert (report["samples"], report["settings"]["size"]) == (4, 10)
    assert report["settings"]["std"] == [0.229, 0.224, 0.225]


def _saved(folder, proto):
    path = folder.parent / "m.onnx"
    onnx.save(proto, path)
    return path


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("--mean 1,2", "--mean has 2 values, input 'x' has 3 channels"),
        ("--std 0", "--std is 0; it must be above 0"),
        ("--size 0", "--size is 0; it must be above 0"),
        ("--mean zero", "--mean 'zero' is not a list of numbers"),
    ],
)
def test_wrong_options(folder, options, expected):
    Image.fromarray(noise(8, 8, 3)).save(folder / "a.png")
    done = lsuv("inspect", _saved(folder, network()), "--data", folder, *options.split())
    assert done.code == 2
    assert expected in done.err


def test_a_damaged_image_is_named(folder):
    Image.fromarray(noise(8, 8, 3)).save(folder / "a.png")
    (folder / "b.png").write_bytes((folder / "a.png").read_bytes()[:60])
    done = lsuv("inspect", _saved(folder, network()), "--data", folder)
    assert done.code == 2
    assert "b.png" in done.err
    assert done.err.count("\n") == 1


def test_a_model_that_takes_no_images(folder):
    Image.fromarray(noise(8, 8, 3)).save(folder / "a.png")
    proto = model("g (float[N,6] x) => (float[N,3] y) { y = MatMul(x, W) }", W=normal(6, 3))
    done = lsuv("inspect", _saved(folder, proto), "--data", folder)
    assert done.code == 2
    assert "images do not fit input 'x'" in done.err


def test_a_single_image(folder):
    pixels = noise(8, 8, 3)
    Image.fromarray(pixels).save(folder / "a.png")
    expect(measured(network(), folder / "a.png"), pixels / 255.0)


def test_class_subfolders_are_taken_in_turn(folder):
    pixels = {}
    for k, name in enumerate(["cats/1", "cats/2", "dogs/1", ".hidden/1"]):
        (folder / name).parent.mkdir(exist_ok=True)
        pixels[name] = noise(8, 8, 3, seed=k)
        Image.fromarray(pixels[name]).save(folder / f"{name}.png")
    seen = [pixels[name] for name in ("cats/1", "dogs/1", "cats/2")]
    expect(measured(network(), folder), np.stack(seen) / 255.0)
    expect(measured(network(), folder, limit=2), np.stack(seen[:2]) / 255.0)
