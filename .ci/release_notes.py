"""The changelog's section of the version that a tag names; an error if tag, package and changelog disagree.

python .ci/release_notes.py v0.2.0
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def notes(tag: str) -> str:
    """The text below the version's title."""
    (version,) = re.findall(r'__version__ = "(.*)"', (ROOT / "lsuv_cli" / "version.py").read_text())
    if tag != f"v{version}":
        sys.exit(f"the tag is {tag}, the package's version {version}")
    sections = re.split(r"^## ", (ROOT / "CHANGELOG.md").read_text(), flags=re.M)
    found = [section for section in sections if section.split("\n", 1)[0].split()[:1] == [version]]
    if len(found) != 1:
        sys.exit(f"CHANGELOG.md has {len(found)} sections for {version}")
    return found[0].split("\n", 1)[1].strip()


if __name__ == "__main__":
    print(notes(sys.argv[1]))
