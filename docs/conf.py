"""The documentation as a site: `sphinx-build -W -c docs . OUT`, from the Markdown as it is (extra `docs`)."""

from lsuv_cli.version import __version__

project = "lsuv"
release = __version__
extensions = ["myst_parser"]
root_doc = "docs/index"
include_patterns = ["docs/*.md", "*.md", "benchmarks/*.md", "sample_models/*.md"]
exclude_patterns = ["**/results/**"]
html_theme = "furo"
html_title = f"lsuv {release}"
myst_heading_anchors = 4
# Sections of a changelog have the same titles; a page beside the site (a picture, a script) is copied as it is.
suppress_warnings = ["myst.header"]
linkcheck_ignore = [r"https://.*"]  # links out of the site are for a machine with a network
