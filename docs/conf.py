"""Settings of the documentation site, built by `make docs`."""

import configparser
import pathlib

_setup = configparser.ConfigParser()
_setup.read(pathlib.Path(__file__).resolve().parents[1] / "setup.cfg", encoding="utf-8")

project = "Ebbflow"
release = _setup["metadata"]["version"]
extensions = ["myst_parser"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"Ebbflow {release}"
html_copy_source = False
html_show_copyright = False
# Blocks without a language are output of a terminal, not code.
highlight_language = "none"
# Headings of up to this level are link targets. A link to a missing one is a warning, at which `make docs` fails.
myst_heading_anchors = 4
