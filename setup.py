"""Packages of the wheel: those of `hf_decayed/`, and `training/` as `hf_decayed.training`, for `hf-decayed train`.

All else is in pyproject.toml, which cannot both find packages and map a folder to a package.
"""

from setuptools import find_namespace_packages, setup


TRAINING = [f"hf_decayed.{name}" for name in find_namespace_packages(include=["training*"])]

setup(
    packages=[*find_namespace_packages(include=["hf_decayed*"]), *TRAINING],
    package_dir={"hf_decayed.training": "training"},
)
