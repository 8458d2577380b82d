"""How the site is built: `make docs`. Every page is executed, and a cell that fails fails the build."""

import logging
import os
import shutil
import sys
import tempfile
import uuid
from importlib.util import find_spec
from pathlib import Path

import jupyter_client
from traitlets import Unicode, default

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
# pages are executed in processes of their own, which find `pages` there
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")]))
# models are packages that are installed: none is looked for elsewhere
os.environ["HF_HUB_OFFLINE"] = "1"
# a progress bar that finds no widgets says so in every page that loads a model
os.environ["PYTHONWARNINGS"] = ",".join(filter(None, [os.environ.get("PYTHONWARNINGS"), "ignore:IProgress not found"]))
# nor do they see how the one who builds has set up IPython; what it says of itself would hide what is worth reading
IPYTHON = HERE.parent / "build" / "docs-ipython"
(IPYTHON / "profile_default").mkdir(parents=True, exist_ok=True)
(IPYTHON / "profile_default" / "ipython_kernel_config.py").write_text(
    "c.IPKernelApp.log_level = 40\nc.HistoryManager.enabled = False\n"
    # what a cell prints is one text: sent in pieces, lines would be cut where time says
    'c.IPKernelApp.exec_lines = ["import sys; sys.stdout.flush_interval = 1e6"]\n'
)
os.environ["IPYTHONDIR"] = str(IPYTHON)
# Pages that are executed at once talk over files, not ports: two processes that look for free ports may find the same,
# and the second page then waits for ever. The names of such files must be short, whatever folder this lies in.
SOCKETS = tempfile.mkdtemp(prefix="docs-", dir="/tmp") if os.name == "posix" else None


class _OverFiles(jupyter_client.AsyncKernelManager):
    transport = Unicode("ipc")
    ip = Unicode()

    @default("ip")
    def _own_name(self):
        return f"{SOCKETS}/{uuid.uuid4().hex}"


if SOCKETS is not None:
    jupyter_client.AsyncKernelManager = _OverFiles  # where nbclient looks for it when a page is executed
logging.getLogger("traitlets").setLevel(logging.WARNING)

from clearhead import __version__  # noqa: E402  # once the environment of pages is set

project = "clearhead"
author = "the clearhead authors"
copyright = author
release = version = __version__
extensions = [
    "myst_nb",
    "public_names",
    "sphinx.ext.autodoc",
    "sphinx.ext.mathjax",
    "sphinx_copybutton",
    "sphinx_gallery.gen_gallery",
]
copybutton_prompt_text = r">>> |\.\.\. "  # examples are copied without them
copybutton_prompt_is_regexp = True
exclude_patterns = ["_made", "pictures", "gallery/*.ipynb", "Thumbs.db"]
source_suffix = {".rst": "restructuredtext", ".md": "myst-nb"}

nb_execution_mode = "force"
# a cell that fails is a warning with its traceback, and warnings are errors: so one build names every page that fails
nb_execution_raise_on_error = False
nb_execution_show_tb = True
nb_execution_timeout = 180
nb_merge_streams = True
myst_enable_extensions = ["dollarmath", "colon_fence", "deflist", "attrs_inline", "attrs_block"]
myst_heading_anchors = 3

# The gallery: each script of `pictures` is run, one after the other, and becomes a page of `gallery`
sphinx_gallery_conf = {
    "examples_dirs": "pictures",
    "gallery_dirs": "gallery",
    "filename_pattern": r"\.py$",
    "image_scrapers": ["pages.last_picture"],
    "reset_modules": (),
    "capture_repr": (),
    "abort_on_example_error": True,
    "within_subsection_order": "FileNameSortKey",
    "download_all_examples": False,
    "show_signature": False,
    "show_memory": False,
    "min_reported_time": 1e9,  # how long a picture took is no part of it
    "write_computation_times": False,
}

html_theme = "furo"
html_title = "clearhead"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_js_files = [("site.js", {"defer": "defer"})]
pygments_dark_style = "github-dark"
html_logo = "_static/logo.svg"
html_favicon = "_static/logo.svg"
html_copy_source = False
html_show_sourcelink = False
html_theme_options = {"sidebar_hide_name": False}
# pages that the cells write, such as saved explorers
html_extra_path = ["_made"]
(HERE / "_made").mkdir(exist_ok=True)

# Formulas are drawn in the reader's browser by one file that needs no other: no fonts, nothing from elsewhere
mathjax_path = "mathjax/tex-svg.js"
mathjax_options = {"defer": "defer"}


def _bring_mathjax(app, failed):
    """Copy MathJax out of the package that carries it."""
    if failed is not None or app.builder.format != "html":
        return
    package = find_spec("sphinx-mathjax-offline")
    if package is None:
        raise ImportError("formulas need MathJax: pip install sphinx-mathjax-offline (the extra `docs` has it)")
    target = Path(app.outdir, "_static", mathjax_path)
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(Path(package.origin).parent / "static" / mathjax_path, target)


def _close_sockets(app, failed):
    """Take away the folder in which executed pages had their sockets."""
    if SOCKETS is not None:
        shutil.rmtree(SOCKETS, ignore_errors=True)


def _mixed(app, env, docnames):
    """Deal pages out evenly: processes take many that follow one another, and those of one folder are alike in cost."""
    folders = {}
    for name in docnames:
        folders.setdefault(name.partition("/")[0], []).append(name)
    share = {name: (place + 0.5) / len(all_) for all_ in folders.values() for place, name in enumerate(all_)}
    docnames.sort(key=share.__getitem__)


def setup(app):
    """What Sphinx calls when it has read this file."""
    app.connect("env-before-read-docs", _mixed)
    app.connect("build-finished", _bring_mathjax)
    app.connect("build-finished", _close_sockets)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
