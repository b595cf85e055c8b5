"""The test suites of transformers and diffusers, taken from a checkout of theirs that an environment variable names.

Their files are no part of this repository. A version near the installed library's is the best:

    git clone --depth 1 --branch v5.22.2 https://github.com/huggingface/transformers
    TRANSFORMERS_SOURCE=transformers python -m pytest -m slow tests/test_transformers_suite.py
    git clone --depth 1 --branch v0.42.1 https://github.com/huggingface/diffusers
    DIFFUSERS_SOURCE=diffusers python -m pytest -m slow tests/test_diffusers_suite.py

They need packages of their own: `pip install parameterized httpx requests-mock`.
"""

import importlib
import os
import sys
import unittest
from importlib.util import find_spec
from pathlib import Path

import pytest


def import_suite(variable: str, *modules: str, needs: tuple[str, ...] = ()) -> list:
    """Modules of the package `tests` of a checkout; without the variable, or what the suite needs, the file is skipped."""
    source = os.environ.get(variable)
    if not source or not (Path(source) / "tests" / "__init__.py").exists():
        pytest.skip(
            f"{variable} does not name a checkout of the library, whose tests these are.", allow_module_level=True
        )
    for package in needs:
        if find_spec(package) is None:
            pytest.skip(
                f"The library's tests need `pip install {package.replace('_', '-')}`.", allow_module_level=True
            )
    for name in [name for name in sys.modules if name.split(".")[0] == "tests"]:  # of the other library
        del sys.modules[name]
    sys.path.insert(0, str(Path(source).resolve()))
    try:
        return [importlib.import_module(f"tests.{name}") for name in modules]
    finally:
        sys.path.pop(0)


def skip_exceptions(exceptions: dict[str, str]):
    """Decorates a class of tests: those named here are skipped, each with the reason why it does not apply."""

    def decorate(test_class: type) -> type:
        for name, reason in exceptions.items():
            assert hasattr(test_class, name), f"{test_class.__name__} has no {name}: the exception is out of date."
            setattr(test_class, name, unittest.skip(reason)(lambda self: None))
        return test_class

    return decorate
