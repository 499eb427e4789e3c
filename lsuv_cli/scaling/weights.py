"""Random weights for a layer, before LSUV scales them.

A layer's weight is seen as one (out, fan_in) matrix per group, so every shape here is (groups, out, fan_in).

Orthonormal matrices are Haar distributed: uniform among all matrices with orthonormal rows (columns, where
there are more rows than columns). A Gaussian matrix X of m rows and n columns, m <= n, becomes one so:

1. Tiny, n <= 64: QR of X' in float64. Q' is Haar once the signs make R's diagonal positive.
2. Wide, m <= n/2: Cholesky-QR. With XX' = LL' the rows of inv(L) X are orthonormal, and Haar since L has a
   positive diagonal. This squares X's condition number: harmless, as a Gaussian matrix so wide has about 6.
3. Nearly square: the first h = n/2 rows [A B] as in 2. The others are uniform in the orthogonal complement of
   these. H = I + V inv(A - I) V' with V' = [A - I, B] is orthogonal and its first h columns are [A B]'
   (multiply it out, with AA' + BB' = I), so its other n - h columns are a basis of the complement. In that
   basis the other rows are a Haar matrix G of m - h rows and n - h columns; written out they are [0 G] H'.
   The inverse is harmless too: A, a quarter of a Haar matrix, has no eigenvalue near 1 (they keep within a
   circle of radius 0.7).

Nearly all of the work is float32 matrix products, and max |QQ' - I| stays near 1e-6. numpy's own QR computes
in float64, by Householder's method, and takes several times as long.
"""

import hashlib
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import ThreadpoolController  # type: ignore[import-untyped]

from lsuv_cli.settings import PreInit

_Float = TypeVar("_Float", np.float32, np.float64)

_TINY = 64  # columns up to which float64 QR is as fast as anything
_CHUNK = 1 << 20  # numbers drawn from one random stream
_PIECE = 1 << 13  # numbers that fit the nearest cache, too few for BLAS to use threads
_SMALL = 1 << 31  # multiplications up to which BLAS gets one thread: at most 0.1 s or so


def stream(seed: int, name: str) -> np.random.Generator:
    """The random stream of the weight `name`. It depends on seed and name alone: no layer changes another's."""
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    return np.random.Generator(np.random.PCG64(int.from_bytes(digest)))


def pre_initialize(kind: PreInit, shape: tuple[int, int, int], rng: np.random.Generator) -> NDArray[np.float32]:
    """A new weight of shape (groups, out, fan_in)."""
    _, out, fan_in = shape
    if 0 in shape:
        return np.zeros(shape, np.float32)
    match kind:
        case PreInit.ORTHONORMAL:
            return orthonormal(shape, rng)
        case PreInit.ORTHONORMAL_MSRA:
            # An orthonormal matrix's entries have mean square 1 / max(out, fan_in); MSRA wants 2 / fan_in.
            weight, variance = orthonormal(shape, rng), 2 / fan_in * max(out, fan_in)
        case PreInit.GAUSSIAN:
            return _normal(shape, rng)
        case PreInit.XAVIER:
            weight, variance = _normal(shape, rng), 1 / fan_in
        case PreInit.MSRA:
            weight, variance = _normal(shape, rng), 2 / fan_in
        case PreInit.KEEP:
            raise ValueError("a weight that is kept is not drawn")
    weight *= np.float32(np.sqrt(variance))
    return weight


def orthonormal(shape: tuple[int, int, int], rng: np.random.Generator) -> NDArray[np.float32]:
    """One Haar matrix per group: orthonormal rows if out <= fan_in, else orthonormal columns."""
    groups, out, fan_in = shape
    if 0 in shape:
        return np.zeros(shape, np.float32)
    if out <= fan_in:
        return _orthonormal_rows(groups, out, fan_in, rng)
    return np.ascontiguousarray(_transpose(_orthonormal_rows(groups, fan_in, out, rng)))


def _orthonormal_rows(groups: int, m: int, n: int, rng: np.random.Generator) -> NDArray[np.float32]:
    """Haar matrices of m <= n rows, by the three cases of the module's docstring."""
    if n <= _TINY:
        return _householder_qr(_normal((groups, m, n), rng))
    h = n // 2
    first = _cholesky_qr(_normal((groups, min(m, h), n), rng))
    if m <= h:
        return first
    return _complete(first, _orthonormal_rows(groups, m - h, n - h, rng))


def _householder_qr(x: NDArray[np.float32]) -> NDArray[np.float32]:
    """Q' of x' = QR with R's diagonal positive, for any number of tiny matrices at once."""
    with _bounded_blas(_TINY**3):
        q, r = np.linalg.qr(_transpose(x).astype(np.float64))
    q *= np.copysign(1, np.diagonal(r, axis1=1, axis2=2))[:, None, :]
    return np.ascontiguousarray(_transpose(q), np.float32)


def _cholesky_qr(x: NDArray[np.float32]) -> NDArray[np.float32]:
    """inv(L) x with LL' = xx', in place. By blocks, as numpy has no triangular solve to do it at once."""
    _, m, n = x.shape
    size = max(64, m // 32)
    with _bounded_blas(m * m * n):
        lower = x @ _transpose(x)  # becomes L from left to right; above the diagonal it is not read again
        for start in range(0, m, size):
            done, block, below = slice(start), slice(start, start + size), slice(start + size, m)
            if start:
                lower[:, start:, block] -= lower[:, start:, done] @ _transpose(lower[:, block, done])
                x[:, block] -= lower[:, block, done] @ x[:, done]
            with _bounded_blas(size**3):
                inverse = np.linalg.inv(np.linalg.cholesky(lower[:, block, block]))
            lower[:, below, block] = lower[:, below, block] @ _transpose(inverse)
            x[:, block] = inverse @ x[:, block]
    return x


def _complete(first: NDArray[np.float32], g: NDArray[np.float32]) -> NDArray[np.float32]:
    """The rows of `first`, and below them those of `g` put into the orthogonal complement of `first`."""
    _, h, n = first.shape
    with _bounded_blas(h * h * n):
        v = first.copy()
        v[:, :, :h] -= np.eye(h, dtype=np.float32)
        others = _transpose(np.linalg.solve(v[:, :, :h], v[:, :, h:] @ _transpose(g))) @ v
        others[:, :, h:] += g
        return np.concatenate([first, others], axis=1)


def _normal(shape: tuple[int, int, int], rng: np.random.Generator) -> NDArray[np.float32]:
    """Standard normal numbers; many of them in chunks with a stream each, whatever the number of threads."""
    numbers = np.empty(shape, np.float32)
    flat = numbers.reshape(-1)
    if flat.size <= _CHUNK:
        rng.standard_normal(dtype=np.float32, out=flat)
        return numbers
    chunks = [flat[start : start + _CHUNK] for start in range(0, flat.size, _CHUNK)]

    def fill(chunk_rng: np.random.Generator, chunk: NDArray[np.float32]) -> None:
        chunk_rng.standard_normal(dtype=np.float32, out=chunk)

    with ThreadPoolExecutor(_threads()) as pool:  # numpy lets go of the GIL while it draws
        list(pool.map(fill, rng.spawn(len(chunks)), chunks))
    return numbers


def mean_and_square(array: NDArray[Any]) -> tuple[float, float]:
    """The means of a weight's entries and of their squares, in float64, without a copy of it."""
    flat = array.reshape(-1)
    total = square = 0.0
    with np.errstate(over="ignore", invalid="ignore"):
        for start in range(0, flat.size, _PIECE):
            piece = flat[start : start + _PIECE].astype(np.float64)
            total += float(piece.sum())
            square += float(piece @ piece)
    return total / max(flat.size, 1), square / max(flat.size, 1)


def _transpose(x: NDArray[_Float]) -> NDArray[_Float]:
    return x.swapaxes(1, 2)


@cache
def _blas() -> ThreadpoolController:
    return ThreadpoolController().select(user_api="blas")


def _threads() -> int:
    """As many threads as BLAS uses, so that one setting bounds both."""
    return max((library["num_threads"] for library in _blas().info()), default=os.cpu_count() or 1)


@contextmanager
def bounded_threads(count: int | None) -> Iterator[None]:
    """Draw weights with at most so many threads; with as many as BLAS has, if not given."""
    if count is None:
        yield
        return
    with _blas().limit(limits=min(count, _threads())):
        yield


def bound_threads(count: int) -> None:
    """Draw all further weights of this process with so many threads."""
    _blas().limit(limits=count)


@contextmanager
def _bounded_blas(multiplications: int) -> Iterator[None]:
    """Keep BLAS to one thread where the work is small.

    OpenBLAS's threads wait for one another at every call. While another process has the cores, that is a
    time slice each: 40 ms for a product that takes 0.4 ms alone.
    """
    if multiplications > _SMALL:
        yield
        return
    with _blas().limit(limits=1):
        yield
