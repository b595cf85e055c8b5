"""Imports every module of the package, wherever it is installed; fails with those that cannot be imported.

Modules of `hf_decayed/metrics` are found by their files: their folders are no packages.
"""

import importlib
import sys
from pathlib import Path

import hf_decayed


folder = Path(hf_decayed.__file__).parent
files = sorted(folder.rglob("*.py"))
failed = []
for file in files:
    name = ".".join(["hf_decayed", *file.relative_to(folder).with_suffix("").parts]).removesuffix(".__init__")
    try:
        importlib.import_module(name)
    except ImportError as error:
        failed.append(f"{name}: {error}")
print("\n".join(failed) or f"{len(files)} modules imported from {folder}")
sys.exit(1 if failed else 0)
