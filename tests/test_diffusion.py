"""U-ViT and SiT with decayed shortcuts, their pipelines and SiT's sampler: formulas by hand, and cases with known answers."""

import dataclasses
import itertools
import json
import math
import os
import random
import subprocess
import sys
import warnings

import numpy as np
import pytest
import torch
from conftest import ROOT, random_weights
from diffusers import (
    AutoencoderKL,
    DDIMPipeline,
    DDIMScheduler,
    DDPMPipeline,
    DDPMScheduler,
    DPMSolverMultistepScheduler,
    EDMEulerScheduler,
    FlowMatchEulerDiscreteScheduler,
    FlowMatchHeunDiscreteScheduler,
    ModelMixin,
)
from diffusers.configuration_utils import ConfigMixin, register_to_config
from diffusers.hooks import (
    FasterCacheConfig,
    FirstBlockCacheConfig,
    MagCacheConfig,
    PyramidAttentionBroadcastConfig,
    TaylorSeerCacheConfig,
)
from loopback_hub import serve
from peft import LoraConfig
from PIL import Image
from torch.nn import functional as F

from hf_decayed.cli import main
from hf_decayed.data.shards import write_shard
from hf_decayed.evaluation.sampling import shard_path
from hf_decayed.models import shortcut_decay, transformer_decayed_sit, unet_decayed_uvit
from hf_decayed.models.transformer_decayed_sit import DecayedSiTTransformer2DModel
from hf_decayed.models.unet_decayed_uvit import DecayedUViT2DModel
from hf_decayed.pipelines.pipeline_decayed_sit import DecayedSiTPipeline
from hf_decayed.pipelines.pipeline_decayed_uvit import DecayedUViTPipeline
from hf_decayed.pipelines.scheduling_sit_sde import SiTSDEScheduler


SIZES = {"sample_size": 8, "in_channels": 3, "hidden_size": 32, "num_layers": 4, "num_attention_heads": 4}
MODELS = [DecayedUViT2DModel, DecayedSiTTransformer2DModel]


def random_model(model_class, **arguments):
    """A model with random weights everywhere, so that no branch has a zero output."""
    model = model_class(**{**SIZES, "num_classes": 5, **arguments})
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.2)
    return model.eval()


@pytest.fixture
def sample():
    return torch.randn(3, 3, 8, 8)


@pytest.fixture
def labels():
    return torch.tensor([0, 5, 2])


@pytest.mark.parametrize("file", [unet_decayed_uvit, transformer_decayed_sit])
def test_each_file_has_the_schedules_of_the_package(file):
    schedules = itertools.product(
        ("linear", "cosine", "constant"), ("sublayer", "layer"), ("both", "attention", "mlp")
    )
    for settings in schedules:
        expected = shortcut_decay.layer_shortcut_factors(7, 0.6, *settings)
        assert file.layer_shortcut_factors(7, 0.6, *settings) == expected
        expected = shortcut_decay.suggest_shortcut_decay(13, 3e-3, *settings)
        assert file.suggest_shortcut_decay(13, 3e-3, *settings) == expected


def attend(x, weights, heads):
    query, key, value = (
        F.linear(x, weights[f"attn.to_{name}.weight"], weights.get(f"attn.to_{name}.bias")) for name in "qkv"
    )
    query, key, value = (tensor.unflatten(-1, (heads, -1)).transpose(1, 2) for tensor in (query, key, value))
    scores = (query @ key.transpose(2, 3) / math.sqrt(query.shape[-1])).softmax(-1)
    return F.linear(
        (scores @ value).transpose(1, 2).flatten(2), weights["attn.to_out.0.weight"], weights["attn.to_out.0.bias"]
    )


def frequencies(time, dim):
    angles = time[:, None] * torch.exp(-math.log(10000) * torch.arange(dim // 2) / (dim // 2))
    return torch.cat([angles.cos(), angles.sin()], dim=1)


def part(state, prefix):
    return {name.removeprefix(prefix): tensor for name, tensor in state.items() if name.startswith(prefix)}


@pytest.mark.parametrize("time_embedding_mlp", [False, True])
@pytest.mark.parametrize(
    "time_input, factor, offset", [("timestep", 1, 0), ("timestep_plus_one", 1, 1), ("continuous", 0.999, 1)]
)
def test_uvit_by_hand(time_embedding_mlp, time_input, factor, offset, sample, labels):
    """Computed from the weights alone: tokens, blocks with weighted shortcuts, skips, output image."""
    model = random_model(
        DecayedUViT2DModel, shortcut_decay=0.6, time_embedding_mlp=time_embedding_mlp, time_input=time_input
    )
    w, times = model.state_dict(), torch.tensor([3.0, 500.0, 999.0])
    x = F.conv2d(sample, w["patch_embedding.weight"], w["patch_embedding.bias"], stride=2).flatten(2).mT
    time = frequencies((times + offset) * factor, 32)
    if time_embedding_mlp:
        time = F.linear(time, w["time_mlp.0.weight"], w["time_mlp.0.bias"])
        time = F.linear(F.silu(time), w["time_mlp.2.weight"], w["time_mlp.2.bias"])
    x = torch.cat([w["class_embedding.weight"][labels][:, None], time[:, None], x], 1) + w["position_embedding"]
    alphas, skips = np.linspace(1, 0.6, 10).reshape(5, 2), []
    for index, name in enumerate(["in_blocks.0.", "in_blocks.1.", "mid_block.", "out_blocks.0.", "out_blocks.1."]):
        block = part(w, name)
        if index > 2:
            x = torch.cat([x, skips.pop()], 2)
            x = F.linear(x, block["skip_projection.weight"], block["skip_projection.bias"])
        normed = F.layer_norm(x, (32,), block["norm1.weight"], block["norm1.bias"])
        x = alphas[index][0] * x + attend(normed, block, 4)
        normed = F.layer_norm(x, (32,), block["norm2.weight"], block["norm2.bias"])
        inner = F.gelu(F.linear(normed, block["fc1.weight"], block["fc1.bias"]))
        x = alphas[index][1] * x + F.linear(inner, block["fc2.weight"], block["fc2.bias"])
        if index < 2:
            skips.append(x)
    x = F.linear(F.layer_norm(x, (32,), w["norm_out.weight"], w["norm_out.bias"]), *part(w, "proj_out.").values())
    image = x[:, 2:].reshape(3, 4, 4, 2, 2, 3).permute(0, 5, 1, 3, 2, 4).reshape(3, 3, 8, 8)
    expected = F.conv2d(image, w["conv_out.weight"], w["conv_out.bias"], padding=1)
    with torch.no_grad():
        torch.testing.assert_close(model(sample, times, labels).sample, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("has_skips", [True, False])
def test_sit_by_hand(has_skips, sample, labels):
    model = random_model(
        DecayedSiTTransformer2DModel, shortcut_decay=0.8, encoder_decoder_skips=has_skips, learned_sigma=True
    )
    w, times = model.state_dict(), torch.tensor([0.1, 0.5, 1.0])
    x = F.conv2d(sample, w["patch_embedding.weight"], w["patch_embedding.bias"], stride=2).flatten(2).mT
    x = x + w["position_embedding"]
    time = F.linear(frequencies(times, 256), w["time_mlp.0.weight"], w["time_mlp.0.bias"])
    time = F.linear(F.silu(time), w["time_mlp.2.weight"], w["time_mlp.2.bias"])
    condition = F.silu(time + w["class_embedding.weight"][labels])
    alphas, skips = np.linspace(1, 0.8, 8).reshape(4, 2), []
    for index in range(4):
        block = part(w, f"transformer_blocks.{index}.")
        if has_skips and index > 1:
            x = x + F.linear(skips.pop(), block["skip_projection.weight"], block["skip_projection.bias"])
        modulation = F.linear(condition, block["modulation.weight"], block["modulation.bias"])
        shift, scale, gate, shift2, scale2, gate2 = modulation[:, None].chunk(6, 2)
        x = alphas[index][0] * x + gate * attend(F.layer_norm(x, (32,), eps=1e-6) * (1 + scale) + shift, block, 4)
        inner = F.layer_norm(x, (32,), eps=1e-6) * (1 + scale2) + shift2
        inner = F.gelu(F.linear(inner, block["fc1.weight"], block["fc1.bias"]), approximate="tanh")
        x = alphas[index][1] * x + gate2 * F.linear(inner, block["fc2.weight"], block["fc2.bias"])
        if index < 2:
            skips.append(x)
    shift, scale = F.linear(condition, *part(w, "modulation_out.").values())[:, None].chunk(2, 2)
    x = F.linear(F.layer_norm(x, (32,), eps=1e-6) * (1 + scale) + shift, *part(w, "proj_out.").values())
    # The weights predict twice the channels; the second half is not returned.
    expected = x.reshape(3, 4, 4, 2, 2, 6).permute(0, 5, 1, 3, 2, 4).reshape(3, 6, 8, 8)[:, :3]
    with torch.no_grad():
        torch.testing.assert_close(model(sample, times, labels).sample, expected, rtol=1e-4, atol=1e-4)


def test_positions_of_sit():
    """Columns first, then rows, each as sines and cosines, as the official weights were trained."""
    table = (
        DecayedSiTTransformer2DModel(**{**SIZES, "sample_size": (8, 12)}).position_embedding[0].unflatten(0, (4, 6))
    )
    omega = 10000 ** -(np.arange(8) / 8)
    expected = np.concatenate([np.sin(5 * omega), np.cos(5 * omega), np.sin(2 * omega), np.cos(2 * omega)])
    np.testing.assert_allclose(table[2, 5].numpy(), expected, atol=1e-6)


@pytest.mark.parametrize("model_class", MODELS)
class TestBoth:
    def test_saved_and_loaded(self, model_class, sample, labels, tmp_path):
        model = random_model(model_class, shortcut_decay="auto")
        assert model.effective_decay() == pytest.approx(3e-3, rel=1e-3)
        model.save_pretrained(tmp_path)
        assert isinstance(json.loads((tmp_path / "config.json").read_text())["shortcut_decay"], float)
        again = model_class.from_pretrained(tmp_path)
        with torch.no_grad():
            assert torch.equal(again(sample, 0.5, labels).sample, model(sample, 0.5, labels).sample)

    def test_checkpointing_changes_no_gradient(self, model_class, sample, labels):
        model = random_model(model_class).train()
        gradients = []
        for checkpointing in (False, True):
            (model.enable_gradient_checkpointing if checkpointing else model.disable_gradient_checkpointing)()
            model.zero_grad()
            model(sample, 0.5, labels).sample.square().mean().backward()
            gradients.append([parameter.grad.clone() for parameter in model.parameters()])
            assert all(gradient.any() for gradient in gradients[-1])
        for without_checkpoints, with_checkpoints in zip(*gradients):
            torch.testing.assert_close(with_checkpoints, without_checkpoints)

    def test_kernels_and_fused_projections(self, model_class, sample, labels):
        model = random_model(model_class)
        with torch.no_grad():
            expected = model(sample, 0.5, labels).sample
            model.set_attention_backend("_native_math")
            torch.testing.assert_close(model(sample, 0.5, labels).sample, expected, rtol=1e-4, atol=1e-5)
            model.fuse_qkv_projections()
            torch.testing.assert_close(model(sample, 0.5, labels).sample, expected, rtol=1e-4, atol=1e-5)
        assert len(model.attn_processors) == (5 if model_class is DecayedUViT2DModel else 4)

    def test_other_sizes_and_hidden_states(self, model_class):
        model = random_model(model_class, num_classes=0)
        outputs = model(torch.randn(2, 3, 12, 6), 0.5, output_hidden_states=True)
        assert outputs.sample.shape == (2, 3, 12, 6)
        assert len(outputs.hidden_states) == (5 if model_class is DecayedUViT2DModel else 4)
        assert outputs.hidden_states[0].shape == (2, 18, 32)
        assert model(torch.randn(2, 3, 8, 8), torch.tensor([0.1, 0.2]), return_dict=False)[0].shape == (2, 3, 8, 8)

    def test_no_labels_are_the_null_class(self, model_class, sample):
        model = random_model(model_class)
        with torch.no_grad():
            assert torch.equal(model(sample, 0.5).sample, model(sample, 0.5, torch.full((3,), 5)).sample)

    def test_learned_alphas(self, model_class, sample, labels):
        model = model_class(**SIZES, num_classes=5, shortcut_schedule="learned")
        names = [name for name, _ in model.named_parameters() if name.endswith("_alpha")]
        assert len(names) == 2 * len([m for m in model.modules() if hasattr(m, "attention_alpha")])
        assert model.effective_decay() == 1.0
        random_model(model_class, shortcut_schedule="learned")(sample, 0.5, labels)
        model = random_model(model_class, shortcut_schedule="learned", shortcut_scope="mlp")
        names = {name.rpartition(".")[2] for name, _ in model.named_parameters() if name.endswith("_alpha")}
        assert names == {"mlp_alpha"}
        model(sample, 0.5, labels).sample.sum().backward()
        assert isinstance(model(sample, 0.5, labels, False), tuple)  # `return_dict` is fourth, as in diffusers

    @pytest.mark.parametrize("scope", ["both", "attention", "mlp"])
    def test_learned_alphas_are_the_equation(self, model_class, scope, sample, labels):
        """A model with learned alphas equals one with the same numbers fixed; the other branch has weight 1."""
        learned = random_model(model_class, shortcut_schedule="learned", shortcut_scope=scope)
        fixed = random_model(model_class)
        weights = {name: tensor for name, tensor in learned.state_dict().items() if not name.endswith("_alpha")}
        fixed.load_state_dict(weights)
        blocks = [[m for m in model.modules() if hasattr(m, "attention_alpha")] for model in (learned, fixed)]
        for learned_block, fixed_block in zip(*blocks):
            for name in ("attention_alpha", "mlp_alpha"):
                alpha = getattr(learned_block, name)
                setattr(fixed_block, name, alpha.item() if isinstance(alpha, torch.Tensor) else alpha)
            assert scope != "mlp" or fixed_block.attention_alpha == 1.0
            assert scope != "attention" or fixed_block.mlp_alpha == 1.0
        with torch.no_grad():
            expected = fixed(sample, 0.5, labels).sample
            torch.testing.assert_close(learned(sample, 0.5, labels).sample, expected, rtol=1e-5, atol=1e-5)

    def test_learned_alphas_do_not_change_the_dtype(self, model_class):
        """Alphas in float32 beside weights in half precision, as with layerwise casting."""
        model = random_model(model_class, shortcut_schedule="learned").to(torch.bfloat16)
        block = next(module for module in model.modules() if hasattr(module, "attention_alpha"))
        for name in ("attention_alpha", "mlp_alpha"):
            setattr(block, name, torch.nn.Parameter(getattr(block, name).float()))
        inputs = [torch.randn(2, 16, 32, dtype=torch.bfloat16)]
        if model_class is DecayedSiTTransformer2DModel:
            inputs.append(torch.randn(2, 32, dtype=torch.bfloat16))
        assert block(*inputs).dtype == torch.bfloat16

    @pytest.mark.parametrize(
        "fields, message",
        [
            ({"sample_size": 7}, "`sample_size` must be divisible by `patch_size`, got 7 x 7 and 2"),
            ({"num_attention_heads": 5}, "`hidden_size` must be divisible"),
            ({"num_layers": 3}, "even"),
            ({"shortcut_decay": 1.5}, "`shortcut_decay` must be 'auto' or lie in"),
            ({"shortcut_decay": "much"}, "`shortcut_decay` must be 'auto' or lie in"),
            (
                {"shortcut_schedule": "quadratic"},
                "`shortcut_schedule` must be one of linear, cosine, constant, learned, got 'quadratic'",
            ),
            ({"shortcut_schedule": ["linear"]}, r"`shortcut_schedule` must be one of .* got \['linear'\]"),
            ({"shortcut_granularity": "block"}, "`shortcut_granularity` must be one of sublayer, layer, got 'block'"),
            ({"shortcut_scope": None}, "`shortcut_scope` must be one of both, attention, mlp, got None"),
            ({"shortcut_decay": math.nan}, r"`shortcut_decay` must be 'auto' or lie in \[0, 1\], got nan"),
            ({"shortcut_decay": True}, "`shortcut_decay` must be .* got True"),
            ({"shortcut_decay": None}, "`shortcut_decay` must be .* got None"),
            ({"qkv_bias": "false"}, "`qkv_bias` must be True or False, got 'false'"),
            ({"hidden_size": -8}, r"`hidden_size` must be an integer in \[1, 1048576\], got -8"),
            ({"hidden_size": 32.0}, "`hidden_size` must be an integer .* got 32.0"),
            ({"hidden_size": True}, "`hidden_size` must be an integer .* got True"),
            ({"hidden_size": 2**31}, "`hidden_size` must be an integer .* got 2147483648"),
            ({"patch_size": 0}, "`patch_size` must be an integer .* got 0"),
            ({"in_channels": 0}, "`in_channels` must be an integer .* got 0"),
            ({"sample_size": "8"}, "`sample_size` must be an integer .* got '8'"),
            ({"sample_size": 0}, "`sample_size` must be an integer .* got 0"),
            ({"sample_size": (8, -8)}, "`sample_size` must be an integer .* got -8"),
            ({"sample_size": (8, 8, 8)}, r"`sample_size` must be one integer or \(height, width\), got \(8, 8, 8\)"),
            ({"num_classes": 1.5}, r"`num_classes` must be an integer in \[0, 1048576\], got 1.5"),
            ({"num_classes": -1}, "`num_classes` must be an integer .* got -1"),
            ({"num_layers": 0}, r"`num_layers` must be an integer in \[1, 10000\], got 0"),
            ({"num_layers": 2**31}, "`num_layers` must be an integer .* got 2147483648"),
            ({"mlp_ratio": "abc"}, r"`mlp_ratio` must be a number in \(0, 1024\], got 'abc'"),
            ({"mlp_ratio": -1.0}, "`mlp_ratio` must be a number .* got -1.0"),
            ({"mlp_ratio": math.nan}, "`mlp_ratio` must be a number .* got nan"),
            ({"mlp_ratio": 0.001}, "`mlp_ratio` must leave the MLP at least one hidden unit, got 0.001"),
            ({"hiden_size": 32}, "Unknown field `hiden_size` .value 32.; did you mean `hidden_size`?"),
            ({"shortcut_decays": 0.6}, "Unknown field `shortcut_decays` .value 0.6.; did you mean `shortcut_decay`?"),
            ({"bananas": 3}, "Unknown field `bananas` .value 3.[.]"),
        ],
    )
    def test_wrong_fields_are_refused(self, model_class, fields, message):
        with pytest.raises(ValueError, match=message):
            model_class(**{**SIZES, **fields})

    def test_unknown_fields_of_a_file(self, model_class, tmp_path):
        """Those of other libraries and versions are ignored, a misspelt field is refused, as in keyword arguments."""
        random_model(model_class).save_pretrained(tmp_path)
        file = tmp_path / "config.json"
        config = json.loads(file.read_text())
        file.write_text(json.dumps({**config, "_name_or_path": "x", "auto_map": {}, "bananas": 3}))
        assert model_class.from_pretrained(tmp_path).config.hidden_size == 32
        assert model_class.from_config({**config, "_name_or_path": "x"}).config.hidden_size == 32
        for load in (
            lambda: model_class.from_pretrained(tmp_path, mlp_ration=2.0),
            lambda: model_class.from_config(config, mlp_ration=2.0),
            lambda: model_class.from_config({**config, "mlp_ration": 2.0}),
        ):
            with pytest.raises(ValueError, match="Unknown field `mlp_ration` .value 2.0.; did you mean `mlp_ratio`?"):
                load()
        with pytest.raises(ValueError, match="`qkv_bias` must be True or False, got 'no'"):
            model_class.from_config({**config, "qkv_bias": "no"})

    def test_warnings(self, model_class):
        # With so few blocks, `auto` is below 0.45 too.
        for decay, message in ((0.3, "below 0.45"), ("auto", "below 0.45"), (0.99, "outside")):
            with pytest.warns(UserWarning, match=message):
                model_class(**SIZES, shortcut_decay=decay)
        with pytest.raises(ValueError, match="cannot reach an effective decay"):
            model_class(**SIZES, shortcut_decay="auto", shortcut_scope="attention")
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            model_class(**{**SIZES, "num_layers": 12}, shortcut_decay="auto")
            model_class(**SIZES, shortcut_decay=1.0)

    def test_bad_inputs(self, model_class, sample):
        model = random_model(model_class)
        for inputs, message in (
            ((sample[:, :1], 1), "3 channels, got 1"),
            ((sample[:, :, :7], 1), "divisible by `patch_size`, got 7 x 8 and 2"),
            ((sample, 1, torch.tensor([0, 1, 6])), r"must lie in \[0, 5\].*got 6"),
            ((sample, 1, torch.tensor([0, -1, 2])), "got -1"),
            ((sample, 1, torch.tensor([0, 1])), r"must be 3 whole numbers, one for each sample, got \(2,\)"),
            ((sample, 1, torch.rand(3)), r"must be 3 whole numbers.* of torch.float32"),
            ((sample, 1, torch.ones(3, dtype=torch.bool)), r"must be 3 whole numbers.* of torch.bool"),
        ):
            with pytest.raises(ValueError, match=message):
                model(*inputs)
        with pytest.raises(ValueError, match="without classes"):
            random_model(model_class, num_classes=0)(sample, 1, torch.tensor([0, 1, 2]))


def test_learned_positions_may_start_as_sines_and_cosines():
    """The initial values equal SiT's fixed positions."""
    sizes = {"sample_size": (8, 12), "patch_size": 2, "hidden_size": 32, "num_layers": 2, "num_attention_heads": 2}
    model = DecayedUViT2DModel(**sizes, num_classes=3, sincos_init_positions=True)
    fixed = DecayedSiTTransformer2DModel(**sizes).position_embedding
    assert torch.equal(model.position_embedding[:, 2:], fixed) and model.position_embedding.requires_grad
    assert 0 < model.position_embedding[:, :2].std() < 0.05
    assert DecayedUViT2DModel(**sizes).position_embedding.std() < 0.05
    with pytest.raises(ValueError, match="divisible by 4, got 30"):
        DecayedUViT2DModel(**{**sizes, "hidden_size": 30}, sincos_init_positions=True)


def test_sizes_by_name():
    with torch.device("meta"):
        latent = {"in_channels": 4, "num_classes": 1000}
        sizes = [DecayedUViT2DModel.from_size(name) for name in ("S", "S-deep")]
        sizes += [DecayedUViT2DModel.from_size(name, **latent) for name in ("M", "L", "H")]
        sit = DecayedSiTTransformer2DModel.from_size("XL/4", encoder_decoder_skips=False, learned_sigma=True)
    # Millions of parameters, as in U-ViT's paper.
    assert [round(model.num_parameters() / 1e6) for model in sizes] == [44, 58, 131, 287, 501]
    assert sit.config.patch_size == 4 and round(sit.num_parameters() / 1e6) == 675
    with pytest.raises(ValueError, match="`size` must be one of S, B, L, XL, got 'M'"):
        DecayedSiTTransformer2DModel.from_size("M/2")


def test_initial_blocks_pass_the_shortcut_alone(sample):
    """With zero-initialised branches, a block of the first half multiplies its input by its two alphas."""
    model = DecayedUViT2DModel(**SIZES, shortcut_decay=0.5)
    alphas = np.linspace(1, 0.5, 10)
    first, second = model(sample, 3, output_hidden_states=True).hidden_states[:2]
    torch.testing.assert_close(second, first * float(alphas[2] * alphas[3]))


@pytest.mark.parametrize("pipeline, scheduler", [(DDPMPipeline, DDPMScheduler), (DDIMPipeline, DDIMScheduler)])
def test_stock_pipelines_take_the_uvit(pipeline, scheduler):
    sampler = pipeline(random_model(DecayedUViT2DModel, num_classes=0), scheduler())
    sampler.set_progress_bar_config(disable=True)
    assert sampler(batch_size=2, num_inference_steps=2).images[1].size == (8, 8)


# Pipelines, with networks whose output is known: data of class c is normal with mean c and standard deviation 0.4.


class Known(ModelMixin, ConfigMixin):
    @register_to_config
    def __init__(self, sample_size=16, in_channels=3, num_classes=3, kind="noise", broken=False):
        super().__init__()
        self.anything = torch.nn.Parameter(torch.zeros(1))
        self.calls = []

    def forward(self, sample, timestep, class_labels=None):
        self.calls.append((len(sample), float(timestep)))
        labels = torch.full((len(sample),), self.config.num_classes) if class_labels is None else class_labels
        # The null class is data with mean 0.
        means = torch.where(labels == self.config.num_classes, 0, labels).float().view(-1, 1, 1, 1)
        if self.config.kind == "noise":
            level = DPMSolverMultistepScheduler().alphas_cumprod[int(timestep)]
            signal, noise = level.sqrt(), (1 - level).sqrt()
        else:
            signal, noise = timestep, 1 - timestep
        dtype, sample = sample.dtype, sample.float()
        residual = (sample - signal * means) / (signal**2 * 0.16 + noise**2)
        expected_noise, expected_data = noise * residual, means + signal * 0.16 * residual
        output = expected_noise if self.config.kind == "noise" else expected_data - expected_noise
        return type("Output", (), {"sample": output.to(dtype) * (math.nan if self.config.broken else 1)})


def known_pipeline(kind, scheduler, **arguments):
    names = {0: "naught", 1: "one", 2: "two"} if arguments.get("num_classes", 3) else None
    pipeline_class = DecayedUViTPipeline if kind == "noise" else DecayedSiTPipeline
    pipeline = pipeline_class(Known(kind=kind, **arguments), scheduler, id2label=names)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


SAMPLERS = {
    "uvit, DPM-Solver++": ("noise", DPMSolverMultistepScheduler, {}, 50, 0.02),
    "uvit, DDIM": ("noise", DDIMScheduler, {"clip_sample": False}, 100, 0.05),
    "sit, Euler": ("flow", FlowMatchEulerDiscreteScheduler, {}, 50, 0.02),
    "sit, Heun": ("flow", FlowMatchHeunDiscreteScheduler, {}, 20, 0.02),
    "sit, DPM-Solver++": (
        "flow",
        DPMSolverMultistepScheduler,
        {"prediction_type": "flow_prediction", "use_flow_sigmas": True},
        30,
        0.02,
    ),
    "sit, SDE": ("flow", SiTSDEScheduler, {}, 250, 0.02),
    "sit, SDE, decreasing": ("flow", SiTSDEScheduler, {"diffusion": "decreasing"}, 250, 0.02),
}


@pytest.mark.parametrize("name", SAMPLERS)
def test_samples_have_the_mean_and_deviation_of_the_data(name):
    kind, scheduler, arguments, steps, tolerance = SAMPLERS[name]
    pipeline = known_pipeline(kind, scheduler(**arguments))
    seeds = torch.Generator().manual_seed(0)
    images = pipeline(
        ["two", 1],
        num_images_per_label=8,
        num_inference_steps=steps,
        generator=seeds,
        output_type="latent",
    ).images
    assert images.shape == (16, 3, 16, 16)
    for part_, mean in ((images[:8], 2), (images[8:], 1)):
        assert part_.mean() == pytest.approx(mean, abs=tolerance)
        assert part_.std() == pytest.approx(0.4, abs=tolerance)
    # Heun's method calls the network twice per step, except in the last.
    network = pipeline.unet if kind == "noise" else pipeline.transformer
    assert len(network.calls) == (2 * steps - 1 if "Heun" in name else steps)


def test_networks_in_half_precision_sample_as_well():
    """The sample itself stays in float32: in the network's precision, many small steps would be rounded away."""
    pipeline = known_pipeline("flow", FlowMatchEulerDiscreteScheduler())
    pipeline.transformer.to(torch.bfloat16)
    images = pipeline(
        2,
        num_images_per_label=8,
        num_inference_steps=250,
        output_type="latent",
        generator=torch.Generator().manual_seed(0),
    ).images
    assert images.mean() == pytest.approx(2, abs=0.05) and images.std() == pytest.approx(0.4, abs=0.03)


@pytest.mark.parametrize("kind, scheduler", [("noise", DDIMScheduler(clip_sample=False)), ("flow", None)])
def test_guidance(kind, scheduler):
    """With equal standard deviations and a null class of mean 0, guidance by s multiplies the class's mean by s."""
    pipeline = known_pipeline(kind, scheduler or FlowMatchEulerDiscreteScheduler())
    network = pipeline.unet if kind == "noise" else pipeline.transformer
    settings = {"num_images_per_label": 4, "num_inference_steps": 50, "output_type": "latent"}
    settings["generator"] = torch.Generator().manual_seed(0)
    strong = pipeline(2, guidance_scale=1.5, **settings).images
    assert strong.mean() == pytest.approx(3, abs=0.05) and {count for count, _ in network.calls} == {8}
    network.calls.clear()
    in_interval = pipeline(2, guidance_scale=1.5, guidance_interval=(0.21, 0.61), **settings).images
    assert 2.1 < in_interval.mean() < 2.9
    time = [t / 1000 if kind == "noise" else 1 - t for _, t in network.calls]
    assert [count for count, _ in network.calls] == [8 if 0.21 <= t <= 0.61 else 4 for t in time]


def test_generators_for_each_image_do_not_depend_on_the_batch():
    pipeline = known_pipeline("flow", SiTSDEScheduler())
    both = pipeline(
        [0, 2],
        num_inference_steps=5,
        output_type="pt",
        generator=[torch.Generator().manual_seed(seed) for seed in (3, 4)],
    ).images
    alone = pipeline(2, num_inference_steps=5, output_type="pt", generator=[torch.Generator().manual_seed(4)]).images
    torch.testing.assert_close(both[1], alone[0])


def test_callbacks_and_initial_noise():
    pipeline = known_pipeline("noise", DPMSolverMultistepScheduler())
    steps = []

    def replace_latents(pipeline, step, timestep, tensors):
        steps.append(step)
        return {"latents": torch.zeros_like(tensors["latents"])} if step == 3 else tensors

    images = pipeline(
        latents=torch.ones(2, 3, 16, 16), batch_size=2, num_inference_steps=4, callback_on_step_end=replace_latents
    ).images
    assert steps == [0, 1, 2, 3] and len(images) == 2


@pytest.mark.parametrize("kind", ["noise", "flow"])
def test_callbacks_find_the_state_of_the_call_and_change_guidance(kind):
    pipeline = known_pipeline(
        kind, DPMSolverMultistepScheduler() if kind == "noise" else FlowMatchEulerDiscreteScheduler()
    )
    network = pipeline.unet if kind == "noise" else pipeline.transformer
    rows = []
    network.register_forward_pre_hook(lambda _, arguments: rows.append(len(arguments[0])))

    def stop_guidance(pipeline, step, timestep, tensors):
        assert pipeline.num_timesteps == 6 and pipeline.guidance_scale == (2.0 if step < 3 else 1.0)
        pipeline._guidance_scale = 2.0 if step < 2 else 1.0
        pipeline._interrupt = step == 4
        return tensors

    pipeline([0], guidance_scale=2.0, num_inference_steps=6, callback_on_step_end=stop_guidance)
    assert rows == [2, 2, 2, 1, 1]  # guided, not guided, and the last step left out
    rows.clear()
    pipeline([0], num_inference_steps=2)
    assert rows == [1, 1] and pipeline.guidance_scale == 1.0 and not pipeline.interrupt


def test_wrong_arguments_of_a_pipeline_are_refused():
    pipeline = known_pipeline("noise", DPMSolverMultistepScheduler())
    for arguments, message in (
        ({"class_labels": 3}, r"must lie in \[0, 3\), got 3"),
        ({"class_labels": [0.7]}, "names or whole numbers, got 0.7"),
        ({"class_labels": 1.7}, "got 1.7"),
        ({"batch_size": 0}, "`batch_size` must be at least 1, got 0"),
        ({"class_labels": 1, "num_images_per_label": 0}, "`num_images_per_label` must be at least 1, got 0"),
        ({"class_labels": ["three"]}, "no class 'three'; there are naught, one, two"),
        ({"guidance_scale": 2.0}, "needs `class_labels`"),
        ({"latents": torch.zeros(1, 3, 8, 8)}, "`latents` must have shape"),
        ({"class_labels": 1, "batch_size": 4}, "`batch_size=4` is for images without classes, and there are 1"),
        ({"num_images_per_label": 4}, "`num_images_per_label` needs `class_labels`"),
        ({"guidance_interval": (1, 0)}, "from a lower to a higher noise level"),
        ({"num_inference_steps": 0}, "at least 1, got 0"),
        ({"output_type": "jpg"}, "must be pil, np, pt or latent, got 'jpg'"),
        ({"class_labels": []}, "`class_labels` is empty"),
        ({"batch_size": 3, "generator": [torch.Generator()] * 2}, "a generator for each of 3 images.*got 2"),
        ({"callback_on_step_end_tensor_inputs": ["noise"]}, "can be 'latents' only"),
    ):
        with pytest.raises(ValueError, match=message):
            pipeline(**arguments)
    with pytest.raises(ValueError, match="without classes"):
        known_pipeline("noise", DPMSolverMultistepScheduler(), num_classes=0)(1)
    for kind, scheduler, message in (
        ("noise", DPMSolverMultistepScheduler(prediction_type="v_prediction"), "predicts 'epsilon'.*'v_prediction'"),
        ("noise", FlowMatchEulerDiscreteScheduler(), "predicts 'epsilon'"),
        ("noise", DPMSolverMultistepScheduler(use_flow_sigmas=True), "no `use_flow_sigmas`"),
        ("noise", EDMEulerScheduler(prediction_type="epsilon"), "other noise levels than the network was trained on"),
        ("flow", FlowMatchEulerDiscreteScheduler(invert_sigmas=True), "`invert_sigmas=True` does not follow"),
        ("flow", FlowMatchEulerDiscreteScheduler(stochastic_sampling=True), "use SiTSDEScheduler"),
        ("flow", DPMSolverMultistepScheduler(), "velocity of a flow.*'epsilon'"),
        ("flow", DPMSolverMultistepScheduler(prediction_type="flow_prediction"), "use_flow_sigmas=True"),
    ):
        with pytest.raises(ValueError, match=message):
            known_pipeline(kind, scheduler)()
    with pytest.raises(ValueError, match="no VAE to decode them"):
        known_pipeline("noise", DPMSolverMultistepScheduler(), in_channels=4)(num_inference_steps=2)
    with pytest.raises(ValueError, match="NaN or infinity, so there are no images"):
        known_pipeline("noise", DPMSolverMultistepScheduler(), broken=True)(num_inference_steps=2)
    for name, value in (("last_step_size", 0), ("diffusion_norm", math.nan), ("num_train_timesteps", "1000")):
        with pytest.raises(ValueError, match=f"`{name}` must .* got '?{value}"):
            SiTSDEScheduler(**{name: value})
    with pytest.raises(ValueError, match="as in 'XL/2', got 'XL/x'"):
        DecayedSiTTransformer2DModel.from_size("XL/x")


def test_labels_of_any_kind():
    pipeline = known_pipeline("noise", DPMSolverMultistepScheduler())
    for labels in (1, "one", np.int64(1), torch.tensor(1), [1], torch.tensor([1]), np.array([1]), (np.int64(1),)):
        assert pipeline.labels_of(labels, 2) == [1, 1]
    for labels in ([[1], [0]], torch.tensor([[1], [0]]), [torch.tensor([1]), 0], (("one",), ["naught"])):
        assert pipeline.labels_of(labels, 1) == [1, 0]


def small_vae(latent_channels, **arguments):
    blocks = {"down_block_types": ("DownEncoderBlock2D",), "up_block_types": ("UpDecoderBlock2D",)}
    sizes = {"block_out_channels": (8,), "norm_num_groups": 4, "latent_channels": latent_channels}
    return random_weights(AutoencoderKL(**blocks, **sizes, **arguments))


@pytest.mark.parametrize("kind", ["noise", "flow"])
def test_decoding_by_the_autoencoder(kind):
    scheduler = DPMSolverMultistepScheduler() if kind == "noise" else FlowMatchEulerDiscreteScheduler(shift=1.0)
    pipeline = known_pipeline(kind, scheduler)
    pipeline.register_modules(vae=small_vae(3, scaling_factor=2.0, shift_factor=0.5))
    pipeline.register_to_config(latent_shift=0.0)  # the pipeline's value takes precedence over the VAE's
    latents = torch.randn(1, 3, 16, 16)
    with torch.no_grad():
        expected = (pipeline.vae.decode(latents / 2.0).sample / 2 + 0.5).clamp(0, 1)
        torch.testing.assert_close(pipeline.decode_latents(latents, "pt"), expected)
        pipeline.vae.decoder.conv_out.weight.fill_(math.nan)
    with pytest.raises(ValueError, match="decoded images hold NaN or infinity.*a VAE in float32"):
        pipeline(num_inference_steps=2)
    pipeline.register_modules(vae=small_vae(4))
    with pytest.raises(ValueError, match="The network has 3 channels, and the VAE takes latents of 4"):
        pipeline(num_inference_steps=2)


CLEAN_PROCESS = """
import importlib.abc, json, sys

class Block(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "hf_decayed":
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Block())
import torch
from diffusers import AutoModel, DiffusionPipeline
pipeline = DiffusionPipeline.from_pretrained(sys.argv[1], trust_remote_code=True)
pipeline.set_progress_bar_config(disable=True)
images = pipeline(["one", 0], guidance_scale=1.4, num_inference_steps=3, output_type="pt",
                  generator=torch.Generator().manual_seed(0)).images
names = [type(pipeline).__name__, type(pipeline.scheduler).__name__]
if len(sys.argv) > 2:
    pipeline.save_pretrained(sys.argv[2])
    names.append(type(AutoModel.from_pretrained(sys.argv[1], subfolder=sys.argv[3], trust_remote_code=True)).__name__)
print(json.dumps([names, images.double().sum().item()]))
"""


def in_clean_process(source, *arguments, **environment):
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", CLEAN_PROCESS, str(source), *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": "", **environment},
        capture_output=True,
        text=True,
        cwd="/",
    )
    assert result.returncode == 0, result.stderr[-3000:]
    assert "auto_map" not in result.stderr
    return json.loads(result.stdout.splitlines()[-1])


def saved_pipeline(kind, folder):
    torch.manual_seed(1)
    vae = AutoencoderKL(
        block_out_channels=(8, 16),
        norm_num_groups=4,
        latent_channels=3,
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
    )
    names = {0: "naught", 1: "one"}
    if kind == "uvit":
        pipeline = DecayedUViTPipeline(
            random_model(DecayedUViT2DModel), DPMSolverMultistepScheduler(), vae, id2label=names, latent_scale=0.5
        )
    else:
        pipeline = DecayedSiTPipeline(random_model(DecayedSiTTransformer2DModel), SiTSDEScheduler(), id2label=names)
    pipeline.set_progress_bar_config(disable=True)
    pipeline.save_pretrained(folder)
    generator = torch.Generator().manual_seed(0)
    images = pipeline(
        ["one", 0], guidance_scale=1.4, num_inference_steps=3, output_type="pt", generator=generator
    ).images
    return images.double().sum().item()


@pytest.mark.parametrize(
    "kind, component", [("uvit", "unet"), pytest.param("sit", "transformer", marks=pytest.mark.slow)]
)
def test_a_saved_pipeline_loads_where_the_package_is_not(kind, component, tmp_path):
    expected = saved_pipeline(kind, tmp_path / "model")
    names, pixel_sum = in_clean_process(tmp_path / "model", tmp_path / "again", component)
    assert pixel_sum == pytest.approx(expected, rel=1e-5)
    assert (
        names
        == {
            "uvit": ["DecayedUViTPipeline", "DPMSolverMultistepScheduler", "DecayedUViT2DModel"],
            "sit": ["DecayedSiTPipeline", "SiTSDEScheduler", "DecayedSiTTransformer2DModel"],
        }[kind]
    )
    # A folder saved by a process without the package loads again, with its code.
    assert in_clean_process(tmp_path / "again")[1] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("kind", ["uvit", "sit"])
def test_the_package_loads_its_own_pipelines_without_trust(kind, tmp_path):
    expected = saved_pipeline(kind, tmp_path)
    pipeline_class = {"uvit": DecayedUViTPipeline, "sit": DecayedSiTPipeline}[kind]
    pipeline = pipeline_class.from_pretrained(tmp_path)
    assert type(pipeline) is pipeline_class
    assert type(pipeline.unet if kind == "uvit" else pipeline.transformer) in MODELS
    assert kind == "uvit" or type(pipeline.scheduler) is SiTSDEScheduler
    generator = torch.Generator().manual_seed(0)
    settings = {"guidance_scale": 1.4, "num_inference_steps": 3, "output_type": "pt", "generator": generator}
    assert pipeline(["one", 0], **settings).images.double().sum().item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", ["uvit", "sit"])
def test_a_saved_pipeline_loads_over_http(kind, tmp_path):
    expected = saved_pipeline(kind, tmp_path / "hub" / "user" / "name")
    name = {"uvit": "DecayedUViTPipeline", "sit": "DecayedSiTPipeline"}[kind]
    code = f"from hf_decayed import {name}; print(type({name}.from_pretrained('user/name')).__module__)"
    with serve(tmp_path / "hub") as server:
        hub = {"HF_ENDPOINT": server.url, "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path / "installed")}
        result = subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, **hub}, capture_output=True, text=True
        )
        assert "hf_decayed.pipelines" in result.stdout, result.stderr[-2000:]
        _, pixel_sum = in_clean_process(
            "user/name", HF_ENDPOINT=server.url, HF_HUB_OFFLINE="0", HF_HOME=str(tmp_path / "cache")
        )
    assert pixel_sum == pytest.approx(expected, rel=1e-5)


def test_many_samples(tmp_path, capsys):
    """Existing shards are used, an image does not depend on the others in its batch, nothing is overwritten."""
    saved_pipeline("sit", tmp_path / "model")
    command = ["sample", str(tmp_path / "model"), "--num_inference_steps", "2", "--batch_size", "2"]

    def images(output):
        return [np.asarray(Image.open(path)) for path in sorted((tmp_path / output / "images").iterdir())]

    assert main([*command, "--num", "5", "--output", str(tmp_path / "five")]) == 0
    assert len(images("five")) == 5 and (tmp_path / "five" / "samples.png").exists()
    assert main([*command, "--num", "4", "--output", str(tmp_path / "four")]) == 0
    assert all(map(np.array_equal, images("four"), images("five")))
    assert main([*command, "--num", "5", "--output", str(tmp_path / "five"), "--format", "npz"]) == 0
    stored = np.load(tmp_path / "five" / "samples.npz")["arr_0"]
    assert stored.dtype == np.uint8 and stored.shape == (5, 8, 8, 3) and np.array_equal(stored, images("five"))

    # A run that was stopped after the first batch does not draw it again.
    (tmp_path / "half" / "shards").mkdir(parents=True)
    record = json.loads((tmp_path / "five" / "sampling.json").read_text())
    (tmp_path / "half" / "sampling.json").write_text(json.dumps({k: v for k, v in record.items() if k != "finished"}))
    images_of_seven = torch.full((2, 8, 8, 3), 7, dtype=torch.uint8)
    write_shard(shard_path(tmp_path / "half", range(2)), [{"images": images_of_seven}])
    assert main([*command, "--num", "5", "--output", str(tmp_path / "half")]) == 0
    assert (images("half")[1] == 7).all() and all(map(np.array_equal, images("half")[2:], images("five")[2:]))

    capsys.readouterr()
    assert main([*command, "--num", "6", "--output", str(tmp_path / "five")]) == 2
    assert "holds other samples (num 5 -> 6)" in capsys.readouterr().err
    assert main([*command, "--num", "6", "--output", str(tmp_path / "model")]) == 2
    assert "files that are no samples" in capsys.readouterr().err
    assert main([*command, "--classes", "one,7", "--output", str(tmp_path / "seven")]) == 2
    assert "must lie in [0, 5), got 7" in capsys.readouterr().err
    assert main([*command[:2], "--num_inference_steps", "0", "--output", str(tmp_path / "none")]) == 2
    assert "`num_inference_steps` must be at least 1, got 0" in capsys.readouterr().err
    # A refused command leaves its output folder usable.
    refused = [*command, "--num", "2", "--classes", "none", "--output", str(tmp_path / "two")]
    assert main([*refused, "--guidance_scale", "3"]) == 2
    assert "needs `class_labels`" in capsys.readouterr().err
    assert main(refused) == 0 and len(images("two")) == 2


def test_a_converted_pipeline_of_latents_gets_its_autoencoder(tmp_path, capsys):
    network = random_weights(DecayedSiTTransformer2DModel(**{**SIZES, "in_channels": 4}, num_classes=0))
    pipeline = DecayedSiTPipeline(network, FlowMatchEulerDiscreteScheduler(shift=1.0), latent_scale=0.5)
    pipeline.save_pretrained(tmp_path / "model")
    small_vae(4).save_pretrained(tmp_path / "vae")
    command = ["sample", str(tmp_path / "model"), "--num", "2", "--num_inference_steps", "2", "--output"]
    assert main([*command, str(tmp_path / "without")]) == 2
    assert "no VAE to decode them" in capsys.readouterr().err
    assert main([*command, str(tmp_path / "with"), "--vae", str(tmp_path / "vae")]) == 0
    assert len(list((tmp_path / "with" / "images").iterdir())) == 2


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_many_samples_by_two_processes(tmp_path):
    saved_pipeline("uvit", tmp_path / "model")
    for processes in (1, 2):
        command = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes", processes]
        command += ["--multi_gpu", "--main_process_port", random.randint(20000, 40000)] if processes > 1 else []
        command += ["-m", "hf_decayed.cli", "sample"]
        command += [tmp_path / "model", "--num", 9, "--batch_size", 2, "--num_inference_steps", 2, "--format", "npz"]
        command += ["--classes", "one,0", "--guidance_scale", 1.5, "--output", tmp_path / str(processes)]
        result = subprocess.run(
            list(map(str, command)),
            env={**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"},
            capture_output=True,
            text=True,
        )
        assert result.returncode == 0, result.stderr[-2000:]
    one, two = (np.load(tmp_path / name / "samples.npz")["arr_0"] for name in "12")
    assert len(one) == 9 and np.array_equal(one, two)


@pytest.mark.parametrize("kind", ["uvit", "sit", pytest.param("sit with skips", marks=pytest.mark.slow)])
def test_caches_of_diffusers(kind):
    """Caches of attention call every block, those of blocks fewer; none of them survives a call."""
    sizes = {"sample_size": 8, "hidden_size": 32, "num_layers": 4, "num_attention_heads": 2, "num_classes": 3}
    sizes |= {"patch_size": 2, "in_channels": 3, "shortcut_decay": 0.6}
    if kind == "uvit":
        network = random_weights(DecayedUViT2DModel(**sizes))
        pipeline = DecayedUViTPipeline(network, DPMSolverMultistepScheduler())
    else:
        network = random_weights(DecayedSiTTransformer2DModel(**sizes, encoder_decoder_skips="skips" in kind))
        pipeline = DecayedSiTPipeline(network, FlowMatchEulerDiscreteScheduler())
    pipeline.set_progress_bar_config(disable=True)
    names = list(network.state_dict())
    called = {"attn": 0, "fc2": 0}
    last_block = (network.out_blocks if kind == "uvit" else network.transformer_blocks)[-1]
    last_block.attn.to_q.register_forward_hook(lambda *_: called.update(attn=called["attn"] + 1))
    last_block.fc2.register_forward_hook(lambda *_: called.update(fc2=called["fc2"] + 1))

    def images():
        called.update(attn=0, fc2=0)
        arguments = {"guidance_scale": 2.0, "guidance_interval": (0.3, 1.0), "num_inference_steps": 8}
        generator = torch.Generator().manual_seed(0)
        return pipeline([0, 1], generator=generator, output_type="np", **arguments).images

    exact = images()
    assert called == {"attn": 8, "fc2": 8}
    attention = PyramidAttentionBroadcastConfig(
        spatial_attention_block_skip_range=2,
        spatial_attention_timestep_skip_range=(100, 900),
        current_timestep_callback=lambda: pipeline.current_timestep,
    )
    taylor = TaylorSeerCacheConfig(cache_interval=2, disable_cache_before_step=1, taylor_factors_dtype=torch.float32)
    lite = dataclasses.replace(taylor, use_lite_mode=True)
    first_block = FirstBlockCacheConfig(threshold=0.5)
    magnitude = MagCacheConfig(mag_ratios=[1.0] * 8, num_inference_steps=8, threshold=0.5)
    for config in (attention, taylor, lite, first_block, magnitude):
        network.enable_cache(config)
        cached = images()
        assert np.isfinite(cached).all() and not np.array_equal(cached, exact)
        assert 1 < called["attn"] < 8 and (called["fc2"] == 8) == (config in (attention, taylor)), config
        assert np.array_equal(images(), cached)  # the cache does not survive a call
        network.disable_cache()
        assert np.array_equal(images(), exact) and list(network.state_dict()) == names
    with pytest.raises(ValueError, match="FasterCacheConfig does not fit this network: use one of Pyramid"):
        network.enable_cache(FasterCacheConfig())


@pytest.mark.parametrize("kind", ["uvit", "sit"])
def test_caches_that_reuse_nothing_change_nothing(kind):
    sizes = {"sample_size": 8, "hidden_size": 32, "num_layers": 4, "num_attention_heads": 2, "num_classes": 3}
    sizes |= {"patch_size": 2, "in_channels": 3, "shortcut_decay": 0.6}
    if kind == "uvit":
        network = random_weights(DecayedUViT2DModel(**sizes))
        pipeline = DecayedUViTPipeline(network, DPMSolverMultistepScheduler())
    else:
        network = random_weights(DecayedSiTTransformer2DModel(**sizes))
        pipeline = DecayedSiTPipeline(network, FlowMatchEulerDiscreteScheduler())
    pipeline.set_progress_bar_config(disable=True)

    def images():
        generator = torch.Generator().manual_seed(0)
        settings = {"guidance_scale": 2.0, "num_inference_steps": 6, "output_type": "np"}
        return pipeline([0, 1], generator=generator, **settings).images

    exact = images()
    for config in (
        FirstBlockCacheConfig(threshold=0.0),
        TaylorSeerCacheConfig(cache_interval=1),
        TaylorSeerCacheConfig(cache_interval=1, use_lite_mode=True),
        TaylorSeerCacheConfig(cache_interval=5, disable_cache_before_step=6, use_lite_mode=True),
        MagCacheConfig(mag_ratios=[1.0] * 6, num_inference_steps=6, retention_ratio=1.0),
        PyramidAttentionBroadcastConfig(
            spatial_attention_block_skip_range=1, current_timestep_callback=lambda: pipeline.current_timestep
        ),
    ):
        network.enable_cache(config)
        assert np.array_equal(images(), exact), config
        network.disable_cache()


@pytest.mark.parametrize("kind", ["uvit", pytest.param("sit", marks=pytest.mark.slow)])
def test_the_pipeline_of_the_package_loads_a_folder_by_itself(kind):
    """In a process that has imported nothing else: diffusers loads components only from imported modules."""
    name = {"uvit": "DecayedUViTPipeline", "sit": "DecayedSiTPipeline"}[kind]
    folder = ROOT / "model_cards" / f"decayed-{kind}-fashion-mnist"
    code = f"from hf_decayed import {name}; {name}.from_pretrained({str(folder)!r})"
    result = subprocess.run([sys.executable, "-c", code], cwd="/", capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-3000:]


@pytest.mark.parametrize("model_class", MODELS)
def test_lora_of_diffusers(model_class, tmp_path, sample):
    network = random_model(model_class)
    arguments = sample, torch.full((3,), 0.5), torch.arange(3)
    with torch.no_grad():
        plain = network(*arguments).sample
        network.add_adapter(LoraConfig(r=2, target_modules=["to_q", "to_v", "fc1"], init_lora_weights=False))
        adapted = network(*arguments).sample
        assert not torch.allclose(adapted, plain)
        network.save_lora_adapter(tmp_path)
        network.fuse_lora()
        torch.testing.assert_close(network(*arguments).sample, adapted, rtol=1e-3, atol=1e-4)
        network.unfuse_lora()
        network.unload_lora()
        torch.testing.assert_close(network(*arguments).sample, plain, rtol=1e-3, atol=1e-4)
        network.load_lora_adapter(tmp_path, prefix=None, weight_name="pytorch_lora_weights.safetensors")
        torch.testing.assert_close(network(*arguments).sample, adapted, rtol=1e-3, atol=1e-4)
        network.disable_lora()
        torch.testing.assert_close(network(*arguments).sample, plain, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
@pytest.mark.skipif(
    torch.__version__.startswith("2.8."), reason="its dynamo cannot trace diffusers' choice of attention"
)
@pytest.mark.parametrize("model_class", [DecayedUViT2DModel, DecayedSiTTransformer2DModel])
def test_blocks_compile_alone(model_class):
    """Diffusers' regional compilation traces the block without graph breaks, and the output stays the same."""
    sizes = {"sample_size": 8, "hidden_size": 32, "num_layers": 4, "num_attention_heads": 2, "in_channels": 3}
    network = random_weights(model_class(**sizes, patch_size=2, shortcut_decay=0.6)).eval()
    inputs = torch.randn(2, 3, 8, 8), torch.tensor([0.2, 0.7])
    with torch.no_grad():
        expected = network(*inputs).sample
        network.compile_repeated_blocks(fullgraph=True, backend="eager")
        assert torch.equal(network(*inputs).sample, expected)
