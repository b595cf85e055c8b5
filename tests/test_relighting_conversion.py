"""Checkpoints of the latent intrinsics release, as weights of our model under its names."""

import pytest
import torch
from conftest import random_weights
from diffusers import DiffusionPipeline

from hf_decayed.hub.conversion import ConversionError, convert
from hf_decayed.models.latent_intrinsics import LatentIntrinsicsModel, sinusoidal_positions


BLOCK_NAMES = {
    "norm1": "norm0",
    "conv1": "conv0",
    "norm2": "norm1",
    "conv2": "conv1",
    "light_projection": "affine",
    "shortcut": "skip",
}


def released_block(block, prefix):
    """A residual block under the release's names; blocks that change the resolution store their filter."""
    weights = {}
    for ours, theirs in BLOCK_NAMES.items():
        layer = getattr(block, ours)
        weights |= {
            f"{prefix}.{theirs}.{name}": tensor for name, tensor in (layer.state_dict() if layer else {}).items()
        }
    if block.resample_mode is not None:
        weights |= {f"{prefix}.{layer}.resample_filter": torch.full((1, 1, 2, 2), 0.25) for layer in ("conv0", "skip")}
    return weights


def released_weights():
    """A small model with random weights, and its weights as the release stores them."""
    sides, layers = (32, 16, 8), (1, 2, 1)
    torch.manual_seed(0)
    model = LatentIntrinsicsModel(
        sample_size=32, block_out_channels=(4, 8, 12), layers_per_block=layers, light_dim=4, light_hidden_dim=6
    )
    model = random_weights(model).eval()
    weights = {f"enc.32x32_conv.{name}": tensor for name, tensor in model.encoder.conv_in.state_dict().items()}
    for side, blocks in zip(sides, model.encoder.scales):
        blocks = list(blocks)
        if side != 32:
            weights |= released_block(blocks.pop(0), f"enc.{side}x{side}_down")
        for number, block in enumerate(blocks):
            is_map = side != 32 and number == len(blocks) - 1
            weights |= released_block(block, f"enc.{side}x{side}_block{number}{'_final' if is_map else ''}")
    decoder = model.decoder
    weights |= released_block(decoder.in_block1, "dec.8x8_in0") | released_block(decoder.in_block2, "dec.8x8_in1")
    attention = decoder.attention
    for name in ("weight", "bias"):
        parts = [getattr(layer, name) for layer in (attention.to_q, attention.to_k, attention.to_v)]
        qkv = torch.stack(parts, dim=1).flatten(0, 1).detach()  # query, key and value of one channel lie side by side
        out = getattr(attention.to_out[0], name).detach()
        is_matrix = name == "weight"
        weights[f"dec.8x8_in0.qkv.{name}"] = qkv[:, :, None, None] if is_matrix else qkv
        weights[f"dec.8x8_in0.proj.{name}"] = out[:, :, None, None] if is_matrix else out
        weights[f"dec.8x8_in0.norm2.{name}"] = getattr(attention.group_norm, name).detach()
    for side, upsampler, blocks in zip(reversed(sides), decoder.upsamplers, decoder.scales):
        if side != 8:
            weights |= released_block(upsampler, f"dec.{side}x{side}_up")
        for number, block in enumerate(blocks):
            weights |= released_block(block, f"dec.{side}x{side}_block{number}")
    for ours, theirs in (("light_encoder", "light_encoder"), ("light_decoder", "light_decoder")):
        weights |= {f"{theirs}.{name}": tensor for name, tensor in getattr(model, ours).state_dict().items()}
    for layer, theirs in ((decoder.norm_out, "final.0"), (decoder.conv_out, "final.2")):
        weights |= {f"{theirs}.{name}": tensor for name, tensor in layer.state_dict().items()}
    weights["pos_embed"] = sinusoidal_positions(8, 8, 12, torch.device("cpu"))
    return model, weights


def save_checkpoint(path, weights):
    """As the release's training writes it: two sets of weights from DistributedDataParallel, and the optimizer."""
    last = {f"module.{name}": torch.zeros_like(tensor) for name, tensor in weights.items()}
    last |= {name: tensor for name, tensor in wrapped(weights).items() if "resample_filter" in name or "pos_" in name}
    contents = {"epoch": 140, "state_dict": last, "ema_state_dict": wrapped(weights), "optimizer": {}, "scaler": {}}
    torch.save(contents, path)


def wrapped(weights):
    return {f"module.{name}": tensor for name, tensor in weights.items()}


def test_a_released_checkpoint_becomes_a_pipeline(tmp_path):
    model, weights = released_weights()
    save_checkpoint(tmp_path / "last.pth.tar", weights)
    summary = convert("latent-intrinsics", tmp_path / "last.pth.tar", tmp_path / "out")
    assert "0.005 is assumed" in summary and "Licence of the weights: unknown." in summary
    card = (tmp_path / "out" / "README.md").read_text()
    assert "pipeline_tag: image-to-image" in card and "CC BY-NC-SA" in card and "license:" not in card
    pipeline = DiffusionPipeline.from_pretrained(tmp_path / "out", trust_remote_code=True)
    images, references = torch.rand(2, 2, 3, 32, 32) * 2 - 1
    with torch.no_grad():
        intrinsics, light = model.encode(images)[0], model.encode(references)[1]
        converted = pipeline.autoencoder.encode(images)[0], pipeline.autoencoder.encode(references)[1]
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(converted[0], intrinsics))
        for alpha in (None, 0.0):
            assert torch.equal(pipeline.autoencoder.decode(*converted, alpha), model.decode(intrinsics, light, alpha))


def test_both_sets_of_weights_by_name(tmp_path):
    _, weights = released_weights()
    save_checkpoint(tmp_path / "last.pth.tar", weights)
    summary = convert("latent-intrinsics-last", tmp_path / "last.pth.tar", tmp_path / "out", {"alpha": 0.01})
    assert "these are its `state_dict`" in summary and "0.01 is assumed." in summary
    last = LatentIntrinsicsModel.from_pretrained(tmp_path / "out", subfolder="autoencoder")
    assert last.config.alpha == 0.01 and not any(parameter.any() for parameter in last.parameters())


@pytest.mark.parametrize(
    "name, tensor, sentence",
    [
        ("dec.8x8_in1.conv0.bias", None, r"Missing: \['decoder.in_block2.conv1.bias'\]"),
        ("dec.8x8_block9.conv0.bias", torch.zeros(1), r"Unknown: \['decoder.scales.0.9.conv1.bias'\]"),
        ("enc.16x16_down.conv0.resample_filter", torch.ones(1, 1, 4, 4), "no mean of 2 x 2 pixels"),
        ("pos_embed", torch.zeros(1, 12, 8, 8), "does not hold the positions of the release"),
        ("pos_embed", None, "lacks pos_embed"),
        ("enc.4x4_block0_final.conv1.weight", torch.zeros(12, 12, 3, 3), "The weights do not fit"),
        ("enc.2x2_block0_final.conv1.weight", torch.zeros(12, 12, 3, 3), r"halve; those of the encoder are"),
        ("enc.32x32_block1_final.conv1.weight", torch.zeros(4, 4, 3, 3), "but the finest must have an intrinsic map"),
    ],
)
def test_what_is_not_exact_is_refused(name, tensor, sentence, tmp_path):
    _, weights = released_weights()
    weights = {**weights, name: tensor}
    save_checkpoint(tmp_path / "last.pth.tar", {key: value for key, value in weights.items() if value is not None})
    with pytest.raises(ConversionError, match=sentence):
        convert("latent-intrinsics", tmp_path / "last.pth.tar", tmp_path / "out")
    assert not (tmp_path / "out").exists()
