"""Images as calibration data: decoded, resized, cropped and normalized as the model's input wants them.

1. An input of shape (N, C, H, W) or (N, H, W, C), with C = 1 or 3, takes images; C = 1 makes them grey.
2. The shorter side is resized to `size` (default: just enough to cover the input), then the middle is cropped to
   H x W. Where the model leaves H and W open, both are `size`.
3. Values are divided by 255, then (x - mean) / std for each channel. An integer input gets the pixel values 0 to 255.
"""

from __future__ import annotations

import itertools
import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from lsuv_cli.data import files
from lsuv_cli.data.files import Array, StoredArray
from lsuv_cli.data.inputs import InputSpec
from lsuv_cli.errors import DataError

SUFFIXES = frozenset({".jpg", ".jpeg", ".png"})


@dataclass(frozen=True)
class ImageOptions:
    """How an image becomes numbers: (pixel / 255 - mean) / std, the shorter side resized to `size`."""

    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)
    size: int | None = None

    def refuse(self, where: str) -> None:
        """Raise if an option was given that data of another kind would silently ignore."""
        for name, value, default in (("mean", self.mean, (0.0,)), ("std", self.std, (1.0,)), ("size", self.size, None)):
            if value != default:
                raise DataError(f"{where}: `{name}` is for images, and this is none; normalize the arrays yourself")


@dataclass(frozen=True)
class ImageLayout:
    """The size, channels and axis order in which the model's input takes an image."""

    channels: int
    height: int
    width: int
    channels_last: bool
    dtype: np.dtype[Any]


def find(path: Path) -> list[Path]:
    """The images at a path: the image itself, or those in a directory, in the order of their names.

    A directory without images and arrays may have them in subdirectories, one for each class: then one image of each
    class follows another, so that the first N are of all classes.
    """
    if not path.is_dir():
        return [path] if path.suffix.lower() in SUFFIXES and path.is_file() else []
    found, arrays = _inside(path), files.inside(path)
    _refuse_both(path, found, arrays)
    if found or arrays or files.test_sets(path):
        return found
    folders = sorted(Path(folder) for folder, *_ in os.walk(path))
    shown = [folder for folder in folders if not any(part.startswith(".") for part in folder.relative_to(path).parts)]
    classes = [_inside(folder) for folder in shown]
    found = [image for turn in itertools.zip_longest(*classes) for image in turn if image is not None]
    _refuse_both(path, found, [array for folder in shown for array in files.inside(folder)])
    return found


def _refuse_both(path: Path, images: list[Path], arrays: list[Path]) -> None:
    if images and arrays:
        image, array = (found[0].relative_to(path) for found in (images, arrays))
        raise DataError(f"{path}: holds images ({image}) and arrays ({array}); give one of them")


def _inside(directory: Path) -> list[Path]:
    entries = (entry for entry in directory.iterdir() if not entry.name.startswith("."))
    return files.by_name(entry for entry in entries if entry.suffix.lower() in SUFFIXES and entry.is_file())


def arrays(found: list[Path], spec: InputSpec, options: ImageOptions) -> list[StoredArray]:
    """Each image as an array that is decoded when it is read."""
    try:
        import PIL  # noqa: F401  only to see whether it is there
    except ImportError:
        raise DataError(f"{found[0]} is an image, and images need Pillow: pip install 'lsuv-cli[images]'") from None
    layout = _layout(spec, options)
    for name, values in (("mean", options.mean), ("std", options.std)):
        if layout.dtype.kind != "f" and values != getattr(ImageOptions(), name):
            wanted = f"input {spec.name!r} {spec.wanted} takes pixels from 0 to 255 as they are"
            raise DataError(f"`{name}` is for inputs of floats, and {wanted}; leave it out")
        if len(values) not in {1, layout.channels}:
            raise DataError(f"`{name}` has {len(values)} values, input {spec.name!r} has {layout.channels} channels")
    if min(options.std) <= 0:
        raise DataError(f"`std` is {min(options.std):g}; it must be above 0")
    one = (layout.height, layout.width, layout.channels)
    shape = (1, *(one if layout.channels_last else (one[2], *one[:2])))
    return [
        StoredArray(str(file), shape, layout.dtype, partial(_decoded, file, layout, options), file=file)
        for file in found
    ]


def _layout(spec: InputSpec, options: ImageOptions) -> ImageLayout:
    shape = spec.shape
    if shape is None or len(shape) != 4:
        raise DataError(f"images do not fit input {spec.name!r} {spec.wanted}; it wants 4 axes, (N, C, H, W)")
    last = shape[1] not in {1, 3} and shape[3] in {1, 3}
    if not last and shape[1] not in {1, 3}:
        raise DataError(f"images do not fit input {spec.name!r} {spec.wanted}; 1 or 3 channels are needed")
    channels, *sides = (shape[3], shape[1], shape[2]) if last else (shape[1], shape[2], shape[3])
    height, width = (side if isinstance(side, int) and side > 0 else options.size for side in sides)
    if height is None or width is None:
        raise DataError(f"input {spec.name!r} {spec.wanted} leaves the size of an image open; give it with `size`")
    if options.size is not None and options.size < min(height, width):
        least = min(height, width)
        raise DataError(
            f"`size` {options.size} is below that of input {spec.name!r} {spec.wanted}; give at least {least}"
        )
    assert isinstance(channels, int)
    return ImageLayout(channels, height, width, last, spec.fed_dtype)


def _decoded(file: Path, layout: ImageLayout, options: ImageOptions) -> Array:
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(file) as opened:
            image = opened.convert("L" if layout.channels == 1 else "RGB")
    except (OSError, ValueError, UnidentifiedImageError, Image.DecompressionBombError) as problem:
        raise DataError(f"{file}: cannot be read as an image ({problem})") from None
    enough = max(layout.height / image.height, layout.width / image.width)
    scale = max(enough, options.size / min(image.size)) if options.size else enough
    sides = (max(layout.width, round(image.width * scale)), max(layout.height, round(image.height * scale)))
    resized = np.asarray(image.resize(sides, Image.Resampling.BILINEAR))
    top, left = (sides[1] - layout.height) // 2, (sides[0] - layout.width) // 2
    cropped = resized[top : top + layout.height, left : left + layout.width].reshape(layout.height, layout.width, -1)
    if layout.dtype.kind == "f":
        mean, std = (np.asarray(values, np.float32) for values in (options.mean, options.std))
        cropped = ((cropped.astype(np.float32) / 255 - mean) / std).astype(layout.dtype)
    else:
        cropped = cropped.astype(layout.dtype)
    return np.ascontiguousarray(cropped if layout.channels_last else cropped.transpose(2, 0, 1))[None]
