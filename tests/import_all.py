"""Imports every module of the package, wherever it is installed; fails with those that cannot be imported.

Modules of `hf_decayed/metrics` are found by their files: their folders are no packages. The scripts of `hf_decayed/training`,
which a wheel has, are no modules: `hf-decayed train` runs them.
"""

import importlib
import sys
from pathlib import Path

import hf_decayed


folder = Path(hf_decayed.__file__).parent
files = sorted(file for file in folder.rglob("*.py") if folder / "training" not in file.parents)
failed = []
for file in files:
    name = ".".join(["hf_decayed", *file.relative_to(folder).with_suffix("").parts]).removesuffix(".__init__")
    try:
        importlib.import_module(name)
    except ImportError as error:
        failed.append(f"{name}: {error}")
print("\n".join(failed) or f"{len(files)} modules imported from {folder}")
sys.exit(1 if failed else 0)
