"""Files for releases and workflows, in what no linter reads: they say what other files say."""

import re
import tomllib
from pathlib import Path

from lsuv_cli.version import __version__

ROOT = Path(__file__).parent.parent
BRACES = re.compile(r"(\S*?)\{(.*?)\}(\S*)")  # as a shell reads them


def test_the_conda_recipe_has_the_version_and_the_dependencies_of_the_package():
    recipe = (ROOT / "conda" / "meta.yaml").read_text()
    assert re.search(r'set version = "(.*?)"', recipe).group(1) == __version__
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    # conda has one package for onnxruntime with and without CUDA.
    needed = {text.split(";")[0].strip().replace("onnxruntime-gpu", "onnxruntime") for text in project["dependencies"]}
    run = recipe.split("  run:\n")[1].split("\n\n")[0]
    listed = {line.strip("- ").replace(" ", "") for line in run.splitlines()}
    assert listed == {*needed, f"python{project['requires-python']}"}
    (entry,) = project["scripts"].items()
    assert f"- {entry[0]} = {entry[1]}" in recipe


def test_the_workflow_for_a_gpu_runs_the_numeric_tests_of_webgpu():
    script, workflow = (ROOT / "tests" / "webgpu.sh", ROOT / ".github" / "workflows" / "gpu.yml")
    (listed,) = re.findall(r"^files=\((tests/.*)\)$", script.read_text(), flags=re.M)
    (run,) = re.findall(r"run: pytest (tests/.*?)  #", workflow.read_text())
    assert run == listed
    names = [f"{start}{word}{end}" for start, words, end in BRACES.findall(run) for word in words.split(",")]
    assert len(names) == 6
    assert all((ROOT / name).exists() for name in names)
