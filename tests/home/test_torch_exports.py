"""Networks exported by PyTorch, by both of its exporters, with random weights. `pytest -m torch`.

Needs `pip install torch onnxscript transformers`. Set LSUV_TABLE=FILE to write the table that the README shows.
"""

import os
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import inliner

import lsuv_cli
from helpers import variances

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore")]
from networks import EAGER, SMALL  # noqa: E402  it needs torch, and makes torchvision usable for transformers

nn: Any = torch.nn


class Basic(nn.Module):
    """A residual block with batch normalization."""

    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.a = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.b = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.na, self.nb = nn.BatchNorm2d(outputs), nn.BatchNorm2d(outputs)
        self.short = nn.Conv2d(inputs, outputs, 1, stride, bias=False) if stride > 1 else nn.Identity()

    def forward(self, x):
        y = torch.relu(self.na(self.a(x)))
        return torch.relu(self.nb(self.b(y)) + self.short(x))


class Inverted(nn.Module):
    """MobileNet's block: 1x1, depthwise, 1x1."""

    def __init__(self, width):
        super().__init__()
        wide = 4 * width
        self.body = nn.Sequential(
            nn.Conv2d(width, wide, 1), nn.ReLU6(), nn.Conv2d(wide, wide, 3, 1, 1, groups=wide), nn.ReLU6(),
            nn.Conv2d(wide, width, 1),
        )  # fmt: skip

    def forward(self, x):
        return x + self.body(x)


class ConvNeXtBlock(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.depthwise = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        y = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        return x + self.down(nn.functional.gelu(self.up(y))).permute(0, 3, 1, 2)


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.down1, self.down2 = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 16, 3, padding=1)
        self.up = nn.ConvTranspose2d(16, 8, 2, 2)
        self.out = nn.Conv2d(16, 2, 3, padding=1)

    def forward(self, x):
        a = torch.relu(self.down1(x))
        b = torch.relu(self.down2(nn.functional.max_pool2d(a, 2)))
        return self.out(torch.cat([a, torch.relu(self.up(b))], 1))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.lstm = nn.Embedding(50, 16), nn.LSTM(16, 24, batch_first=True, bidirectional=True)
        self.head = nn.Linear(48, 5)

    def forward(self, ids):
        return self.head(self.lstm(self.embed(ids))[0][:, -1])


def images(size=32, channels=3):
    return (torch.randn(4, channels, size, size, generator=torch.Generator().manual_seed(0)),)


def ids(length=12, most=50):
    return (torch.randint(0, most, (4, length), generator=torch.Generator().manual_seed(0)),)


class First(nn.Module):
    """A transformers model reduced to one tensor in, one tensor out."""

    def __init__(self, model, masked=False):
        super().__init__()
        self.model, self.masked = model, masked

    def forward(self, x):
        # With a mask, transformers does not look for packed sequences, which the legacy exporter cannot express.
        mask = {"attention_mask": torch.ones_like(x)} if self.masked else {}
        return self.model(x, return_dict=False, **mask)[0]


def hugging(kind):
    import transformers as t

    match kind:
        case "ViT":
            return First(t.ViTModel(t.ViTConfig(**SMALL, image_size=32, patch_size=8, **EAGER))), images()
        case "BERT":
            return First(t.BertModel(t.BertConfig(**SMALL, vocab_size=50, max_position_embeddings=32, **EAGER))), ids()
        case "GPT-2":
            config = t.GPT2Config(
                n_layer=2, n_embd=32, n_head=4, vocab_size=50, n_positions=32, use_cache=False, bos_token_id=0,
                eos_token_id=0, **EAGER,
            )  # fmt: skip
            return First(t.GPT2LMHeadModel(config), masked=True), ids()
        case "Llama-like":
            config = t.LlamaConfig(
                **SMALL, vocab_size=50, num_key_value_heads=2, max_position_embeddings=32, use_cache=False,
                bos_token_id=0, eos_token_id=0, pad_token_id=0, **EAGER,
            )  # fmt: skip
            return First(t.LlamaForCausalLM(config), masked=True), ids()
        case "Whisper encoder":
            config = t.WhisperConfig(
                d_model=32, encoder_layers=2, encoder_attention_heads=4, encoder_ffn_dim=64, num_mel_bins=16,
                max_source_positions=20, **EAGER,
            )  # fmt: skip
            encoder = t.models.whisper.modeling_whisper.WhisperEncoder(config)
            return First(encoder), (torch.randn(4, 16, 40, generator=torch.Generator().manual_seed(0)),)


PLAIN = {
    "ResNet": lambda: (
        nn.Sequential(nn.Conv2d(3, 8, 3, 1, 1), nn.ReLU(), Basic(8, 8, 1), Basic(8, 16, 2), nn.AdaptiveAvgPool2d(1),
                      nn.Flatten(), nn.Linear(16, 10)),
        images(),
    ),
    "MobileNet": lambda: (nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU6(), Inverted(8), Inverted(8)), images()),
    "ConvNeXt": lambda: (
        nn.Sequential(nn.Conv2d(3, 16, 4, 4), ConvNeXtBlock(16), ConvNeXtBlock(16)), images()
    ),
    "U-Net": lambda: (UNet(), images()),
    "DCGAN generator": lambda: (
        nn.Sequential(nn.ConvTranspose2d(16, 32, 4, 1, 0, bias=False), nn.BatchNorm2d(32), nn.ReLU(),
                      nn.ConvTranspose2d(32, 16, 4, 2, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU(),
                      nn.ConvTranspose2d(16, 3, 4, 2, 1), nn.Tanh()),
        images(1, 16),
    ),
    "LSTM classifier": lambda: (Recurrent(), ids()),
    "TransformerEncoder": lambda: (
        nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), 2, enable_nested_tensor=False),
        (torch.randn(4, 10, 32, generator=torch.Generator().manual_seed(0)),),
    ),
}  # fmt: skip
HUGGING = ["ViT", "BERT", "GPT-2", "Llama-like", "Whisper encoder"]
ROWS: dict[tuple[str, str], str] = {}


def built(name: str):
    torch.manual_seed(0)
    module, inputs = PLAIN[name]() if name in PLAIN else hugging(name)
    return module.eval(), inputs


def export(module: Any, inputs: tuple[Any, ...], dynamo: bool, path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        options = {} if dynamo else {"opset_version": 17, "do_constant_folding": True}
        torch.onnx.export(module, inputs, str(path), dynamo=dynamo, input_names=["x"], verbose=False, **options)


@pytest.mark.parametrize("exporter", ["legacy", "dynamo"])
@pytest.mark.parametrize("name", [*PLAIN, *HUGGING])
def test_an_export_is_initialized(name, exporter, tmp_path):
    if name in HUGGING:
        pytest.importorskip("transformers")
    module, inputs = built(name)
    x = inputs[0].numpy()
    try:
        export(module, inputs, exporter == "dynamo", tmp_path / "m.onnx")
    except Exception as problem:  # the exporter's own failure is not ours
        ROWS[name, exporter] = "not exported"
        pytest.skip(f"PyTorch could not export it: {str(problem).splitlines()[0][:100]}")
    done = lsuv_cli.initialize(tmp_path / "m.onnx", x, output=tmp_path / "o.onnx", tied="untie")
    written = onnx.load(tmp_path / "o.onnx")
    layers = [layer for layer in done.report.layers if layer.status == "ok"]
    others = [layer for layer in done.report.layers if layer.status != "ok"]
    assert layers
    assert all(layer.status == "skipped" for layer in others), [(x.name, x.status, x.notes) for x in others]
    flat = inliner.inline_local_functions(written) if written.functions else written
    (feed,) = [i.name for i in flat.graph.input]
    found = variances(flat, {feed: x}, reference=False)
    near = [variance for variance in found.values() if abs(variance - 1) < 1e-3]
    assert len(near) >= len(layers) - sum("shared" in " ".join(x.notes) for x in layers), found
    assert np.isfinite(list(found.values())).all()
    rest = f", {len(others)} skipped" if others else ""
    ROWS[name, exporter] = f"{len(layers)} layers{rest}"


@pytest.fixture(scope="module", autouse=True)
def table():
    yield
    if target := os.environ.get("LSUV_TABLE"):
        lines = ["| network | legacy exporter | dynamo exporter |", "|---|---|---|"]
        names = dict.fromkeys(name for name, _ in ROWS)
        lines += [f"| {n} | {ROWS.get((n, 'legacy'), '')} | {ROWS.get((n, 'dynamo'), '')} |" for n in names]
        Path(target).write_text("\n".join(lines) + "\n")
