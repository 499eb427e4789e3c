"""The paper's tables as benchmarks/paper.py has them, and the part of them that has a closed form."""

from __future__ import annotations

import importlib.util
import json
import math
import statistics
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

import lsuv_cli
from lsuv_cli import PreInit

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"


def load(name: str) -> ModuleType:
    """A script of benchmarks, which is a directory of scripts and not a package."""
    spec = importlib.util.spec_from_file_location(f"benchmarks_{name}", BENCHMARKS / f"{name}.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their own module up
    sys.path.insert(0, str(BENCHMARKS))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(BENCHMARKS))
    return module


paper = load("paper")
published = load("published")
runs = load("runs")
tables = load("paper_tables")
train = load("train")
train_tables = load("train_tables")
pipeline = sys.modules["pipeline"]
CLOSED = ("orthonormal", "msra", "xavier")


def test_the_scripts_import_without_torch_and_matplotlib() -> None:
    code = "import sys; sys.modules |= dict.fromkeys(['torch', 'matplotlib', 'onnx2torch']); import paper, train"
    subprocess.run([sys.executable, "-c", code], cwd=BENCHMARKS, check=True)


def test_the_shapes_are_those_of_the_sample_model() -> None:
    graph = paper.network("relu").graph
    sizes = {t.name: tuple(t.dims) for t in graph.initializer}
    assert {
        k: (sizes[f"{k}.weight"][0], math.prod(sizes[f"{k}.weight"][1:])) for k in published.LAYERS
    } == published.SHAPES


@pytest.mark.parametrize("init", CLOSED)
def test_the_papers_deviations_have_a_closed_form(init: str) -> None:
    away = {
        (init, layer)
        for layer in published.LAYERS
        if abs(published.STD[init][layer] / published.closed_form(init, layer) - 1) > 0.03
    }
    assert away == {cell for cell in published.MARKED if cell[0] == init}


@pytest.mark.parametrize("init", CLOSED)
def test_our_weights_have_the_closed_forms_deviation(init: str) -> None:
    # The standard deviation of conv11's 864 Gaussian numbers is off by 2.4 % by chance: take several draws.
    model = paper.network("relu")
    draws = [
        {
            x.name: x.weight_std
            for x in lsuv_cli.initialize(model, pre_init=PreInit(init), rescale=False, seed=seed).report.layers
        }
        for seed in range(1 if init == "orthonormal" else 8)
    ]
    for layer in published.LAYERS:
        mean = math.sqrt(statistics.fmean(found[layer] ** 2 for found in draws))
        assert mean == pytest.approx(published.closed_form(init, layer), rel=0.02), layer


def test_the_papers_lsuv_weights_are_sqrt_2_times_orthonormal_ones_behind_a_relu() -> None:
    # A ReLU halves the second moment, so the weights behind it must make up for that.
    paper_ratio = [
        published.STD["lsuv"][layer] / published.STD["orthonormal"][layer] for layer in ("conv32", "conv33", "conv34")
    ]
    assert statistics.fmean(paper_ratio) == pytest.approx(math.sqrt(2), rel=0.05)


@pytest.mark.parametrize("init", published.RATIO)
def test_the_papers_gradient_ratios_follow_from_its_columns(init: str) -> None:
    column = published.GRADIENTS[init]
    assert column["ip1"] / column["conv11"] == pytest.approx(published.RATIO[init], rel=0.05)


def test_the_check_of_the_deviations_sees_what_is_off() -> None:
    found = {init: {"mean": {k: published.closed_form(init, k) for k in published.LAYERS}} for init in CLOSED}
    assert tables.check_std(found) == []
    found["msra"]["mean"]["conv22"] *= 1.05
    assert [text.split(":")[0] for text in tables.check_std(found)] == ["msra conv22", "msra conv22"]


@pytest.mark.torch
def test_the_faster_max_has_the_values_and_gradients_of_onnx2torchs(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    if importlib.util.find_spec("onnx2torch") is None:  # importing it may need pipeline's help first
        pytest.skip("onnx2torch is not installed")
    path = pipeline.build(tmp_path / "net.onnx", "fitnet_mnist", "maxout")
    faster = pipeline.to_torch(path)
    from onnx2torch import convert

    plain = convert(str(path))
    x = torch.randn(4, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    for module in (faster, plain):
        module(x).square().sum().backward()
    assert {type(part).__name__ for part in plain.children()} ^ {type(part).__name__ for part in faster.children()}
    assert torch.equal(faster(x), plain(x))
    for ours, theirs in zip(faster.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(ours.grad, theirs.grad, rtol=1e-5, atol=0)


def test_the_grid_has_every_cell_of_the_papers_two_tables() -> None:
    grid = runs.grid_runs()
    assert len(grid) == len({run.name for run in grid}) == 2 * 4 * 4
    for run in grid:
        assert run.activation in published.GRID[run.network][run.init]
    marks = [cell for table in published.GRID.values() for row in table.values() for cell in row.values()]
    assert marks.count(None) == 1 + 6


def test_the_learning_rate_falls_where_the_run_says() -> None:
    run = runs.Run("x", "fitnet_mnist", "maxout", "lsuv", iterations=100, rate=0.01, drops=(0.3, 0.6, 0.9))
    assert [run.rate_at(k) for k in (0, 29, 30, 60, 99)] == pytest.approx([1e-2, 1e-2, 1e-3, 1e-4, 1e-5])


def test_the_authors_runs_have_the_settings_of_their_solver_files() -> None:
    found = runs.authors_runs(3, iterations=50000, batch_size=64)
    cells = {(run.init, run.loss) for run in found[:4]}
    assert cells == set(published.MNIST)
    assert [run.seed for run in found] == [0] * 4 + [1] * 4 + [2] * 4  # every cell has a seed before one has two
    assert len({run.name for run in found}) == 12
    for run in found:
        # base_lr 0.002, lr_policy step, stepsize 15000, gamma 0.1, max_iter 50000
        rates = [run.rate_at(k) for k in (0, 14999, 15000, 29999, 30000, 44999, 45000, 49999)]
        assert rates == pytest.approx([2e-3, 2e-3, 2e-4, 2e-4, 2e-5, 2e-5, 2e-6, 2e-6])
        assert (run.optimizer, run.rms_decay, run.decay, run.decay_biases) == ("rmsprop", 0.99, 5e-4, True)
        assert (run.dropout, run.dropout_before, run.images, run.augment) == (0.3, ("ip1",), "divided", False)


def test_another_setting_than_the_authors_is_part_of_the_name() -> None:
    (run, *_) = runs.authors_runs(1, rate=0.001, images="normalized")
    assert run.name == "authors-lsuv-softmax-s0-rate-0.001-images-normalized"


def test_the_authors_images_are_pixels_times_0_004() -> None:
    pixels = np.arange(256, dtype=np.uint8).reshape(1, 1, 16, 16)
    images = pipeline.Images(pixels, np.zeros(1, np.int64), pipeline.DIVIDED)
    np.testing.assert_allclose(images.normalized(slice(None)), pixels * 0.004, rtol=1e-6)


def test_contrast_normalized_images_have_mean_0_and_deviation_1_each() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (3, 3, 8, 8), np.uint8)
    pixels[1] //= 4  # a dark image of little contrast
    found = pipeline.contrast_normalized(pixels)
    flat = pixels.reshape(3, -1).astype(np.float64)
    wanted = (flat - flat.mean(1, keepdims=True)) / flat.std(1, keepdims=True)
    np.testing.assert_allclose(found.reshape(3, -1), wanted, atol=1e-5)


def test_a_cut_from_a_border_is_the_image_shifted() -> None:
    images = np.random.default_rng(0).uniform(1, 2, (200, 1, 6, 6)).astype(np.float32)
    shifts = set()
    for whole, cut in zip(images, pipeline.cropped(images, 2, seed=0), strict=True):
        (found,) = [
            (i, j)
            for i in range(-2, 3)
            for j in range(-2, 3)
            if np.array_equal(cut[0], np.pad(whole[0], 2)[2 + i : 8 + i, 2 + j : 8 + j])
        ]
        shifts.add(found)
    assert len(shifts) == 25


def test_runs_saved_before_a_setting_was_there_are_still_the_same_runs() -> None:
    for run in runs.mnist_runs(2, iterations=14055, batch_size=64):
        saved = json.loads((BENCHMARKS / "results" / "train" / f"{run.name}.json").read_text())["run"]
        assert "optimizer" not in saved
        assert run.same_start(saved)
        assert runs.Run(**{**saved, "optimizer": "rmsprop"}).changed(saved) == {"optimizer"}


@pytest.mark.torch
def test_rmsprop_is_caffes() -> None:
    torch = pytest.importorskip("torch")
    (run, *_) = runs.authors_runs(1)
    random = np.random.default_rng(0)
    weight = random.standard_normal((3, 4))
    module = torch.nn.Linear(4, 3, bias=False).double()
    module.weight.data = torch.from_numpy(weight.copy())
    optimizer = train.optimizer_of(run, module)
    mean_square = np.zeros_like(weight)
    for gradient in random.standard_normal((5, 3, 4)) * 1e-3:
        module.weight.grad = torch.from_numpy(gradient.copy())
        optimizer.step()
        with_decay = gradient + 5e-4 * weight
        mean_square = 0.99 * mean_square + 0.01 * with_decay**2
        weight -= 0.002 * with_decay / (np.sqrt(mean_square) + 1e-8)
        np.testing.assert_allclose(module.weight.detach().numpy(), weight, rtol=1e-12)


@pytest.mark.torch
def test_an_interrupted_run_goes_on_bit_for_bit(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    if importlib.util.find_spec("onnx2torch") is None:
        pytest.skip("onnx2torch is not installed")
    random = np.random.default_rng(0)
    pixels, labels = random.integers(0, 256, (300, 1, 28, 28), np.uint8), random.integers(0, 10, 300)
    data = train.Data(*[pipeline.Images(pixels, labels, pipeline.DIVIDED)] * 2)
    run = runs.authors_runs(1, iterations=10, batch_size=32)[2]  # LSUV with hinge: drops after 3, 6 and 9

    class At:
        """An interruption after a number of iterations."""

        def __init__(self, last: int) -> None:
            self.last, self.wanted = last, False

        def tell(self, state: object) -> None:
            self.wanted = vars(state)["iteration"] == self.last

    def trained(name: str, *ends: int) -> dict[str, object]:
        for end in ends:
            trainer, at = train.Trainer(run, data, tmp_path / name, tmp_path / name, 1), At(end)
            try:
                trainer.train(at, at.tell)
            except train.Interrupted:
                assert trainer.state.iteration == end
        assert json.loads(trainer.file.read_text())["iteration"] == 10
        return dict(torch.load(trainer.checkpoint, weights_only=False)["module"])

    whole, parts = trained("whole", 0), trained("parts", 4, 7, 0)
    assert whole.keys() == parts.keys()
    assert all(torch.equal(whole[k], parts[k]) for k in whole)


def test_a_run_has_converged_when_its_recent_loss_is_below_the_threshold() -> None:
    run = runs.Run("x", "fitnet4", "relu", "lsuv", log_every=10)
    learning = runs.State(losses=[2.3, 2.3, 2.2, 2.1, 1.9, 1.8, 1.7, 1.6])
    assert learning.outcome(run) == "converged"
    assert learning.converged_at(run) == 50  # (2.3 + 2.3 + 2.2 + 2.1 + 1.9) / 5 = 2.16
    assert runs.State(losses=[2.3, 2.3, 2.2, 2.2, 2.1]).converged_at(run) is None  # 2.22
    assert runs.State(losses=[2.3] * 8).outcome(run) == "n/c"
    assert runs.State(losses=[2.3, None], diverged_at=12).outcome(run) == "diverged"


@pytest.mark.parametrize("folder", train_tables.SHOWN)
def test_the_readme_has_between_the_marks_what_the_json_gives(folder: str) -> None:
    readme, results = (BENCHMARKS / "README.md").read_text(), BENCHMARKS / "results" / folder
    part = train_tables.part_of_readme(folder, train_tables.text_of(results)) if results.is_dir() else ""
    assert train_tables.with_part(readme, folder, part) == readme


def test_a_part_of_the_readme_replaces_the_one_before_it() -> None:
    readme = "a\n<!-- train_authors -->\nold\n<!-- end of train_authors -->\nb\n"
    part = train_tables.part_of_readme("train_authors", "### title\n\n| x |\n| --- |\n| 1 |\n\nhours\n")
    found = train_tables.with_part(readme, "train_authors", part)
    assert found.startswith("a\n<!-- train_authors -->\n\n")
    assert found.endswith("<!-- end of train_authors -->\nb\n")
    assert "| x |\n| --- |\n| 1 |\n" in found
    assert "old" not in found
    assert "hours" not in found
    assert train_tables.with_part(found, "train_authors", part) == found
    with pytest.raises(SystemExit, match="has no lines"):
        train_tables.with_part("a\n<!-- train_authors -->\nb\n", "train_authors", part)


@pytest.mark.parametrize("name", paper.SECTIONS)
def test_the_papers_tables_are_those_of_the_json(name: str) -> None:
    file = BENCHMARKS / "results" / f"paper_{name}.json"
    assert paper.SECTIONS[name].table(json.loads(file.read_text())["found"]) == file.with_suffix(".md").read_text()


@pytest.mark.parametrize("file", sorted(BENCHMARKS.glob("results/*/tables.md")), ids=lambda path: path.parent.stem)
def test_the_tables_of_the_runs_are_those_of_the_json(file: Path) -> None:
    assert train_tables.text_of(file.parent) == file.read_text()


def test_a_table_of_mnist_tells_each_seed_and_the_mean_of_what_is_finished() -> None:
    def found(seed: int, accuracy: float, iteration: int = 10, diverged: int | None = None) -> dict[str, object]:
        tests = [{"accuracy": 0.5}, {"accuracy": accuracy}]
        run = {"seed": seed, "iterations": 10}
        return {"run": run, "iteration": iteration, "tests": tests, "cpu_seconds": 60.0, "diverged_at": diverged}

    saved = {
        "authors-lsuv-softmax-s0": found(0, 0.9950),
        "authors-lsuv-softmax-s1": found(1, 0.9941),
        "authors-lsuv-softmax-s2": found(2, 0.9, 9),
        "authors-lsuv-hinge-s0": found(0, 0.9, 3, 3),
        "authors-lsuv-softmax-s0-rate-0.001": found(0, 0.1),
    }
    rows = train_tables.table_mnist(saved, "authors").splitlines()
    assert "| LSUV, softmax | 0.48 | 0.50, 0.59 | 0.545 | 1 |" in rows
    assert "| LSUV, hinge | 0.38 | diverged at 3 |  |  |" in rows
    assert "| OrthoNorm, hinge | 0.43 | not finished |  |  |" in rows


def test_a_table_of_what_was_tried_has_theirs_first_and_the_seeds_of_a_setting_in_one_row() -> None:
    def found(run: object, accuracy: float, diverged: int | None = None) -> dict[str, object]:
        tests = [] if diverged else [{"accuracy": accuracy}]
        return {"run": vars(run), "iteration": 7496, "tests": tests, "diverged_at": diverged}

    plain = runs.authors_runs(2)
    images = runs.authors_runs(2, images="normalized")
    rate = runs.authors_runs(1, rate=0.5)
    saved = [(images[4], 0.9951), (images[0], 0.9944), (plain[1], 0.995), (plain[0], 0.99)]
    told = {run.name: found(run, accuracy) for run, accuracy in saved}
    told[rate[2].name] = found(rate[2], 0.0, 12)
    told["not ended"] = found(rate[0], 0.9) | {"iteration": 100}
    assert train_tables.table_tried(told).splitlines()[4:] == [
        "| theirs | LSUV, softmax | 7496 | 1.00 |  |",
        "| theirs | OrthoNorm, softmax | 7496 | 0.50 |  |",
        "| images normalized | LSUV, softmax | 7496 | 0.56, 0.49 | 0.525 |",
        "| rate 0.5 | LSUV, hinge | 7496 | diverged at 12 |  |",
    ]


def test_a_table_of_long_runs_tells_the_accuracy_after_each_quarter_of_what_has_ended() -> None:
    def found(iteration: int, diverged: int | None = None) -> dict[str, object]:
        tests = [{"iteration": i, "accuracy": i / 100} for i in range(10, iteration + 1, 10)]
        run = {"iterations": 80}
        return {"run": run, "iteration": iteration, "tests": tests, "cpu_seconds": 600.0, "diverged_at": diverged}

    saved = {
        "long-fitnet1-relu-lsuv": found(80),
        "long-fitnet1-relu-norm": found(70),
        "long-fitnet4-maxout-msra": found(3, 3),
    }
    rows = train_tables.table_long(saved).splitlines()[4:]
    assert rows == [
        "| FitNet-1, ReLU | LSUV | 20.0 | 40.0 | 60.0 | 80.0 | 10 |",
        "| FitNet-4, maxout | MSRA |  |  |  |  | diverged at iteration 3 |",
    ]


def test_a_table_of_rates_has_the_accuracy_at_the_end_for_each_rate_of_a_start_that_ran_at_several() -> None:
    def found(rate: float, accuracy: float, diverged: int | None = None, iteration: int = 80) -> dict[str, object]:
        tests = [] if diverged else [{"iteration": 40, "accuracy": 0.1}, {"iteration": 80, "accuracy": accuracy}]
        run = {"iterations": 80, "rate": rate, "seed": 0}
        return {"run": run, "iteration": diverged or iteration, "tests": tests, "diverged_at": diverged}

    saved = {
        "long-fitnet1-maxout-lsuv": found(0.01, 0.7),
        "long-fitnet1-maxout-lsuv-rate-0.1": found(0.1, 0.0, 7),
        "long-fitnet1-relu-norm-rate-0.003": found(0.003, 0.5),
        "long-fitnet1-relu-norm": found(0.01, 0.75),
        "long-fitnet1-relu-norm-rate-0.03": found(0.03, 0.9, iteration=40),
        "long-fitnet1-relu-lsuv": found(0.01, 0.6),
        "long-fitnet1-relu-norm-s1": found(0.01, 0.99),
    }
    saved["long-fitnet1-relu-norm-s1"]["run"] = {"iterations": 80, "rate": 0.01, "seed": 1}
    assert train_tables.table_rates(saved).splitlines()[2:] == [
        "|  | start | 0.003 | 0.01 | 0.1 |",
        "| --- | ---: | ---: | ---: | ---: |",
        "| FitNet-1, ReLU | batch normalization | 50.0 | 75.0 |  |",
        "| FitNet-1, maxout | LSUV |  | 70.0 | diverged at 7 |",
    ]


def test_a_run_at_another_rate_has_another_name() -> None:
    names = [run.name for rate in (0.01, 0.03) for run in runs.long_runs(rate=rate)]
    assert len(set(names)) == 30
    assert {"long-fitnet1-relu-lsuv", "long-fitnet1-relu-lsuv-rate-0.03"} <= set(names)
    assert [run.rate for run in runs.long_runs(rate=0.03)] == [0.03] * 15


def test_long_runs_drop_their_rate_where_the_paper_does() -> None:
    first, *others = runs.long_runs(iterations=2300)
    rates = [first.rate_at(i) for i in (999, 1001, 1501, 2001)]
    assert rates == pytest.approx([0.01, 0.001, 1e-4, 1e-5])
    assert len({first.name, *(run.name for run in others)}) == 15


@pytest.mark.parametrize("file", sorted(BENCHMARKS.rglob("results/**/*.md")), ids=lambda path: path.stem)
def test_the_readme_shows_the_tables_as_they_were_measured(file: Path) -> None:
    shown = (BENCHMARKS / "README.md").read_text().splitlines()
    rows = [line for line in file.read_text().splitlines() if line.startswith("|")]
    assert rows
    assert [row for row in rows if row not in shown] == []


def test_plots_are_small_and_shown() -> None:
    readme = (BENCHMARKS / "README.md").read_text()
    for plot in BENCHMARKS.rglob("*.png"):
        assert plot.stat().st_size < 200_000, plot
        assert plot.relative_to(BENCHMARKS).as_posix() in readme, plot
