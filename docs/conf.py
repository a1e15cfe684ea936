"""Settings of the documentation site. `./run docs` builds it into docs/_build; warnings are errors."""

import re
import sys
from pathlib import Path

from sphinx.application import Sphinx

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "docs" / "_extensions"), str(ROOT / "src")]

project = "caaseg"
author = "The caaseg contributors"
copyright = author
release = re.search(r'__version__ = "(.*)"', (ROOT / "src/caaseg/__init__.py").read_text())[1]
version = release

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "command_reference", "result_numbers"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build", "_extensions", "notebooks"]
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3
smartquotes = False  # options such as --steps must stay as they are

nitpicky = True
# Types of other packages, type variables and aliases have no page here, and no network is needed for a build.
nitpick_ignore_regex = [("py:.*", r"(?!caaseg\.(?:\w+$|attention\.\w+$)).*")]
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 88

html_theme = "furo"
html_title = f"caaseg {release}"
html_theme_options = {"navigation_with_keys": True}
html_static_path: list[str] = []
html_show_sphinx = False
html_show_copyright = False


def link_to_files_outside(app: Sphinx, page: str, source: list[str]) -> None:
    """Change links that leave docs/ for a Markdown file: to the page that includes it, or to a download."""
    source[0] = re.sub(r"\]\((?:\.\./)+benchmarks/README\.md", "](/benchmarks.md", source[0])
    source[0] = re.sub(r"\[([^\]]*)\]\(((?:\.\./)+src/[^)]*\.md)\)", r"{download}`\1 <\2>`", source[0])


def setup(app: Sphinx) -> None:
    """Register the change of links."""
    app.connect("source-read", link_to_files_outside)
