"""A published folder loads where `hf_decayed` cannot be imported: from disk, over HTTP, with every Auto class."""

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from conftest import PRESETS, TINY_SIZES, random_weights
from loopback_hub import serve
from transformers import (
    AutoImageProcessor,
    AutoModel,
    AutoModelForImageClassification,
    AutoModelForPreTraining,
    ViTConfig,
    ViTMAEConfig,
    ViTMAEForPreTraining,
    ViTMAEModel,
    ViTModel,
)

from hf_decayed import (
    DecayedViTMAEConfig,
    DecayedViTMAEForImageClassification,
    DecayedViTMAEForPreTraining,
    DecayedViTMAEModel,
)


CLASSES = [DecayedViTMAEModel, DecayedViTMAEForPreTraining, DecayedViTMAEForImageClassification]

# Runs in a process that cannot import the package; prints the outputs of the three Auto classes on fixed input.
CLEAN_PROCESS = """
import importlib.abc, json, sys

class Block(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "hf_decayed":
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Block())
import torch
from transformers import AutoImageProcessor, AutoModel, AutoModelForImageClassification, AutoModelForPreTraining

source = sys.argv[1]
torch.manual_seed(0)
pixel_values, noise = torch.randn(2, 3, 32, 32), torch.rand(2, 16)
results = {}
with torch.no_grad():
    for auto in (AutoModel, AutoModelForPreTraining, AutoModelForImageClassification):
        model = auto.from_pretrained(source, trust_remote_code=True).eval()
        assert not any(name.startswith("hf_decayed") for name in sys.modules)
        outputs = model(pixel_values, noise=noise) if auto is AutoModelForPreTraining else model(pixel_values)
        value = outputs.pooler_output if auto is AutoModel else outputs.logits
        results[auto.__name__] = [type(model).__name__, value.double().sum().item()]
processor = AutoImageProcessor.from_pretrained(source)
results["processor"] = [processor.image_mean, processor.size["height"]]
if len(sys.argv) > 2:
    model.save_pretrained(sys.argv[2])
print(json.dumps(results))
"""


def in_clean_process(source, *arguments, **environment):
    environment = {**os.environ, "PYTHONPATH": "", **environment}
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", CLEAN_PROCESS, str(source), *map(str, arguments)],
        env=environment,
        capture_output=True,
        text=True,
        cwd="/",
    )
    assert result.returncode == 0, result.stderr[-3000:]
    assert "trust_remote_code" not in result.stderr  # no warning of an argument that everyone passes
    return json.loads(result.stdout.splitlines()[-1])


def with_the_package(source, **kwargs):
    """The same numbers as `CLEAN_PROCESS`, with the installed classes."""
    torch.manual_seed(0)
    pixel_values, noise = torch.randn(2, 3, 32, 32), torch.rand(2, 16)
    results = {}
    with torch.no_grad():
        for auto in (AutoModel, AutoModelForPreTraining, AutoModelForImageClassification):
            model = auto.from_pretrained(source, **kwargs).eval()
            assert type(model).__module__.startswith("hf_decayed.")
            outputs = model(pixel_values, noise=noise) if auto is AutoModelForPreTraining else model(pixel_values)
            value = outputs.pooler_output if auto is AutoModel else outputs.logits
            results[auto.__name__] = [type(model).__name__, value.double().sum().item()]
    return results


def publish(folder, model_class=DecayedViTMAEForPreTraining, **fields):
    torch.manual_seed(1)
    model = random_weights(model_class(DecayedViTMAEConfig(**TINY_SIZES, **fields)))
    model.save_pretrained(folder)
    return model


def head_of(model_class):
    """The Auto classes whose weights a folder of `model_class` holds in full; other heads start untrained."""
    return {
        DecayedViTMAEModel: ["AutoModel"],
        DecayedViTMAEForPreTraining: ["AutoModel", "AutoModelForPreTraining"],
        DecayedViTMAEForImageClassification: ["AutoModel", "AutoModelForImageClassification"],
    }[model_class]


@pytest.mark.parametrize(
    "model_class",
    [DecayedViTMAEForPreTraining]
    + [pytest.param(cls, marks=pytest.mark.slow) for cls in CLASSES if cls is not DecayedViTMAEForPreTraining],
)
def test_folder_of_every_class_loads_with_every_auto_class(model_class, tmp_path):
    publish(tmp_path / "model", model_class)
    files = {path.name for path in (tmp_path / "model").iterdir()}
    assert files == {
        "config.json",
        "configuration_decayed_vit_mae.py",
        "image_processing_decayed.py",
        "model.safetensors",
        "modeling_decayed_vit_mae.py",
        "preprocessor_config.json",
        "shortcut_decay.py",
    }
    remote = in_clean_process(tmp_path / "model", tmp_path / "again")
    assert {path.name for path in (tmp_path / "again").iterdir()} == files
    for trust in ({}, {"trust_remote_code": True}):
        local = with_the_package(tmp_path / "model", **trust)
        for auto, (name, value) in local.items():
            assert remote[auto][0] == name
            if auto in head_of(model_class):
                assert remote[auto][1] == value
    assert remote["processor"] == [[0.485, 0.456, 0.406], 32]
    # A folder saved by a process without the package loads again, with its code.
    assert in_clean_process(tmp_path / "again")["AutoModel"] == remote["AutoModel"]


@pytest.mark.slow  # test_publishing.py loads over HTTP too
def test_over_http(tmp_path):
    publish(tmp_path / "hub" / "user" / "decayed-mae")
    with serve(tmp_path / "hub") as server:
        remote = in_clean_process(
            "user/decayed-mae", HF_ENDPOINT=server.url, HF_HUB_OFFLINE="0", HF_HOME=str(tmp_path / "cache")
        )
    assert "user/decayed-mae/resolve" in " ".join(server.downloads)
    local = with_the_package(tmp_path / "hub" / "user" / "decayed-mae")
    assert [remote[auto] for auto in ("AutoModel", "AutoModelForPreTraining")] == [
        local[auto] for auto in ("AutoModel", "AutoModelForPreTraining")
    ]
    # Once downloaded, it needs no network.
    offline = in_clean_process("user/decayed-mae", HF_HOME=str(tmp_path / "cache"))
    assert offline["AutoModel"] == remote["AutoModel"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["learned", "plain", "skips_and_norm"])
def test_other_presets_in_a_clean_process(name, tmp_path):
    random_weights(DecayedViTMAEForPreTraining(PRESETS[name](**TINY_SIZES))).save_pretrained(tmp_path)
    remote, local = in_clean_process(tmp_path), with_the_package(tmp_path)
    for auto in ("AutoModel", "AutoModelForPreTraining"):
        assert remote[auto] == local[auto]


def test_an_older_transformers_fails_with_the_required_version(tmp_path):
    publish(tmp_path)
    code = f"""
import importlib.metadata as metadata
real = metadata.version
metadata.version = lambda name: "5.0.0" if name == "transformers" else real(name)
from transformers import AutoModel
AutoModel.from_pretrained({str(tmp_path)!r}, trust_remote_code=True)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd="/")
    assert result.returncode != 0
    assert "transformers>=5.18.0 is required" in result.stderr and "found transformers==5.0.0" in result.stderr


def test_no_local_path_is_saved(tmp_path):
    publish(tmp_path / "first")
    DecayedViTMAEModel.from_pretrained(tmp_path / "first").save_pretrained(tmp_path / "second")
    for file in (tmp_path / "second").glob("*.json"):
        assert str(tmp_path) not in file.read_text()


def test_the_saved_processor_fits_the_model_and_is_not_overwritten(tmp_path):
    publish(tmp_path / "grey", num_channels=1)
    processor = AutoImageProcessor.from_pretrained(tmp_path / "grey")
    assert processor.image_mean == pytest.approx([0.449]) and processor.image_std == pytest.approx([0.226])
    processor.image_mean = [0.2]
    processor.save_pretrained(tmp_path / "grey")
    publish(tmp_path / "grey", num_channels=1)
    assert AutoImageProcessor.from_pretrained(tmp_path / "grey").image_mean == pytest.approx([0.2])
    DecayedViTMAEModel(DecayedViTMAEConfig(**{**TINY_SIZES, "image_size": 64})).save_pretrained(tmp_path / "grey")
    assert AutoImageProcessor.from_pretrained(tmp_path / "grey").size["height"] == 64


# Checkpoints of other models are converted or refused.


def test_vit_mae_folder_is_converted(tmp_path, pixel_values, noise):
    theirs = random_weights(ViTMAEForPreTraining(ViTMAEConfig(**TINY_SIZES))).eval()
    theirs.save_pretrained(tmp_path / "vit_mae")
    config = DecayedViTMAEConfig.from_pretrained(tmp_path / "vit_mae")
    DecayedViTMAEForPreTraining.from_pretrained(tmp_path / "vit_mae", config=config)
    ours = DecayedViTMAEForPreTraining.from_pretrained(tmp_path / "vit_mae").eval()
    state = theirs.state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in ours.state_dict().items())
    torch.testing.assert_close(ours(pixel_values, noise=noise).loss, theirs(pixel_values, noise=noise).loss)
    ours.save_pretrained(tmp_path / "ours")
    again = DecayedViTMAEModel.from_pretrained(tmp_path / "ours")
    assert torch.equal(again.layers[3].mlp.fc2.weight, theirs.vit.layers[3].mlp.fc2.weight)


def test_another_family_is_refused(tmp_path):
    sizes = {
        name: TINY_SIZES[name]
        for name in ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
    }
    ViTModel(ViTConfig(**sizes, image_size=32, patch_size=8)).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="`model_type` must be 'decayed_vit_mae' or 'vit_mae', got 'vit'"):
        DecayedViTMAEModel.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match="do not fit DecayedViTMAEModel. Missing or .*Unexpected: "):
        DecayedViTMAEModel.from_pretrained(tmp_path, config=DecayedViTMAEConfig(**TINY_SIZES))


@pytest.mark.parametrize(
    "fields,key",
    [
        ({"num_hidden_layers": 6}, "vit.layers.5.mlp.fc1.weight"),
        ({"num_hidden_layers": 2}, "vit.layers.3.mlp.fc1.weight"),
        ({"decoder_num_hidden_layers": 4}, "decoder.decoder_layers.3.mlp.fc1.weight"),
        ({"final_norm": True}, "vit.layernorm.weight"),
        ({"shortcut_schedule": "learned"}, "vit.layers.0.attention_alpha"),
    ],
)
def test_weights_that_do_not_fit_the_config_are_refused(fields, key, tmp_path):
    publish(tmp_path)
    with pytest.raises(ValueError, match=f"do not fit DecayedViTMAEForPreTraining.*{key}"):
        DecayedViTMAEForPreTraining.from_pretrained(tmp_path, **fields)


def test_sharded_weights_and_oblong_sizes(tmp_path):
    sizes = {**TINY_SIZES, "image_size": (32, 48), "patch_size": (8, 4)}
    model = random_weights(DecayedViTMAEForPreTraining(DecayedViTMAEConfig(**sizes)))
    model.save_pretrained(tmp_path, max_shard_size="50KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    images, noise = torch.randn(2, 3, 32, 48), torch.rand(2, 48)
    loaded = AutoModelForPreTraining.from_pretrained(tmp_path)
    torch.testing.assert_close(loaded(images, noise=noise).logits, model(images, noise=noise).logits)


def test_fields_overridden_on_loading(tmp_path, pixel_values):
    publish(tmp_path)
    model = AutoModel.from_pretrained(tmp_path, shortcut_decay=0.8)
    assert model.config.shortcut_decay == 0.8 and model.shortcut_alphas() == model.config.shortcut_alphas()
    assert model.shortcut_alphas()[-1][1] == pytest.approx(0.8)
    with pytest.raises(Exception, match=r"`shortcut_decay` must lie in \[0, 1\], got 7.0"):
        DecayedViTMAEConfig.from_pretrained(tmp_path, shortcut_decay=7.0)


def test_a_config_changed_after_building_is_not_saved(tmp_path):
    model = publish(tmp_path / "first")
    model.config.shortcut_decay = 0.8
    with pytest.raises(ValueError, match="shortcut fields have changed since the model was built"):
        model.save_pretrained(tmp_path / "second")
    assert not (tmp_path / "second").exists()


def test_other_shapes_are_refused_with_ignore_mismatched_sizes(tmp_path):
    publish(tmp_path, DecayedViTMAEForImageClassification, num_labels=3)
    with pytest.raises(ValueError, match="of another shape: .*mlp.fc1.weight"):
        DecayedViTMAEModel.from_pretrained(tmp_path, intermediate_size=128, ignore_mismatched_sizes=True)
    # A classifier with other labels is what the argument is for.
    model = DecayedViTMAEForImageClassification.from_pretrained(tmp_path, num_labels=9, ignore_mismatched_sizes=True)
    assert model.classifier.weight.shape == (9, 32)


def test_pickles_are_refused_with_advice(tmp_path):
    model = publish(tmp_path)
    with pytest.raises(ValueError, match="`use_safetensors` must be True"):
        DecayedViTMAEModel.from_pretrained(tmp_path, use_safetensors=False)
    (tmp_path / "model.safetensors").unlink()
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(OSError, match="holds pickled weights, not safetensors; `hf-decayed convert"):
        DecayedViTMAEForPreTraining.from_pretrained(tmp_path)


def test_a_missing_decoder(tmp_path):
    """The decoder of our own checkpoints starts untrained, with a warning; a ViTMAE checkpoint without one is refused."""
    publish(tmp_path / "ours", DecayedViTMAEModel)
    with pytest.warns(UserWarning, match="holds no decoder: it starts untrained"):
        DecayedViTMAEForPreTraining.from_pretrained(tmp_path / "ours")
    ViTMAEModel(ViTMAEConfig(**TINY_SIZES)).save_pretrained(tmp_path / "theirs")
    with pytest.raises(ValueError, match="Missing or of another shape: .*decoder.decoder_embed.weight"):
        DecayedViTMAEForPreTraining.from_pretrained(tmp_path / "theirs")


def test_the_final_norm_is_not_dropped_silently(tmp_path):
    plain = DecayedViTMAEConfig.plain(**TINY_SIZES)
    random_weights(DecayedViTMAEForPreTraining(plain)).save_pretrained(tmp_path / "pretraining")
    random_weights(DecayedViTMAEForImageClassification(plain)).save_pretrained(tmp_path / "classifier")
    with pytest.raises(ValueError, match="Unexpected: .*layernorm.weight"):
        DecayedViTMAEForPreTraining.from_pretrained(tmp_path / "pretraining", final_norm=False)
    with pytest.raises(ValueError, match="of another shape: .*fc_norm.weight"):
        DecayedViTMAEForImageClassification.from_pretrained(tmp_path / "classifier", final_norm=False)


def test_the_processor_is_uploaded_too(tmp_path, monkeypatch):
    sent = []
    monkeypatch.setattr(
        "huggingface_hub.HfApi.create_repo", lambda self, repo_id, **_: SimpleNamespace(repo_id=f"user/{repo_id}")
    )
    monkeypatch.setattr("huggingface_hub.HfApi.create_commit", lambda self, operations, **_: sent.extend(operations))
    monkeypatch.setattr("huggingface_hub.HfApi.create_branch", lambda self, **_: None)
    model = publish(tmp_path / "other")
    model.save_pretrained(tmp_path / "decayed-mae", push_to_hub=True)
    names = {operation.path_in_repo for operation in sent}
    assert {"preprocessor_config.json", "model.safetensors", "modeling_decayed_vit_mae.py", "config.json"} <= names


def test_fine_tuning_may_drop_the_final_norm(tmp_path):
    random_weights(DecayedViTMAEForPreTraining(DecayedViTMAEConfig.plain(**TINY_SIZES))).save_pretrained(tmp_path)
    model = DecayedViTMAEForImageClassification.from_pretrained(
        tmp_path, final_norm=False, pooling="patch_mean", num_labels=7
    )
    assert model.classifier.weight.shape == (7, 32)


def test_truncated_weights_are_refused(tmp_path):
    publish(tmp_path)
    weights = tmp_path / "model.safetensors"
    whole = weights.read_bytes()
    for length in (0, 5, 100, len(whole) // 2, len(whole) - 1):
        weights.write_bytes(whole[:length])
        with pytest.raises(OSError, match="weights of .* are damaged or incomplete"):
            DecayedViTMAEForPreTraining.from_pretrained(tmp_path)


def test_importing_the_package_is_light():
    code = "import hf_decayed, sys; sys.exit('diffusers' in sys.modules or 'torchvision' in sys.modules or 'timm' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd="/").returncode == 0


@pytest.mark.parametrize(
    "first_import",
    [
        "pass",
        "from transformers import AutoModel",
        pytest.param("from transformers import AutoImageProcessor, Trainer", marks=pytest.mark.slow),
        pytest.param("from hf_decayed import HierarchicalLatentEncoder", marks=pytest.mark.slow),
        pytest.param("from hf_decayed import DecayedUViTPipeline", marks=pytest.mark.slow),
        pytest.param("from hf_decayed import UnsupervisedSegmentationPipeline", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("package_first", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_importing_the_package_registers_its_classes(first_import, package_first):
    """In whatever order transformers, its Auto classes and our modules are imported."""
    imports = ["import hf_decayed", first_import] if package_first else [first_import, "import hf_decayed"]
    code = "\n".join(
        [
            *imports,
            "from transformers import AutoConfig, AutoModel, AutoModelForImageClassification, pipelines",
            "from transformers.models.auto.image_processing_auto import get_image_processor_class_from_name as processor",
            "sizes = dict(hidden_size=32, num_attention_heads=2, intermediate_size=32)",
            "config = AutoConfig.for_model('decayed_vit_mae', **sizes)",
            "assert isinstance(AutoModel.from_config(config), hf_decayed.DecayedViTMAEModel)",
            "model = AutoModelForImageClassification.from_config(AutoConfig.for_model('decayed_resnet'))",
            "assert isinstance(model, hf_decayed.DecayedResNetForImageClassification)",
            "assert 'unsupervised-segmentation' in pipelines.PIPELINE_REGISTRY.get_supported_tasks()",
            "assert processor('GreyImageProcessor').__module__ == 'hf_decayed.models.image_processing_decayed'",
        ]
    )
    result = subprocess.run([sys.executable, "-W", "ignore", "-c", code], cwd="/", capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-3000:]
