"""Nested diffusion: the network of a level, the latents, the chain."""

import json
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

import nested
import nested_report
import numpy as np
import pytest
import sweep
import torch
import uvit
from accelerate import Accelerator
from conftest import ROOT, random_weights, run_script
from diffusers import DDPMScheduler, DiffusionPipeline, DPMSolverMultistepScheduler
from huggingface_hub.errors import StrictDataclassError
from PIL import Image
from safetensors.torch import load_file
from script_server import kill, start_script
from test_diffusion_training import small_vae
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    AutoModel,
    BeitModel,
    CLIPVisionConfig,
    CLIPVisionModel,
    ResNetConfig,
    ResNetModel,
    ViTConfig,
    ViTModel,
)

from hf_decayed import (
    DecayedUViT2DModel,
    DecayedUViTPipeline,
    DecayedViTMAEConfig,
    DecayedViTMAEModel,
    HierarchicalLatentConfig,
    HierarchicalLatentEncoder,
    NestedDiffusionPipeline,
    NestedUViT2DModel,
    stock_model,
)
from hf_decayed.cli import main
from hf_decayed.data.keyed_random import sample_generator, sample_seed
from hf_decayed.data.latents import pixel_images
from hf_decayed.data.nested_latents import (
    LatentTable,
    NestedLatents,
    cache_nested_latents,
    image_batches,
    load_latent_encoder,
    random_projection,
)
from hf_decayed.data.sources import ImageSplits, load_image_splits, load_splits
from hf_decayed.errors import DataError, UserError
from hf_decayed.evaluation.nested import (
    chain_macs,
    equal_mac_depth,
    group_neighbours,
    oracle_reconstruction,
    sample_groups,
    single_macs,
)
from hf_decayed.models.unet_nested_uvit import dissertation_levels


SIZES = {"hidden_size": 32, "num_layers": 2, "num_attention_heads": 4}
LEVELS = [(16, 1, 4), (2, 6, 1), (1, 8, 1)]  # of levels 1, 2 and 3


def level_network(level, levels=LEVELS, **fields):
    torch.manual_seed(level)
    sigmas = [0.5] * (len(levels) - level)
    return random_weights(
        NestedUViT2DModel.for_level(levels, level, "S", **{**SIZES, "condition_sigmas": sigmas, **fields})
    ).eval()


def condition_tensors(network, number=2):
    return [torch.randn(number, channels, size, size) for size, channels, _ in network.config.condition_levels]


# The network of one level.


@pytest.mark.parametrize(
    "fields", [{}, {"num_classes": 3, "time_embedding_mlp": True, "shortcut_schedule": "learned"}]
)
def test_without_conditions_it_is_the_uvit(fields):
    sizes = {"sample_size": 8, "in_channels": 4, **SIZES, **fields}
    theirs = random_weights(DecayedUViT2DModel(**sizes))
    ours = NestedUViT2DModel(**sizes)
    ours.load_state_dict(theirs.state_dict())  # strict: the same names, nothing extra
    sample, time = torch.randn(2, 4, 8, 8), torch.tensor([3, 700])
    labels = {"class_labels": torch.tensor([1, 3])} if "num_classes" in fields else {}
    assert torch.equal(ours(sample, time, **labels).sample, theirs(sample, time, **labels).sample)
    initial = []  # the same seed gives the same initial weights
    for model_class in (DecayedUViT2DModel, NestedUViT2DModel):
        torch.manual_seed(5)
        initial.append(model_class(**sizes).state_dict())
    assert all(torch.equal(initial[0][name], initial[1][name]) for name in initial[0])


def test_tokens_and_macs_of_the_dissertation():
    """Table D.1: parameters in millions and multiply-accumulates in billions of chains with 1 to 5 levels."""
    page = (ROOT / "docs" / "nested_diffusion.md").read_text()
    tokens = [size**2 // patch**2 for size, _, patch in reversed(dissertation_levels(5))]
    assert tokens == [1, 4, 4, 16, 256]
    for num_levels, (parameters, macs) in enumerate(
        [(104, 26.82), (208, 27.13), (313, 28.17), (417, 29.61), (523, 33.98)], 1
    ):
        levels = dissertation_levels(num_levels)
        with torch.device("meta"):
            networks = [NestedUViT2DModel.for_level(levels, level) for level in range(1, num_levels + 1)]
        lengths = [
            1 + sum(tokens[: num_levels - 1]) + 256,
            *(1 + sum(tokens[:n]) for n in range(num_levels - 1, 0, -1)),
        ]
        assert [network.num_tokens for network in networks] == lengths  # a time token, and all latents above
        our_macs = sum(network.count_macs() for network in networks) / 1e9
        number = sum(parameter.numel() for network in networks for parameter in network.parameters()) / 1e6
        assert our_macs == pytest.approx(macs, rel=0.002) and number == pytest.approx(parameters, rel=0.005)
        above = 100 * (1 - networks[0].count_macs() / 1e9 / our_macs)
        assert f"| {num_levels} | {number:.1f} | {parameters} | {our_macs:.2f} | {macs} | {above:.1f} |" in page
    with torch.device("meta"):
        single = NestedUViT2DModel.from_size("M-16", sample_size=32, in_channels=4)
    assert single.count_macs() / 1e9 == pytest.approx(35.11, rel=0.002)
    with pytest.raises(ValueError, match=r"`num_levels` must be an integer in \[1, 5\], got 6"):
        dissertation_levels(6)


@pytest.mark.parametrize("level", [1, 2, 3])
def test_macs_are_those_that_torch_counts(level):
    network = level_network(level, [(8, 4, 2), (4, 6, 2), (1, 8, 1)], time_embedding_mlp=True)
    size, channels = network.config.sample_size, network.config.in_channels
    # The counter does not see inside of the fused kernels of a CPU.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        network(torch.randn(1, channels, size, size), 3, conditions=condition_tensors(network, 1) or None)
    assert network.count_macs() == pytest.approx(counter.get_total_flops() / 2, rel=1e-6)


def test_conditions_and_empty_tokens():
    network = level_network(1)
    sample, conditions = torch.randn(3, 1, 16, 16), condition_tensors(network, 3)
    conditioned, empty = network(sample, 5, conditions=conditions).sample, network(sample, 5).sample
    dropped = network(sample, 5, conditions=conditions, drop_conditions=torch.tensor([True, False, True])).sample
    torch.testing.assert_close(dropped, torch.stack([empty[0], conditioned[1], empty[2]]))
    assert (conditioned - empty).abs().min(dim=0).values.max() > 1e-3
    for position in (0, 1):  # every level above matters
        changed = [latent + (number == position) for number, latent in enumerate(conditions)]
        assert (network(sample, 5, conditions=changed).sample - conditioned).abs().max() > 1e-3
    network.train()
    drop = torch.tensor([True, False, False])
    network(sample, 5, conditions=conditions, drop_conditions=drop).sample.square().sum().backward()
    for name in ("empty_condition", "condition_embeddings.0.weight", "condition_embeddings.1.weight"):
        assert network.get_parameter(name).grad.abs().sum() > 0, name


def test_initial_values():
    network = NestedUViT2DModel.for_level(LEVELS, 1, "S", **SIZES)
    assert network.empty_condition.shape == (1, 5, 32) and 0.01 < network.empty_condition.std() < 0.03
    assert network.position_embedding.shape == (1, 1 + 5 + 16, 32) and 0.01 < network.position_embedding.std() < 0.03
    assert all(embedding.weight.std() > 0 for embedding in network.condition_embeddings)
    assert network.in_blocks[0].fc2.weight.abs().sum() == 0 and network.out_blocks[0].skip_projection.weight.std() > 0


def test_a_level_is_saved_and_loaded(tmp_path):
    network = level_network(2, latent_fingerprint="abc")
    network.save_pretrained(tmp_path)
    loaded = NestedUViT2DModel.from_pretrained(tmp_path)
    sample, conditions = torch.randn(2, 6, 2, 2), condition_tensors(network)
    outputs = [model(sample, 3, conditions=conditions).sample for model in (network, loaded)]
    torch.testing.assert_close(*outputs)
    assert loaded.config.condition_sigmas == [0.5] and loaded.config.latent_fingerprint == "abc"


@pytest.mark.parametrize(
    "fields, sentence",
    [
        ({"condition_levels": [(2, 6)]}, r"`condition_levels` must hold \(size, channels, patch size\) of each level"),
        ({"condition_levels": [(3, 6, 2)]}, "`condition_levels` needs sizes divisible by their patch size"),
        (
            {"condition_levels": [(2, 6, 1)], "condition_sigmas": [-0.5]},
            "`condition_sigmas` must be finite and at least 0",
        ),
        (
            {"condition_levels": [(2, 6, 1)], "condition_sigmas": [1, 1]},
            "`condition_sigmas` must have one number for each of 1",
        ),
        ({"level": 0}, r"`level` must be an integer in \[1"),
        ({"condition_level": [(2, 6, 1)]}, "did you mean `condition_levels`"),
    ],
)
def test_wrong_fields_of_a_level(fields, sentence):
    with pytest.raises(ValueError, match=sentence):
        NestedUViT2DModel(**SIZES, **fields)


def test_wrong_conditions():
    network, sample = level_network(2), torch.randn(2, 6, 2, 2)
    with pytest.raises(ValueError, match=r"`conditions` must have shapes \[\(2, 8, 1, 1\)\], the highest level first"):
        network(sample, 3, conditions=[torch.randn(2, 8, 2, 2)])
    with pytest.raises(ValueError, match="`conditions` were passed to the highest level"):
        level_network(3)(torch.randn(2, 8, 1, 1), 3, conditions=[sample])


# The latents.


def tiny_vit(**fields):
    torch.manual_seed(0)
    sizes = {
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 32,
        "image_size": 16,
        "patch_size": 4,
    }
    return ViTModel(ViTConfig(hidden_size=16, num_channels=1, **sizes, **fields), add_pooling_layer=False).eval()


def latent_encoder(levels=((1, 8), (2, 6)), fitted=True, encoder=None, **fields):
    settings = {"image_mean": [0.5], "image_std": [0.25], "min_crop_size": 8, **fields}
    model = HierarchicalLatentEncoder.from_encoder(encoder or tiny_vit(), list(levels), 16, **settings)
    return model.fit(scenes(64).split(16)) if fitted else model


def scenes(number, seed=0):
    """Images `(number, 1, 16, 16)` in [0, 1]: a bright square somewhere, on noise."""
    generator = torch.Generator().manual_seed(seed)
    images = 0.3 * torch.rand(number, 1, 16, 16, generator=generator)
    for image, (top, left) in zip(images, torch.randint(0, 11, (number, 2), generator=generator).tolist()):
        image[:, top : top + 5, left : left + 5] += 0.7
    return images


def test_the_latents_are_those_of_an_svd():
    """Against torch's SVD of all features at once; batches may be of any size."""
    model, images = latent_encoder(fitted=False), scenes(64)
    features = {level: tensor.flatten(0, 2).double() for level, tensor in model.features(images).items()}
    model.fit(images.split(7))
    latents = model.encode(images)
    assert {level: tuple(tensor.shape) for level, tensor in latents.items()} == {3: (64, 8, 1, 1), 2: (64, 6, 2, 2)}
    for level, projection in zip((3, 2), model.projections):
        centred = features[level] - features[level].mean(dim=0)
        _, values, vectors = torch.linalg.svd(centred, full_matrices=False)
        channels = len(projection.components)
        expected = centred @ vectors[:channels].T
        expected = expected / expected.var(dim=0, correction=0).mean().sqrt()
        actual = latents[level].movedim(1, -1).flatten(0, 2).double()
        signs = (actual * expected).sum(dim=0).sign()
        torch.testing.assert_close(actual, expected * signs, rtol=1e-3, atol=1e-3)
        variances = actual.var(dim=0, correction=0)
        assert variances.mean() == pytest.approx(1, rel=1e-4) and (variances.diff() <= 1e-6).all()
        share = values[:channels].square().sum() / values.square().sum()
        assert model.explained_variance()[level] == pytest.approx(float(share), rel=1e-4)
        # The inverse is the projection of the features on the channels that are left.
        inverse = model.decode_features({level: latents[level]})[level].flatten(0, 2).double()
        subspace = centred @ vectors[:channels].T @ vectors[:channels] + features[level].mean(dim=0)
        torch.testing.assert_close(inverse, subspace, rtol=1e-3, atol=1e-4)
    again = latent_encoder(fitted=False).fit(images.split(64))
    torch.testing.assert_close(again.encode(images)[2], latents[2], rtol=1e-4, atol=1e-4)


def test_all_channels_lose_nothing():
    model, images = latent_encoder([(1, 16)]), scenes(4)
    assert model.explained_variance()[2] == pytest.approx(1, abs=1e-5)
    features = model.decode_features(model.encode(images))[2]
    torch.testing.assert_close(features, model.features(images)[2], rtol=1e-4, atol=1e-4)


def test_crops_and_feature_maps():
    model, images = latent_encoder([(1, 8), (2, 6), (4, 4)], fitted=False), scenes(3)
    features = model.features(images)
    corner = torch.nn.functional.interpolate(images[..., :8, 8:], size=16, mode="bicubic", antialias=True).clamp(0, 1)
    with torch.no_grad():
        expected = model.encoder((corner - 0.5) / 0.25).last_hidden_state[:, 0]
        patches = model.encoder((images - 0.5) / 0.25).last_hidden_state[:, 1:]
    torch.testing.assert_close(features[3][:, 0, 1], expected)  # the crop in the first row and second column
    torch.testing.assert_close(features[2].flatten(1, 2), patches)  # crops of 4 pixels are too small: the feature map
    pooled = latent_encoder([(2, 6)], fitted=False, min_crop_size=16).features(images)[2]
    torch.testing.assert_close(pooled[:, 0, 0], patches.unflatten(1, (4, 4))[:, :2, :2].mean(dim=(1, 2)))


@pytest.mark.parametrize(
    "fields", [{}, {"shortcut_schedule": "learned"}, {"final_norm": True, "pooling": "patch_mean"}]
)
def test_a_decayed_encoder_becomes_an_ordinary_one(fields):
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 32}
    config = DecayedViTMAEConfig(**sizes, image_size=16, patch_size=4, num_channels=1, **fields)
    encoder = DecayedViTMAEModel(config).eval()
    with torch.no_grad():
        for name, parameter in encoder.named_parameters():
            parameter.uniform_(0.6, 1.0) if name.endswith("alpha") else parameter.normal_(std=0.3)
    with pytest.raises(ValueError, match=r"of a decayed masked autoencoder pass `stock_model\(encoder\)`"):
        latent_encoder([(1, 8)], encoder=encoder)
    model = latent_encoder([(1, 8)], encoder=stock_model(encoder), pooling=config.pooling)
    images = scenes(5)
    with torch.no_grad():
        expected = encoder((images - 0.5) / 0.25).pooler_output
    torch.testing.assert_close(model.features(images)[2][:, 0, 0], expected, rtol=1e-3, atol=1e-4)
    assert type(model.encoder) is (ViTModel if config.final_norm else BeitModel)


def test_other_encoders():
    torch.manual_seed(0)
    sizes = {
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 32,
        "image_size": 16,
        "patch_size": 4,
    }
    clip = CLIPVisionModel(CLIPVisionConfig(hidden_size=16, num_channels=1, **sizes)).eval()
    assert latent_encoder(encoder=clip).encode(scenes(2))[2].shape == (2, 6, 2, 2)
    resnet = ResNetModel(
        ResNetConfig(num_channels=1, embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic")
    ).eval()
    for levels in ([(1, 8), (2, 6)], [(1, 8), (8, 6)]):
        model = latent_encoder(levels, encoder=resnet)
        assert model.encode(scenes(2))[3].shape == (2, 8, 1, 1)


def test_latents_are_saved_and_loaded(tmp_path):
    model, images = latent_encoder(), scenes(3)
    model.save_pretrained(tmp_path)
    loaded = AutoModel.from_pretrained(tmp_path)
    assert type(loaded) is HierarchicalLatentEncoder
    assert loaded.config.fingerprint == model.config.fingerprint == loaded.compute_fingerprint()
    outputs = loaded(images).latents
    assert all(torch.equal(outputs[level], latents) for level, latents in model.encode(images).items())
    assert not any(parameter.requires_grad for parameter in loaded.parameters())
    assert latent_encoder([(1, 8), (2, 5)]).config.fingerprint != model.config.fingerprint
    assert latent_encoder().config.fingerprint == model.config.fingerprint


def test_wrong_latents():
    with pytest.raises(
        ValueError, match="`levels` asks for 20 channels at level 2, and the encoder's features have 16"
    ):
        latent_encoder([(1, 20)])
    with pytest.raises(
        StrictDataclassError, match="`image_size` must be divisible by the grid of every level, got 16 and 3"
    ):
        latent_encoder([(3, 4)])
    with pytest.raises(
        StrictDataclassError, match="`image_mean` must have one number for each of the 1 `num_channels`"
    ):
        latent_encoder(image_mean=[0.5] * 3)
    unfitted = latent_encoder(fitted=False)
    with pytest.raises(ValueError, match="has no SVD yet"):
        unfitted.encode(scenes(1))
    with pytest.raises(ValueError, match="`fit` got no images"):
        unfitted.fit([])
    with pytest.raises(ValueError, match="An SVD with 8 channels needs more vectors than that, got 5"):
        unfitted.fit([scenes(5)])
    with pytest.raises(ValueError, match=r"`pixel_values` must have shape \(batch, 1, 16, 16\), got \(2, 3, 16, 16\)"):
        unfitted.features(torch.rand(2, 3, 16, 16))
    with pytest.raises(ValueError, match="must be a model of transformers, got HierarchicalLatentEncoder"):
        HierarchicalLatentEncoder.from_encoder(unfitted, [(1, 8)], 16)
    assert HierarchicalLatentConfig().levels == ((1, 256), (2, 128), (4, 64), (8, 32))


def test_a_random_projection_is_linear_and_always_the_same():
    model = latent_encoder([(1, 8)], encoder=random_projection(16, 1), pooling="patch_mean")
    first, second = scenes(1, seed=1), scenes(1, seed=2)
    latents = [model.encode(images)[2] for images in (first, second, 0.25 * first + 0.75 * second)]
    torch.testing.assert_close(latents[2], 0.25 * latents[0] + 0.75 * latents[1], rtol=1e-3, atol=1e-4)
    again = latent_encoder([(1, 8)], encoder=random_projection(16, 1), pooling="patch_mean")
    assert again.config.fingerprint == model.config.fingerprint
    assert model.encode(scenes(64))[2].var(dim=0).mean() == pytest.approx(1, abs=0.05)


def latents_command(folder, *flags, encoder="random_projection"):
    small = ["--hierarchy", "1x8", "2x4", "--min_crop_size", 7, "--max_train_samples", 40, "--svd_images", 40]
    small += ["--image_size", 28, "--num_channels", 1, "--latents_dir", folder]
    return main(["latents", encoder, *map(str, small), *map(str, flags)])


def test_latents_are_cached_by_a_command(tmp_path, capsys, monkeypatch):
    small_vae().save_pretrained(tmp_path / "vae")
    assert latents_command(tmp_path / "cache", "--vae", tmp_path / "vae") == 0
    printed = capsys.readouterr().out
    assert "of 40 images (level 3: " in printed and "level 1: latents of the VAE" in printed
    files = sorted((tmp_path / "cache").rglob("*.safetensors"))
    kinds = {json.loads(file.read_text())["kind"]: file.parent for file in tmp_path.rglob("identity.json")}
    assert set(kinds) == {"nested latents", "latents"} and len(files) == 3  # and the latent encoder
    table = LatentTable(sorted(kinds["nested latents"].glob("*.safetensors")))
    assert len(table) == 40 and table.rows(2, [3, 5], [False, True]).shape == (2, 4, 2, 2)
    assert table.labels is not None

    # Everything is there when it is called again; other flags make another cache.
    monkeypatch.setattr(HierarchicalLatentEncoder, "features", lambda *_: pytest.fail("encoded again"))
    assert latents_command(tmp_path / "cache", "--vae", tmp_path / "vae") == 0
    monkeypatch.undo()
    assert latents_command(tmp_path / "cache", "--horizontal_flip", "false", "--conditional", "false") == 0
    assert len(sorted((tmp_path / "cache").rglob("*.safetensors"))) == 4
    # The encoder is the one that training loads.
    splits = load_image_splits().take(40)
    arguments = (splits, 28, 1, [(1, 8), (2, 4)], 7, 40, tmp_path / "cache", Accelerator(cpu=True))
    assert load_latent_encoder("random_projection", *arguments).config.fingerprint in printed


def test_a_damaged_latent_encoder_is_fitted_again(tmp_path, caplog):
    """One bit of its weights would change the latents of every later run."""
    arguments = (load_image_splits().take(40), 28, 1, [(1, 8), (2, 4)], 7, 40, tmp_path, Accelerator(cpu=True))
    fingerprint = load_latent_encoder("random_projection", *arguments).config.fingerprint
    for name, damage in (
        ("model.safetensors", lambda content: content[:-1] + bytes([content[-1] ^ 1])),
        ("model.safetensors", lambda content: content[:-100]),
        ("config.json", lambda content: content[:-100]),
    ):
        path = next(tmp_path.rglob(name))
        path.write_bytes(damage(path.read_bytes()))
        assert load_latent_encoder("random_projection", *arguments).config.fingerprint == fingerprint
        assert caplog.text.count("Fitting the SVD again: 'encoder-") == 1
        caplog.clear()
        load_latent_encoder("random_projection", *arguments)
        assert caplog.text == ""


@pytest.mark.parametrize(
    "flags, sentence",
    [
        ({"encoder": "nowhere/nothing"}, "nowhere/nothing"),
        ({"flags": ["--num_channels", 3], "encoder": "model_cards/plain-mae-fashion-mnist"}, "channels"),
        ({"flags": ["--hierarchy", "3x4"]}, "`image_size` must be divisible by the grid of every level, got 28 and 3"),
        ({"flags": ["--hierarchy", "1x400"]}, "asks for 400 channels at level 2, and the encoder's features have 256"),
        ({"flags": ["--on_bad_image", "skip"]}, "must stay in step"),
    ],
)
def test_wrong_flags_of_the_command(flags, sentence, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    encoder = flags.get("encoder", "random_projection")
    assert latents_command(tmp_path, *flags.get("flags", []), encoder=encoder) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("hf-decayed latents: ") and sentence in error


# The chain.


def chain(scheduler=None, encoder=None, **fields):
    networks = {f"level_{level}": level_network(level, **fields) for level in (1, 2, 3)}
    names = {0: "naught", 1: "one", 2: "two"} if fields.get("num_classes") else None
    pipeline = NestedDiffusionPipeline(
        scheduler or DPMSolverMultistepScheduler(), **networks, latent_encoder=encoder, id2label=names
    )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("scheduler", [DDPMScheduler, DPMSolverMultistepScheduler])
def test_a_chain_samples_all_levels(scheduler):
    pipeline = chain(scheduler(), num_classes=3)
    output = pipeline(2, ["one", 0], num_inference_steps=3, guidance_weights=[1.5, 1.4, 1.3], generator=seeded())
    assert {level: tuple(latents.shape) for level, latents in output.latents.items()} == {
        3: (4, 8, 1, 1),
        2: (4, 6, 2, 2),
        1: (4, 1, 16, 16),
    }
    assert len(output.images) == 4 and output.images[0].size == (16, 16)
    # One generator per image: an image does not depend on the others of its batch.
    generators = [seeded(number) for number in (3, 4)]
    both = pipeline(class_labels=[1, 2], num_inference_steps=3, generator=generators, output_type="pt", gamma=0.0)
    alone = pipeline(class_labels=2, num_inference_steps=3, generator=[seeded(4)], output_type="pt", gamma=0.0)
    torch.testing.assert_close(both.images[1:], alone.images, rtol=1e-4, atol=1e-5)


def test_networks_may_predict_the_image():
    """A network whose prediction is always the same image gives this image."""
    network = level_network(1, [(16, 1, 4)])
    network.forward = lambda sample, *_, **__: type("Output", (), {"sample": torch.full_like(sample, 0.25)})
    scheduler = DPMSolverMultistepScheduler(prediction_type="sample")
    pipeline = NestedDiffusionPipeline(scheduler, level_1=network, prediction_type="sample")
    pipeline.set_progress_bar_config(disable=True)
    images = pipeline(num_images=2, num_inference_steps=5, output_type="latent").images
    torch.testing.assert_close(images, torch.full((2, 1, 16, 16), 0.25), rtol=0, atol=1e-3)


def test_levels_share_nothing():
    pipeline = chain()
    pointers = [{parameter.data_ptr() for parameter in network.parameters()} for network in pipeline.networks.values()]
    assert not pointers[0] & pointers[1] and not pointers[1] & pointers[2] and not pointers[0] & pointers[2]
    # The loss of a level has gradients in its own network alone.
    network = pipeline.level_2
    network(torch.randn(2, 6, 2, 2), 3, conditions=condition_tensors(network)).sample.sum().backward()
    assert any(parameter.grad is not None for parameter in network.parameters())
    assert all(
        parameter.grad is None for parameter in (*pipeline.level_1.parameters(), *pipeline.level_3.parameters())
    )


def test_fixed_latents_stay_fixed():
    pipeline = chain()
    first = pipeline(3, num_inference_steps=2, generator=seeded(0), output_type="pt")
    fixed = {level: first.latents[level] for level in (3, 2)}
    second = pipeline(fixed_latents=fixed, num_inference_steps=2, generator=seeded(1), output_type="pt")
    assert all(torch.equal(second.latents[level], fixed[level]) for level in fixed)
    assert (second.latents[1] - first.latents[1]).abs().amin(dim=0).max() > 1e-3
    # One row serves all images, and the image depends on what is fixed.
    row = {3: first.latents[3][:1]}
    output = pipeline(2, fixed_latents=row, num_inference_steps=2, generator=[seeded(5), seeded(5)], output_type="pt")
    assert torch.equal(output.latents[3], row[3].expand(2, -1, -1, -1))
    torch.testing.assert_close(output.images[0], output.images[1])
    other = pipeline(1, fixed_latents={3: row[3] + 3}, num_inference_steps=2, generator=[seeded(5)], output_type="pt")
    assert (other.latents[2] - output.latents[2][:1]).abs().max() > 1e-3
    everything = pipeline(fixed_latents=first.latents, output_type="pt")
    assert torch.equal(everything.images, first.images)


def test_level_1_alone_has_the_empty_condition():
    pipeline = chain()
    alone = pipeline(2, start_level=1, num_inference_steps=2, generator=seeded(), output_type="latent")
    assert list(alone.latents) == [1]
    network, scheduler = pipeline.level_1, pipeline.scheduler
    scheduler.set_timesteps(2)
    latents = torch.randn(2, 1, 16, 16, generator=seeded())
    with torch.no_grad():
        for timestep in scheduler.timesteps:
            latents = scheduler.step(network(latents, timestep).sample, timestep, latents).prev_sample
    torch.testing.assert_close(alone.images, latents)


def recorded_conditions(pipeline, level, **arguments):
    """The conditions that a level's network gets at every step, and the clean latents."""
    calls, network = [], getattr(pipeline, f"level_{level}")
    handle = network.register_forward_pre_hook(
        lambda module, args, kwargs: calls.append(kwargs.get("conditions")), with_kwargs=True
    )
    output = pipeline(200, num_inference_steps=4, generator=seeded(), output_type="latent", **arguments)
    handle.remove()
    return calls, output.latents


def test_limits_of_gamma():
    pipeline = NestedDiffusionPipeline(
        DPMSolverMultistepScheduler(), level_2=level_network(2), level_3=level_network(3)
    )
    pipeline.set_progress_bar_config(disable=True)
    calls, latents = recorded_conditions(pipeline, 2, gamma=math.inf)
    assert len(calls) == 4 and all(torch.equal(call[0], latents[3]) for call in calls)
    calls, latents = recorded_conditions(pipeline, 2)  # without guidance no noise either, as in the dissertation
    assert all(torch.equal(call[0], latents[3]) for call in calls)
    calls, latents = recorded_conditions(pipeline, 2, gamma=0.0)
    noise = torch.stack([call[0] - latents[3] for call in calls])
    assert noise.flatten(1).std(dim=1).tolist() == pytest.approx([0.5] * 4, rel=0.05)  # sigma of training, every step
    assert (noise[0] - noise[1]).abs().mean() > 0.3  # drawn anew
    for reading, power in (("variance", 0.5), ("std", 1.0)):
        calls, latents = recorded_conditions(pipeline, 2, gamma=2.0, gamma_scales=reading)
        times = [(int(timestep) + 1) / 1000 for timestep in pipeline.scheduler.timesteps]
        deviations = [float((call[0] - latents[3]).std()) for call in calls]
        assert deviations == pytest.approx([0.5 * time ** (2.0 * power) for time in times], rel=0.05)
    calls, latents = recorded_conditions(pipeline, 2, guidance_weights=1.8)
    assert float((calls[0][0][:200] - latents[3]).std()) == pytest.approx(0.5, rel=0.05)  # gamma 0.3 where t is near T


def test_guidance_is_in_the_convention_of_diffusers():
    """By hand for one step: a weight of 1 + w gives `e + w (e - empty)`; the highest level has nothing to guide by."""
    pipeline = chain(DDPMScheduler(clip_sample=False))
    fixed = {level: torch.randn(2, *shape) for level, shape in ((3, (8, 1, 1)), (2, (6, 2, 2)))}
    noise = torch.randn(2, 1, 16, 16, generator=seeded())
    guided = pipeline(
        fixed_latents=fixed,
        guidance_weights=[1, 1, 1.5],
        gamma=math.inf,
        num_inference_steps=1,
        generator=seeded(),
        output_type="latent",
    ).images
    with torch.no_grad():
        conditional = pipeline.level_1(noise, 0, conditions=[fixed[3], fixed[2]]).sample
        empty = pipeline.level_1(noise, 0).sample
    pipeline.scheduler.set_timesteps(1)
    expected = pipeline.scheduler.step(conditional + 0.5 * (conditional - empty), 0, noise, generator=seeded())
    torch.testing.assert_close(guided, expected.prev_sample, rtol=1e-4, atol=1e-4)
    settings = {"num_inference_steps": 2, "output_type": "latent", "gamma": math.inf}
    tops = [pipeline(guidance_weights=[w, 1, 1], generator=seeded(), **settings).latents[3] for w in (1.0, 9.0)]
    assert torch.equal(*tops)
    by_class = chain(num_classes=3)
    tops = [by_class(1, 1, guidance_weights=w, generator=seeded(), **settings).latents[3] for w in (1.0, 9.0)]
    assert not torch.allclose(*tops)


def test_vary_and_interpolate():
    encoder = latent_encoder()
    pipeline = chain(encoder=encoder, latent_fingerprint=encoder.config.fingerprint)
    images = scenes(2, seed=9)
    latents = encoder.encode(images)
    for from_level, unchanged in ((2, (3, 2)), (3, (3,))):
        output = pipeline.vary(images, from_level=from_level, num_images=2, num_inference_steps=2)
        assert len(output.images) == 4
        for level in (3, 2):
            expected = latents[level].repeat_interleave(2, dim=0)
            assert torch.allclose(output.latents[level], expected, atol=1e-5) == (level in unchanged)
    picture = Image.fromarray((images[0, 0] * 255).byte().numpy())
    torch.testing.assert_close(pipeline.encode_image(picture)[3], latents[3][:1], rtol=0.05, atol=0.05)
    picture.getexif()[0x0112] = 6  # the camera lay on its side
    lying = torch.from_numpy(np.array(picture.transpose(Image.Transpose.ROTATE_270)))[None, None] / 255
    torch.testing.assert_close(pipeline.encode_image(picture)[3], encoder.encode(lying)[3])
    clear = Image.new("RGBA", picture.size, (9, 9, 9, 0))
    torch.testing.assert_close(pipeline.encode_image(clear)[3], encoder.encode(torch.ones(1, *images.shape[1:]))[3])
    output = pipeline.interpolate(images[:1], images[1:], num_images=5, num_inference_steps=2, output_type="pt")
    torch.testing.assert_close(output.latents[3][[0, -1]], latents[3], rtol=1e-4, atol=1e-4)
    middle, ends = output.latents[3][2].norm(), latents[3].flatten(1).norm(dim=1)
    assert min(ends) * 0.9 < middle < max(ends) * 1.1  # a straight line would pass near the origin
    assert not torch.allclose(output.latents[1][0], output.latents[1][-1])
    same = pipeline.interpolate(images[:1], images[:1], num_images=3, num_inference_steps=2, output_type="pt")
    same = same.latents[1]
    torch.testing.assert_close(same[0], same[2], rtol=1e-3, atol=1e-4)  # from the same noise


def test_chains_without_a_null_condition_are_not_guided():
    networks = {f"level_{level}": level_network(level, num_classes=3) for level in (1, 2, 3)}
    pipeline = NestedDiffusionPipeline(DDPMScheduler(), **networks, null_condition=False)
    pipeline.set_progress_bar_config(disable=True)
    assert len(pipeline(1, 1, num_inference_steps=1, output_type="pt").images) == 1
    for arguments in ({}, {"class_labels": 1, "guidance_weights": 2.0}, {"class_labels": 1, "start_level": 1}):
        with pytest.raises(ValueError, match="were not trained without class and latents above"):
            pipeline(**arguments, num_inference_steps=1)


def test_half_precision():
    encoder = latent_encoder()
    pipeline, images = chain(DDPMScheduler(), encoder=encoder), scenes(2)
    outputs = []
    for dtype in (torch.float32, torch.float16):
        output = pipeline.to(dtype).vary(
            images, num_inference_steps=2, generator=seeded(), output_type="latent", gamma=0.0
        )
        outputs.append(output)
    assert all(latents.dtype == torch.float32 for latents in outputs[1].latents.values())
    for level in (3, 2, 1):
        torch.testing.assert_close(outputs[1].latents[level], outputs[0].latents[level], rtol=0.05, atol=0.1)


def test_callbacks_see_every_level():
    pipeline, seen = chain(), []

    def callback(pipeline, step, timestep, tensors):
        seen.append((pipeline.current_level, step, tensors["latents"].shape[1]))
        return {"latents": torch.zeros_like(tensors["latents"])} if pipeline.current_level == 1 else {}

    output = pipeline(num_inference_steps=2, callback_on_step_end=callback, output_type="latent")
    assert seen == [(3, 0, 8), (3, 1, 8), (2, 0, 6), (2, 1, 6), (1, 0, 1), (1, 1, 1)]
    assert output.images.abs().sum() == 0 and pipeline.current_level is None


def test_offloading_brings_every_component_in_turn():
    """Diffusers' own hooks, with the CPU in place of an accelerator; images are the same, again and again."""
    encoder = latent_encoder()
    pipeline, image = chain(encoder=encoder), scenes(1, seed=4)
    settings = {"num_inference_steps": 2, "output_type": "pt"}
    expected = pipeline.vary(image, from_level=3, generator=seeded(), **settings).images
    pipeline.enable_model_cpu_offload(device="cpu")
    modules = {name: part for name, part in pipeline.components.items() if isinstance(part, torch.nn.Module)}
    assert set(modules) == {"level_1", "level_2", "level_3", "latent_encoder"}
    assert all(hasattr(module, "_hf_hook") for module in modules.values())
    order = []
    for name, module in modules.items():
        module.register_forward_pre_hook(lambda *_, name=name: order.append(name))
    for _ in range(2):
        images = pipeline.vary(image, from_level=3, generator=seeded(), **settings).images
        torch.testing.assert_close(images, expected)
    assert list(dict.fromkeys(order)) == ["latent_encoder", "level_2", "level_1"]  # the order of the hooks
    assert pipeline.model_cpu_offload_seq.split("->")[-3:] == ["level_2", "level_1", "vae"]


def test_every_level_has_a_progress_bar(capsys):
    pipeline = chain()
    pipeline.set_progress_bar_config(disable=False)
    pipeline(num_inference_steps=3, output_type="latent")
    assert capsys.readouterr().err.count("3/3") == 3
    pipeline.set_progress_bar_config(disable=True)
    pipeline(num_inference_steps=3, output_type="latent")
    assert capsys.readouterr().err == ""


def test_a_chain_that_is_not_trained_to_the_end():
    networks = {"level_2": level_network(2), "level_3": level_network(3)}
    pipeline = NestedDiffusionPipeline(DDPMScheduler(), **networks)
    pipeline.set_progress_bar_config(disable=True)
    output = pipeline(2, num_inference_steps=2, output_type="latent")
    assert list(output.latents) == [3, 2] and output.images is output.latents[2]
    with pytest.raises(ValueError, match="There is no `level_1`, so the chain ends above the image"):
        pipeline()
    middle = NestedDiffusionPipeline(DDPMScheduler(), level_1=level_network(1), level_3=level_network(3))
    middle.set_progress_bar_config(disable=True)
    with pytest.raises(ValueError, match="There is no `level_2`, so its latents cannot be sampled"):
        middle()
    fixed = {3: torch.randn(2, 8, 1, 1), 2: torch.randn(2, 6, 2, 2)}
    assert len(middle(fixed_latents=fixed, num_inference_steps=2).images) == 2


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        (
            {"guidance_weights": [1.5, 1.4]},
            "`guidance_weights` must be one number or one for each of 3 levels, .* got 2",
        ),
        ({"guidance_weights": 0.5}, "`guidance_weights` must be at least 1, .*its 0.5 is 1.5 here"),
        ({"gamma": -1.0}, "`gamma` must be at least 0, got -1.0"),
        ({"gamma_scales": "noise"}, "`gamma_scales` must be variance or std, got 'noise'"),
        (
            {"fixed_latents": {3: torch.zeros(1, 8, 2, 2)}},
            r"of level 3 must have shape \(number, 8, 1, 1\), got \(1, 8, 2",
        ),
        ({"fixed_latents": {4: torch.zeros(1, 8, 1, 1)}}, r"`fixed_latents` must be of levels \[1, 2, 3\], got 4"),
        ({"fixed_latents": {2: torch.zeros(1, 6, 2, 2)}}, "of level 2 need those of level 3 too"),
        ({"fixed_latents": {3: torch.zeros(2, 8, 1, 1)}, "num_images": 3}, "must have 3 rows, .* got \\[2\\]"),
        ({"start_level": 4}, r"`start_level` must lie in \[1, 3\], got 4"),
        ({"start_level": 2}, r"`start_level=2` needs `fixed_latents` of levels \[3\], got \[\]"),
        ({"num_images": 0}, "`num_images` must be a whole number of at least 1, got 0"),
        ({"class_labels": 1}, "`class_labels` were passed to a network without classes"),
        ({"generator": [torch.Generator()] * 2}, "There must be a generator for each of 1 images"),
        ({"output_type": "jpeg"}, "`output_type` must be pil, np, pt or latent"),
    ],
)
def test_wrong_arguments_of_the_chain(arguments, sentence):
    with pytest.raises(ValueError, match=sentence):
        chain()(num_inference_steps=2, **arguments)


def test_levels_that_do_not_fit():
    first, scheduler = level_network(1), DDPMScheduler()
    with pytest.raises(ValueError, match="There are no networks"):
        NestedDiffusionPipeline(scheduler)
    with pytest.raises(ValueError, match="`level_2` was trained as level 3"):
        NestedDiffusionPipeline(scheduler, level_1=first, level_2=level_network(3))
    for levels in ([(16, 1, 4), (2, 6, 1), (1, 9, 1)], [(16, 1, 4), (2, 7, 1), (1, 8, 1)], LEVELS[:2]):
        with pytest.raises(ValueError, match="`level_2` belongs to another hierarchy than `level_1`"):
            NestedDiffusionPipeline(scheduler, level_1=first, level_2=level_network(2, levels))
    with pytest.raises(ValueError, match="`level_2` has 3 classes, and `level_1` 0"):
        NestedDiffusionPipeline(scheduler, level_1=first, level_2=level_network(2, num_classes=3))
    marked = [level_network(level, latent_fingerprint=mark) for level, mark in ((1, "abc"), (2, "def"))]
    with pytest.raises(ValueError, match=r"latents of different encoders \(level_1 abc, level_2 def\)"):
        NestedDiffusionPipeline(scheduler, *marked)
    with pytest.raises(ValueError, match="latents of different encoders"):
        NestedDiffusionPipeline(scheduler, level_1=marked[0], latent_encoder=latent_encoder())
    oblong = level_network(1, [((16, 8), 1, 4), *LEVELS[1:]])
    with pytest.raises(ValueError, match=r"The latents of `level_1` must be square, got .16, 8."):
        NestedDiffusionPipeline(scheduler, level_1=oblong)
    with pytest.raises(ValueError, match="has no `latent_encoder`"):
        chain().vary(scenes(1))
    encoder = latent_encoder()
    for level in (1, 4):
        with pytest.raises(ValueError, match=r"A level to keep must lie in \[2, 3\], got"):
            chain(encoder=encoder).vary(scenes(1), from_level=level)
    with pytest.raises(ValueError, match="`num_images` must be at least 2, the two ends, got 1"):
        chain(encoder=encoder).interpolate(scenes(1), scenes(1), num_images=1)


# Training.


def nested_data(tmp_path, number=40):
    """Bundled images with latents of a tiny encoder of images of 28 pixels, cached."""
    train = load_splits()[0].select(range(number))
    splits = ImageSplits("forty", train, train, "none", "image", "label")
    torch.manual_seed(0)
    sizes = {
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 32,
        "image_size": 28,
        "patch_size": 7,
    }
    encoder = ViTModel(ViTConfig(hidden_size=16, num_channels=1, **sizes), add_pooling_layer=False).eval()
    fields = {"image_mean": [0.5], "image_std": [0.25], "min_crop_size": 14}
    model = HierarchicalLatentEncoder.from_encoder(encoder, [(1, 8), (2, 4)], 28, **fields)
    model.fit(image_batches(splits, 28, 1, None))
    shards = cache_nested_latents(model, splits, tmp_path, Accelerator(cpu=True), batch_size=8, shard_size=16)
    return splits, model, shards


def test_latents_are_those_of_the_images_that_level_1_sees(tmp_path):
    """Mirrored where the image is; the same from memory and from the disk; draws that belong to the sample."""
    splits, model, shards = nested_data(tmp_path)
    assert len(shards) == 3
    tables = LatentTable(shards), LatentTable(shards, memory_limit=0)
    assert tables[0].memory is not None and tables[1].memory is None and len(tables[0]) == 40
    keys = [(epoch, index) for epoch in (0, 1, 2) for index in (3, 17, 39, 20)]
    pixels = pixel_images(splits, 28, 1, seed=3)
    batches = [NestedLatents(table, 1, 3, 3, True, pixels).__getitems__(keys) for table in tables]
    flips = {bool(sample_generator(3, *key).random(23)[22] < 0.5) for key in keys}
    assert flips == {True, False}
    expected = model.encode((batches[0]["sample"] + 1) / 2)
    for batch in batches:
        for latents, level in zip(batch["conditions"], (3, 2)):
            torch.testing.assert_close(latents, expected[level], rtol=1e-3, atol=1e-3)
    upper = NestedLatents(tables[0], 2, 3, 3, True)
    batch, alone = upper.__getitems__(keys), upper.__getitems__(keys[5:6])
    torch.testing.assert_close(batch["sample"], expected[2], rtol=1e-3, atol=1e-3)
    assert len(batch["conditions"]) == 1 and torch.equal(batch["labels"], batches[0]["labels"])
    for name in ("sample", "noise", "uniform", "labels"):
        assert torch.equal(batch[name][5], alone[name][0])
    assert torch.equal(batch["condition_noise"][0][5], alone["condition_noise"][0][0])
    assert torch.equal(
        batch["condition_noise"][0], batches[0]["condition_noise"][0]
    )  # of the sample, whatever the level
    assert not torch.equal(batch["noise"][0], batch["noise"][4])  # another epoch
    many = upper.__getitems__([(epoch, index) for epoch in range(50) for index in range(40)])
    assert (many["uniform"][:, 1] < 0.1).float().mean() == pytest.approx(
        0.1, abs=0.02
    )  # the share of empty conditions
    assert many["condition_noise"][0].std() == pytest.approx(1, abs=0.02)
    assert abs((many["condition_noise"][0][:, 0] * many["noise"][:, 0, :1, :1]).mean()) < 0.05  # independent draws
    with pytest.raises(DataError, match="There are 20 images, and latents of 40"):
        NestedLatents(tables[0], 1, 3, 3, True, pixel_images(splits.take(20), 28, 1, seed=3))


def test_views_of_procedural_images_are_fixed(tmp_path):
    """Latents are computed once, so every epoch has the view that they were computed of."""
    splits = load_image_splits(dataset_name="bundled:coloured").take(40).with_fixed_views()
    assert splits.views is None and splits.fingerprint() != load_image_splits("bundled:coloured").fingerprint()
    accelerator = Accelerator(cpu=True)
    model = load_latent_encoder("random_projection", splits, 28, 3, [(1, 8)], 64, 40, tmp_path, accelerator)
    shards = cache_nested_latents(model, splits, tmp_path, accelerator, mirrored=False)
    pixels = pixel_images(splits, 28, 3, seed=3, horizontal_flip=False)
    batch = NestedLatents(LatentTable(shards), 1, 2, 3, False, pixels).__getitems__([(0, 7), (5, 7), (0, 8)])
    assert torch.equal(batch["sample"][0], batch["sample"][1])
    torch.testing.assert_close(
        batch["conditions"][0], model.encode((batch["sample"] + 1) / 2)[2], rtol=1e-3, atol=1e-3
    )
    with pytest.raises(DataError, match="draws new views in every epoch"):
        cache_nested_latents(model, load_image_splits("bundled:coloured"), tmp_path, accelerator)


def test_the_command_caches_fixed_views(tmp_path, capsys):
    flags = ["--dataset_name", "bundled:coloured", "--num_channels", 3, "--hierarchy", "1x8"]
    assert latents_command(tmp_path / "cache", *flags) == 0
    assert "of 40 images (level 2: " in capsys.readouterr().out


@pytest.mark.parametrize(
    "flags, sentence",
    [
        (["--hierarchy", "1-256"], "must be GRIDxCHANNELS or GRIDxCHANNELS/PATCH, such as 1x256, got '1-256'"),
        (["--sigmas", "-1"], "must be at least 0, got -1"),
        (["--sigmas", "1", "2"], "--sigmas must be one number or 1, got 2"),
        (["--level", "3"], "--level must be at most 2, the levels of --hierarchy and the first"),
        (["--set", "condition_levels=[]"], "--set condition_levels: it follows from --hierarchy"),
        (["--on_bad_image", "skip"], "--on_bad_image skip: the images of level 1 and the latents above"),
    ],
)
def test_wrong_flags(flags, sentence, capsys):
    with pytest.raises(SystemExit) as stopped:
        nested.parse_arguments(flags)
    assert stopped.value.code == 2 and sentence in capsys.readouterr().err


def test_the_recipe_of_the_dissertation():
    options, run_options = nested.parse_arguments(["--recipe", "imagenet256", "--encoder", "some/encoder"])
    assert [(32, 4, 2), *reversed(options.hierarchy)] == dissertation_levels(5) and options.size == "M-12"
    assert options.sigmas == [0.5, 0.5, 0.5, 1.0] and options.num_levels == 5 and run_options.batch_size == 512
    with pytest.raises(SystemExit):
        nested.parse_arguments(["--recipe", "imagenet256"])  # it names no encoder


SMALL = ["--set", "hidden_size=32", "--set", "num_layers=2", "--batch_size", 16, "--max_train_steps", 16]
SMALL += ["--max_train_samples", 80, "--warmup_steps", 4, "--log_every", 1, "--checkpointing_steps", 4]
SMALL += ["--sample_every", 8, "--sample_steps", 2, "--eval_samples", 9, "--sample_images", 4, "--cpu_threads", 1]
SMALL += ["--hierarchy", "1x8", "2x4", "--min_crop_size", 14]


def run_command(*arguments):
    command = [sys.executable, "-m", "hf_decayed.cli", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def weights(folder):
    return {path.parent.name: load_file(path) for path in sorted(folder.glob("level_*/*.safetensors"))}


def killed_at(checkpoint, *flags):
    """Trains until a checkpoint is there, and kills the run."""
    process = start_script("nested.py", *flags)
    while not checkpoint.exists():
        assert process.poll() is None
        time.sleep(0.02)
    kill(process)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_killed_chain_resumes_to_the_last_bit(tmp_path):
    flags = [*SMALL, "--latents_dir", tmp_path / "latents"]
    whole = run_script("nested.py", *flags, "--output_dir", tmp_path / "whole")
    assert "pipeline of 3 levels, samples.png, results.json" in whole.stdout
    results = json.loads((tmp_path / "whole" / "results.json").read_text())
    assert set(results["levels"]) == {"1", "2", "3"} and results["frechet_pixels_9"] > 0
    assert Image.open(tmp_path / "whole" / "samples.png").width > 100

    parts = [*flags, "--output_dir", tmp_path / "parts"]
    resume = [*parts, "--resume_from_checkpoint", "latest"]
    for level, step, words in ((2, 4, parts), (1, 8, resume)):
        killed_at(tmp_path / "parts" / "runs" / f"level_{level}" / "checkpoints" / f"step-{step:08d}", *words)
    assert "belongs to another run" in run_script("nested.py", *resume, "--sigmas", 1, code=2).stderr
    assert "resumed at step" in run_script("nested.py", *resume).stdout
    first, second = weights(tmp_path / "whole"), weights(tmp_path / "parts")
    assert list(first) == ["level_1", "level_2", "level_3"]
    assert all(torch.equal(first[level][name], second[level][name]) for level in first for name in first[level])

    # A level alone: given the latents of held-out images, where there is no network above.
    printed = run_script("nested.py", *flags, "--output_dir", tmp_path / "alone", "--level", 1).stdout
    assert "no pipeline yet: train level 2, 3, with the same --output_dir" in printed
    alone = load_file(tmp_path / "alone" / "runs" / "level_1" / "diffusion_pytorch_model.safetensors")
    assert all(torch.equal(first["level_1"][name], alone[name]) for name in alone)
    assert not (tmp_path / "alone" / "model_index.json").exists()
    # A level of another hierarchy is refused before it is trained.
    shutil.rmtree(tmp_path / "whole" / "runs" / "level_1")  # a finished level would be refused for that
    other = ["--output_dir", tmp_path / "whole", "--level", 1, "--hierarchy", "1x8", "2x6"]
    assert "belongs to another hierarchy" in run_script("nested.py", *flags, *other, code=2).stderr
    assert main(["publish", str(tmp_path / "whole"), "--repo_id", "user/nested", "--dry_run"]) == 0


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_classes_and_vae_latents_with_one_process_and_two(tmp_path):
    small_vae().save_pretrained(tmp_path / "vae")
    flags = [*SMALL, "--latents_dir", tmp_path / "latents", "--vae", tmp_path / "vae", "--conditional", "true"]
    flags += ["--horizontal_flip", "true", "--hierarchy", "1x8", "--max_train_steps", 6, "--set", "patch_size=2"]
    run_script("nested.py", *flags, "--output_dir", tmp_path / "one")
    for level in (2, 1):
        run_script("nested.py", *flags, "--output_dir", tmp_path / "two", "--level", level, processes=2)
    refused = run_script("nested.py", *flags, "--output_dir", tmp_path / "three", processes=2, code=1)
    assert "With several processes, train one level after the other" in refused.stderr
    losses = []
    for folder in ("one", "two"):
        lines = [(tmp_path / folder / "runs" / f"level_{n}" / "metrics.jsonl").read_text() for n in (1, 2)]
        records = [json.loads(line) for text in lines for line in text.splitlines()]
        losses.append([record["loss"] for record in records if "loss" in record])
    assert len(losses[0]) == 12 and losses[0] == pytest.approx(losses[1], rel=1e-4)
    pipeline = DiffusionPipeline.from_pretrained(tmp_path / "one", trust_remote_code=True)
    pipeline.set_progress_bar_config(disable=True)
    output = pipeline(2, "Ankle boot", guidance_weights=[1.5, 1.2], num_inference_steps=2)
    assert output.latents[1].shape == (2, 3, 14, 14) and output.images[0].size == (28, 28)
    printed = run_command(
        "sample", tmp_path / "one", "--num", 4, "--output", tmp_path / "samples", "--guidance_scale", 1.5
    )
    assert "4 samples (png)" in printed


# Evaluation.


def test_oracle_reconstruction():
    encoder = latent_encoder()
    pipeline, images = chain(encoder=encoder), scenes(5, seed=2)
    settings = {"num_inference_steps": 2, "seed": 3}
    measured = oracle_reconstruction(pipeline, images, **settings)
    generators = [seeded(sample_seed(3, index)) for index in range(5)]
    samples = pipeline.vary(images, num_images=1, generator=generators, num_inference_steps=2, output_type="pt").images
    assert measured["oracle_rmse"] == pytest.approx(float((samples - images).square().mean().sqrt()), rel=1e-5)
    other = (samples - images[[4, 0, 1, 2, 3]]).square().mean().sqrt()
    assert measured["other_rmse"] == pytest.approx(float(other), rel=1e-5)
    in_parts = oracle_reconstruction(pipeline, images, **settings, batch_size=2)
    assert in_parts == pytest.approx(measured, rel=1e-4)
    with pytest.raises(ValueError, match="pass at least two, got 1"):
        oracle_reconstruction(pipeline, images[:1])


def test_groups_of_one_top_latent():
    pipeline = chain(num_classes=3)
    images, groups = sample_groups(pipeline, 2, 3, num_classes=3, num_inference_steps=2)
    assert images.shape == (6, 1, 16, 16) and groups.tolist() == [0, 0, 0, 1, 1, 1]
    in_parts, _ = sample_groups(pipeline, 2, 3, num_classes=3, batch_size=2, num_inference_steps=2)
    torch.testing.assert_close(in_parts, images, rtol=1e-3, atol=1e-3)


def test_neighbours_of_groups():
    groups = torch.arange(5).repeat_interleave(4)
    centres = 10 * torch.eye(5)
    apart = group_neighbours(centres[groups] + 0.1 * torch.randn(20, 5), groups, k=3)
    assert apart["same_latent_knn"] == 1 and apart["within_distance"] < 1 < 13 < apart["between_distance"]
    unrelated = group_neighbours(torch.randn(400, 5), torch.arange(100).repeat_interleave(4))
    assert unrelated["same_latent_knn"] < 0.05 and unrelated["same_latent_chance"] == pytest.approx(3 / 399)
    assert unrelated["within_distance"] == pytest.approx(unrelated["between_distance"], rel=0.1)
    for features, numbers, sentence in (
        (torch.randn(4, 2), torch.zeros(4), "Neighbours need two groups"),
        (torch.randn(4, 2), torch.arange(4), "Neighbours need two groups"),
        (torch.randn(4, 2), torch.arange(3), "There must be a group for each of 4 features, got 3"),
    ):
        with pytest.raises(ValueError, match=sentence):
            group_neighbours(features, numbers)


def test_the_single_network_of_the_same_cost():
    pipeline = chain()
    assert chain_macs(pipeline) == sum(network.count_macs() for network in pipeline.networks.values())
    depth, macs = equal_mac_depth(pipeline)
    single = {layers: NestedUViT2DModel(**{**SIZES, "sample_size": 16, "in_channels": 1, "patch_size": 4,
              "num_layers": layers}).count_macs() for layers in (2, 4, 6)}  # fmt: skip
    assert single[depth] == macs and abs(macs - chain_macs(pipeline)) == min(
        abs(cost - chain_macs(pipeline)) for cost in single.values()
    )
    # The dissertation's five levels cost less than its single network of depth 16.
    with torch.device("meta"):
        five = {level: NestedUViT2DModel.for_level(dissertation_levels(5), level) for level in range(1, 6)}
    large = NestedDiffusionPipeline(DDPMScheduler(), **{f"level_{level}": network for level, network in five.items()})
    assert equal_mac_depth(large)[0] == 16


def test_report_of_chains_and_single_networks(tmp_path, monkeypatch, capsys):
    encoder = latent_encoder()
    results = {"steps": 3, "command": "accelerate launch training/nested.py", "latents": {"encoder": "tiny"}}
    for seed in (0, 1):
        folder = tmp_path / f"chain_{seed}"
        chain(encoder=encoder, latent_fingerprint=encoder.config.fingerprint).save_pretrained(folder)
        (folder / "results.json").write_text(json.dumps({**results, "seed": seed}))
    sizes = {"sample_size": 16, "in_channels": 1, "patch_size": 4}
    single = random_weights(DecayedUViT2DModel(**SIZES, **sizes))
    DecayedUViTPipeline(single, DPMSolverMultistepScheduler()).save_pretrained(tmp_path / "single")
    (tmp_path / "single" / "results.json").write_text(json.dumps({**results, "seed": 0}))
    command = ["nested_report.py", *(str(tmp_path / f"chain_{seed}") for seed in (0, 1)), "--single"]
    command += [str(tmp_path / "single"), "--num", "12", "--num_latents", "2", "--sample_steps", "2"]
    command += ["--picture", str(tmp_path / "variations.png"), "--output", str(tmp_path / "report.json")]
    monkeypatch.setattr(sys, "argv", command)
    nested_report.main()
    assert Image.open(tmp_path / "variations.png").width > 7 * 16
    report = json.loads((tmp_path / "report.json").read_text())
    assert list(report["results"]) == ["chain_0", "chain_1", "single", "held_out_images"]
    first = report["results"]["chain_0"]
    assert first["seed"] == 0 and first["encoder"] == "tiny" and first["sigmas"] == [0.5, 0.5]
    assert 0 <= first["latent_knn_accuracy"] <= 1 and first["within_distance"] > 0
    assert (
        report["results"]["single"]["macs"] == single_macs(single) == NestedUViT2DModel(**SIZES, **sizes).count_macs()
    )
    distances, latents = nested_report.format_report(report).values()
    assert distances in (printed := capsys.readouterr().out) and latents in printed
    assert [line.split(" | ")[0] for line in distances.splitlines()[2:]] == [
        "| chain, tiny, sigma 0.5, 0.5",
        "| one network",
        "| held-out images",
    ]
    row = latents.splitlines()[2]
    assert row.count(", ") == 3 + 7  # in the name; two seeds in every cell
    monkeypatch.setattr(sys, "argv", ["nested_report.py", str(tmp_path / "single")])
    with pytest.raises(UserError, match="holds a DecayedUViTPipeline: chains come first"):
        nested_report.main()

    # The same command again, with one model more: what is in the file is not judged again.
    shutil.copytree(tmp_path / "chain_0", tmp_path / "chain_2")
    judged, judge_chain = [], nested_report.judge_chain
    monkeypatch.setattr(nested_report, "judge_chain", lambda *args: (judged.append(1), judge_chain(*args))[1])
    monkeypatch.setattr(sys, "argv", [*command[:2], str(tmp_path / "chain_2"), *command[2:]])
    nested_report.main()
    again = json.loads((tmp_path / "report.json").read_text())
    assert len(judged) == 1 and again["results"]["chain_1"] == report["results"]["chain_1"]
    assert list(again["results"]) == ["chain_0", "chain_2", "chain_1", "single", "held_out_images"]
    monkeypatch.setattr(sys, "argv", [*command, "--seed", "1"])  # other settings: everything is judged again
    nested_report.main()
    assert len(judged) == 3

    # Folders of one name stay apart, networks of other costs have rows of their own, and data may have no labels.
    shutil.copytree(tmp_path / "single", tmp_path / "other" / "single")
    monkeypatch.setattr(
        sys, "argv", [*command[:4], str(tmp_path / "single"), str(tmp_path / "other" / "single"), *command[5:]]
    )
    nested_report.main()
    results = json.loads((tmp_path / "report.json").read_text())["results"]
    assert list(results) == ["chain_0", "chain_1", "single", "single-4", "held_out_images"]
    results["single-4"]["macs"] *= 2
    results["chain_0"]["latent_knn_accuracy"] = results["chain_1"]["latent_knn_accuracy"] = None
    distances, _ = nested_report.format_report({"results": results}).values()
    assert distances.count("| one network |") == 2
    (tmp_path / "other" / "single" / "results.json").unlink()
    shutil.rmtree(tmp_path / "other" / "single" / "results", ignore_errors=True)
    (tmp_path / "report.json").unlink()
    with pytest.raises(UserError, match="has no results.json of its training"):
        nested_report.main()


def test_the_report_trains_what_is_missing_of_a_grid(tmp_path, monkeypatch):
    """Finished runs are judged, whether they were selected or not; others are trained if they were."""
    monkeypatch.chdir(tmp_path)
    options = nested_report.parse_arguments(["--grid", "nested_encoders", "--only", "^decayed", "--cpu_threads", "1"])
    assert options.dataset_name == "bundled:coloured" and options.output.as_posix() == "outputs/nested_encoders.json"
    started = []

    def run_process(command, name):
        """In place of the process of a training script."""
        values = {flag: command[command.index(flag) + 1] for flag in ("--seed", "--output_dir")}
        started.append((name, Path(values["--output_dir"]).name.split("-seed")[0], values["--seed"]))
        assert ("--cpu_threads" in command) == (len(started) <= 2)
        Path(values["--output_dir"]).mkdir(parents=True)
        (Path(values["--output_dir"]) / "results.json").write_text("{}")

    monkeypatch.setattr(sweep, "run_process", run_process)
    nested_report.train_grid(options)
    assert started == [("nested.py", "decayed", "0"), ("nested.py", "decayed", "1")]
    assert len(options.chains) == 2 and options.single == []
    options = nested_report.parse_arguments(["--grid", "nested_encoders", "--only", "^plain"])
    nested_report.train_grid(options)
    assert [name for _, name, _ in started] == ["decayed"] * 2 + ["plain"] * 2 and len(options.chains) == 4
    options = nested_report.parse_arguments(["--grid", "nested", "--only", "^one"])
    nested_report.train_grid(options)
    assert options.chains == [] and len(options.single) == 2


@pytest.mark.parametrize("words", [[], ["outputs/nested", "--grid", "nested"], ["--grid", "nowhere"]])
def test_the_report_needs_folders_or_a_grid(words, capsys):
    with pytest.raises(SystemExit) as stopped:
        nested_report.parse_arguments(words)
    message = "there is no grid 'nowhere'" if words[-1:] == ["nowhere"] else "name folders, or a --grid"
    assert stopped.value.code == 2 and message in capsys.readouterr().err


def test_one_network_of_the_grid_costs_as_much_as_the_chain():
    runs = {run["name"]: run for run in sweep.expand(sweep.parse_arguments(["nested"])[1], {})}
    options, _ = nested.parse_arguments(sweep.as_flags(runs["sigma 0.5"]))
    single, _ = uvit.parse_arguments(sweep.as_flags(runs["one network"]))
    for name in ("batch_size", "max_train_steps", "learning_rate", "weight_decay", "adam_beta1", "adam_beta2",
                 "ema_decay", "warmup_steps", "prediction_type", "max_train_samples", "conditional",
                 "horizontal_flip", "image_size"):  # fmt: skip
        assert getattr(options, name) == getattr(single, name), name
    fields = {name: value for name, value in options.fields.items() if name not in ("patch_size", "in_channels")}
    levels = [(options.image_size, options.fields["in_channels"], options.fields["patch_size"]), *options.hierarchy]
    networks = [NestedUViT2DModel.for_level(levels, level, options.size, **fields) for level in (1, 2)]
    one = NestedUViT2DModel.from_size(single.size, **{**single.fields, "sample_size": single.image_size})
    assert one.count_macs() == pytest.approx(sum(network.count_macs() for network in networks), rel=0.005)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_condition_noise_stops_leakage():
    """The dissertation's most robust claim: with noise on the condition, the true latents give away less of the image.

    On garments, of which 16 numbers say much; with all this noise they still say more than the latents of another image.
    """
    splits, levels = load_image_splits(), [(16, 1, 4), (1, 16, 1)]
    images = torch.cat(list(image_batches(splits, 16, 1, 2000)))
    held_out = torch.cat(list(image_batches(splits, 16, 1, 64, "held_out")))
    encoder = latent_encoder([(1, 16)], fitted=False, encoder=random_projection(16, 1), pooling="patch_mean")
    encoder.fit(images.split(100))
    latents, noise_schedule = encoder.encode(images)[2], DDPMScheduler(prediction_type="v_prediction")
    errors = []
    for sigma in (0.0, 0.5, 1.0):
        torch.manual_seed(0)
        sizes = {"hidden_size": 64, "num_layers": 4, "num_attention_heads": 4, "shortcut_decay": 0.9}
        network = NestedUViT2DModel.for_level(levels, 1, "S", condition_sigmas=[sigma], final_conv=False, **sizes)
        optimizer = torch.optim.AdamW(network.parameters(), 2e-3)
        for _ in range(700):
            rows = torch.randint(len(images), (64,))
            clean, noise, times = 2 * images[rows] - 1, torch.randn(64, 1, 16, 16), torch.randint(1000, (64,))
            condition = latents[rows] + sigma * torch.randn(64, 16, 1, 1)
            noisy = noise_schedule.add_noise(clean, noise, times)
            target = noise_schedule.get_velocity(clean, noise, times)
            loss = (network(noisy, times, conditions=[condition]).sample - target).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        scheduler = DPMSolverMultistepScheduler(prediction_type="v_prediction")
        pipeline = NestedDiffusionPipeline(
            scheduler, level_1=network.eval(), latent_encoder=encoder, prediction_type="v_prediction"
        )
        pipeline.set_progress_bar_config(disable=True)
        errors.append(oracle_reconstruction(pipeline, held_out, num_inference_steps=20))
    own, other = ([error[name] for error in errors] for name in ("oracle_rmse", "other_rmse"))
    assert own[0] < own[1] < own[2] < min(other), errors


CLEAN_PROCESS = """
import json, sys
sys.modules["hf_decayed"] = None
import torch
from diffusers import AutoModel, DiffusionPipeline
pipeline = DiffusionPipeline.from_pretrained(sys.argv[1], trust_remote_code=True)
pipeline.set_progress_bar_config(disable=True)
image = torch.linspace(0, 1, 256).view(1, 1, 16, 16)
output = pipeline.vary(image, num_inference_steps=3, output_type="pt", generator=torch.Generator().manual_seed(0))
names = [type(pipeline).__name__, type(pipeline.latent_encoder).__name__]
if len(sys.argv) > 2:
    pipeline.save_pretrained(sys.argv[2])
    names.append(type(AutoModel.from_pretrained(sys.argv[2], subfolder="level_2", trust_remote_code=True)).__name__)
print(json.dumps([names, output.images.double().sum().item()]))
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
    return json.loads(result.stdout.splitlines()[-1])


def save_chain(folder):
    encoder = latent_encoder()
    pipeline = chain(encoder=encoder, latent_fingerprint=encoder.config.fingerprint)
    pipeline.save_pretrained(folder)
    image = torch.linspace(0, 1, 256).view(1, 1, 16, 16)
    images = pipeline.vary(image, num_inference_steps=3, output_type="pt", generator=seeded()).images
    return images.double().sum().item()


def test_a_saved_chain_loads_where_the_package_is_not(tmp_path):
    expected = save_chain(tmp_path / "model")
    names, pixel_sum = in_clean_process(tmp_path / "model", tmp_path / "again")
    assert names == ["NestedDiffusionPipeline", "HierarchicalLatentEncoder", "NestedUViT2DModel"]
    assert pixel_sum == pytest.approx(expected, rel=1e-5)
    # The folder that it saved there has its code, too.
    again = {path.relative_to(tmp_path / "again").as_posix() for path in (tmp_path / "again").rglob("*.py")}
    assert again == {path.relative_to(tmp_path / "model").as_posix() for path in (tmp_path / "model").rglob("*.py")}


def test_what_the_page_shows_runs(tmp_path, monkeypatch):
    page = (ROOT / "docs" / "nested_diffusion.md").read_text()
    for line in re.findall(r"^accelerate launch training/nested.py(.*)$", page.replace("\\\n", " "), re.MULTILINE):
        assert nested.parse_arguments(shlex.split(line))
    monkeypatch.chdir(tmp_path)
    encoder = latent_encoder([(1, 8)])
    networks = {f"level_{level}": level_network(level, [(16, 1, 4), (1, 8, 1)]) for level in (1, 2)}
    pipeline = NestedDiffusionPipeline(DPMSolverMultistepScheduler(), **networks, latent_encoder=encoder)
    pipeline.save_pretrained("outputs/nested")
    image = Image.fromarray((scenes(1)[0, 0] * 255).byte().numpy())
    names = {"image": image, "image_a": image, "image_b": image.rotate(90)}
    for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        exec(block, names)
    assert len(names["output"].images) == 8
    for link in re.findall(r"\]\(([^)#]+)\)", page):
        assert (ROOT / "docs" / link).exists(), link


def test_the_tables_of_the_page_are_those_of_the_results():
    page, folder = (ROOT / "docs" / "nested_diffusion.md").read_text(), ROOT / "model_cards/results/nested_diffusion"
    shown = re.findall(r"<!-- table (\w+) (\w+) -->\n(.*?)\n<!-- end -->", page, re.DOTALL)
    expected = [
        (file.stem, name, table)
        for file in sorted(folder.glob("*.json"))
        for name, table in nested_report.format_report(json.loads(file.read_text())).items()
    ]
    assert sorted(shown) == sorted(expected)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_saved_chain_loads_over_http(tmp_path):
    from loopback_hub import serve

    expected = save_chain(tmp_path / "hub" / "user" / "name")
    with serve(tmp_path / "hub") as server:
        _, pixel_sum = in_clean_process(
            "user/name", HF_ENDPOINT=server.url, HF_HUB_OFFLINE="0", HF_HOME=str(tmp_path / "cache")
        )
    assert pixel_sum == pytest.approx(expected, rel=1e-5)
