"""How the site is built: `make docs`. Every page is executed, and a cell that fails fails the build."""

import os
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
# pages are executed in processes of their own, which find `pages` and write nothing but what they say
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")]))
os.environ.setdefault("MPLBACKEND", "agg")

from clearhead import __version__  # noqa: E402

project = "clearhead"
author = "the clearhead authors"
copyright = author
release = version = __version__
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.mathjax", "sphinx_copybutton"]
exclude_patterns = ["_made", "Thumbs.db"]
source_suffix = {".rst": "restructuredtext", ".md": "myst-nb"}

nb_execution_mode = "force"
nb_execution_raise_on_error = True
nb_execution_timeout = 180
nb_merge_streams = True
myst_enable_extensions = ["dollarmath", "colon_fence", "deflist"]
myst_heading_anchors = 3

html_theme = "furo"
html_title = "clearhead"
# pages that the cells write, such as saved explorers
html_extra_path = ["_made"]
(HERE / "_made").mkdir(exist_ok=True)
