"""Node data for Model Explorer, in the form of its GraphNodeData."""

import json

import pytest

from shell import MAXOUT, lsuv

DATA = MAXOUT.with_suffix(".npy")


@pytest.mark.parametrize("command", ["init", "inspect", "check"])
def test_every_layer_has_its_variance_and_a_colour(tmp_path, command):
    more = ("-o", tmp_path / "m.onnx") if command == "init" else ()
    path = tmp_path / "nodes.json"
    done = lsuv(command, MAXOUT, "--data", DATA, "--limit", 8, "--model-explorer", path, "--json", *more)
    report, nodes = json.loads(done.out), json.loads(path.read_text())
    assert nodes["results"] == {layer["name"]: {"value": layer["variance"]} for layer in report["layers"]}
    limits = [item["value"] for item in nodes["thresholds"]]
    assert limits == sorted(limits)
    # A node has the colour of the first threshold that is not below its value.
    colours = {
        next(item["bgColor"] for item in nodes["thresholds"] if entry["value"] <= item["value"])
        for entry in nodes["results"].values()
    }
    assert (colours == {"#bfe3c8"}) == (command == "init")
    assert report["details"] is None  # nothing more is measured


def test_the_file_must_be_json(tmp_path):
    done = lsuv("check", MAXOUT, "--data", DATA, "--model-explorer", tmp_path / "n.txt")
    assert "must end in .json" in done.err


def test_model_explorer_takes_the_file(tmp_path):
    builder = pytest.importorskip("model_explorer.node_data_builder", reason="there is no Model Explorer here")
    path = tmp_path / "nodes.json"
    lsuv("check", MAXOUT, "--data", DATA, "--limit", 8, "--model-explorer", path)
    given = json.loads(path.read_text())
    data = builder.GraphNodeData(
        results={name: builder.NodeDataResult(**item) for name, item in given["results"].items()},
        thresholds=[builder.ThresholdItem(**item) for item in given["thresholds"]],
        name=given["name"],
    )
    assert {k: v for k, v in json.loads(data.to_json_string()).items() if k in given} == given
