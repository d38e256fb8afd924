"""Settings of the documentation site, built by `make docs`."""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from ebbflow import __version__ as release

project = "Ebbflow"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"Ebbflow {release}"
html_copy_source = False
html_show_copyright = False
# Blocks without a language are output of a terminal, not code.
highlight_language = "none"
# Headings of up to this level are link targets. A link to a missing one is a warning, at which
# `make docs` fails.
myst_heading_anchors = 4
# The page of the Python API is made of docstrings. Types in its signatures have no pages here.
autodoc_typehints = "none"
nitpick_ignore_regex = [("py:.*", ".*")]
