"""Build script; the metadata is in setup.cfg."""

import re
from pathlib import Path

from setuptools import setup


def without_links_to_files(text: str) -> str:
    """Leave out what an index does not have: pictures, and links to files of the repository."""
    here = r"(?!https?:|#)"
    text = re.sub(rf"!\[[^\]]*\]\({here}[^)]*\)\n", "", text)
    for name in re.findall(rf"^\[(\w+)\]: {here}.*$", text, re.M):
        text = re.sub(rf"\[([^\]]+)\]\[{name}\]", r"\1", text)
    text = re.sub(rf"^\[\w+\]: {here}.*\n", "", text, flags=re.M)
    return re.sub(rf"\[([^\]]+)\]\({here}[^)]*\)", r"\1", text)


readme = (Path(__file__).parent / "README.md").read_text(encoding="utf-8")
setup(
    long_description=without_links_to_files(readme),
    long_description_content_type="text/markdown",
)
