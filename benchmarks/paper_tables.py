"""Tables and plots of what paper.py measured, ours beside the paper's."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import pipeline
import published
from pipeline import markdown
from published import BATCHES, LAYERS, MARKED, TITLES, closed_form

Found = dict[str, Any]


def off(ours: float, wanted: float) -> float:
    """Relative error."""
    return abs(ours / wanted - 1)


def check_std(found: Found) -> list[str]:
    """What is wrong with the closed-form columns: nothing, one hopes."""
    wrong = []
    for init in ("orthonormal", "msra", "xavier"):
        for layer in LAYERS:
            ours, form, paper = found[init]["mean"][layer], closed_form(init, layer), published.STD[init][layer]
            if off(ours, form) > 0.02:
                wrong.append(f"{init} {layer}: ours {ours:.4f}, closed form {form:.4f}")
            if (off(ours, paper) > 0.03) != ((init, layer) in MARKED):
                wrong.append(f"{init} {layer}: ours {ours:.4f}, paper {paper:.3f}")
    return wrong


def table_std(found: Found) -> str:
    header = ["layer"]
    for init in published.STD:
        header += [f"{TITLES[init]} ours", "paper", "ratio" if init == "lsuv" else "closed form"]
    rows = []
    for layer in LAYERS:
        row = [layer]
        for init in published.STD:
            ours, spread, paper = found[init]["mean"][layer], found[init]["std"][layer], published.STD[init][layer]
            if init == "lsuv":
                row += [f"{ours:.3f} ± {spread:.3f}", f"{paper:.3f}", f"{ours / paper:.2f}"]
            else:
                mark = " *" if (init, layer) in MARKED else ""
                row += [f"{ours:.4f}", f"{paper:.3f}{mark}", f"{closed_form(init, layer):.4f}"]
        rows.append(row)
    wrong = check_std(found)
    verdict = (
        "\nEvery OrthoNorm, MSRA and Xavier cell is within 2 % of its closed form, and within 3 % of the paper's "
        "except those marked *, where the paper leaves the closed form.\n"
    )
    return markdown(header, rows) + (verdict if not wrong else "\nOUT OF BOUNDS:\n- " + "\n- ".join(wrong) + "\n")


def table_nonlinearities(found: Found) -> str:
    header = ["layer"]
    for name in published.NONLINEARITIES:
        header += [f"{TITLES[name]} ours", "paper", "ratio"]
    rows = []
    for layer in LAYERS:
        row = [layer]
        for name, column in published.NONLINEARITIES.items():
            ours = found[name]["mean"][layer]
            row += [
                f"{ours:.3f} ± {found[name]['std'][layer]:.3f}",
                f"{column[layer]:.3f}",
                f"{ours / column[layer]:.2f}",
            ]
        rows.append(row)
    return markdown(header, rows)


def table_contrast(found: Found) -> str:
    """Both of the paper's columns of FitNet-4 with ReLU and LSUV: it has one in each of two tables."""
    papers = (published.STD["lsuv"], published.NONLINEARITIES["relu"])
    titles = {"channel": "by channel", "contrast": "contrast", "padded": "contrast, padded"}
    rows = [["root mean square of the images", *(f"{found[k]['rms']:.3f}" for k in titles), "", ""]]
    for layer in LAYERS:
        ours = [f"{found[k]['mean'][layer]:.3f} ± {found[k]['std'][layer]:.3f}" for k in titles]
        rows.append([layer, *ours, *(f"{paper[layer]:.3f}" for paper in papers)])
    return markdown(["layer", *titles.values(), "paper", "paper, again"], rows)


def table_dropout(found: Found) -> str:
    """LSUV with and without dropout beside both of the paper's columns."""
    papers = (published.STD["lsuv"], published.NONLINEARITIES["relu"])
    titles = {"without": "without dropout", "dropout": "dropout 0.2", "padded": "dropout 0.2, contrast, padded"}
    rows = []
    for layer in LAYERS:
        ours = [f"{found[k]['mean'][layer]:.3f} ± {found[k]['std'][layer]:.3f}" for k in titles]
        ratio = found["dropout"]["mean"][layer] / statistics.fmean(paper[layer] for paper in papers)
        rows.append([layer, *ours, *(f"{paper[layer]:.3f}" for paper in papers), f"{ratio:.2f}"])
    return markdown(["layer", *titles.values(), "paper", "paper, again", "dropout 0.2 / paper"], rows)


def spreads(sizes: Found, size: int) -> tuple[float, float, float]:
    """Of the layers' scales over the draws: mean and largest relative spread; mean distance from the largest size's."""
    scales, reference = sizes[str(size)], sizes[str(BATCHES[-1])]
    relative = [statistics.pstdev(v) / statistics.fmean(v) for v in scales.values()]
    away = [off(statistics.fmean(v), statistics.fmean(reference[k])) for k, v in scales.items()]
    return statistics.fmean(relative), max(relative), statistics.fmean(away)


def table_batch(found: Found) -> str:
    header = ["images", *(f"{TITLES[a]}: {what}" for a in found for what in ("spread", "largest", "distance"))]
    rows = [[str(size), *(f"{100 * v:.2f} %" for a in found for v in spreads(found[a], size))] for size in BATCHES]
    return markdown(header, rows)


def ratio(column: dict[str, float]) -> float:
    return column["ip1"] / column["conv11"]


def table_gradients(found: Found) -> str:
    header = ["layer"]
    for init in published.GRADIENTS:
        header += [f"{TITLES[init]} ours", "paper"]
    columns = [c for init in published.GRADIENTS for c in (found[init]["output"], published.GRADIENTS[init])]
    rows = [[layer, *(f"{c[layer]:.2e}" for c in columns)] for layer in LAYERS]
    ratios = [v for init in published.GRADIENTS for v in (ratio(found[init]["output"]), published.RATIO[init])]
    rows.append(["var(ip1)/var(conv11)", *(f"{v:.3g}" for v in ratios)])
    second = [[layer, *(f"{found[i]['weight'][layer]:.2e}" for i in published.GRADIENTS)] for layer in LAYERS]
    second.append(["var(ip1)/var(conv11)", *(f"{ratio(found[i]['weight']):.3g}" for i in published.GRADIENTS)])
    with_respect = "\nThe same with respect to the weights (not in the paper):\n\n"
    return (
        markdown(header, rows) + with_respect + markdown(["layer", *(TITLES[i] for i in published.GRADIENTS)], second)
    )


def typical(run: Found) -> float | None:
    """The median update of a run, None if it diverged."""
    values = run["update"]
    return None if None in values else statistics.median(values)


def table_updates(found: Found) -> str:
    runs = found["runs"]
    scales = list(next(iter(runs.values())))
    rows = []
    for scale in scales:
        row = [scale]
        for name in runs:
            run = runs[name][scale]
            middle = typical(run)
            row.append(
                f"diverged at {len(run['loss'])}"
                if middle is None
                else f"{100 * middle:.2g} %, loss {run['loss'][0]:.2f} to {run['loss'][-1]:.2f}"
            )
        rows.append(row)
    return markdown(["scale", *(TITLES[name] for name in runs)], rows)


def _beside(path: Path, title: str, label: str, ours: dict[str, Any], papers: dict[str, dict[str, float]]) -> None:
    """By layer, on a logarithmic scale: a line of ours and a dotted one of the paper's for each of its columns."""

    def draw(axes: Any) -> None:
        a = axes[0][0]
        for k, (name, paper) in enumerate(papers.items()):
            a.plot([ours[name][layer] for layer in LAYERS], color=f"C{k}", label=f"{TITLES[name]}, ours")
            dotted = {"linestyle": ":", "marker": ".", "label": f"{TITLES[name]}, paper"}
            a.plot([paper[layer] for layer in LAYERS], color=f"C{k}", **dotted)
        a.set_xticks(range(len(LAYERS)), LAYERS, rotation=90, fontsize=7)
        a.set_title(title, fontsize=9)
        a.set_ylabel(label, fontsize=8)
        a.set_yscale("log")
        a.legend(fontsize=7)
        a.grid(alpha=0.3)

    pipeline.figure(path, 1, 1, draw, (6.4, 4.2))


def plot_std(found: Found, path: Path) -> None:
    means = {init: found[init]["mean"] for init in published.STD}
    _beside(path, "FitNet-4 ReLU", "weight standard deviation", means, published.STD)


def plot_nonlinearities(found: Found, path: Path) -> None:
    means = {name: found[name]["mean"] for name in published.NONLINEARITIES}
    _beside(path, "FitNet-4, LSUV", "weight standard deviation", means, published.NONLINEARITIES)


def plot_batch(found: Found, path: Path) -> None:
    def draw(axes: Any) -> None:
        for k, name in enumerate(found):
            values = [spreads(found[name], size) for size in BATCHES]
            axes[0][0].plot(BATCHES, [100 * v[0] for v in values], color=f"C{k}", marker="o", label=TITLES[name])
            axes[0][0].plot(BATCHES, [100 * v[1] for v in values], color=f"C{k}", linestyle=":", label="worst layer")
        axes[0][0].set(xscale="log", yscale="log", xlabel="calibration images", ylabel="spread of the scales, %")
        axes[0][0].legend(fontsize=7)
        axes[0][0].grid(alpha=0.3)

    pipeline.figure(path, 1, 1, draw)


def plot_gradients(found: Found, path: Path) -> None:
    variances = {init: found[init]["output"] for init in published.GRADIENTS}
    _beside(path, "FitNet-4 ReLU", "variance of the gradient of the layer's output", variances, published.GRADIENTS)


def plot_updates(found: Found, path: Path) -> None:
    names = list(found["runs"])

    def draw(axes: Any) -> None:
        flat = [a for row in axes for a in row]
        for name, a in zip(names, flat, strict=False):
            for k, (scale, run) in enumerate(found["runs"][name].items()):
                values = [100 * u for u in run["update"] if u is not None]
                a.plot(values, color=f"C{k}", label=scale + ("" if None not in run["update"] else " (diverged)"))
            a.set_title(TITLES[name], fontsize=9)
        summary = flat[len(names)]
        for k, name in enumerate(names):
            runs = found["runs"][name]
            kept = [(float(s), 100 * m) for s, r in runs.items() if (m := typical(r)) is not None]
            summary.plot(*zip(*kept, strict=True) if kept else ([], []), marker="o", color=f"C{k}", label=TITLES[name])
        summary.set_title("median over the run", fontsize=9)
        for a in flat[: len(names) + 1]:
            a.set_yscale("log")
            a.set_ylim(1e-5, 1e5)
            a.axhspan(0.1, 1, color="0.9")  # the paper: 0.1 % to 1 % leads to convergence
            a.set_ylabel("|update| / |weight|, %", fontsize=8)
            a.set_xlabel("weight scale" if a is summary else "iteration", fontsize=8)
            a.legend(fontsize=6, ncols=2, loc="upper right")
        for a in flat[len(names) + 1 :]:
            a.axis("off")

    pipeline.figure(path, 2, (len(names) + 2) // 2, draw, (3.6, 2.9))
