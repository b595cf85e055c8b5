"""What pyproject.toml cannot say: the packages of the wheel, and a README whose links work on PyPI.

Packages are those of `hf_decayed/`, and `training/` as `hf_decayed.training`, for `hf-decayed train`. In the README, links to
files of the repository become links to the address `Repository` of `[project.urls]`, if there is one.
"""

import re
from pathlib import Path

from setuptools import find_namespace_packages, setup


ROOT = Path(__file__).parent
RELATIVE_LINK = re.compile(r"(!?)(\[(?:[^\[\]]|!\[[^\]]*\]\([^)]*\))*\])\((?!https?:|#|mailto:)([^)\s]+)\)")


def absolute_links(text: str, repository: str) -> str:
    """Markdown whose relative links lead to the repository: pictures to their files, all else to its pages."""

    def rewrite(match: re.Match) -> str:
        picture, label, target = match.groups()
        return f"{picture}{label}({repository}/{'raw' if picture else 'blob'}/main/{target})"

    return RELATIVE_LINK.sub(rewrite, text)


def read_long_description() -> str:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    repository = re.search(r'^Repository = "(.+?)/?"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    return absolute_links(text, repository[1]) if repository else text


if __name__ == "__main__":
    training = [f"hf_decayed.{name}" for name in find_namespace_packages(include=["training*"])]
    setup(
        packages=[*find_namespace_packages(include=["hf_decayed*"]), *training],
        package_dir={"hf_decayed.training": "training"},
        long_description=read_long_description(),
        long_description_content_type="text/markdown",
    )
