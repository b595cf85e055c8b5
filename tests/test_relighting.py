"""Latent intrinsics: losses, the network, data, the pipeline, metrics, and the script `relight.py`."""

import copy
import io
import json
import math
import os
import random
import re
import shlex
import subprocess
import sys
import time
import warnings
from types import SimpleNamespace

import evaluate
import numpy as np
import pytest
import relight
import torch
from accelerate import Accelerator
from conftest import ROOT, random_weights, run_script
from diffusers import DiffusionPipeline
from diffusers.utils import export_to_gif
from PIL import Image
from script_server import kill, start_script
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from hf_decayed.cli import main
from hf_decayed.data.lambertian import LambertianScenes, is_lit
from hf_decayed.data.relighting_folders import (
    ProceduralPairs,
    RelightingFolder,
    RelightingPairs,
    relighting_examples,
    to_bytes,
)
from hf_decayed.errors import DataError, UserError
from hf_decayed.evaluation.relighting import (
    Judgement,
    albedo_error,
    correct_colours,
    light_consistency,
    read_iiw_judgements,
    reference_leakage,
    relighting_errors,
    whdr,
)
from hf_decayed.kinds.relighting import relighting_output
from hf_decayed.losses.coding_rate import coding_rate, max_coding_rate, uniform_coding_rate
from hf_decayed.losses.relighting import (
    gradient_difference,
    invariance_loss,
    pixel_loss,
    spread_loss,
    structural_similarity,
)
from hf_decayed.models.latent_intrinsics import (
    INITIAL_BRANCH_SCALE,
    LatentIntrinsicsBlock,
    LatentIntrinsicsEncoding,
    LatentIntrinsicsModel,
    constrained_scaling,
    sinusoidal_positions,
)
from hf_decayed.pipelines.pipeline_relighting import (
    RelightingPipeline,
    interpolate_codes,
    strips,
    tile_starts,
    tiles,
)
from hf_decayed.run.relighting import DensePrior, RelightingMonitor, other_lights


TINY = {"sample_size": 16, "block_out_channels": (8, 8, 16), "layers_per_block": (1, 1, 2), "light_dim": 4}


def tiny_model(**fields):
    torch.manual_seed(0)
    return LatentIntrinsicsModel(**{**TINY, "light_hidden_dim": 12, **fields}).eval()


@pytest.fixture
def images():
    return torch.rand(3, 3, 16, 16) * 2 - 1


def unit_rows(number, dim):
    return F.normalize(torch.randn(number, dim), dim=1)


# Losses.


def test_coding_rate_of_spread_and_of_collapsed_rows():
    assert coding_rate(unit_rows(50_000, 16)) == pytest.approx(8 * math.log(6), abs=0.02)
    assert coding_rate(torch.eye(8).repeat(5, 1)) == pytest.approx(4 * math.log(6), abs=1e-5) == max_coding_rate(40, 8)
    assert coding_rate(torch.eye(8)[:3]) == pytest.approx(max_coding_rate(3, 8), abs=1e-5)
    collapsed = coding_rate(unit_rows(1, 16).expand(1000, 16))
    assert collapsed == pytest.approx(math.log(1 + 16 / 0.2) / 2, abs=1e-3)
    assert uniform_coding_rate(64, 16) == pytest.approx(13.6, abs=0.2)  # measured by the specification
    assert uniform_coding_rate(64, 16) == pytest.approx(coding_rate(unit_rows(64, 16)).item(), abs=0.5)
    maps = torch.randn(2, 5, 7, 16)
    torch.testing.assert_close(coding_rate(maps), coding_rate(maps.reshape(-1, 16)))
    with pytest.raises(ValueError, match="must have rows and columns"):
        coding_rate(torch.zeros(0, 4))


def test_coding_rate_in_half_precision():
    rows = unit_rows(64, 16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(coding_rate(rows), coding_rate(rows.double()).float())


TWO_PROCESSES = """
import os, sys, torch
from hf_decayed.losses.coding_rate import coding_rate
torch.distributed.init_process_group("gloo")
rank = torch.distributed.get_rank()
torch.manual_seed(0)
model = torch.nn.Linear(6, 5)
rows = torch.randn(12, 6)
network = torch.nn.parallel.DistributedDataParallel(model)
share = rows[:4] if rank == 0 else rows[4:]
rate = coding_rate(torch.nn.functional.normalize(network(share), dim=1))
rate.backward()
if rank == 0:
    torch.save({"rate": rate.detach(), "gradient": model.weight.grad}, sys.argv[1])
torch.distributed.barrier()  # gloo may abort a process that ends while the other one still works
torch.distributed.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_coding_rate_of_two_processes_is_that_of_one(tmp_path):
    """Value and gradients, for shares of different sizes."""
    (tmp_path / "two.py").write_text(TWO_PROCESSES)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port"]
    command += [str(random.randint(20000, 40000)), str(tmp_path / "two.py"), str(tmp_path / "two.pt")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    two = torch.load(tmp_path / "two.pt", weights_only=True)
    torch.manual_seed(0)
    model = torch.nn.Linear(6, 5)
    rate = coding_rate(F.normalize(model(torch.randn(12, 6)), dim=1))
    rate.backward()
    torch.testing.assert_close(two["rate"], rate.detach())
    torch.testing.assert_close(two["gradient"], model.weight.grad)


def test_structural_similarity_of_one_window():
    """An image of one window: the formula of the paper, with weighted moments."""
    first, second = torch.rand(2, 1, 1, 11, 11, dtype=torch.float64)
    weights = torch.exp(-((torch.arange(11) - 5.0) ** 2) / (2 * 1.5**2)).double()
    weights = weights[:, None] * weights / weights.sum() ** 2
    means = [(weights * image).sum() for image in (first, second)]
    variances = [(weights * (image - mean) ** 2).sum() for image, mean in zip((first, second), means)]
    covariance = (weights * (first - means[0]) * (second - means[1])).sum()
    expected = (2 * means[0] * means[1] + 0.0004) * (2 * covariance + 0.0036)
    expected /= (means[0] ** 2 + means[1] ** 2 + 0.0004) * (sum(variances) + 0.0036)
    assert structural_similarity(first, second).item() == pytest.approx(expected.item(), abs=1e-5)
    images = torch.rand(3, 3, 16, 12)
    torch.testing.assert_close(structural_similarity(images, images), torch.ones(3))
    similarity = structural_similarity(images, images.flip(0))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(structural_similarity(images, images.flip(0)).double(), similarity.double())
    with pytest.raises(ValueError, match="at least 11 x 11 pixels, got .8, 12."):
        structural_similarity(images[:, :, :8], images[:, :, :8])
    with pytest.raises(ValueError, match="one shape"):
        structural_similarity(images, images[:1])


def test_pixel_loss_has_three_terms():
    predicted, target = torch.rand(2, 2, 3, 16, 16)
    assert pixel_loss(target, target) == pytest.approx(0, abs=1e-6)
    brighter = target + 0.5
    assert gradient_difference(brighter, target) == pytest.approx(0, abs=1e-6)
    edge = torch.zeros(1, 1, 4, 4)
    edge[..., 2:] = 1.0  # one of three columns of slopes
    assert gradient_difference(edge, torch.zeros(1, 1, 4, 4)) == pytest.approx(1 / 3)
    terms = [pixel_loss(predicted, target, *weights) for weights in ((1, 0, 0), (0, 1, 0), (0, 0, 1))]
    assert pixel_loss(predicted, target) == pytest.approx((10 * terms[0] + 0.1 * terms[1] + terms[2]).item())
    assert terms[0] == pytest.approx(F.mse_loss(predicted, target).item())


def test_invariance_in_both_forms():
    maps, others = ([F.normalize(torch.randn(2, dim, 4, 4), dim=1) for dim in (6, 8)] for _ in range(2))
    assert invariance_loss(maps, maps) == pytest.approx(-1) and invariance_loss(maps, maps, "distance") == 0
    opposite = [-tensor for tensor in maps]
    assert invariance_loss(maps, opposite) == pytest.approx(1)
    assert invariance_loss(maps, opposite, "distance") == pytest.approx(4)  # 2 at either scale
    assert invariance_loss(maps, others) > -1 and invariance_loss(maps, others, "distance") > 0
    leaves = [tensor.clone().requires_grad_() for tensor in maps]
    invariance_loss(leaves, maps, "distance").backward()
    assert all(torch.isfinite(tensor.grad).all() for tensor in leaves)  # where they are equal, too
    with pytest.raises(ValueError, match="`form` must be 'cosine' or 'distance', got 'l1'"):
        invariance_loss(maps, others, "l1")


def test_spread_loss_has_its_own_target_for_every_tensor():
    maps = [F.normalize(torch.randn(8, dim, 8, 8), dim=1) for dim in (4, 16)]
    collapsed = [F.normalize(torch.ones_like(tensor), dim=1) for tensor in maps]
    assert spread_loss(maps) < 0.1 < 10 < spread_loss(collapsed)
    light = unit_rows(16, 8)
    expected = (coding_rate(light) - uniform_coding_rate(16, 8)) ** 2
    assert spread_loss([light]) == pytest.approx(expected.item(), abs=1e-5)
    expected = (coding_rate(light) - 4 * math.log(6)) ** 2
    assert spread_loss([light], "max") == pytest.approx(expected.item(), rel=1e-4)
    with pytest.raises(ValueError, match="`target` must be 'own' or 'max', got 'none'"):
        spread_loss([light], "none")


# The network.


def count(module):
    return sum(parameter.numel() for parameter in module.parameters())


def test_base_is_the_size_of_the_dissertation():
    with torch.device("meta"):
        model = LatentIntrinsicsModel()
        named = LatentIntrinsicsModel.from_size("base")
    parts = [model.encoder, model.decoder, model.light_encoder, model.light_decoder]
    assert [round(count(part) / 1e6, 3) for part in parts] == [26.130, 70.989, 0.271, 0.019]
    assert round(count(model) / 1e6, 2) == 97.41 and count(named) == count(model)
    with torch.device("meta"):
        assert count(LatentIntrinsicsModel.from_size("tiny")) < 1.5e6 < count(LatentIntrinsicsModel.from_size("small"))
        intrinsics, light = model.encode(torch.zeros(2, 3, 256, 256))
        assert [tuple(intrinsic.shape[1:]) for intrinsic in intrinsics] == [
            (64, 128, 128),
            (128, 64, 64),
            (128, 32, 32),
            (256, 16, 16),
            (512, 8, 8),
        ]
        assert light.shape == (2, 16) and model.decode(intrinsics, light).shape == (2, 3, 256, 256)
    with pytest.raises(ValueError, match="`size` must be one of tiny, small, base, got 'huge'"):
        LatentIntrinsicsModel.from_size("huge")


def test_codes_have_length_one(images):
    intrinsics, light = random_weights(tiny_model()).encode(images)
    for vectors in (*intrinsics, light):
        torch.testing.assert_close(vectors.norm(dim=1), torch.ones_like(vectors[:, 0]))
    assert [tuple(intrinsic.shape[1:]) for intrinsic in intrinsics] == [(8, 8, 8), (16, 4, 4)]


def test_constrained_scaling_is_the_formula():
    features, modulation = torch.randn(2, 5, 3, 4), 100 * torch.randn(2, 5)
    scaled = constrained_scaling(features, modulation, 0.25)
    torch.testing.assert_close(scaled[1, 2, 0, 1], features[1, 2, 0, 1] * (1 + 0.25 * torch.tanh(modulation[1, 2])))
    assert ((scaled / features - 1).abs() <= 0.25 + 1e-5).all()
    torch.testing.assert_close(
        constrained_scaling(features, modulation, 1.0, bounded=False)[0, 0], features[0, 0] * (1 + modulation[0, 0])
    )


@torch.no_grad()
def test_alpha_zero_switches_the_light_off(images):
    model = random_weights(tiny_model())
    intrinsics, light = model.encode(images)
    other = F.normalize(torch.randn_like(light), dim=1)
    assert torch.equal(model.decode(intrinsics, light, alpha=0.0), model.decode(intrinsics, other, alpha=0.0))
    assert not torch.equal(model.decode(intrinsics, light), model.decode(intrinsics, other))
    torch.testing.assert_close(model.decode(intrinsics, light), model.decode(intrinsics, light, alpha=5e-3))


@torch.no_grad()
def test_light_changes_little_in_a_new_network(images):
    """The change is of the order of alpha: ten times the alpha, about ten times the change."""
    model = tiny_model()
    for module in model.modules():
        if isinstance(module, LatentIntrinsicsBlock):
            module.conv2.weight.div_(INITIAL_BRANCH_SCALE)  # otherwise the light reaches nothing yet
    intrinsics, light = model.encode(images)
    without = model.decode(intrinsics, light, alpha=0.0)
    changes = [(model.decode(intrinsics, light, alpha=alpha) - without).norm().item() for alpha in (1e-3, 1e-2)]
    assert 0 < changes[0] < 0.02 * without.norm() and changes[1] == pytest.approx(10 * changes[0], rel=0.1)


@torch.no_grad()
def test_decoding_is_pure_and_by_image(images):
    model = random_weights(tiny_model())
    intrinsics, light = model.encode(images)
    before = [intrinsic.clone() for intrinsic in intrinsics]
    codes = list(intrinsics)
    first, second = model.decode(codes, light), model.decode(codes, light)
    assert torch.equal(first, second) and len(codes) == 2
    assert all(torch.equal(a, b) for a, b in zip(before, intrinsics))
    order = torch.tensor([2, 0, 1])
    swapped = model.decode([intrinsic[order] for intrinsic in intrinsics], light[order])
    torch.testing.assert_close(swapped, first[order], rtol=1e-4, atol=1e-4)
    output = model(images, light_index=order)
    torch.testing.assert_close(output.sample, model.decode(intrinsics, light[order]))
    assert torch.equal(output.light, light) and torch.equal(model(images, return_dict=False)[0], first)


@torch.no_grad()
def test_scene_and_light_come_from_their_own_codes(images):
    """With maps that are all alike, images of different scenes are alike but for the light."""
    model = random_weights(tiny_model())
    intrinsics, light = model.encode(images)
    same = [intrinsic[:1].expand_as(intrinsic) for intrinsic in intrinsics]
    decoded = model.decode(same, light[:1].expand_as(light))
    torch.testing.assert_close(decoded, decoded[:1].expand_as(decoded))
    different = model.decode(intrinsics, light[:1].expand_as(light))
    assert (different[1:] - different[:1]).abs().amax(dim=(1, 2, 3)).min() > 10 * (decoded - decoded[:1]).abs().max()


@torch.no_grad()
def test_patches_of_pixels_are_positions_of_the_finest_scale():
    model = random_weights(tiny_model(sample_size=32, patch_size=2))
    assert model.scale_factor == 8 and model.encoder.conv_in.in_channels == model.decoder.conv_out.out_channels == 12
    images = torch.rand(2, 3, 32, 32) * 2 - 1
    intrinsics, light = model.encode(images)
    assert [tuple(intrinsic.shape[2:]) for intrinsic in intrinsics] == [(8, 8), (4, 4)]
    assert model.decode(intrinsics, light).shape == images.shape
    with pytest.raises(ValueError, match="`sample_size` must be divisible by 8, got 20"):
        tiny_model(sample_size=20, patch_size=2)


@torch.no_grad()
def test_dense_features_of_another_encoder(images):
    """A new network ignores them but for the small start of their projections; a trained one does not."""
    model, plain = tiny_model(prior_channels=5), tiny_model()
    prior = torch.randn(3, 5, 2, 3)
    missing, unknown = model.load_state_dict(plain.state_dict(), strict=False)
    assert not unknown and all(name.startswith("prior_projections") for name in missing) and len(missing) == 4
    torch.testing.assert_close(model.encode(images, prior).light, plain.encode(images).light, rtol=1e-3, atol=1e-3)
    model = random_weights(model)
    maps, others = model.encode(images, prior).intrinsics, model.encode(images, -prior).intrinsics
    assert all((a - b).abs().max() > 0.1 for a, b in zip(maps, others))
    torch.testing.assert_close(model(images, prior=prior).light, model.encode(images, prior).light)
    with pytest.raises(ValueError, match="takes dense features of another encoder: pass `prior` of 5 channels"):
        model.encode(images)
    with pytest.raises(ValueError, match=r"`prior` must have the shape \(3, 0, rows, columns\), got \(3, 5, 2, 3\)"):
        plain.encode(images, prior)


def test_positions_are_fixed_and_counted_from_the_middle():
    table = sinusoidal_positions(8, 6, 16, torch.device("cpu"))[
        0
    ]  # 4 cosines and 4 sines of the row, then of the column
    assert table.shape == (16, 8, 6)
    assert table[0, 0, 3] == pytest.approx(math.cos(-3.5)) and table[4, 7, 0] == pytest.approx(math.sin(3.5))
    assert table[8, 5, 0] == pytest.approx(math.cos(-2.5)) and table[13, 0, 5] == pytest.approx(math.sin(2.5 / 10))
    assert len({tuple(vector) for vector in table.flatten(1).T.round(decimals=4).tolist()}) == 48


def test_initial_values():
    model = tiny_model(block_out_channels=(32, 32, 64))
    for name, parameter in model.named_parameters():
        fan_in, fan_out = (parameter[0].numel(), parameter[:, 0].numel()) if parameter.ndim > 1 else (0, 0)
        if name.endswith("bias"):
            assert torch.equal(parameter, torch.zeros_like(parameter)), name
        elif parameter.ndim == 1:
            assert torch.equal(parameter, torch.ones_like(parameter)), name
        else:
            std = math.sqrt(2 / (fan_in + fan_out))
            if "conv2" in name or "to_out" in name:
                std *= 1e-5
            elif ".to_" in name:
                std *= math.sqrt(0.1)
            elif "conv_out" in name:
                std = math.sqrt(1 / fan_in)
            assert parameter.std().item() == pytest.approx(std, rel=0.25), name


def test_a_saved_model_comes_back(images, tmp_path):
    model = random_weights(tiny_model(alpha=0.01))
    model.save_pretrained(tmp_path)
    loaded = LatentIntrinsicsModel.from_pretrained(tmp_path).eval()
    assert loaded.config.alpha == 0.01 and torch.equal(loaded(images).sample, model(images).sample)


def test_gradient_checkpointing_changes_no_gradient(images):
    gradients = []
    for checkpointing in (False, True):
        model = tiny_model(dropout=0.0)
        if checkpointing:
            model.enable_gradient_checkpointing()
        torch.manual_seed(1)
        model = random_weights(model)
        model(images, light_index=torch.tensor([1, 2, 0])).sample.square().mean().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert all(gradient is not None for gradient in gradients[0])
    for plain, checkpointed in zip(*gradients):
        torch.testing.assert_close(plain, checkpointed)


@pytest.mark.parametrize(
    "fields, sentence",
    [
        ({"alpha": 2.0}, r"`alpha` must be a number in \[0, 1\], got 2.0"),
        ({"block_out_channels": (8,)}, "`block_out_channels` must list at least two scales"),
        ({"layers_per_block": (1, 1)}, "`layers_per_block` must have an entry for each of 3 scales"),
        ({"block_out_channels": (8, 8, 18)}, "`block_out_channels` must be divisible by 4, got 18"),
        ({"sample_size": 18}, "`sample_size` must be divisible by 4, got 18"),
        ({"light_dims": 3}, "Unknown field `light_dims` .* did you mean `light_dim`"),
    ],
)
def test_wrong_fields_are_one_sentence(fields, sentence):
    with pytest.raises(ValueError, match=sentence):
        tiny_model(**fields)


def test_wrong_inputs_are_one_sentence(images):
    model = tiny_model()
    intrinsics, light = model.encode(images)
    with pytest.raises(ValueError, match=r"must have the shape \(batch, 3, height, width\), got \(3, 1, 16, 16\)"):
        model.encode(images[:, :1])
    with pytest.raises(ValueError, match="must be divisible by 4, got 16 x 14"):
        model.encode(images[..., :14])
    with pytest.raises(ValueError, match=r"`alpha` must be a number in \[0, 1\], got -1"):
        model.decode(intrinsics, light, alpha=-1)
    with pytest.raises(ValueError, match="`intrinsics` must be 2 maps of 8, 16 channels"):
        model.decode(intrinsics[:1], light)
    with pytest.raises(ValueError, match=r"`light` must have the shape \(3, 4\), got \(1, 4\)"):
        model.decode(intrinsics, light[:1])


# Data.


def test_lambertian_images_are_the_formula():
    scenes = LambertianScenes(num_scenes=3, num_lights=4, size=24)
    scene, light = scenes.scene(1), {name: values[2] for name, values in scenes.lights.items()}
    torch.testing.assert_close(scene["normals"].norm(dim=0), torch.ones(24, 24))
    torch.testing.assert_close(scenes.lights["direction"].norm(dim=1), torch.ones(4))
    assert 0 <= scene["albedo"].min() and scene["albedo"].max() <= 1 and (scenes.lights["direction"][:, 2] > 0).all()
    row, column = 5, 17
    cosine = max(0.0, float(scene["normals"][:, row, column] @ light["direction"]))
    expected = scene["albedo"][:, row, column] * (light["ambient"] + cosine * light["colour"])
    torch.testing.assert_close(scenes.images([1], [2])[0, :, row, column], expected)


def test_normals_belong_to_the_height_field():
    scene = LambertianScenes(num_scenes=1, size=128).scene(0)
    x, y, z = scene["normals"]
    for axis, component in ((1, x), (0, y)):
        height = scene["height"].movedim(axis, 0)
        slopes = (height[2:] - height[:-2]) * 128 / 2
        expected = -(component / z).movedim(axis, 0)[1:-1]
        close = (slopes - expected).abs() < 0.05 + 0.1 * expected.abs()
        assert close.float().mean() > 0.9  # all but the edges of domes


def test_scenes_depend_on_seed_and_index_alone():
    scenes = LambertianScenes(num_scenes=3, num_lights=2, size=16)
    held_out = LambertianScenes(num_scenes=2, num_lights=2, size=16, first_scene=1)
    assert torch.equal(scenes.images([2], [1]), held_out.images([1], [1]))
    assert not torch.equal(scenes.images([0], [1]), held_out.images([0], [1]))
    other = LambertianScenes(num_scenes=3, num_lights=2, size=16, seed=1)
    assert not torch.equal(scenes.images([2], [1]), other.images([2], [1]))
    prints = [variant.fingerprint() for variant in (scenes, held_out, other, LambertianScenes(3, 2, 16))]
    assert prints[0] == prints[3] and len(set(prints)) == 3
    with pytest.raises(ValueError, match="`num_lights` must be at least 2, got 1"):
        LambertianScenes(num_lights=1)
    with pytest.raises(ValueError, match=r"`index` must lie in \[0, 3\), got 3"):
        scenes.scene(3)


def test_shadows_and_highlights_by_switch():
    plain, shadows, highlights = (
        LambertianScenes(2, 8, 32, **switch).images([0, 1] * 4, list(range(8)))
        for switch in ({}, {"shadows": True}, {"highlights": True})
    )
    assert (shadows <= plain).all() and (shadows < plain).any()
    assert (highlights >= plain).all() and (highlights > plain).any()
    wall = torch.zeros(16, 16)
    wall[:, 8] = 1.0  # a wall; the light comes from the right, at 45 degrees
    lit = is_lit(wall, torch.tensor([math.sqrt(0.5), 0.0, math.sqrt(0.5)]))
    assert (lit[:, 9:] == 1).all() and (lit[:, 5:8] == 0).all()


def test_pairs_are_cropped_alike():
    """The same image under both lights: what the pair shows is equal, whatever the crop and the flip."""
    source = ProceduralPairs(LambertianScenes(num_scenes=4, num_lights=3, size=24))
    source.images[:] = source.images[:, :1]
    pairs = RelightingPairs(source, image_size=16, seed=0, pairs_per_scene=2)
    keys = [(0, 0), (0, 5), (1, 0)]
    batch = pairs.__getitems__(keys)
    assert torch.equal(batch["pixel_values"], batch["target_values"]) and len(pairs) == 8
    assert not torch.equal(batch["noise"], batch["target_noise"])
    assert not torch.equal(batch["pixel_values"][0], batch["pixel_values"][2])  # another epoch, another crop
    assert batch["pixel_values"].shape == (3, 3, 16, 16) and batch["pixel_values"].abs().max() <= 1
    again = pairs.__getitems__(keys[1:])
    assert all(torch.equal(batch[name][1:], again[name]) for name in batch)
    whole = RelightingPairs(source, 24, seed=0, crop_scale=None, horizontal_flip=False).__getitems__([(0, 2)])
    torch.testing.assert_close(whole["pixel_values"][0], source.images[2, 0] / 127.5 - 1, rtol=0, atol=1e-5)


def save_scene(folder, size=(20, 16), lights=2):
    folder.mkdir(parents=True)
    for light in range(lights):
        pixels = np.random.default_rng(light).integers(0, 255, (size[1], size[0], 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"dir_{light}_mip2.png")


def test_pairs_of_a_folder(tmp_path):
    for name in ("kitchen", "attic"):
        save_scene(tmp_path / name, lights=3)
        (tmp_path / name / "meta.json").write_text("{}")
        for other, size in (("materials_mip2.png", (20, 16)), ("thumb.jpg", (5, 4))):  # no lights
            Image.new("RGB", size).save(tmp_path / name / other)
    source = RelightingFolder(tmp_path)
    assert len(source) == 2 and source.names == ["attic", "kitchen"] and source.num_lights(0) == 3
    expected = np.asarray(Image.open(tmp_path / "kitchen" / "dir_2_mip2.png"))
    assert np.array_equal(source.pair(1, (0, 2))[1].permute(1, 2, 0).numpy(), expected)
    batch = RelightingPairs(source, image_size=8, seed=0).__getitems__([(0, 0), (0, 1)])
    assert batch["pixel_values"].shape == (2, 3, 8, 8) and not torch.equal(
        batch["pixel_values"], batch["target_values"]
    )
    before = source.fingerprint()
    save_scene(tmp_path / "cellar")
    assert RelightingFolder(tmp_path).fingerprint() != before


def test_folders_that_cannot_be_used(tmp_path):
    with pytest.raises(DataError, match="is no folder of scenes"):
        RelightingFolder(tmp_path / "absent")
    with pytest.raises(DataError, match="holds no scenes"):
        RelightingFolder(tmp_path)
    save_scene(tmp_path / "one" / "attic", lights=1)
    with pytest.raises(DataError, match=r"The scene 'attic' has 1 image\(s\): a pair needs two lights"):
        RelightingFolder(tmp_path / "one")
    save_scene(tmp_path / "sizes" / "attic")
    Image.new("RGB", (8, 8)).save(tmp_path / "sizes" / "attic" / "dir_1_mip2.png")
    with pytest.raises(DataError, match="'attic' have different sizes, 20 x 16 and 8 x 8 pixels"):
        RelightingFolder(tmp_path / "sizes").pair(0, (0, 1))
    (tmp_path / "sizes" / "attic" / "dir_1_mip2.png").write_bytes(b"no image")
    with pytest.raises(DataError, match="'attic/dir_1_mip2.png' cannot be decoded"):
        RelightingFolder(tmp_path / "sizes").pair(0, (0, 1))


def test_images_of_16_bits_are_scaled_and_nan_is_refused(tmp_path):
    for name in ("attic", "cellar"):
        save_scene(tmp_path / name)
    deep = np.arange(320, dtype=np.uint16).reshape(16, 20) * 205
    Image.fromarray(deep).save(tmp_path / "attic" / "dir_1_mip2.png")
    pixels = RelightingFolder(tmp_path).pair(0, (0, 1))[1]
    assert np.array_equal(pixels[0].numpy(), (deep / 257.0).astype(np.uint8)) and torch.equal(pixels[0], pixels[2])
    Image.fromarray(np.full((16, 20), np.nan, np.float32)).save(tmp_path / "cellar" / "dir_2.tiff")
    with pytest.raises(DataError, match="'cellar/dir_2.tiff' cannot be decoded .it holds NaN or infinity."):
        RelightingFolder(tmp_path).pair(1, (0, 2))


def test_scenes_may_differ_in_size(tmp_path):
    save_scene(tmp_path / "attic", size=(20, 16))
    save_scene(tmp_path / "cellar", size=(31, 12))
    for crop_scale in ((0.5, 1.0), None):
        batch = RelightingPairs(RelightingFolder(tmp_path), 8, 0, crop_scale).__getitems__([(0, 0), (0, 1)])
        assert batch["pixel_values"].shape == batch["target_values"].shape == (2, 3, 8, 8)


def test_clipping_is_a_cameras():
    assert to_bytes(torch.tensor([0.0, 0.7, 1.4, 9.0])).tolist() == [0, 128, 255, 255]


# The pipeline.


@pytest.fixture
def pipeline():
    return RelightingPipeline(random_weights(tiny_model()))


def picture(width=16, height=16, seed=0):
    return Image.fromarray(np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8))


def as_tensor(image):
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)[None] / 255


@torch.no_grad()
def test_an_image_of_one_tile_is_relit_as_a_whole(pipeline):
    image, reference = picture(), picture(seed=1)
    relit = pipeline(image, reference, output_type="pt").images
    intrinsics, _ = pipeline.autoencoder.encode(2 * as_tensor(image) - 1)
    light = pipeline.autoencoder.encode(2 * as_tensor(reference) - 1).light
    expected = (pipeline.autoencoder.decode(intrinsics, light) / 2 + 0.5).clamp(0, 1)
    torch.testing.assert_close(relit, expected)
    torch.testing.assert_close(pipeline.light(reference), light)
    albedo = pipeline.albedo(image, output_type="pt").images
    expected = (pipeline.autoencoder.decode(intrinsics, light, alpha=0.0) / 2 + 0.5).clamp(0, 1)
    torch.testing.assert_close(albedo, expected)
    assert pipeline(image, reference).images[0].size == (16, 16)


@pytest.mark.parametrize("width, height", [(16, 16), (37, 21), (9, 5), (64, 16)])
def test_tiles_cover_images_of_any_size(width, height, pipeline):
    image = picture(width, height)
    assert pipeline(image, picture(30, 18, seed=1)).images[0].size == (width, height)
    assert pipeline.albedo(image, tile_size=8, tile_overlap=0.0).images[0].size == (width, height)


def test_tiles_blend_to_the_whole():
    """If a tile gives back its own pixels, the blend is the image."""
    image = torch.rand(21, 40)
    total, weight_sum = torch.zeros_like(image), torch.zeros_like(image)
    number = 0
    for rows, columns, weights in tiles(21, 40, 16, 0.5):
        assert weights.shape == (16, 16) and 0 < weights.min() <= weights.max() <= 1 + 1e-6
        total[rows, columns] += weights * image[rows, columns]
        weight_sum[rows, columns] += weights
        number += 1
    torch.testing.assert_close(weight_sum, torch.ones_like(image))
    torch.testing.assert_close(total, image)
    assert number == 2 * 4 and tile_starts(40, 16, 0.5) == [0, 8, 16, 24] and tile_starts(10, 16, 0.5) == [0]
    # Where two tiles overlap, the one whose middle is nearer has the larger weight: 16 to 24 are right of the first's.
    (_, first), (_, second) = strips(24, 16, 0.5)
    assert (first[8:].diff() < 0).all() and (second[:8].diff() > 0).all() and first[8] > second[0]


class Mirror(torch.nn.Module):
    """In place of the autoencoder: images are decoded as they were encoded, whatever the light."""

    config = SimpleNamespace(sample_size=16, light_dim=4)
    scale_factor, dtype, device = 4, torch.float32, torch.device("cpu")

    def encode(self, pixel_values):
        return LatentIntrinsicsEncoding((pixel_values,), torch.zeros(len(pixel_values), 4))

    def decode(self, intrinsics, light, alpha=None):
        return intrinsics[0].clone()


@pytest.mark.parametrize("height, width", [(64, 48), (37, 21), (9, 50), (5, 7)])
def test_tiles_of_a_pipeline_equal_the_whole(height, width, pipeline):
    """With a network that returns its input, tiles of any size and overlap are the image again."""
    pipeline.autoencoder = Mirror()
    images = torch.rand(2, 3, height, width)
    for tile_size, overlap in ((None, 0.5), (8, 0.0), (12, 0.9)):
        relit = pipeline(images, images[:1], tile_size=tile_size, tile_overlap=overlap, output_type="pt").images
        torch.testing.assert_close(relit, images)


class LargeAllocations(TorchDispatchMode):
    """Names of the operations inside of the context that allocate at least so many bytes."""

    def __init__(self, num_bytes):
        super().__init__()
        self.num_bytes, self.names = num_bytes, []

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        result = operation(*args, **(kwargs or {}))
        inputs = {value.untyped_storage().data_ptr() for value in args if isinstance(value, torch.Tensor)}
        for value in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(value, torch.Tensor) and value.untyped_storage().nbytes() >= self.num_bytes:
                if value.untyped_storage().data_ptr() not in inputs:
                    self.names.append(str(operation))
        return result


def test_memory_grows_by_the_image_and_the_relit_image_alone():
    """Every other tensor is smaller than a quarter of the image."""
    pipeline = RelightingPipeline(tiny_model())
    image, reference = torch.rand(1, 3, 96, 96), torch.rand(1, 3, 16, 16)
    with LargeAllocations(image.numel()) as large:
        relit = pipeline(image, reference, tile_overlap=0.0, output_type="pt").images
    assert relit.shape == image.shape and relit.std() > 0
    # The processor's copy of the input, and the sum of the tiles, which is the result.
    assert large.names == ["aten.cat.default", "aten.new_zeros.default"]


@torch.no_grad()
def test_a_pipeline_with_dense_features_of_another_encoder():
    pipeline = RelightingPipeline(random_weights(tiny_model(prior_channels=6)))
    image, reference = torch.rand(2, 1, 3, 16, 16)
    with pytest.raises(ValueError, match="takes dense features of another encoder: pass `prior` of 6 channels"):
        pipeline(image, reference)

    def prior(pixel_values):
        assert -1 <= pixel_values.min() < 0 and pixel_values.max() <= 1
        return F.pixel_unshuffle(pixel_values, 4)[:, :6]

    pipeline.prior = prior
    relit = pipeline(image, reference, output_type="pt").images
    model = pipeline.autoencoder
    intrinsics, _ = model.encode(2 * image - 1, prior(2 * image - 1))
    light = model.encode(2 * reference - 1, prior(2 * reference - 1)).light
    torch.testing.assert_close(relit, (model.decode(intrinsics, light) / 2 + 0.5).clamp(0, 1))
    assert pipeline.albedo(torch.rand(1, 3, 24, 40), output_type="pt").images.shape == (1, 3, 24, 40)


def test_pictures_are_read_as_in_training(pipeline):
    """Upright, and on white."""
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera lay on its side
    buffer = io.BytesIO()
    picture(20, 12).save(buffer, "PNG", exif=exif)
    lying = Image.open(buffer)
    upright = picture(20, 12).transpose(Image.Transpose.ROTATE_270)
    torch.testing.assert_close(pipeline.preprocess(lying), pipeline.preprocess(upright))
    assert pipeline(lying, picture(seed=1)).images[0].size == (12, 20)
    assert pipeline.preprocess(Image.new("RGBA", (16, 16), (9, 9, 9, 0))).min() == 1


def test_offloading_brings_the_autoencoder(pipeline):
    """Diffusers' own hooks, with the CPU in place of an accelerator."""
    expected = pipeline(picture(), picture(seed=1), output_type="pt").images
    pipeline.enable_model_cpu_offload(device="cpu")
    calls, hook = [], pipeline.autoencoder._hf_hook
    before = hook.pre_forward
    hook.pre_forward = lambda *inputs, **named: calls.append(1) or before(*inputs, **named)
    torch.testing.assert_close(pipeline(picture(), picture(seed=1), output_type="pt").images, expected)
    assert len(calls) >= 3  # two encodings and a decoding


def test_a_light_that_is_rounded_away_is_told(pipeline):
    half = RelightingPipeline(random_weights(tiny_model(alpha=5e-3)).to(torch.bfloat16))
    with pytest.warns(UserWarning, match="In bfloat16 numbers near 1 are 0.0078125 apart, .* = 0.005: .* Use float32"):
        half(picture(), picture(seed=1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        half.albedo(picture())  # without light
        pipeline.autoencoder.warn_about_rounding()


def test_batches_and_references(pipeline):
    images = [picture(20, 16, seed) for seed in (0, 1)]
    both = pipeline(images, picture(seed=2), output_type="np").images
    for index, image in enumerate(images):
        alone = pipeline(image, picture(seed=2), output_type="np").images[0]
        np.testing.assert_allclose(both[index], alone, atol=1e-5)
    assert pipeline.light([picture(8, 30), picture()]).shape == (2, 4)
    tensors = pipeline(torch.cat([as_tensor(image) for image in images]), picture(seed=2), output_type="np").images
    np.testing.assert_allclose(tensors, both, atol=1e-5)


def test_interpolation_goes_from_light_to_light(pipeline):
    image, references = picture(), [picture(seed=1), picture(seed=2), picture(seed=3)]
    frames = pipeline.interpolate(image, references, num_frames=5, output_type="pt").images
    assert len(frames) == 5
    for frame, reference in zip(frames[::2], references):
        torch.testing.assert_close(frame[None], pipeline(image, reference, output_type="pt").images)
    codes = interpolate_codes(F.normalize(torch.randn(2, 8), dim=1), 7)
    torch.testing.assert_close(codes.norm(dim=1), torch.ones(7))
    assert [frame.size for frame in pipeline.interpolate(image, references[:2], num_frames=2).images] == [(16, 16)] * 2


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        ({"tile_size": 10}, "`tile_size` must be a multiple of 4, at least 8, got 10"),
        ({"tile_size": 4}, "`tile_size` must be a multiple of 4, at least 8, got 4"),
        ({"tile_overlap": 1.0}, r"`tile_overlap` must lie in \[0, 1\), got 1.0"),
        ({"alpha": 3.0}, r"`alpha` must be a number in \[0, 1\], got 3.0"),
        ({"output_type": "latent"}, "`output_type` must be pil, np or pt"),
        ({"reference": [picture(), picture(), picture()]}, "`reference` must be 1 image or 1, one for each, got 3"),
        ({"image": [picture(), picture(8, 8)]}, "Images of one call must have one size"),
        ({"image": []}, "There must be at least one image"),
        ({"image": "photo.jpg"}, "must be PIL images, arrays or tensors, got str"),
        ({"image": Image.new("I;16", (16, 16))}, "8 bits per channel, got the mode I;16"),
        ({"image": np.full((16, 16, 3), 40_000, np.uint16)}, r"values in \[0, 1\], got the integers of torch.uint16"),
        ({"image": torch.zeros((3, 16, 16), dtype=torch.uint8)}, "got the integers of torch.uint8"),
        ({"image": torch.full((1, 3, 16, 16), math.nan)}, "An image holds NaN or infinity"),
        ({"image": np.where(np.arange(16) == 7, np.nan, np.ones((1, 16, 16, 1)))}, "An image holds NaN or infinity"),
        ({"reference": torch.full((1, 3, 16, 16), math.inf)}, "An image holds NaN or infinity"),
        ({"image": torch.full((1, 3, 16, 16), 200.0)}, r"values in \[0, 1\], got torch.float32 from 200.0 to 200.0"),
    ],
)
def test_wrong_arguments_of_the_pipeline_are_one_sentence(arguments, sentence, pipeline):
    with pytest.raises(ValueError, match=sentence):
        pipeline(**{"image": picture(), "reference": picture(seed=1), **arguments})


def test_frames_become_a_gif(tmp_path):
    pipeline = RelightingPipeline(random_weights(tiny_model(alpha=1.0)))  # frames must differ: a GIF merges equal ones
    frames = pipeline.interpolate(picture(), [picture(seed=1), picture(seed=2)], num_frames=5).images
    export_to_gif(frames, str(tmp_path / "light.gif"))
    with Image.open(tmp_path / "light.gif") as animation:
        assert animation.n_frames == 5 and animation.size == (16, 16)


def test_wrong_interpolations_are_one_sentence(pipeline):
    with pytest.raises(ValueError, match="`references` must be at least two images, got 1"):
        pipeline.interpolate(picture(), [picture()])
    with pytest.raises(ValueError, match="`num_frames` must be at least 2, got 1"):
        pipeline.interpolate(picture(), [picture(), picture()], num_frames=1)
    with pytest.raises(ValueError, match="`image` must be one image, got 2"):
        pipeline.interpolate([picture(), picture()], [picture(), picture()])


@pytest.mark.parametrize(
    "image",
    [picture(), [picture()], np.full((1, 16, 16, 3), 0.5), torch.full((1, 3, 16, 16), 0.5)],
    ids=["PIL", "list", "array", "tensor"],
)
def test_a_reference_that_equals_the_image_is_told(image, pipeline):
    with pytest.warns(UserWarning, match="`reference` equals `image`: the result is a reconstruction"):
        pipeline(image, copy.deepcopy(image))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pipeline(image, picture(seed=1))


CLEAN_PROCESS = """
import sys
sys.modules["hf_decayed"] = None
import json, torch
from diffusers import AutoModel, DiffusionPipeline
pipeline = DiffusionPipeline.from_pretrained(sys.argv[1], trust_remote_code=True)
generator = torch.Generator().manual_seed(0)
image, reference = torch.rand(2, 1, 3, 20, 16, generator=generator)
relit = pipeline(image, reference, output_type="pt").images.double().sum().item()
pipeline.save_pretrained(sys.argv[2])
model = AutoModel.from_pretrained(sys.argv[1], subfolder="autoencoder", trust_remote_code=True)
print(json.dumps([type(pipeline).__name__, type(model).__name__, relit]))
"""


def test_a_saved_pipeline_loads_where_the_package_is_not(pipeline, tmp_path):
    pipeline.save_pretrained(tmp_path / "model")
    image, reference = torch.rand(2, 1, 3, 20, 16, generator=torch.Generator().manual_seed(0))
    expected = pipeline(image, reference, output_type="pt").images.double().sum().item()
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", CLEAN_PROCESS, str(tmp_path / "model"), str(tmp_path / "again")],
        env={**os.environ, "PYTHONPATH": "", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        cwd="/",
    )
    assert result.returncode == 0, result.stderr[-3000:]
    *names, relit = json.loads(result.stdout.splitlines()[-1])
    assert names == ["RelightingPipeline", "LatentIntrinsicsModel"] and relit == pytest.approx(expected, rel=1e-5)
    # A folder that was saved without the package is complete, too.
    again = DiffusionPipeline.from_pretrained(tmp_path / "again", trust_remote_code=True)
    relit = again(image, reference, output_type="pt").images.double().sum().item()
    assert relit == pytest.approx(expected, rel=1e-5)


# Metrics.


def test_colour_correction_is_exact_for_a_scaled_copy():
    target = torch.rand(2, 3, 16, 16) * 2 - 1
    factors = torch.tensor([[0.3, 0.9, 1.5], [1.0, 0.5, 2.0]])[:, :, None, None]
    scaled = (target + 1) * factors - 1
    torch.testing.assert_close(correct_colours(scaled, target), target, rtol=1e-4, atol=1e-5)
    errors = relighting_errors(scaled, target)
    assert (
        errors["rmse"] > 0.1 and errors["rmse_corrected"] < 1e-5 and errors["ssim_corrected"] > 0.999 > errors["ssim"]
    )
    shifted = target + factors - 1
    torch.testing.assert_close(correct_colours(shifted, target, "shift"), target, rtol=1e-4, atol=1e-5)
    assert relighting_errors(shifted, target, "shift")["rmse_corrected"] < 1e-5
    expected = np.sqrt(((scaled - target).numpy() ** 2).mean(axis=(1, 2, 3))).mean()
    assert errors["rmse"] == pytest.approx(expected, rel=1e-5)
    with pytest.raises(ValueError, match="`method` must be 'scale' or 'shift', got 'hue'"):
        correct_colours(scaled, target, "hue")
    with pytest.raises(ValueError, match="one shape"):
        relighting_errors(scaled, target[:1])


def test_leakage_is_where_the_reference_has_edges():
    target, reference = torch.zeros(2, 3, 24, 24), torch.zeros(2, 3, 24, 24)
    reference[:, :, :, 12:] = 1.0
    leaked = 0.1 * F.pad(reference.diff(dim=3).abs(), (0, 1))
    assert reference_leakage(target + leaked, target, reference) == pytest.approx(1.0)
    assert abs(reference_leakage(target + 0.1 * torch.rand(2, 3, 24, 24), target, reference)) < 0.15
    with pytest.raises(ValueError, match="Images must have one shape"):
        reference_leakage(target, target, reference[:1])


def test_albedo_error_forgives_the_scale():
    albedo = torch.rand(3, 3, 8, 8)
    assert albedo_error(albedo * torch.tensor([0.1, 1.0, 7.0]).view(3, 1, 1, 1), albedo) < 1e-6
    assert albedo_error(torch.rand(3, 3, 8, 8), albedo) > 0.1
    assert albedo_error(torch.zeros(1, 3, 8, 8), albedo[:1]) == pytest.approx(albedo[0].square().mean().sqrt().item())


DARK, GREY, LIGHT = (0.1, 0.5), (0.5, 0.5), (0.9, 0.5)


def three_points():
    """Dark on the left, light on the right."""
    return torch.tensor([0.2, 0.5, 0.9]).expand(3, 2, 3)


def test_whdr_reads_the_label_as_the_darker_point():
    right = [Judgement(DARK, LIGHT, "1", 2.0), Judgement(LIGHT, GREY, "2"), Judgement(GREY, GREY, "E")]
    assert whdr(three_points(), right) == 0.0
    wrong = [Judgement(DARK, LIGHT, "2", 2.0), Judgement(LIGHT, GREY, "1"), Judgement(GREY, DARK, "E")]
    assert whdr(three_points(), wrong) == 1.0
    assert whdr(three_points(), [wrong[0], right[1], right[2]]) == 0.5  # by weight, 2 of 4
    assert whdr(three_points(), [Judgement(GREY, LIGHT, "1")], delta=0.7) == 0.0
    assert whdr(three_points(), [Judgement(GREY, LIGHT, "E")], delta=0.9) == 0.0
    with pytest.raises(ValueError, match="`darker` must be '1', '2' or 'E', got '3'"):
        whdr(three_points(), [Judgement(DARK, LIGHT, "3")])
    with pytest.raises(ValueError, match="needs judgements"):
        whdr(three_points(), [])


def test_judgements_of_iiw():
    points = [
        {"id": index, "x": x, "y": y, "opaque": index != 3} for index, (x, y) in enumerate((DARK, GREY, LIGHT, LIGHT))
    ]
    comparisons = [
        {"point1": 0, "point2": 2, "darker": "1", "darker_score": 0.7},
        {"point1": 0, "point2": 3, "darker": "1", "darker_score": 0.7},
        {"point1": 1, "point2": 2, "darker": "E", "darker_score": None},
    ]
    content = {"intrinsic_points": points, "intrinsic_comparisons": comparisons}
    assert read_iiw_judgements(content) == [Judgement(DARK, LIGHT, "1", 0.7)]
    assert whdr(three_points(), read_iiw_judgements(content)) == 0.0


def test_light_consistency_tells_lights_apart():
    lights = torch.tensor([0, 1, 0, 1, 2])
    codes = torch.eye(3)[lights]
    assert light_consistency(codes, lights) == (1.0, 0.0)
    assert light_consistency(torch.ones(5, 3), lights) == pytest.approx((1.0, 1.0))
    with pytest.raises(ValueError, match="two lights, and two images of one"):
        light_consistency(codes[:2], lights[:2])


def test_evaluate_modules_give_the_functions_numbers(tmp_path):
    def load(name):
        return evaluate.load(str(ROOT / "hf_decayed" / "metrics" / name), cache_dir=str(tmp_path))

    first, second = torch.rand(2, 2, 3, 12, 12)
    errors = load("relighting_errors").compute(
        predictions=first.numpy(), references=second.numpy(), correction="shift"
    )
    assert errors == pytest.approx(relighting_errors(first, second, "shift"))
    error = load("albedo_error").compute(predictions=first.numpy(), references=second.numpy())
    assert error == {"albedo_error": pytest.approx(albedo_error(first, second))}
    codes, lights = torch.randn(4, 5), [0, 0, 1, 1]
    similarity = load("light_consistency").compute(predictions=codes.numpy(), references=lights)
    assert tuple(similarity.values()) == pytest.approx(light_consistency(codes, torch.tensor(lights)))
    row = {"x1": 0.1, "y1": 0.5, "x2": 0.9, "y2": 0.5, "weight": 1.0}
    rows = [{**row, "darker": "1"}, {**row, "darker": "2"}]
    rate = load("whdr").compute(predictions=three_points()[None].numpy(), references=[rows])
    assert rate == {"whdr": 0.5}


# Training.


def test_examples_ask_for_the_light_of_another_scene():
    scenes = LambertianScenes(num_scenes=3, num_lights=4, size=16)
    examples = relighting_examples(ProceduralPairs(scenes), 16, 24)
    assert set(examples.lights.tolist()) == {0, 1, 2, 3}
    for index in range(24):
        scene, light = index % 3, int(examples.lights[index])
        expected = to_bytes(scenes.images([scene], [light]))[0] / 127.5 - 1
        torch.testing.assert_close(examples.target[index], expected, rtol=0, atol=1e-5)
        candidates = [to_bytes(scenes.images([other], [light]))[0] / 127.5 - 1 for other in range(3) if other != scene]
        assert min((examples.reference[index] - image).abs().max() for image in candidates) < 1e-5
        assert not torch.equal(examples.image[index], examples.target[index])
        assert torch.equal(examples.albedo[index], scenes.scene(scene)["albedo"])
    with pytest.raises(DataError, match="hold out at least two scenes"):
        relighting_examples(ProceduralPairs(LambertianScenes(1, 2, 16)), 16, 2)


def test_folders_are_split_by_scene(tmp_path):
    for number in range(5):
        save_scene(tmp_path / f"scene{number}", size=(24, 18), lights=3)
    train, held_out = RelightingFolder(tmp_path).split()
    assert len(train) >= 2 <= len(held_out) and not set(train.names) & set(held_out.names)
    examples = relighting_examples(held_out, 16, 4)
    assert examples.albedo is None and examples.target.shape == (4, 3, 16, 16)
    with pytest.raises(DataError, match="has 3 scenes: .* need at least 4"):
        RelightingFolder(tmp_path).select([0, 1, 2]).split()


def test_monitor_compares_with_the_unchanged_image(pipeline, tmp_path):
    examples = relighting_examples(ProceduralPairs(LambertianScenes(3, 4, 16)), 16, 6)
    monitor = RelightingMonitor(Accelerator(cpu=True), examples)
    pipeline.autoencoder.train()
    metrics = monitor.evaluate(pipeline)
    assert pipeline.autoencoder.training and all(math.isfinite(value) for value in metrics.values())
    assert metrics["copy_rmse"] == pytest.approx(relighting_errors(examples.image, examples.target)["rmse"])
    assert metrics["albedo_error_of_input"] == pytest.approx(albedo_error((examples.image + 1) / 2, examples.albedo))
    pipeline.autoencoder.eval()
    with torch.no_grad():
        intrinsics, light = (
            pipeline.autoencoder.encode(examples.image)[0],
            pipeline.autoencoder.encode(examples.reference)[1],
        )
        relit = pipeline.autoencoder.decode(intrinsics, light)
    assert metrics["relit_rmse"] == pytest.approx(relighting_errors(relit, examples.target)["rmse"], rel=1e-5)
    with torch.no_grad():
        images = [examples.image, examples.target]
        albedos = [pipeline.autoencoder.decode(*pipeline.autoencoder.encode(each), alpha=0.0) for each in images]
    albedos = [((albedo + 1) / 2).clamp(0, 1) for albedo in albedos]
    assert metrics["albedo_change"] == pytest.approx(albedo_error(*albedos), rel=1e-4)
    images = [(each + 1) / 2 for each in images]
    assert metrics["albedo_change_of_input"] == pytest.approx(albedo_error(*images), rel=1e-4)
    # The mean over all lights is closer than any one image on average; another light is another image.
    assert metrics["mean_light_rmse"] < metrics["copy_rmse"]
    assert metrics["wrong_reference_rmse"] != metrics["relit_rmse"]
    monitor.picture(tmp_path / "deep" / "picture.png")
    assert Image.open(tmp_path / "deep" / "picture.png").width > 100
    assert relighting_output(pipeline).shape == (4, 3, 16, 16)


def test_wrong_references_have_another_light():
    assert other_lights(torch.tensor([0, 0, 1, 2, 2])).tolist() == [2, 2, 3, 0, 0]
    assert other_lights(torch.tensor([1, 1])).tolist() == [0, 1]


def test_dense_prior_is_frozen_and_normalised():
    with pytest.raises(UserError, match="--prior nowhere: "):
        DensePrior("nowhere", torch.device("cpu"))
    with pytest.raises(UserError, match="must take images in colour, and has 1 channel"):
        DensePrior(str(ROOT / "model_cards" / "plain-mae-fashion-mnist"), torch.device("cpu"))
    prior = DensePrior(str(ROOT / "model_cards" / "plain-mae-coloured"), torch.device("cpu"))
    features = prior(torch.rand(2, 3, 64, 64) * 2 - 1)
    assert features.shape == (2, prior.channels, 7, 7) and not features.requires_grad
    torch.testing.assert_close(features.mean(dim=1), torch.zeros(2, 7, 7), rtol=0, atol=1e-4)
    torch.testing.assert_close(features.std(dim=1), torch.ones(2, 7, 7), rtol=0.02, atol=0.02)


def test_noise_ends_with_its_part_of_the_steps():
    draws = torch.tensor([0.0, 1.0])
    sigma = relight.noise_sigma(draws, step=4, noise_steps=5)
    torch.testing.assert_close(sigma.flatten(), torch.exp(1.2 * draws - 1.2))
    assert sigma.shape == (2, 1, 1, 1) and relight.noise_sigma(draws, step=5, noise_steps=5).eq(0).all()


@pytest.mark.parametrize(
    "flags, sentence",
    [
        (
            ["--gradient_accumulation_steps", "2"],
            "--gradient_accumulation_steps must be 1: the coding rates are of a whole",
        ),
        (["--set", "sample_size=32"], "--set sample_size: it is --image_size"),
        (["--set", "prior_channels=32"], "--set prior_channels: it is --prior"),
        (["--num_lights", "1"], "--num_lights must be at least 2, because a pair needs two lights, got 1"),
        (["--set", "light_dims=3"], "light_dim"),
        (["--extrinsic_target", "none"], "--extrinsic_target: invalid choice: 'none'"),
    ],
)
def test_flags_that_are_refused(flags, sentence, capsys):
    with pytest.raises(SystemExit) as stopped:
        relight.parse_arguments(flags)
    lines = capsys.readouterr().err.strip().splitlines()
    assert stopped.value.code == 2 and len(lines) == 1 and sentence in lines[0]


SCRIPT = ["--image_size", 16, "--num_scenes", 12, "--num_lights", 3, "--batch_size", 4, "--max_train_steps", 10]
SCRIPT += ["--set", "block_out_channels=(8,8,16)", "--set", "layers_per_block=(1,1,1)", "--set", "dropout=0.1"]
SCRIPT += [
    "--crop_scale",
    0.5,
    1.0,
    "--eval_examples",
    4,
    "--checkpointing_steps",
    3,
    "--log_every",
    1,
    "--cpu_threads",
    1,
]


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("processes", [1, 2])
def test_a_killed_run_ends_with_the_same_bits(processes, tmp_path):
    from test_run import weights

    run_script("relight.py", *SCRIPT, "--output_dir", tmp_path / "whole", processes=processes)
    flags = [*SCRIPT, "--output_dir", tmp_path / "killed", "--resume_from_checkpoint", "latest"]
    process = start_script("relight.py", *flags, processes=processes)
    while process.poll() is None and not list((tmp_path / "killed" / "checkpoints").glob("step-*")):
        time.sleep(0.01)
    assert process.poll() is None, process.communicate()
    kill(process)
    assert "resumed at step" in run_script("relight.py", *flags, processes=processes).stdout
    whole, resumed = weights(tmp_path / "whole"), weights(tmp_path / "killed")
    assert [name for name in whole if not torch.equal(whole[name], resumed[name])] == []
    assert main(["publish", str(tmp_path / "whole"), "--repo_id", "user/relighting", "--dry_run"]) == 0


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_one_and_two_processes_train_alike(tmp_path):
    """The coding rates are of the whole batch, whoever holds its parts; without dropout, whose draws differ."""
    from test_run import weights

    flags = [
        *SCRIPT,
        "--set",
        "dropout=0.0",
        "--max_train_steps",
        4,
        "--intrinsic_weight",
        1e-2,
        "--extrinsic_weight",
        1e-2,
    ]
    for processes in (1, 2):
        run_script("relight.py", *flags, "--output_dir", tmp_path / str(processes), processes=processes)
    one, two = weights(tmp_path / "1"), weights(tmp_path / "2")
    for name in one:
        torch.testing.assert_close(one[name], two[name], rtol=1e-3, atol=1e-5)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_training_on_a_folder(tmp_path):
    for number in range(5):
        save_scene(tmp_path / "scenes" / f"scene{number}", size=(24, 18), lights=3)
    flags = [
        *SCRIPT,
        "--scenes_path",
        tmp_path / "scenes",
        "--batch_size",
        2,
        "--max_train_steps",
        2,
        "--num_workers",
        0,
    ]
    run_script("relight.py", *flags, "--output_dir", tmp_path / "out")
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert results["dataset"]["name"] == "scenes" and "albedo_error" not in results and results["relit_rmse"] > 0
    save_scene(tmp_path / "scenes" / "last", lights=1)
    refused = (
        run_script("relight.py", *flags, "--output_dir", tmp_path / "again", code=2).stderr.strip().splitlines()[-1]
    )
    assert refused == "relight.py: The scene 'last' has 1 image(s): a pair needs two lights."


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_training_with_the_features_of_an_mae(tmp_path):
    folder = ROOT / "model_cards" / "decayed-mae-coloured"
    flags = [*SCRIPT, "--prior", folder, "--max_train_steps", 2, "--intrinsic_weight", 0, "--output_dir", tmp_path]
    run_script("relight.py", *flags)
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["prior"] == "decayed-mae-coloured" and results["bounded_modulation"] is True
    assert results["intrinsic_weight"] == 0 and results["extrinsic_weight"] == 1e-4
    pipeline = DiffusionPipeline.from_pretrained(tmp_path, trust_remote_code=True)
    assert pipeline.autoencoder.config.prior_channels == 96
    pipeline.prior = DensePrior(str(folder), torch.device("cpu"))
    assert pipeline(picture(40, 24), picture(seed=1)).images[0].size == (40, 24)
    assert 'pipeline.prior = DensePrior("path/to/decayed-mae-coloured"' in (tmp_path / "README.md").read_text()
    assert main(["publish", str(tmp_path), "--repo_id", "user/relighting", "--dry_run"]) == 0


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_small_network_learns_to_relight():
    """Six scenes by heart: relit images beat the unchanged ones, light codes are those of lights, albedo loses its light."""
    torch.manual_seed(0)
    source = ProceduralPairs(LambertianScenes(num_scenes=6, num_lights=3, size=16))
    pairs = RelightingPairs(source, 16, seed=0, crop_scale=None, horizontal_flip=False)
    sizes = {**TINY, "block_out_channels": (8, 16, 32), "layers_per_block": (1, 1, 1)}
    model = LatentIntrinsicsModel(**sizes, light_hidden_dim=32, alpha=1.0, dropout=0.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(250):
        batch = pairs.__getitems__([(step, scene) for scene in range(6)])
        target = batch["target_values"]
        output = model(torch.cat([batch["pixel_values"], target]), light_index=torch.arange(6, 12).repeat(2))
        first, second = zip(*(intrinsic.chunk(2) for intrinsic in output.intrinsics))
        loss = sum(pixel_loss(images, target) for images in output.sample.chunk(2))
        loss = loss + 0.1 * invariance_loss(first, second) + 1e-4 * (spread_loss(first) + spread_loss([output.light]))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    examples = relighting_examples(source, 16, 18)
    metrics = RelightingMonitor(Accelerator(cpu=True), examples).evaluate(RelightingPipeline(model))
    assert metrics["relit_rmse"] < 0.6 * metrics["copy_rmse"]
    assert metrics["albedo_error"] < metrics["albedo_error_of_input"]
    assert metrics["albedo_change"] < metrics["albedo_change_of_input"]
    assert metrics["light_similarity"] > metrics["light_similarity_of_others"] + 0.5
    assert metrics["intrinsic_similarity"] > metrics["intrinsic_similarity_of_others"] + 0.2


# The page.


def test_the_page_runs(tmp_path, monkeypatch):
    """Python blocks run one after another in a clone, and scripts understand their flags."""
    page = (ROOT / "docs" / "relighting.md").read_text()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model_cards").symlink_to(ROOT / "model_cards")
    (tmp_path / "outputs").mkdir()
    (tmp_path / "outputs" / "relight").symlink_to(ROOT / "model_cards" / "relighting-procedural")
    RelightingPipeline(tiny_model(prior_channels=96)).save_pretrained("outputs/prior_decayed")
    for seed, name in enumerate(("room", "morning", "evening")):
        picture(72, 40, seed).save(f"{name}.png")
    names = {}
    for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        exec(compile(block, "relighting.md", "exec"), names)
    assert names["relit"].size == names["albedo"].size == (72, 40) and names["code"].norm().item() == pytest.approx(1)
    with Image.open("room.gif") as animation:
        assert animation.size == (72, 40)
    commands = re.findall(r"^accelerate launch training/relight\.py(.*)$", page, re.MULTILINE)
    assert len(commands) >= 5 and all(relight.parse_arguments(shlex.split(flags)) for flags in commands)


COLUMNS = {
    "relit_rmse": "RMSE, relit",
    "wrong_reference_rmse": "wrong reference",
    "albedo_error": "albedo error",
    "light_similarity": "light codes, same light",
    "light_similarity_of_others": "other lights",
    "intrinsic_spread": "spread of maps",
    "reference_leakage": "leakage",
}
# What needs no training, by the same columns.
BASELINES = {
    "unchanged image": {"relit_rmse": "copy_rmse", "albedo_error": "albedo_error_of_input"},
    "scene averaged over all lights": {"relit_rmse": "mean_light_rmse"},
}


def load_runs():
    """Records of the runs, by alpha, prior and seed; those of the first runs leave out settings at their defaults."""
    defaults = {"bounded_modulation": True, "intrinsic_weight": 1e-4, "extrinsic_weight": 1e-4, "prior": None}
    folder = ROOT / "model_cards" / "results" / "relighting"
    runs = [{**defaults, **json.loads(file.read_text())} for file in sorted(folder.glob("*.json"))]
    return sorted(
        runs,
        key=lambda run: (not run["bounded_modulation"], run["alpha"], -run["intrinsic_weight"], run["seed"]),
    )


def results_table(runs, labels):
    lines = ["| | seed | " + " | ".join(COLUMNS.values()) + " |", "|---" * (len(COLUMNS) + 2) + "|"]
    for label, names in BASELINES.items():
        numbers = {name: {f"{run[names[name]]:.3f}" for run in runs} for name in names}
        assert all(len(values) == 1 for values in numbers.values())  # all runs are judged by the same images
        lines.append(f"| {label} | | " + " | ".join(numbers.get(name, {""}).pop() for name in COLUMNS) + " |")
    for run, label in zip(runs, labels):
        numbers = [f"{run[name]:.3f}" for name in COLUMNS]
        lines.append(f"| {label} | {run['seed']} | " + " | ".join(numbers) + " |")
    return "\n".join(lines)


def ablation_table():
    """Runs without a prior."""
    runs = [run for run in load_runs() if run["prior"] is None]
    labels = []
    for run in runs:
        assert (run["intrinsic_weight"] == 0) == (run["extrinsic_weight"] == 0)
        alpha = f"alpha {run['alpha']:g}" if run["bounded_modulation"] else "alpha infinite"
        labels.append(alpha + (", no coding rate" if run["intrinsic_weight"] == 0 else ""))
    return results_table(runs, labels)


PRIORS = {
    None: "none",
    "plain-mae-coloured": "plain MAE",
    "undecayed-mae-coloured": "undecayed MAE",
    "decayed-mae-coloured": "decayed MAE",
}


def prior_table():
    """Runs with a prior, and those without one that are the same otherwise."""
    runs = [run for run in load_runs() if run["alpha"] == 0.5 and run["intrinsic_weight"] > 0]
    runs.sort(key=lambda run: (list(PRIORS).index(run["prior"]), run["seed"]))
    return results_table(runs, [PRIORS[run["prior"]] for run in runs])


@pytest.mark.parametrize("name, table", [("relighting_tiny", ablation_table), ("relighting_priors", prior_table)])
def test_the_page_has_the_numbers_of_the_runs(name, table):
    page = (ROOT / "docs" / "relighting.md").read_text()
    assert page.split(f"<!-- table {name} -->\n")[1].split("\n<!-- end -->")[0] == table()
