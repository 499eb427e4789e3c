"""Print the oldest versions that pyproject.toml allows, as constraints for pip."""

import re
import tomllib
from pathlib import Path

TOOLS = {"mypy", "ruff"}  # they judge the code and are no part of it
project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())["project"]
extras = project["optional-dependencies"]
for lines in (project["dependencies"], *(extras[name] for name in ("images", "plot", "weights", "test"))):
    for line in lines:
        match = re.match(r"([\w.-]+)>=([\w.]+)", line)
        if match and match[1] not in TOOLS:
            print(f"{match[1]}=={match[2]}")
