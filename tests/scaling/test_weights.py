"""Random weights against linear algebra in float64 and the known moments of their distributions."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from threadpoolctl import threadpool_info, threadpool_limits  # type: ignore[import-untyped]

from lsuv_cli.scaling import weights
from lsuv_cli.scaling.weights import orthonormal, pre_initialize, stream
from lsuv_cli.settings import PreInit

DRAWN = [kind for kind in PreInit if kind is not PreInit.KEEP]


def distance_from_orthonormal(weight: NDArray[np.float32]) -> float:
    """The largest entry of |WW' - I| (|W'W - I| if W is tall) over all groups, in float64."""
    w = weight.astype(np.float64)
    if w.shape[1] > w.shape[2]:
        w = w.swapaxes(1, 2)
    return float(np.abs(w @ w.swapaxes(1, 2) - np.eye(w.shape[1])).max())


# Orthonormal: the property itself


@pytest.mark.parametrize(
    "shape",
    [
        (1, 5, 5),
        (512, 1, 9),
        (512, 9, 1),
        (32, 4, 36),
        (1, 1, 3000),
        (1, 3000, 1),
        (1, 64, 64),
        (1, 65, 65),
        (1, 32, 65),
        (1, 33, 65),
        (1, 64, 65),
        (1, 128, 1152),
        (1, 1152, 128),
        (1, 500, 128),
        (2, 384, 384),
        (2, 300, 400),
        (4, 256, 130),
        (1, 1024, 1024),
        (1, 700, 1000),
    ],
    ids=str,
)
def test_rows_or_columns_are_orthonormal(shape: tuple[int, int, int]) -> None:
    weight = orthonormal(shape, stream(0, "w"))
    assert weight.shape == shape
    assert distance_from_orthonormal(weight) < 3e-6


@given(groups=st.integers(1, 4), out=st.integers(1, 150), fan_in=st.integers(1, 150), seed=st.integers(0, 99))
@settings(max_examples=150, deadline=None)
def test_every_small_shape_is_orthonormal(groups: int, out: int, fan_in: int, seed: int) -> None:
    weight = orthonormal((groups, out, fan_in), stream(seed, "w"))
    assert weight.shape == (groups, out, fan_in)
    assert distance_from_orthonormal(weight) < 3e-6


def test_a_matrix_of_several_chunks_and_blas_threads_is_orthonormal() -> None:
    assert distance_from_orthonormal(orthonormal((1, 2100, 2300), stream(0, "w"))) < 3e-6


def test_thousands_of_square_groups_are_all_orthonormal() -> None:
    # Of so many Gaussian matrices some are nearly singular, which must not show.
    assert distance_from_orthonormal(orthonormal((20000, 3, 3), stream(0, "w"))) < 1e-6
    assert distance_from_orthonormal(orthonormal((2000, 66, 66), stream(0, "w"))) < 5e-6


# Orthonormal: uniform over all such matrices


def assert_moment(numbers: NDArray[np.float32], power: int, expected: float) -> None:
    """E[x^power] is as expected, to within five standard errors of so many independent numbers."""
    powers = numbers.astype(np.float64) ** power
    standard_error = powers.std() / np.sqrt(powers.size)
    assert abs(powers.mean() - expected) <= 5 * standard_error


def assert_entry_of_haar(entry: NDArray[np.float32], n: int) -> None:
    """`entry` is one coordinate of uniform unit vectors in n dimensions."""
    assert_moment(entry, 1, 0)
    assert_moment(entry, 2, 1 / n)
    assert_moment(entry, 4, 3 / (n * (n + 2)))


@pytest.mark.parametrize("shape", [(2, 2), (3, 3), (5, 8), (8, 5), (20, 70), (70, 70), (60, 100), (100, 80)], ids=str)
def test_entries_have_the_moments_of_haar(shape: tuple[int, int]) -> None:
    q = orthonormal((3000, *shape), stream(3, "w"))
    for corner in [q[:, 0, 0], q[:, 0, -1], q[:, -1, 0], q[:, -1, -1]]:
        assert_entry_of_haar(corner, max(shape))


@pytest.mark.parametrize("n", [3, 70])
def test_rotating_both_sides_leaves_the_distribution_alone(n: int) -> None:
    # Haar is what stays the same under Q -> UQV for fixed orthogonal U and V.
    rng = np.random.default_rng(0)
    u, v = np.linalg.qr(rng.standard_normal((2, n, n)))[0]
    rotated = u @ orthonormal((3000, n, n), stream(4, "w")) @ v
    assert_entry_of_haar(rotated[:, -1, -1], n)


@pytest.mark.parametrize("n", [1, 2, 3, 65, 70])
def test_trace_and_determinant_are_those_of_haar(n: int) -> None:
    # E[tr Q] = 0 and E[(tr Q)^2] = 1, whatever n; det is +1 or -1 equally often.
    q = orthonormal((3000, n, n), stream(5, "w")).astype(np.float64)
    trace = np.trace(q, axis1=1, axis2=2)
    assert_moment(trace, 1, 0)
    assert_moment(trace, 2, 1)
    assert 0.45 < (np.linalg.det(q) > 0).mean() < 0.55


def test_a_rotation_of_the_plane_has_a_uniform_angle() -> None:
    q = orthonormal((8000, 2, 2), stream(6, "w"))
    counts, _ = np.histogram(np.arctan2(q[:, 0, 1], q[:, 0, 0]), bins=16, range=(-np.pi, np.pi))
    chi_squared = ((counts - 500) ** 2 / 500).sum()
    assert chi_squared < 37.7  # of 15 degrees of freedom; exceeded once in a thousand


# The other kinds


@pytest.mark.parametrize(
    ("kind", "shape", "variance"),
    [
        (PreInit.GAUSSIAN, (2, 200, 300), 1),
        (PreInit.XAVIER, (2, 200, 300), 1 / 300),
        (PreInit.XAVIER, (2, 300, 200), 1 / 200),
        (PreInit.MSRA, (2, 200, 300), 2 / 300),
        (PreInit.MSRA, (2, 300, 200), 2 / 200),
        (PreInit.GAUSSIAN, (1, 1100, 2000), 1),
    ],
)
def test_gaussian_kinds_have_their_variance(kind: PreInit, shape: tuple[int, int, int], variance: float) -> None:
    weight = pre_initialize(kind, shape, stream(0, "w"))
    assert_moment(weight, 1, 0)
    assert_moment(weight, 2, variance)
    assert_moment(weight, 4, 3 * variance**2)


@pytest.mark.parametrize("shape", [(1, 20, 50), (1, 50, 20), (3, 40, 40), (512, 1, 9)], ids=str)
def test_orthonormal_msra_is_orthonormal_times_a_number(shape: tuple[int, int, int]) -> None:
    weight = pre_initialize(PreInit.ORTHONORMAL_MSRA, shape, stream(0, "w"))
    plain = orthonormal(shape, stream(0, "w"))
    assert np.mean(weight.astype(np.float64) ** 2) == pytest.approx(2 / shape[2], rel=1e-5)
    np.testing.assert_allclose(weight / plain, (weight / plain).flat[0], rtol=1e-5)
    assert (weight / plain).flat[0] > 0


def test_orthonormal_kind_is_orthonormal() -> None:
    weight = pre_initialize(PreInit.ORTHONORMAL, (2, 30, 40), stream(0, "w"))
    assert distance_from_orthonormal(weight) < 1e-6


def test_one_by_one_is_a_random_sign() -> None:
    assert set(orthonormal((50, 1, 1), stream(0, "w")).ravel()) == {-1.0, 1.0}


@pytest.mark.parametrize("kind", DRAWN)
@pytest.mark.parametrize("shape", [(0, 3, 4), (2, 0, 4), (2, 3, 0), (1, 0, 0)], ids=str)
def test_empty_weights_stay_empty(kind: PreInit, shape: tuple[int, int, int]) -> None:
    weight = pre_initialize(kind, shape, stream(0, "w"))
    assert weight.shape == shape
    assert weight.dtype == np.float32


@pytest.mark.parametrize("kind", DRAWN)
@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 5, 7), (3, 7, 5), (1, 130, 70), (1, 100, 100)], ids=str)
def test_weights_are_contiguous_float32(kind: PreInit, shape: tuple[int, int, int]) -> None:
    weight = pre_initialize(kind, shape, stream(0, "w"))
    assert weight.shape == shape
    assert weight.dtype == np.float32
    assert weight.flags.c_contiguous
    assert weight.flags.writeable
    assert np.isfinite(weight).all()


def test_a_kept_weight_is_not_drawn() -> None:
    with pytest.raises(ValueError, match="kept"):
        pre_initialize(PreInit.KEEP, (1, 2, 3), stream(0, "w"))


@pytest.mark.parametrize("shape", [(3, 5, 7), (3, 100, 100), (3, 10, 100)], ids=str)
def test_groups_differ_from_each_other(shape: tuple[int, int, int]) -> None:
    a, b, c = orthonormal(shape, stream(0, "w"))
    for x, y in [(a, b), (a, c), (b, c)]:
        assert np.abs(x - y).max() > 0.01


# Streams


@pytest.mark.parametrize("kind", DRAWN)
def test_same_seed_and_name_give_the_same_bytes(kind: PreInit) -> None:
    shape = (1, 90, 100)
    assert (pre_initialize(kind, shape, stream(7, "w")) == pre_initialize(kind, shape, stream(7, "w"))).all()


@pytest.mark.parametrize("kind", DRAWN)
def test_another_seed_or_name_gives_other_weights(kind: PreInit) -> None:
    weight, *others = (pre_initialize(kind, (1, 9, 100), stream(*key)) for key in [(7, "w"), (8, "w"), (7, "v")])
    for other in others:
        assert not np.isclose(weight, other, rtol=1e-3).all(axis=-1).any()


def test_every_seed_and_name_has_its_own_stream() -> None:
    names = ["", "w", "W", "conv1.weight", "conv2.weight", "/1", "1", "1 1", "ü", "名前"]
    first = {stream(seed, name).random() for seed in [*range(20), -1, 2**63, 2**200] for name in names}
    assert len(first) == 23 * len(names)


def test_a_stream_does_not_depend_on_the_streams_before_it() -> None:
    names = ["a", "b", "c"]
    forward = {name: pre_initialize(PreInit.ORTHONORMAL, (1, 4, 6), stream(1, name)) for name in names}
    backward = {name: pre_initialize(PreInit.ORTHONORMAL, (1, 4, 6), stream(1, name)) for name in names[::-1]}
    assert all((forward[name] == backward[name]).all() for name in names)


def test_a_stream_is_the_same_in_every_process_and_release() -> None:
    # Python's own hash() of a string would not be. PCG64 seeded with sha256("3 conv1.weight") gives this.
    assert stream(3, "conv1.weight").bit_generator.random_raw() == 9820902351907340033


def test_chunks_of_a_large_weight_differ_and_do_not_depend_on_the_number_of_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shape = (3, 1024, 1024)
    drawn = []
    for threads in [1, 2, 5]:
        monkeypatch.setattr(weights, "_threads", lambda threads=threads: threads)
        drawn.append(pre_initialize(PreInit.GAUSSIAN, shape, stream(0, "w")))
    assert (drawn[0] == drawn[1]).all()
    assert (drawn[0] == drawn[2]).all()
    assert np.abs(np.corrcoef(drawn[0].reshape(3, -1)) - np.eye(3)).max() < 0.01


def test_small_matrices_leave_blas_one_thread_and_then_give_the_others_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def blas_threads() -> list[int]:
        return [library["num_threads"] for library in threadpool_info() if library["user_api"] == "blas"]

    cholesky, seen = np.linalg.cholesky, []

    def watched(a: NDArray[np.float32]) -> NDArray[np.float32]:
        seen.append(max(blas_threads(), default=1))
        return cholesky(a)

    monkeypatch.setattr(np.linalg, "cholesky", watched)
    with threadpool_limits(2, user_api="blas"):
        before = blas_threads()
        orthonormal((1, 100, 100), stream(0, "w"))
        assert blas_threads() == before
    assert set(seen) == {1}


@pytest.mark.parametrize("size", [0, 1, 7, 8191, 8192, 8193, 50_000])
def test_moments_of_a_weight_count_every_entry_once(size: int) -> None:
    # No two entries have the same fraction of the sum, so that a lost or doubled one shows.
    array = np.random.default_rng(size).standard_normal(size).astype(np.float32) + np.arange(size, dtype=np.float32)
    wide = array.astype(np.float64)
    expected = (wide.mean(), (wide**2).mean()) if size else (0.0, 0.0)
    assert weights.mean_and_square(array) == pytest.approx(expected, rel=1e-12)
    if size == 50_000:
        assert weights.mean_and_square(array.reshape(5, 100, 100)) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("size", [1000, 1100])
def test_what_a_seed_gives_is_settled(size: int) -> None:
    # Up to 2**20 numbers come from the weight's own stream, more of them from streams spawned for each 2**20.
    rng, count = stream(5, "w"), size * 1000
    drawn = [rng] if count <= 2**20 else rng.spawn(-(-count // 2**20))
    pieces = [piece.standard_normal(min(2**20, count - 2**20 * k), np.float32) for k, piece in enumerate(drawn)]
    found = pre_initialize(PreInit.GAUSSIAN, (1, size, 1000), stream(5, "w"))
    assert np.array_equal(found.ravel(), np.concatenate(pieces))


@pytest.mark.parametrize("shape", [(1, 200, 420), (1, 300, 420), (1, 420, 300), (2, 130, 150), (1, 100, 64), (3, 7, 9)])
def test_matrices_of_several_blocks_are_orthonormal(shape: tuple[int, int, int]) -> None:
    """The factorization goes by blocks of 64 rows, in single precision."""
    for matrix in orthonormal(shape, np.random.default_rng(0)).astype(np.float64):
        rows = matrix if shape[1] <= shape[2] else matrix.T
        np.testing.assert_allclose(rows @ rows.T, np.eye(len(rows)), atol=2e-5)
