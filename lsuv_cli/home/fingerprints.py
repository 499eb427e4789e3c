"""Fingerprints of tensors that forget the order of the elements: H(A) = sum of mix(bits of a) over all a, modulo 2^64.

A tensor keeps its fingerprint when its axes are permuted or its elements reordered, and the fingerprint of a
concatenation is the sum of its parts' fingerprints. So a slice of a packed tensor is found among running sums, without
a sort.
"""

from __future__ import annotations

import hashlib
import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Sums = NDArray[np.uint64]

CHUNK = 1 << 20  # elements mixed at a time: each takes eight bytes meanwhile
UNSIGNED = {2: np.uint16, 4: np.uint32, 8: np.uint64}


def total(array: Array) -> int:
    """The fingerprint of a whole tensor of floating-point numbers."""
    flat = np.ascontiguousarray(array).reshape(-1)
    with np.errstate(over="ignore"):
        parts = [_mixed(flat[k : k + CHUNK]).sum(dtype=np.uint64) for k in range(0, flat.size, CHUNK)]
        return int(np.array(parts, np.uint64).sum(dtype=np.uint64))


def slabs(array: Array, axes: tuple[int, int]) -> Sums:
    """The fingerprint at each place along some neighbouring axes (from, to), all other axes summed over."""
    before, count, behind = split(array.shape, axes)
    cube = np.ascontiguousarray(array).reshape(before, count, behind)
    sums = np.zeros(count, np.uint64)
    planes = max(1, CHUNK // max(1, count * behind))
    step = max(1, CHUNK // max(1, behind))
    with np.errstate(over="ignore"):
        for p in range(0, before, planes):
            for k in range(0, count, step):
                part = _mixed(cube[p : p + planes, k : k + step])
                sums[k : k + step] += part.sum(axis=2, dtype=np.uint64).sum(axis=0, dtype=np.uint64)
    return sums


def windows(sums: Sums, width: int) -> Sums:
    """The fingerprint of every run of `width` places."""
    with np.errstate(over="ignore"):
        running = np.concatenate([np.zeros(1, np.uint64), np.cumsum(sums, dtype=np.uint64)])
        found: Sums = running[width:] - running[:-width]
    return found


def split(shape: tuple[int, ...], axes: tuple[int, int]) -> tuple[int, int, int]:
    """The number of places along the axes before `axes` (from, to), along `axes`, and along the axes behind."""
    first, last = axes
    return math.prod(shape[:first]), math.prod(shape[first:last]), math.prod(shape[last:])


def digest(array: Array) -> bytes:
    """A hash of a tensor's type, its shape and its elements in order."""
    found = hashlib.blake2b(f"{array.dtype} {array.shape}".encode(), digest_size=16)
    found.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return found.digest()


def _mixed(array: Array) -> Sums:
    """The bits of each element, scattered (the finalizer of splitmix64); -0 counts as 0."""
    plain = array + array.dtype.type(0)
    bits: Sums = plain.view(UNSIGNED[array.dtype.itemsize]).astype(np.uint64)
    bits += np.uint64(0x9E3779B97F4A7C15)
    bits ^= bits >> np.uint64(30)
    bits *= np.uint64(0xBF58476D1CE4E5B9)
    bits ^= bits >> np.uint64(27)
    bits *= np.uint64(0x94D049BB133111EB)
    bits ^= bits >> np.uint64(31)
    return bits
