"""How Sphinx builds the site: ``make docs``."""

from __future__ import annotations

import sys
from importlib.metadata import version as installed_version
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
# `benchmark` is not installed, and the tests share their table of mistakes
sys.path[:0] = [str(HERE / "_ext"), str(ROOT), str(ROOT / "test")]

project = "BackPACK"
author = "the backpack contributors"
copyright = author
release = installed_version("backpack-for-pytorch")
version = release

extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.doctest",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "sphinx_gallery.gen_gallery",
    "myst_parser",
    "constructors",
    "gallery_output",
    "generated",
    "local_links",
    "mathml",
    "public_api",
]
exclude_patterns = ["_build", "_ext", "generated/examples", "generated/*.inc.*", "gallery/**.md5"]

# --- Appearance ------------------------------------------------------------------------

html_theme = "furo"
html_title = f"BackPACK {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_theme_options = {"navigation_with_keys": True}
pygments_style = "friendly"
pygments_dark_style = "github-dark"
copybutton_prompt_text = r">>> |\.\.\. "
copybutton_prompt_is_regexp = True
html_math_renderer = "mathml"

# --- Docstrings ------------------------------------------------------------------------

default_role = "code"
autoclass_content = "both"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_typehints_format = "short"
add_module_names = False
myst_heading_anchors = 3
python_maximum_signature_line_length = 88
python_use_unqualified_type_names = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False
nitpicky = True
# other libraries, and what is internal
nitpick_ignore_regex = [
    ("py:.*", r"(?!backpack).*"),
    ("py:.*", r"backpack\.core\..*"),
    ("py:.*", r"backpack\.custom_module\.conversions.*"),
    ("py:class", r".*\.(_\w+|T)"),
]

# --- Examples --------------------------------------------------------------------------

doctest_test_doctest_blocks = "default"

sphinx_gallery_conf = {
    "examples_dirs": "generated/examples",
    "gallery_dirs": "gallery",
    "filename_pattern": ".*",
    "ignore_pattern": r"__init__\.py",
    "within_subsection_order": "gallery_order.Position",
    "abort_on_example_error": True,
    "download_all_examples": False,
    "show_signature": False,
    "min_reported_time": 1,
    "remove_config_comments": True,
    "image_scrapers": ("matplotlib",),
    "default_thumb_file": str(HERE / "generated" / "table.png"),
    "matplotlib_animations": False,
    "capture_repr": (),
    "plot_gallery": "True",
    "write_computation_times": False,
    "nested_sections": True,
    "reset_modules": ("matplotlib", "gallery_order.reset"),
    "parallel": 2,  # programs at once, each in a process of its own
}
