"""Networks to take to ONNX and back: of torchvision, timm and transformers, and hand-written ones with one trap each.

Each is small and freshly made from one seed. `NETWORKS[name]()` gives the module, in eval mode, and a batch: a tuple
of positional inputs, or a dict of keyword arguments as transformers wants them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

Batch = tuple[torch.Tensor, ...] | dict[str, torch.Tensor]
Built = tuple[nn.Module, Batch]
NETWORKS: dict[str, Callable[[], Built]] = {}
SAMPLES = 8


def network(name: str) -> Callable[[Callable[[], Built]], Callable[[], Built]]:
    """Put a builder into NETWORKS, with the seed set before and eval mode after."""

    def keep(build: Callable[[], Built]) -> Callable[[], Built]:
        def seeded() -> Built:
            torch.manual_seed(0)
            module, batch = build()
            return module.eval(), batch

        NETWORKS[name] = seeded
        return build

    return keep


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(SAMPLES, *shape, generator=torch.Generator().manual_seed(1))


def images(size: int = 32, channels: int = 3) -> tuple[torch.Tensor, ...]:
    return (normal(channels, size, size),)


def tokens(length: int = 12, most: int = 50) -> torch.Tensor:
    return torch.randint(2, most, (SAMPLES, length), generator=torch.Generator().manual_seed(1))


# torchvision and timm

try:
    import torchvision  # noqa: F401  only to see whether it is there
except RuntimeError:
    # Where its compiled operators do not fit torch, torchvision cannot be imported until these are declared.
    _operators = torch.library.Library("torchvision", "DEF")
    for _name in ("nms", "qnms"):
        _operators.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
except ImportError:
    pass

TORCHVISION = {
    "resnet18": 32, "mobilenet_v2": 32, "mobilenet_v3_small": 32, "efficientnet_b0": 32, "shufflenet_v2_x0_5": 32,
    "squeezenet1_1": 64, "googlenet": 64, "mnasnet0_5": 32, "regnet_y_400mf": 32, "densenet121": 32,
}  # fmt: skip
TIMM: dict[str, tuple[str, int, dict[str, Any]]] = {
    "timm resnet18": ("resnet18", 32, {}),  # the last norm of each block multiplies by 0
    "timm ViT": ("vit_tiny_patch16_224", 32, {"img_size": 32, "patch_size": 8, "embed_dim": 48, "depth": 2}),
    "timm DeiT": ("deit_tiny_distilled_patch16_224", 32,
                  {"img_size": 32, "patch_size": 8, "embed_dim": 48, "depth": 2}),
    "timm Swin": ("swin_tiny_patch4_window7_224", 32,
                  {"img_size": 32, "embed_dim": 24, "depths": (2, 2), "num_heads": (2, 4), "window_size": 4}),
    "timm ConvNeXt": ("convnext_atto", 32, {"depths": (1, 1, 2, 1), "dims": (16, 24, 32, 48)}),
    "timm NF-ResNet": ("nf_resnet26", 32, {}),  # weight standardization
    "timm MLP-Mixer": ("mixer_s32_224", 64, {"img_size": 64}),
    "timm GhostNet": ("ghostnet_050", 32, {}),
    "timm MobileViT": ("mobilevit_xxs", 32, {}),
    "timm EdgeNeXt": ("edgenext_xx_small", 32, {}),
    "timm LCNet": ("lcnet_050", 32, {}),
}  # fmt: skip


def _torchvision(name: str, size: int) -> Callable[[], Built]:
    def build() -> Built:
        import torchvision

        extra = {"aux_logits": False, "init_weights": True} if name == "googlenet" else {}
        return getattr(torchvision.models, name)(weights=None, num_classes=10, **extra), images(size)

    return build


def _timm(kind: str, size: int, options: dict[str, Any]) -> Callable[[], Built]:
    def build() -> Built:
        import timm

        return timm.create_model(kind, pretrained=False, num_classes=10, **options), images(size)

    return build


for _name, _size in TORCHVISION.items():
    network(_name)(_torchvision(_name, _size))
for _name, (_kind, _size, _options) in TIMM.items():
    network(_name)(_timm(_kind, _size, _options))


# transformers

SMALL = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64}
EAGER = {"attn_implementation": "eager"}
WORDS = {"vocab_size": 50, "max_position_embeddings": 32}
NO_CACHE = {"use_cache": False, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}


def text() -> dict[str, torch.Tensor]:
    ids = tokens()
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def _hugging(kind: str, config: str, batch: Callable[[], Batch], **options: Any) -> Callable[[], Built]:
    def build() -> Built:
        import transformers

        chosen = getattr(transformers, config)(**options, **EAGER)
        return getattr(transformers, kind)(chosen), batch()

    return build


HUGGING: dict[str, Callable[[], Built]] = {
    "BERT": _hugging("BertForSequenceClassification", "BertConfig", text, **SMALL, **WORDS),
    "DistilBERT": _hugging("DistilBertForSequenceClassification", "DistilBertConfig", text, n_layers=2, dim=32,
                           n_heads=4, hidden_dim=64, **WORDS),
    "RoBERTa": _hugging("RobertaModel", "RobertaConfig", text, **SMALL, **WORDS),
    "ALBERT": _hugging("AlbertModel", "AlbertConfig", text, **SMALL, **WORDS, embedding_size=16),
    "ELECTRA": _hugging("ElectraModel", "ElectraConfig", text, **SMALL, **WORDS, embedding_size=16),
    "GPT-2": _hugging("GPT2LMHeadModel", "GPT2Config", text, n_layer=2, n_embd=32, n_head=4, vocab_size=50,
                      n_positions=32, **NO_CACHE),
    "Llama": _hugging("LlamaForCausalLM", "LlamaConfig", text, **SMALL, **WORDS, **NO_CACHE, num_key_value_heads=2),
    "T5 encoder": _hugging("T5EncoderModel", "T5Config", text, vocab_size=50, d_model=32, d_kv=8, d_ff=64,
                           num_layers=2, num_heads=4),
    "Hugging Face ViT": _hugging("ViTForImageClassification", "ViTConfig", lambda: {"pixel_values": normal(3, 32, 32)},
                                 **SMALL, image_size=32, patch_size=8),
    "Wav2Vec2": _hugging("Wav2Vec2Model", "Wav2Vec2Config", lambda: {"input_values": normal(800)}, **SMALL,
                         conv_dim=(16, 16), conv_stride=(5, 4), conv_kernel=(10, 8), num_conv_pos_embeddings=16,
                         num_conv_pos_embedding_groups=4, num_feat_extract_layers=2, mask_time_prob=0.0),
}  # fmt: skip
for _name, _build in HUGGING.items():
    network(_name)(_build)


@network("Whisper encoder")
def _whisper() -> Built:
    import transformers
    from transformers.models.whisper.modeling_whisper import WhisperEncoder

    config = transformers.WhisperConfig(
        d_model=32, encoder_layers=2, encoder_attention_heads=4, encoder_ffn_dim=64, num_mel_bins=16,
        max_source_positions=20, **EAGER,
    )  # fmt: skip
    return WhisperEncoder(config), {"input_features": normal(16, 40)}


# Hand-written, one trap each


def _trained(module: nn.Module) -> nn.Module:
    """Statistics and factors of batch normalization as after training."""
    generator = torch.Generator().manual_seed(2)
    for part in module.modules():
        if isinstance(part, nn.modules.batchnorm._BatchNorm):
            for tensor, low, high in (
                (part.running_mean, -1, 1), (part.running_var, 0.3, 3), (part.weight, 0.5, 2), (part.bias, -0.5, 0.5)
            ):  # fmt: skip
                tensor.data.uniform_(low, high, generator=generator)
    return module


@network("convolutions and linear layers")
def _plain() -> Built:
    class Net(nn.Module):
        """Conv, a depthwise one, ConvTranspose, and Linear on 3 and 2 axes, with and without bias."""

        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 8, 3, padding=1)
            self.depthwise = nn.Conv2d(8, 8, 3, groups=8, bias=False)
            self.up = nn.ConvTranspose2d(8, 6, 2, stride=2)
            self.sequence = nn.Linear(6, 16)
            self.nobias = nn.Linear(16, 12, bias=False)
            self.head = nn.Linear(12, 5)
            self.last = nn.Linear(5, 5, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = torch.relu(self.up(torch.relu(self.depthwise(torch.relu(self.conv(x))))))
            x = torch.relu(self.nobias(torch.relu(self.sequence(x.flatten(2).transpose(1, 2)))))
            return self.last(torch.relu(self.head(x.mean(1))))

    return Net(), images(8)


@network("batch normalization, trained")
def _norms() -> Built:
    return _trained(nn.Sequential(
        nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.ReLU(),
        nn.Flatten(), nn.Linear(8 * 8 * 8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4),
    )), images(12)  # fmt: skip


@network("U-Net")
def _unet() -> Built:
    def double(inputs: int, outputs: int) -> nn.Sequential:
        parts: list[nn.Module] = []
        for k in (inputs, outputs):
            parts += [nn.Conv2d(k, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]
        return nn.Sequential(*parts)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.d1, self.d2, self.bottom = double(3, 8), double(8, 16), double(16, 32)
            self.up2, self.up1 = nn.ConvTranspose2d(32, 16, 2, 2), nn.ConvTranspose2d(16, 8, 2, 2)
            self.u2, self.u1 = double(32, 16), double(16, 8)
            self.out = nn.Conv2d(8, 2, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            a = self.d1(x)
            b = self.d2(functional.max_pool2d(a, 2))
            c = self.up2(self.bottom(functional.max_pool2d(b, 2)))
            return self.out(self.u1(torch.cat([a, self.up1(self.u2(torch.cat([b, c], 1)))], 1)))

    return _trained(Net()), images(16)


@network("DCGAN generator")
def _generator() -> Built:
    return nn.Sequential(
        nn.ConvTranspose2d(16, 32, 4, 1, 0, bias=False), nn.BatchNorm2d(32), nn.ReLU(),
        nn.ConvTranspose2d(32, 16, 4, 2, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU(),
        nn.ConvTranspose2d(16, 3, 4, 2, 1), nn.Tanh(),
    ), images(1, 16)  # fmt: skip


@network("swapped registration, zero biases")
def _swapped() -> Built:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.second, self.first = nn.Linear(12, 12), nn.Linear(12, 12)
            for part in (self.second, self.first):
                nn.init.zeros_(part.bias)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(torch.relu(self.first(x)))

    return Net(), (normal(5, 12),)


@network("zero bias beside LayerNorm")
def _layer_norm() -> Built:
    net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.LayerNorm(32), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))
    for part in net:
        if isinstance(part, nn.Linear):
            nn.init.zeros_(part.bias)
    return net, (normal(5, 8),)


@network("equal layers")
def _equal() -> Built:
    """Copies of one layer, which an exporter merges."""
    import copy

    first = nn.Linear(10, 10)
    return nn.Sequential(first, nn.ReLU(), copy.deepcopy(first), nn.ReLU(), copy.deepcopy(first)), (normal(4, 10),)


@network("a module called three times")
def _called() -> Built:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.h, self.head = nn.Linear(6, 10), nn.Linear(10, 10), nn.Linear(10, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = torch.relu(self.stem(x))
            for _ in range(3):
                x = torch.relu(self.h(x))
            return self.head(x)

    return Net(), (normal(6),)


class Classifier(nn.Module):
    """A recurrent network with a linear head."""

    def __init__(self, kind: type[nn.RNNBase], width: int = 24, **options: Any) -> None:
        super().__init__()
        self.embed, self.rnn = nn.Embedding(50, 16), kind(16, width, batch_first=True, **options)
        self.head = nn.Linear(width * (2 if options.get("bidirectional") else 1), 5)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.rnn(self.embed(ids))[0][:, -1])


@network("LSTM")
def _lstm() -> Built:
    return Classifier(nn.LSTM, num_layers=2, bidirectional=True), (tokens(),)


@network("GRU")
def _gru() -> Built:
    return Classifier(nn.GRU), (tokens(),)


class Attention(nn.Module):
    """Self-attention, or attention to another sequence."""

    def __init__(self, cross: bool, **options: Any) -> None:
        super().__init__()
        self.stem, self.attn = nn.Linear(7, 16), nn.MultiheadAttention(16, 4, batch_first=True, **options)
        self.cross, self.head = cross, nn.Linear(16, 3)

    def forward(self, x: torch.Tensor, *other: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        keys = other[0] if self.cross else x
        return self.head(self.attn(x, keys, keys, need_weights=False)[0])


@network("MultiheadAttention, self")
def _self() -> Built:
    return Attention(False), (normal(6, 7),)


@network("MultiheadAttention, cross")
def _cross() -> Built:
    class Cross(Attention):
        def forward(self, x: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
            return super().forward(x, memory)

    return Cross(True), (normal(6, 7), normal(9, 16))


@network("MultiheadAttention, kdim and vdim")
def _kdim() -> Built:
    class Cross(Attention):
        def forward(self, x: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
            return super().forward(x, memory)

    return Cross(True, kdim=10, vdim=10), (normal(6, 7), normal(9, 10))


@network("TransformerEncoder")
def _encoder() -> Built:
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), (normal(6, 16),)


@network("Transformer")
def _transformer() -> Built:
    return nn.Transformer(16, 2, 1, 1, 32, batch_first=True), (normal(6, 16), normal(5, 16))


@network("weight_norm, parametrized")
def _weight_norm() -> Built:
    norm = nn.utils.parametrizations.weight_norm
    return nn.Sequential(
        norm(nn.Conv1d(4, 8, 3)), nn.ReLU(), nn.Flatten(), norm(nn.Linear(8 * 10, 12)), nn.ReLU(), nn.Linear(12, 3)
    ), (normal(4, 12),)  # fmt: skip


@network("weight_norm, old")
def _old_weight_norm() -> Built:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        norm = nn.utils.weight_norm
        return nn.Sequential(
            norm(nn.Conv1d(4, 8, 3)), nn.ReLU(), nn.Flatten(), norm(nn.Linear(8 * 10, 12)), nn.ReLU(), nn.Linear(12, 3)
        ), (normal(4, 12),)  # fmt: skip


@network("weight standardization")
def _standardized() -> Built:
    class Standardized(nn.Conv2d):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            centred = self.weight - self.weight.mean((1, 2, 3), keepdim=True)
            weight = centred / centred.square().mean((1, 2, 3), keepdim=True).sqrt()
            return functional.conv2d(x, weight, self.bias)

    return nn.Sequential(Standardized(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 6 * 6, 4)), images(8)


@network("spectral_norm")
def _spectral_norm() -> Built:
    norm = nn.utils.parametrizations.spectral_norm
    return nn.Sequential(norm(nn.Linear(12, 16)), nn.ReLU(), nn.Linear(16, 3)), (normal(12),)


@network("orthogonal parametrization")
def _orthogonal() -> Built:
    kind = nn.utils.parametrizations.orthogonal
    return nn.Sequential(kind(nn.Linear(12, 16)), nn.ReLU(), nn.Linear(16, 3)), (normal(12),)


@network("tied embedding and head")
def _tied() -> Built:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.body = nn.Embedding(50, 16), nn.Linear(16, 16)
            self.head = nn.Linear(16, 50, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.head(torch.tanh(self.body(self.embed(ids))))

    return Net(), (tokens(),)


@network("Conv1d")
def _conv1() -> Built:
    return nn.Sequential(
        nn.Conv1d(4, 12, 5), nn.GELU(), nn.Conv1d(12, 12, 3, groups=3), nn.GELU(), nn.ConvTranspose1d(12, 4, 4, 2),
    ), (normal(4, 32),)  # fmt: skip


@network("Conv3d")
def _conv3() -> Built:
    return nn.Sequential(
        nn.Conv3d(2, 6, 3), nn.ReLU(), nn.Conv3d(6, 6, 3, groups=6, bias=False), nn.ReLU(), nn.ConvTranspose3d(6, 2, 2),
    ), (normal(2, 7, 7, 7),)  # fmt: skip


@network("Bilinear")
def _bilinear() -> Built:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.pair, self.out = nn.Linear(6, 5), nn.Bilinear(5, 6, 4), nn.Linear(4, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.out(torch.relu(self.pair(torch.relu(self.a(x)), x)))

    return Net(), (normal(6),)


@network("functional layers")
def _functional() -> Built:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(8, 6))
            self.matrix = nn.Parameter(torch.randn(8, 5))
            self.kernel = nn.Parameter(torch.randn(4, 1, 3))
            self.head = nn.Linear(12, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = torch.relu(functional.linear(x, self.w)) @ self.matrix
            return self.head(torch.relu(functional.conv1d(x[:, None], self.kernel)).flatten(1))

    return Net(), (normal(6),)


@network("two inputs, ModuleDict")
def _two() -> Built:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleDict({"a": nn.Linear(6, 8), "b": nn.Linear(4, 8), "out": nn.Linear(8, 3)})

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return self.parts["out"](torch.relu(self.parts["a"](x) + self.parts["b"](y)))

    return Net(), (normal(6), normal(4))


@network("a layer without bias before another")
def _sequence() -> Built:
    """Linear layers on sequences, the first without a bias of its own: the next bias is not its name."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shift = nn.Parameter(torch.randn(10))
            self.a, self.b = nn.Linear(6, 10, bias=False), nn.Linear(10, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(torch.relu(self.a(x) + self.shift))

    return Net(), (normal(5, 6),)
