"""The numbers of "All you need is a good init" (Mishkin and Matas, 2015), as printed."""

from __future__ import annotations

import math

LAYERS = (
    *("conv11", "conv12", "conv13", "conv14", "conv15"),
    *("conv21", "conv22", "conv23", "conv24", "conv25", "conv26"),
    *("conv31", "conv32", "conv33", "conv34", "conv35", "conv36"),
    "ip1",
)
# (outputs, fan-in) of FitNet-4 with ReLU.
_WIDTHS = (3, 32, 32, 32, 48, 48, *[80] * 6, *[128] * 6)
SHAPES = {
    **{name: (out, 9 * into) for name, into, out in zip(LAYERS, _WIDTHS, _WIDTHS[1:], strict=False)},
    "ip1": (500, 128),
}


def _column(text: str) -> dict[str, float]:
    return dict(zip(LAYERS, map(float, text.split()), strict=True))


# "Standard deviations of the weights per layer for different initializations, FitNet4, CIFAR10, ReLU"
STD = {
    "lsuv": _column(
        "0.383 0.091 0.083 0.076 0.068  0.036 0.048 0.061 0.052 0.067 0.055  0.034 0.044 0.042 0.041 0.040 0.043  0.048"
    ),
    "orthonormal": _column(
        "0.175 0.058 0.058 0.058 0.048  0.048 0.037 0.037 0.037 0.037 0.037  0.037 0.029 0.029 0.029 0.029 0.029  0.044"
    ),
    "msra": _column(
        "0.265 0.082 0.083 0.083 0.060  0.052 0.052 0.052 0.052 0.052 0.052  0.052 0.041 0.041 0.041 0.041 0.041  0.124"
    ),
    "xavier": _column(
        "0.191 0.059 0.059 0.059 0.048  0.037 0.037 0.037 0.037 0.037 0.037  0.037 0.029 0.029 0.029 0.029 0.029  0.088"
    ),
}
# Where the paper's own numbers leave the closed form: conv15 has a fan-in of 432, as has conv21.
MARKED = frozenset({("msra", "conv15"), ("msra", "conv21"), ("xavier", "conv21")})

# "... for different non-linearities, found by LSUV, FitNet4, CIFAR10"
NONLINEARITIES = {
    "tanh": _column(
        "0.386 0.118 0.102 0.101 0.081  0.065 0.064 0.060 0.058 0.061 0.063  0.054 0.052 0.051 0.050 0.051 0.051  0.084"
    ),
    "relu": _column(
        "0.388 0.083 0.096 0.082 0.064  0.044 0.055 0.055 0.064 0.061 0.049  0.032 0.049 0.048 0.047 0.047 0.040  0.044"
    ),
    "vlrelu": _column(
        "0.384 0.084 0.075 0.080 0.065  0.037 0.047 0.049 0.049 0.043 0.052  0.037 0.037 0.042 0.038 0.039 0.037  0.044"
    ),
    "maxout": _column(
        "0.383 0.058 0.063 0.065 0.044  0.034 0.040 0.032 0.041 0.040 0.037  0.027 0.031 0.033 0.028 0.030 0.033  0.038"
    ),
}

# "Variance of the initial gradients per layer, different initializations, FitNet4, ReLU"
GRADIENTS = {
    "lsuv": _column(
        "4.87E-10 5.07E-10 4.36E-10 3.21E-10 3.85E-10  1.25E-09 1.15E-09 1.19E-09 9.12E-10 7.45E-10 8.21E-10  "
        "3.06E-09 2.57E-09 2.40E-09 2.19E-09 1.94E-09 2.31E-09  1.24E-07"
    ),
    "msra": _column(
        "9.42E-09 9.62E-09 1.07E-08 7.03E-09 6.57E-09  9.11E-09 9.73E-09 1.07E-08 1.07E-08 1.09E-08 1.15E-08  "
        "1.92E-08 2.01E-08 1.99E-08 2.25E-08 2.57E-08 2.97E-08  1.95E-07"
    ),
    "orthonormal": _column(
        "5.67E-15 1.17E-14 2.30E-14 2.95E-14 6.71E-14  1.95E-13 3.79E-13 8.18E-13 1.79E-12 4.04E-12 8.36E-12  "
        "2.65E-11 5.95E-11 1.21E-10 2.64E-10 5.89E-10 1.32E-09  6.91E-08"
    ),
    "xavier": _column(
        "2.30E-14 4.85E-14 9.94E-14 1.35E-13 3.10E-13  8.00E-13 1.56E-12 3.28E-12 6.69E-12 1.36E-11 2.99E-11  "
        "1.05E-10 2.28E-10 4.69E-10 1.01E-09 2.27E-09 5.57E-09  7.31E-08"
    ),
}
# var(ip1)/var(conv11)
RATIO = {"lsuv": 255.0, "msra": 20.0, "orthonormal": 12198922.0, "xavier": 3176821.0}


def closed_form(init: str, layer: str) -> float:
    """The standard deviation that an initialization gives a layer of FitNet-4, up to sampling noise."""
    out, fan_in = SHAPES[layer]
    return {
        "orthonormal": 1 / math.sqrt(max(out, fan_in)),
        "msra": math.sqrt(2 / fan_in),
        "xavier": 1 / math.sqrt(fan_in),
    }[init]


# The sizes of the calibration batch that it compares.
BATCHES = (2, 16, 32, 128, 1024)

# Accuracies on CIFAR-10 after 230 epochs; None is n/c, "failed to converge".
GRID: dict[str, dict[str, dict[str, float | None]]] = {
    "fitnet4": {
        "lsuv": {"maxout": 93.94, "relu": 92.11, "vlrelu": 92.97, "tanh": 89.28},
        "orthonormal": {"maxout": 93.78, "relu": 91.74, "vlrelu": 92.40, "tanh": 89.48},
        "xavier": {"maxout": 91.75, "relu": 90.63, "vlrelu": 92.27, "tanh": 89.82},
        "msra": {"maxout": None, "relu": 90.91, "vlrelu": 92.43, "tanh": 89.54},
    },
    "fitresnet4": {
        "lsuv": {"maxout": 94.16, "relu": 92.82, "vlrelu": 93.36, "tanh": 89.17},
        "orthonormal": {"maxout": None, "relu": 91.42, "vlrelu": None, "tanh": 89.31},
        "xavier": {"maxout": None, "relu": 92.48, "vlrelu": 93.34, "tanh": 89.62},
        "msra": {"maxout": None, "relu": None, "vlrelu": None, "tanh": 88.59},
    },
}
# Errors on MNIST, %.
MNIST = {
    ("lsuv", "softmax"): 0.48,
    ("orthonormal", "softmax"): 0.48,
    ("lsuv", "hinge"): 0.38,
    ("orthonormal", "hinge"): 0.43,
}

# How the paper calls what our options and files call otherwise.
TITLES = {"lsuv": "LSUV", "orthonormal": "OrthoNorm", "xavier": "Xavier", "msra": "MSRA", "given": "Gaussian, 0.01"}
TITLES |= {"maxout": "maxout", "relu": "ReLU", "vlrelu": "VLReLU", "tanh": "tanh"}
TITLES |= {"norm": "batch normalization", "fitnet1": "FitNet-1", "fitnet4": "FitNet-4", "fitresnet4": "FitResNet-4"}
