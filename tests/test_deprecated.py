"""Old names stay importable for one version, and warn; new names do not."""

import importlib
import subprocess
import sys
import warnings

import pytest

from hf_decayed._deprecated import MOVED


@pytest.mark.parametrize(
    "old, new",
    [
        ("data.DataError", "errors.DataError"),
        ("data.some", "data.sources.take_subset"),
        ("data.EpochBatches", "data.datasets.EpochBatchSampler"),
        ("runs.one_sentence", "errors.format_error"),
        ("runs.make_repository", "hub.upload.create_repository"),
        ("cards.write_card", "hub.cards.write_card"),
        ("cards.table", "evaluation.tables.markdown_table"),
        ("conversion.convert", "hub.conversion.convert"),
        ("conversion_diffusion.fields_of", "hub.formats.format_fields"),
        ("optimization.warmed_average", "run.optimization.ema_with_warmup"),
        ("pictures.save_grid", "plots.save_grid"),
        ("publishing.publish", "hub.publishing.publish"),
        ("sampling.sample", "evaluation.sampling.sample"),
        ("latents.load_vae", "data.latents.load_vae"),
        ("augmentation.mixup_cutmix", "data.augmentation.mixup_cutmix"),
        ("evaluation.features.fingerprint", "provenance.model_fingerprint"),
        ("cli.field_and_value", "command_line.parse_field"),
    ],
)
def test_an_old_name_warns_and_is_the_new_one(old, new):
    old_module, old_name = old.rsplit(".", 1)
    new_module, new_name = new.rsplit(".", 1)
    names = {}
    with pytest.warns(FutureWarning, match=f"hf_decayed.{old} is now hf_decayed.{new}") as caught:
        exec(compile(f"from hf_decayed.{old_module} import {old_name}", "script.py", "exec"), names)
    assert caught[-1].filename == "script.py"  # the user's line, not ours
    assert names[old_name] is getattr(importlib.import_module(f"hf_decayed.{new_module}"), new_name)


def test_every_entry_has_a_target():
    for old_module, targets in MOVED.items():
        module = importlib.import_module(f"hf_decayed.{old_module}")
        for name in (entry.partition("=")[0] for entry in " ".join(targets.values()).split()):
            if name not in vars(module):  # the module may use it itself
                with pytest.warns(FutureWarning, match="is now"):
                    assert getattr(module, name) is not None


def test_other_names_are_missing():
    import hf_decayed.data
    import hf_decayed.runs

    for module in (hf_decayed.data, hf_decayed.runs):
        with pytest.raises(AttributeError, match=f"module '{module.__name__}' has no attribute 'nonsense'"):
            _ = module.nonsense
        assert not hasattr(module, "__wrapped__")
    with pytest.raises(ImportError, match="cannot import name 'nonsense'"):
        from hf_decayed.runs import nonsense  # noqa: F401
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("hf_decayed.nonsense")


def test_a_target_that_is_gone_is_said(monkeypatch):
    monkeypatch.setitem(MOVED, "runs", {"errors": "old=no_such_name"})
    module = importlib.import_module("hf_decayed.runs")
    with pytest.raises(AttributeError, match="hf_decayed.runs.old was removed, as was errors.no_such_name"):
        _ = module.old


@pytest.mark.slow
def test_ordinary_use_does_not_warn():
    program = """
import importlib, pkgutil, warnings
import torch, transformers, diffusers, datasets, accelerate
warnings.simplefilter("error", FutureWarning)
import hf_decayed
from hf_decayed import *
for module in pkgutil.walk_packages(hf_decayed.__path__, "hf_decayed."):
    if ".metrics." not in module.name and not module.name.endswith("__main__"):
        importlib.import_module(module.name)
hf_decayed.cli.main([])
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-2000:]


def test_packages_are_imported_as_before():
    """The finder leaves loader, file and submodules of packages alone that still exist."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        package = importlib.import_module("hf_decayed.data")
    assert package.__file__.endswith("__init__.py") and package.__spec__.submodule_search_locations
    assert importlib.import_module("hf_decayed.data.sources") is package.sources
