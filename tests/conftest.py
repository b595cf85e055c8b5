"""Shared by all tests: no network, tiny sizes, small images."""

import os
import subprocess
import sys
from pathlib import Path


ROOT = Path(__file__).parents[1]

# Scripts import one another. Last on the path, so that they hide no library.
sys.path.append(str(ROOT / "training"))
sys.path.append(str(ROOT / "training" / "benchmarks"))
sys.path.append(str(ROOT / "model_cards" / "space"))

# Before any Hugging Face import: nothing here may reach out.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
if "PYTEST_XDIST_WORKER" in os.environ:  # a worker per core: more threads than cores are many times slower
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest  # noqa: E402
import torch  # noqa: E402
from script_server import start_script  # noqa: E402

from hf_decayed import DecayedViTMAEConfig, DecayedViTMAEForPreTraining  # noqa: E402


TINY_SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "image_size": 32,
    "patch_size": 8,
    "decoder_hidden_size": 24,
    "decoder_num_hidden_layers": 3,
    "decoder_num_attention_heads": 4,
    "decoder_intermediate_size": 48,
}

# Every documented way to put the architecture together, by name.
PRESETS = {
    "default": DecayedViTMAEConfig,
    "default_at_one": lambda **sizes: DecayedViTMAEConfig(shortcut_decay=1.0, **sizes),
    "plain": DecayedViTMAEConfig.plain,
    "no_skips_ablation": lambda **sizes: DecayedViTMAEConfig.plain(
        **{"shortcut_decay": 0.6, "zero_init_branches": True, **sizes}
    ),
    "learned": lambda **sizes: DecayedViTMAEConfig(shortcut_schedule="learned", **sizes),
    "cosine_by_layer": lambda **sizes: DecayedViTMAEConfig(
        shortcut_schedule="cosine", shortcut_granularity="layer", **sizes
    ),
    "constant_mlp_only": lambda **sizes: DecayedViTMAEConfig(
        shortcut_schedule="constant", shortcut_scope="mlp", shortcut_decay=0.8, **sizes
    ),
    "scale_both": lambda **sizes: DecayedViTMAEConfig(residual_form="scale_both", shortcut_decay=1.0, **sizes),
    "scale_branch": lambda **sizes: DecayedViTMAEConfig(residual_form="scale_branch", shortcut_decay=1.0, **sizes),
    "skips_and_latent": lambda **sizes: DecayedViTMAEConfig(decoder_input="latent", **sizes),
    "two_deepest_skips": lambda **sizes: DecayedViTMAEConfig(encoder_decoder_skips=2, **sizes),
    "skips_and_norm": lambda **sizes: DecayedViTMAEConfig(final_norm=True, pooling="patch_mean", **sizes),
}


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture
def pixel_values():
    return torch.randn(3, 3, 32, 32)


@pytest.fixture
def noise():
    return torch.rand(3, 16)


@pytest.fixture(params=PRESETS)
def preset(request):
    return PRESETS[request.param](**TINY_SIZES)


def random_weights(model):
    """Fills every parameter at random, so that no branch is silent as it is at initialisation."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.2) if parameter.ndim > 1 else parameter.uniform_(0.5, 1.0)
    return model


@pytest.fixture(scope="session")
def pretrained(tmp_path_factory):
    """Folder of an encoder for scripts that start from one."""
    folder = tmp_path_factory.mktemp("pretrained")
    torch.manual_seed(0)
    config = DecayedViTMAEConfig(**{**TINY_SIZES, "num_channels": 1})
    random_weights(DecayedViTMAEForPreTraining(config)).save_pretrained(folder)
    return folder


def run_script(script, *flags, code=0, **settings):
    """Runs a script of `training/` to its end, which must be `code`; what it printed. Settings are `start_script`'s."""
    process = start_script(script, *flags, **settings)
    stdout, stderr = process.communicate()
    assert process.returncode == code, (stdout + stderr)[-3000:]
    return subprocess.CompletedProcess([script, *flags], code, stdout, stderr)
