"""Networks as people use them, at full size or with their libraries' default options, there and back.

`python tests/home/large_networks.py [NAME ...] [--files]` prints one line for each network: home by the one call, and
with `--files` also by value through the files of both exporters, with nothing folded and as they write by default.
What is measured is what round_trip.py measures: variances by forward hooks, and the output beside the written file's.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from networks import Batch, Built, network
from round_trip import EXPORTERS, Outcome, by_call, ways

# Name -> size of the images, how many, and options.
TORCHVISION: dict[str, tuple[int, int, dict[str, Any]]] = {
    "resnet50": (64, 4, {}), "densenet121": (64, 4, {}), "efficientnet_b0": (64, 4, {}), "convnext_tiny": (64, 4, {}),
    "swin_t": (64, 4, {}), "swin_v2_t": (64, 4, {}), "vit_b_16": (224, 2, {}), "inception_v3": (96, 4, {}),
    "fcn_resnet50": (64, 4, {"weights_backbone": None}), "deeplabv3_resnet50": (64, 4, {"weights_backbone": None}),
}  # fmt: skip
TIMM = {
    "regnetx_004": 64, "levit_128s": 224, "efficientformer_l1": 224, "mixer_b16_224": 224, "repvgg_a0": 64,
    "xcit_nano_12_p16_224": 224, "coat_tiny": 224, "dm_nfnet_f0": 64, "resnetv2_50x1_bit": 64,
}  # fmt: skip
WIDTH = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 128}
LAYERS = {
    "d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128,
}  # fmt: skip
WORDS = {"vocab_size": 200, "bos_token_id": 2, "eos_token_id": 3, "pad_token_id": 1}


def tokens(length: int = 24) -> torch.Tensor:
    return torch.randint(5, 200, (4, length), generator=torch.Generator().manual_seed(1))


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def pairs() -> Batch:
    return {"input_ids": tokens(), "decoder_input_ids": tokens(10)}


def both() -> Batch:
    ids = tokens(12)
    return {"input_ids": ids, "pixel_values": normal(4, 3, 32, 32), "attention_mask": torch.ones_like(ids)}


# Name -> class, options of its configuration, and batch.
HUGGING: dict[str, tuple[str, dict[str, Any], Callable[[], Batch]]] = {
    "BERT": ("BertForMaskedLM", {**WORDS, **WIDTH}, lambda: {"input_ids": tokens()}),
    "GPT-2": ("GPT2LMHeadModel", {**WORDS, "n_embd": 64, "n_layer": 3, "n_head": 4}, lambda: {"input_ids": tokens()}),
    "T5": ("T5ForConditionalGeneration",
           {"vocab_size": 200, "d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4}, pairs),
    "Llama": ("LlamaForCausalLM", {**WORDS, **WIDTH, "num_key_value_heads": 2}, lambda: {"input_ids": tokens()}),
    # It drops by a function, which no module tells: in train mode its variances would be others.
    "BART": ("BartForConditionalGeneration", {**WORDS, **LAYERS, "dropout": 0.0}, pairs),
    "Whisper": ("WhisperForConditionalGeneration",
                {**WORDS, **LAYERS, "max_source_positions": 50, "num_mel_bins": 16, "decoder_start_token_id": 2},
                lambda: {"input_features": normal(4, 16, 100), "decoder_input_ids": tokens(8)}),
    "Wav2Vec2": ("Wav2Vec2ForCTC",
                 {**WIDTH, "conv_dim": (32,) * 3, "conv_stride": (5, 2, 2), "conv_kernel": (10, 3, 3),
                  "num_feat_extract_layers": 3, "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4},
                 lambda: {"input_values": normal(4, 2000)}),
    "CLIP": ("CLIPModel", {"text_config": {**WORDS, **WIDTH}, "projection_dim": 32,
                           "vision_config": {**WIDTH, "image_size": 32, "patch_size": 8}}, both),
    "SegFormer": ("SegformerForSemanticSegmentation",
                  {"hidden_sizes": [16, 32, 48, 64], "depths": [1] * 4, "decoder_hidden_size": 32, "num_labels": 5},
                  lambda: {"pixel_values": normal(4, 3, 64, 64)}),
}  # fmt: skip


def _torchvision(name: str) -> Built:
    import torchvision

    size, count, options = TORCHVISION[name]
    return torchvision.models.get_model(name, weights=None, **options), (normal(count, 3, size, size),)


def _timm(name: str) -> Built:
    import timm

    return timm.create_model(name, pretrained=False), (normal(2, 3, TIMM[name], TIMM[name]),)


def _hugging(name: str) -> Built:
    import transformers

    kind, options, batch = HUGGING[name]
    made = getattr(transformers, kind)
    return made(made.config_class(**options)), batch()


def _without_cache(name: str) -> Built:
    """Files hold tensors alone: a decoder is exported without its cache."""
    net, batch = _hugging(name)
    for part in net.modules():
        if hasattr(part, "config"):
            part.config.use_cache = False
    return net, batch


def _made(build: Callable[[str], Built], name: str) -> Callable[[], Built]:
    return lambda: build(name)


LARGE = {
    **{f"torchvision {name}": _made(_torchvision, name) for name in TORCHVISION},
    **{f"timm {name}": _made(_timm, name) for name in TIMM},
    **{f"transformers {name}": _made(_hugging, name) for name in HUGGING},
}


def rows(name: str, files: bool) -> Iterator[tuple[str, Outcome]]:
    """How one network came home."""
    network(name)(LARGE[name])
    yield "one call", by_call(name)
    if not files:
        return
    if name.startswith("transformers "):
        network(name)(_made(_without_cache, name.removeprefix("transformers ")))
    for exporter in EXPORTERS:
        for folded in (False, True):
            with tempfile.TemporaryDirectory() as directory:
                found = dict(ways(name, exporter, Path(directory), folded, ("like",)))
            yield f"{exporter}{' folded' if folded else ''}", found["like"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of: {', '.join(LARGE)}; all, if none is given")
    parser.add_argument("--files", action="store_true", help="also through the files of both exporters")
    chosen = parser.parse_args()
    for name in chosen.names or LARGE:
        begun = time.perf_counter()
        found = dict(rows(name, chosen.files))
        words = "; ".join(f"{way}: {outcome.words}" for way, outcome in found.items())
        print(f"{name}: {words} ({time.perf_counter() - begun:.0f} s)", flush=True)
        for way, outcome in found.items():
            if outcome.reason or outcome.wrong:
                print(f"    {way}: {'; '.join([outcome.reason, *(f'WRONG: {text}' for text in outcome.wrong)])}")


if __name__ == "__main__":
    main()
