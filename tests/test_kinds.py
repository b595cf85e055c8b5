"""Kinds: a new system, or a new format of checkpoints, is a new file, and no list is edited."""

import ast
import importlib
import inspect
import json
import re
import subprocess
import sys
from types import SimpleNamespace

import diffusers
import pytest
import torch
import transformers
from conftest import ROOT

import hf_decayed
from hf_decayed import kinds, models
from hf_decayed.cli import main
from hf_decayed.errors import UserError
from hf_decayed.hub import formats
from hf_decayed.kinds import find_kind, list_kinds, package_class, read_field, read_model_folder


PUBLIC_NAMES = {
    "DatasetSpectralClustering",
    "DecayedResNetConfig",
    "DecayedResNetForImageClassification",
    "DecayedResNetModel",
    "DecayedSiTPipeline",
    "DecayedSiTTransformer2DModel",
    "DecayedUViT2DModel",
    "DecayedUViTPipeline",
    "DecayedViTMAEBackbone",
    "DecayedViTMAEConfig",
    "DecayedViTMAEForImageClassification",
    "DecayedViTMAEForPreTraining",
    "DecayedViTMAEModel",
    "GreyImageProcessor",
    "HierarchicalLatentConfig",
    "HierarchicalLatentEncoder",
    "LatentIntrinsicsModel",
    "LayerSpectralClustering",
    "NestedDiffusionPipeline",
    "NestedUViT2DModel",
    "RelightingPipeline",
    "Segmenter",
    "SiTSDEScheduler",
    "StructuralDiscriminatorConfig",
    "StructuralDiscriminatorModel",
    "StructuralGANPipeline",
    "StructuralGenerator",
    "UnsupervisedSegmentationPipeline",
    "attention_map",
    "decay_shortcuts",
    "effective_decay",
    "fold_shortcuts",
    "record_attention",
    "remove_decay",
    "set_shortcut_decay",
    "shortcut_alphas",
    "shortcut_parameter_groups",
    "stock_model",
    "suggest_shortcut_decay",
}

# Two files that somebody adds: one to models/, one to kinds/.
MODELING = """
import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import ImageClassifierOutput


class ToyConfig(PreTrainedConfig):
    model_type = "toy"

    def __init__(self, num_channels=3, **kwargs):
        super().__init__(**kwargs)
        self.num_channels = num_channels


class ToyModel(PreTrainedModel):
    config_class = ToyConfig

    def __init__(self, config):
        super().__init__(config)
        self.linear = nn.Linear(config.num_channels, 2)
        self.post_init()

    def _init_weights(self, module):
        pass

    def forward(self, pixel_values):
        return ImageClassifierOutput(logits=self.linear(pixel_values.mean((2, 3))))


AUTO_MAP = {"AutoConfig": "modeling_toy.ToyConfig", "AutoModel": "modeling_toy.ToyModel"}
ToyConfig.register_for_auto_class()
ToyModel.register_for_auto_class("AutoModel")
"""
KIND = """
from hf_decayed.kinds import Kind, SavedClass


def toy_output(loaded):
    import torch

    with torch.no_grad():
        return loaded.eval()(torch.ones(1, loaded.config.num_channels, 4, 4)).logits


KIND = Kind(
    script="toy",
    library="transformers",
    classes={"ToyModel": SavedClass("toy", "image-classification", "It is a toy.", ("AutoModel",))},
    modules={"ToyModel": "hf_decayed.models.modeling_toy"},
    usage=lambda folder, name, results: f'model = AutoModel.from_pretrained("{name}")',
    reference_output=toy_output,
    has_shortcuts=False,
    pictures={"toy.png": "a toy"},
    metrics={"fun": "fun that it is"},
)
"""
FORMAT = """
from hf_decayed.hub.formats import Format


FORMATS = [
    Format("toy-file", "somebody/toys", "mit", lambda checkpoint, fields: (SOURCE, ["A note."]), lambda: {"colour"})
]
SOURCE = None
"""


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """The package with the files of a new system beside its own; yields a folder that its class saved."""
    for package, name, text in (
        (models, "modeling_toy", MODELING),
        (kinds, "toy", KIND),
        (formats, "toy_files", FORMAT),
    ):
        folder = tmp_path / package.__name__
        folder.mkdir()
        (folder / f"{name}.py").write_text(text)
        monkeypatch.setattr(package, "__path__", [*package.__path__, str(folder)])
        module = f"{package.__name__}.{name}"
        monkeypatch.setitem(sys.modules, module, importlib.import_module(module))  # removed afterwards
    modeling = importlib.import_module("hf_decayed.models.modeling_toy")
    hf_decayed._register(modeling.AUTO_MAP)
    torch.manual_seed(0)
    modeling.ToyModel(modeling.ToyConfig()).save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "preprocessor_config.json").write_text("{}")
    (tmp_path / "model" / "results.json").write_text(json.dumps({"fun": 0.25}))
    return tmp_path / "model"


def test_a_new_kind_is_a_new_file(toy, capsys):
    assert "toy" in list_kinds() and find_kind("ToyModel").script == "toy"
    assert package_class("ToyModel").__name__ == read_model_folder(toy).class_name == "ToyModel"
    assert main(["card", str(toy), "--repo_id", "user/toy", "--license", "mit"]) == 0
    text = (toy / "README.md").read_text()
    assert "# Toy\n\nA toy.\n\n0.0 million parameters." in text and "It is a toy. It repeats the biases" in text
    assert "| fun that it is | 0.25 |" in text and 'AutoModel.from_pretrained("user/toy")' in text
    assert "shortcut" not in text.replace("decayed-identity-shortcuts", "")
    capsys.readouterr()
    assert main(["publish", str(toy), "--repo_id", "user/toy", "--dry_run"]) == 0, capsys.readouterr().err
    assert "gives what the source gives (largest difference 0.0e+00)" in capsys.readouterr().out


def test_a_new_format_is_a_new_file(toy, tmp_path, monkeypatch, capsys):
    with pytest.raises(SystemExit):
        main(["convert", "--help"])
    assert re.search(r"toy-file +a file of somebody/toys\n", capsys.readouterr().out)
    checkpoint = tmp_path / "toy.pth"
    checkpoint.write_bytes(b"1")
    source = SimpleNamespace(save_pretrained=lambda folder: (folder / "config.json").write_text("{}"))
    monkeypatch.setattr("hf_decayed.hub.formats.toy_files.SOURCE", source)
    command = ["convert", "--from", "toy-file", "--checkpoint", str(checkpoint), "--output", str(tmp_path / "out")]
    assert main([*command, "--set", "size=3"]) == 2 and "'size' is not a field" in capsys.readouterr().err
    assert main([*command, "--set", "colour=red"]) == 0
    printed, card = capsys.readouterr().out, (tmp_path / "out" / "README.md").read_text()
    assert "Licence of the weights: mit." in printed and "A note." in printed
    assert "The weights are those of somebody/toys:" in card and "license: mit" in card


@pytest.mark.parametrize("name", list_kinds())
def test_a_kind_describes_what_there_is(name):
    kind = list_kinds()[name]
    assert (ROOT / "training" / f"{kind.script}.py").exists()
    library = {"transformers": transformers, "diffusers": diffusers}[kind.library]
    for class_name, saved_class in kind.classes.items():
        assert package_class(class_name).__name__ == class_name and find_kind(class_name) is kind
        assert saved_class.loaders and all(hasattr(library, loader) for loader in saved_class.loaders)
    assert all(package_class(class_name) for class_name in kind.modules)
    assert (kind.network is not None) == (kind.library == "diffusers")
    if kind.network:
        pipeline_class = package_class(next(iter(kind.classes)))
        assert kind.network in inspect.signature(pipeline_class.__init__).parameters


def test_files_of_kinds_import_no_heavy_library():
    for path in (ROOT / "hf_decayed" / "kinds").glob("*.py"):
        for node in ast.parse(path.read_text()).body:
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            modules += [node.module or ""] if isinstance(node, ast.ImportFrom) and node.level == 0 else []
            assert not {module.split(".")[0] for module in modules} & {"torch", "transformers", "diffusers"}, path


@pytest.mark.slow
def test_diffusers_is_imported_on_demand():
    program = (
        "import sys, hf_decayed, hf_decayed.cli; from hf_decayed.kinds import list_kinds; list_kinds(); "
        "from hf_decayed.hub.formats import list_formats; list_formats(); hf_decayed.cli.main([]); "
        "assert 'diffusers' not in sys.modules; hf_decayed.DecayedUViTPipeline; assert 'diffusers' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)


def test_public_names():
    assert set(hf_decayed.__all__) == PUBLIC_NAMES and len(hf_decayed.__all__) == len(PUBLIC_NAMES)
    assert PUBLIC_NAMES <= set(dir(hf_decayed)) and "__version__" in dir(hf_decayed)
    names = {}
    exec("from hf_decayed import *", names)
    assert set(names) - {"__builtins__"} == PUBLIC_NAMES
    assert all(getattr(hf_decayed, name).__module__.startswith("hf_decayed.") for name in PUBLIC_NAMES)
    with pytest.raises(AttributeError, match="module 'hf_decayed' has no attribute 'DecayedViT'"):
        _ = hf_decayed.DecayedViT


@pytest.mark.parametrize(
    "value, kind, sentence",
    [
        (True, float, "'x' in 'a.json' must be a number, got True"),
        (1.5, int, "'x' in 'a.json' must be a whole number, got 1.5"),
        ([], dict, r"'x' in 'a.json' must be an object, got \[\]"),
        (None, str, "'a.json' has no 'x'"),
    ],
)
def test_a_field_of_the_wrong_type_is_named(value, kind, sentence):
    with pytest.raises(UserError, match=sentence):
        read_field({"x": value}, "x", kind, "a.json")
    assert read_field({"x": 3}, "x", float, "a.json") == 3 and read_field({}, "x", kind, "a.json", 5) == 5
