"""The variance of residual streams after `lsuv init`, with and without `--residual bounded`.

    python benchmarks/streams.py                # exports, initializes and measures; the table in docs/options.md

gpt-2        transformers' GPT2Model, 6 blocks; its embeddings, drawn from N(0, 0.02²), begin the stream
vit          timm's VisionTransformer, 8 blocks
pre-ln bert  transformers' RobertaPreLayerNormModel, 6 blocks
resnet       torchvision's ResNet-34 without its normalizations: four streams, of 3, 4, 6 and 3 branches

The files that `lsuv init` writes are measured here, not by lsuv: onnxruntime runs them without optimizers, and numpy
takes the variances in float64. The data is random: token ids, standard normal images.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pipeline

RESULTS = pipeline.RESULTS / "streams.json"
PAGE = pipeline.ROOT / "docs" / "options.md"
SUMS = {"gpt-2": 12, "vit": 16, "pre-ln bert": 12, "resnet": 16}
OPTIONS = ("keep", "bounded")  # of --residual
WIDTH, HEADS, BLOCKS, TOKENS, VOCABULARY, SAMPLES = 96, 4, 6, 32, 1000, 16


def built(network: str) -> tuple[Any, dict[str, Any]]:
    """A network of PyTorch, and its inputs by name."""
    import torch

    torch.manual_seed(0)
    ids = {"input_ids": torch.randint(5, VOCABULARY, (SAMPLES, TOKENS))}
    if network == "gpt-2":
        from transformers import GPT2Config, GPT2Model

        sizes = {"n_embd": WIDTH, "n_layer": BLOCKS, "n_head": HEADS, "n_positions": TOKENS, "vocab_size": VOCABULARY}
        return GPT2Model(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0, use_cache=False)), ids
    if network == "pre-ln bert":
        from transformers import RobertaPreLayerNormConfig, RobertaPreLayerNormModel

        sizes = {"hidden_size": WIDTH, "num_hidden_layers": BLOCKS, "num_attention_heads": HEADS}
        sizes |= {"intermediate_size": 4 * WIDTH, "vocab_size": VOCABULARY}
        return RobertaPreLayerNormModel(RobertaPreLayerNormConfig(**sizes), add_pooling_layer=False), ids
    if network == "vit":
        from timm.models.vision_transformer import VisionTransformer

        net = VisionTransformer(img_size=32, patch_size=4, embed_dim=WIDTH, depth=8, num_heads=HEADS, num_classes=10)
        return net, {"x": torch.randn(SAMPLES, 3, 32, 32)}
    from torchvision.models import resnet34

    return resnet34(norm_layer=torch.nn.Identity, num_classes=10), {"x": torch.randn(SAMPLES, 3, 64, 64)}


def first_output(net: Any, names: list[str]) -> Any:
    """A network that is called with tensors in the order of these names and gives its first output alone."""
    import torch

    class Called(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def forward(self, *tensors: Any) -> Any:
            found = self.net(**dict(zip(names, tensors, strict=True)))
            return found if isinstance(found, torch.Tensor) else found[0]

    return Called().eval()


def exported(network: str, folder: Path) -> tuple[Path, dict[str, np.ndarray]]:
    import torch

    net, inputs = built(network)
    names, path = list(inputs), folder / "given.onnx"
    batch = [{0: torch.export.Dim("batch")}] * len(names)
    called = first_output(net, names)
    program = torch.onnx.export(
        called, tuple(inputs.values()), input_names=names, dynamo=True, dynamic_shapes=(tuple(batch),), verbose=False
    )
    program.save(str(path), external_data=False)
    return path, {name: tensor.numpy() for name, tensor in inputs.items()}


# Measurement, without lsuv


def variances(path: Path, feeds: dict[str, np.ndarray], names: list[str]) -> list[float]:
    """The variances, in float64, of the outputs of the nodes of these names."""
    proto = onnx.load(path)
    outputs = {node.name: node.output[0] for node in proto.graph.node}
    wanted = [outputs.get(name, name) for name in names]
    known = {output.name for output in proto.graph.output}
    proto.graph.output.extend(onnx.ValueInfoProto(name=name) for name in wanted if name not in known)
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return [float(np.asarray(value, np.float64).var()) for value in session.run(wanted, feeds)]


def begins(path: Path, sums: list[dict[str, Any]]) -> list[str]:
    """For each stream, the operand of its first sum that does not come from that sum's last layer."""
    proto = onnx.load(path)
    nodes = {node.name: node for node in proto.graph.node}
    producer = {name: node for node in proto.graph.node for name in node.output}
    found = []
    for each in sums:
        if each["branch"] > 1:
            continue
        for name in nodes[each["name"]].input:
            seen, wanted = set(), [name]
            while wanted:
                node = producer.get(wanted.pop())
                if node is not None and node.name not in seen:
                    seen.add(node.name)
                    wanted += node.input
            if each["layer"] not in seen:
                found.append(name)
    return found


def one(network: str) -> dict[str, Any]:
    """The variances at every sum of a network, for each option."""
    with tempfile.TemporaryDirectory() as scratch:
        path, feeds = exported(network, Path(scratch))
        data, files = Path(scratch) / "data.npz", {option: Path(scratch) / f"{option}.onnx" for option in OPTIONS}
        arrays: dict[str, Any] = dict(feeds)
        np.savez(data, **arrays)
        for option, target in files.items():
            command: list[str | Path] = [pipeline.lsuv_command(), "init", path, "--data", data, "-o", target, "--json"]
            done = subprocess.run([*command, "--residual", option], check=True, capture_output=True)
        sums = json.loads(done.stdout)["sums"]
        assert len(sums) == SUMS[network], (network, len(sums))
        names = [each["name"] for each in sums]
        entry: dict[str, Any] = {"streams": [each["stream"] for each in sums]}
        entry["begins"] = variances(files["bounded"], feeds, begins(files["bounded"], sums))
        return entry | {option: variances(files[option], feeds, names) for option in OPTIONS}


# The table


def table(saved: dict[str, Any]) -> str:
    """A row for each network: what its streams begin with, and the least and greatest variance at a sum."""
    header = ["network", "sums", "begins with", "`keep`", "`bounded`", "`bounded`, first sum", "last sum"]
    rows = []
    for network, entry in saved["networks"].items():
        held, streams = entry["bounded"], entry["streams"]
        first = [v for k, v in enumerate(held) if streams.index(streams[k]) == k]
        last = [v for k, v in enumerate(held) if streams[k] not in streams[k + 1 :]]
        ranges = (entry["begins"], entry["keep"], held, first, last)
        rows.append([network, str(len(held)), *(span(each) for each in ranges)])
    return pipeline.markdown(header, rows)


def span(numbers: list[float]) -> str:
    low, high = (f"{value:.2g}" if value < 0.01 else f"{value:.2f}" for value in (min(numbers), max(numbers)))
    return low if low == high else f"{low} to {high}"


def on_page(page: str, saved: dict[str, Any]) -> str:
    """docs/options.md with the table of these numbers between its marks."""
    return pipeline.between(page, "streams", table(saved))


def main() -> None:
    parser = argparse.ArgumentParser(description="The variance of residual streams, kept and bounded.")
    parser.add_argument("--only", choices=list(SUMS), nargs="+", default=list(SUMS))
    parser.add_argument("--table", action="store_true", help="only the table, from the saved numbers")
    asked = parser.parse_args()
    saved: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"networks": {}}
    for network in [] if asked.table else asked.only:
        saved["networks"][network] = one(network)
        print(network, json.dumps(saved["networks"][network]), flush=True)
        pipeline.write_text(RESULTS, json.dumps(saved, indent=1) + "\n")
    pipeline.write_text(PAGE, on_page(PAGE.read_text(), saved))
    print(table(saved), end="")


if __name__ == "__main__":
    main()
