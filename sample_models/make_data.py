"""Make the calibration data of the kept sample models from photographs that scikit-image carries.

    pip install scikit-image
    python sample_models/make_data.py

Each sample is a square cut out of a photograph at a random place and scale, averaged down to the size of
the network's input; each channel of the whole set is then brought to mean 0 and standard deviation 1. Only
images in the public domain or under CC0 are used (see README.md), and only PNG files: all readers decode
those alike.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import skimage.data

HERE = Path(__file__).resolve().parent
COLOUR = ("astronaut", "chelsea", "coffee")
GREY = ("camera", "text", "gravel", "brick")

Images = npt.NDArray[np.float64]


def photograph(name: str) -> Images:
    """One of scikit-image's photographs as (height, width, channels)."""
    image = np.asarray(getattr(skimage.data, name)(), np.float64)
    return image if image.ndim == 3 else image[:, :, np.newaxis]


def cut(image: Images, size: int, random: np.random.RandomState) -> Images:
    """A square somewhere in the image, as (channels, size, size).

    The square's side is a multiple of the size, so that averaging whole blocks of pixels is all the resizing
    it needs: no interpolation, no choice of filter. It is at most half of the image's, lest cuts look alike.
    """
    height, width, channels = image.shape
    factor = random.randint(1, min(height, width) // (2 * size) + 1)
    side = factor * size
    top, left = random.randint(0, height - side + 1), random.randint(0, width - side + 1)
    square = image[top : top + side, left : left + side]
    blocks = square.reshape(size, factor, size, factor, channels)
    return np.asarray(blocks.mean(axis=(1, 3)).transpose(2, 0, 1))


def samples(names: tuple[str, ...], count: int, size: int) -> npt.NDArray[np.float32]:
    """`count` cuts from the photographs in turn, normalized per channel."""
    random = np.random.RandomState(0)
    photographs = [photograph(name) for name in names]
    cuts = np.stack([cut(photographs[i % len(names)], size, random) for i in range(count)])
    axes = (0, 2, 3)
    normalized = (cuts - cuts.mean(axes, keepdims=True)) / cuts.std(axes, keepdims=True)
    return np.asarray(normalized, np.float32)


def main() -> None:
    for file, data in (
        ("fitnet1_relu.npy", samples(COLOUR, count=32, size=32)),
        ("fitnet_mnist_maxout.npy", samples(GREY, count=128, size=28)),
    ):
        np.save(HERE / file, data)
        print(f"{file}: {data.shape} {data.dtype}")


if __name__ == "__main__":
    main()
