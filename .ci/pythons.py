"""Print the Python interpreters on this machine that pyproject.toml allows: one path a line, oldest first.

Looks for python3.N on PATH and in pyenv's versions; one interpreter for each N, releases only, and only where it can
make a virtual environment. What pyenv puts on PATH may be a shim of a version that is not switched on, so each one is
run once.
"""

import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

NEWEST_TRIED = 30
CHECK = "import ensurepip, sys, venv; v = sys.version_info; print(v.minor if v.releaselevel == 'final' else '')"
CHECK += "; print(sys.executable)"


def supported(command: str) -> tuple[int, str] | None:
    """N of Python 3.N and the interpreter's own path, if it runs."""
    try:
        done = subprocess.run([command, "-c", CHECK], capture_output=True, text=True, timeout=60)
    except OSError:
        return None
    minor, _, path = done.stdout.strip().partition("\n")
    return (int(minor), path) if done.returncode == 0 and minor.isdigit() else None


project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())["project"]
(lowest,) = map(int, re.fullmatch(r">=3\.(\d+)", project["requires-python"]).groups())
pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
found: dict[int, str] = {}
for minor in range(lowest, NEWEST_TRIED):
    commands = [shutil.which(f"python3.{minor}"), *sorted(map(str, pyenv.glob(f"3.{minor}.*/bin/python")))]
    for command in filter(None, commands):
        if (python := supported(command)) and python[0] == minor:
            found.setdefault(*python)
print(*found.values(), sep="\n")
