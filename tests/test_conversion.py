"""Converters: MAE code bases' checkpoints against a reference written from the spec, ViTMAE both ways, bad files."""

import argparse
import json
import os
import re
import subprocess
import sys

import pytest
import torch
from conftest import ROOT, TINY_SIZES, random_weights
from diffusers import DiffusionPipeline
from huggingface_hub import ModelCard
from loopback_hub import serve
from safetensors.torch import load_file, save_file
from torch.nn import functional as F
from transformers import AutoImageProcessor, ViTImageProcessorPil, ViTMAEConfig, ViTMAEForPreTraining, ViTMAEModel

import hf_decayed
from hf_decayed import (
    DecayedViTMAEConfig,
    DecayedViTMAEForImageClassification,
    DecayedViTMAEForPreTraining,
    DecayedViTMAEModel,
)
from hf_decayed.cli import main
from hf_decayed.hub.conversion import ConversionError, convert, to_vit_mae
from hf_decayed.models.modeling_decayed_vit_mae import sincos_positions
from hf_decayed.models.transformer_decayed_sit import DecayedSiTTransformer2DModel
from hf_decayed.models.unet_decayed_uvit import DecayedUViT2DModel


WIDTH, DECODER_WIDTH, PATCH, GRID, HEADS, DECODER_HEADS = 32, 24, 8, 4, 4, 4
HEAD_FIELDS = {"num_attention_heads": HEADS, "decoder_num_attention_heads": DECODER_HEADS}


def timm_weights(
    depth,
    decoder_depth=3,
    released=False,
    decoder=True,
    classes=None,
    average_pooling=False,
    width=WIDTH,
    decoder_width=DECODER_WIDTH,
    patch=PATCH,
    grid=GRID,
):
    """A state dict with the names and shapes of facebookresearch/mae, or of the authors' decayed MAE."""
    weights = {
        "cls_token": (1, 1, width),
        "pos_embed": sincos_positions((grid, grid), width),
        "patch_embed.proj.weight": (width, 3, patch, patch),
        "patch_embed.proj.bias": (width,),
    }

    def linear(name, fan_in, fan_out):
        weights.update({f"{name}.weight": (fan_out, fan_in), f"{name}.bias": (fan_out,)})

    def norm(name, size):
        weights.update({f"{name}.weight": (size,), f"{name}.bias": (size,)})

    def block(name, size):
        norm(f"{name}.norm1", size)
        linear(f"{name}.attn.qkv", size, 3 * size)
        linear(f"{name}.attn.proj", size, size)
        norm(f"{name}.norm2", size)
        linear(f"{name}.mlp.fc1", size, 2 * size)
        linear(f"{name}.mlp.fc2", 2 * size, size)

    for layer in range(depth):
        block(f"blocks.{layer}", width)
    if not released:
        norm("fc_norm" if average_pooling else "norm", width)
    if decoder:
        weights["decoder_pos_embed"] = sincos_positions((grid, grid), decoder_width)
        linear("decoder_embed", decoder_width if released else width, decoder_width)
        weights["decoder_cls_token" if released else "mask_token"] = (1, 1, decoder_width)
        for skip in range(depth // 2 if released else 0):
            linear(f"skip.{skip}.fc.0", width + decoder_width, decoder_width)
            linear(f"skip.{skip}.fc.2", decoder_width, decoder_width)
            weights[f"skip.{skip}.mask_token"] = (1, 1, width)
        for layer in range(decoder_depth):
            block(f"decoder_blocks.{layer}", decoder_width)
        norm("decoder_norm", decoder_width)
        linear("decoder_pred", decoder_width, patch * patch * 3)
    if classes:
        linear("head", width, classes)
    return {
        name: shape if isinstance(shape, torch.Tensor) else 0.3 * torch.randn(shape) for name, shape in weights.items()
    }


class Reference:
    """Forward passes on such a state dict, token by token as the spec tells it, in double precision."""

    def __init__(self, weights, alphas):
        self.weights = {name: tensor.double() for name, tensor in weights.items()}
        self.alphas = alphas  # two per encoder layer

    def linear(self, name, x):
        return x @ self.weights[f"{name}.weight"].T + self.weights[f"{name}.bias"]

    def norm(self, name, x):
        return F.layer_norm(x, x.shape[-1:], self.weights[f"{name}.weight"], self.weights[f"{name}.bias"], 1e-6)

    def attention(self, name, x, heads):
        batch, length, width = x.shape
        qkv = self.linear(f"{name}.qkv", x).view(batch, length, 3, heads, width // heads).permute(2, 0, 3, 1, 4)
        scores = (qkv[0] @ qkv[1].transpose(-1, -2)) * (width // heads) ** -0.5
        return self.linear(f"{name}.proj", (scores.softmax(-1) @ qkv[2]).transpose(1, 2).reshape(x.shape))

    def block(self, name, x, heads, alphas=(1.0, 1.0)):
        x = alphas[0] * x + self.attention(f"{name}.attn", self.norm(f"{name}.norm1", x), heads)
        hidden = F.gelu(self.linear(f"{name}.mlp.fc1", self.norm(f"{name}.norm2", x)))
        return alphas[1] * x + self.linear(f"{name}.mlp.fc2", hidden)

    def encode(self, images, ids_keep):
        conv = F.conv2d(
            images.double(), self.weights["patch_embed.proj.weight"], self.weights["patch_embed.proj.bias"], PATCH
        )
        patches = conv.flatten(2).transpose(1, 2) + self.weights["pos_embed"][:, 1:]
        patches = torch.stack([image[ids] for image, ids in zip(patches, ids_keep)])
        cls_token = self.weights["cls_token"] + self.weights["pos_embed"][:, :1]
        x = torch.cat([cls_token.expand(len(images), -1, -1), patches], 1)
        stored = []
        for layer in range(len(self.alphas) // 2):
            x = self.block(f"blocks.{layer}", x, HEADS, self.alphas[2 * layer : 2 * layer + 2])
            if layer % 2 == 1:
                stored.append(x)
        return x, stored

    def full_grid(self, tokens, mask_token, ids_keep):
        """Class token first, then every patch in its place, `mask_token` where it was removed."""
        full = mask_token.expand(len(tokens), 1 + GRID * GRID, -1).clone()
        full[:, 0] = tokens[:, 0]
        for image, ids in enumerate(ids_keep):
            full[image, 1 + ids] = tokens[image, 1:]
        return full

    def pretrain(self, images, noise):
        ids_keep = noise.argsort(1)[:, : GRID * GRID // 4]
        x, stored = self.encode(images, ids_keep)
        weights = self.weights
        if "decoder_cls_token" in weights:
            y = torch.cat([weights["decoder_cls_token"], weights["decoder_pos_embed"][:, 1:]], 1)
            y = self.linear("decoder_embed", y).expand(len(images), -1, -1)
        else:
            y = self.linear("decoder_embed", self.norm("norm", x))
            y = self.full_grid(y, weights["mask_token"], ids_keep) + weights["decoder_pos_embed"]
        layer = 0
        while f"decoder_blocks.{layer}.norm1.weight" in weights:
            if "decoder_cls_token" in weights and stored:
                skip = self.full_grid(stored.pop(), weights[f"skip.{layer}.mask_token"], ids_keep)
                inner = self.linear(f"skip.{layer}.fc.0", torch.cat([skip, y], -1))
                y = y + self.linear(f"skip.{layer}.fc.2", F.silu(inner))
            y = self.block(f"decoder_blocks.{layer}", y, DECODER_HEADS)
            layer += 1
        return self.linear("decoder_pred", self.norm("decoder_norm", y))[:, 1:]


def assert_equal_to_reference(actual, expected):
    assert (actual.double() - expected).abs().max() < 2e-6 * expected.abs().max()


@pytest.mark.parametrize("depth,dropped", [(4, []), (8, ["skip.3"]), (12, ["skip.3", "skip.4", "skip.5"])])
def test_released_mae(depth, dropped, tmp_path, pixel_values, noise, capsys):
    weights = timm_weights(depth, released=True)
    torch.save({"model": weights, "epoch": 5}, tmp_path / "checkpoint.pth")
    command = ["convert", "--from", "released-mae", "--checkpoint", str(tmp_path / "checkpoint.pth")]
    command += ["--output", str(tmp_path / "out"), "--set", "shortcut_decay=.7"]
    assert main(command + [f"--set={name}={value}" for name, value in HEAD_FIELDS.items()]) == 0
    printed = capsys.readouterr().out
    assert "cc-by-nc-4.0" in printed
    assert [f"skip.{index}" for index in range(depth // 2) if f"skip.{index}.fc.0.weight" in printed] == dropped

    model = DecayedViTMAEForPreTraining.from_pretrained(tmp_path / "out").eval()
    assert (model.config.num_hidden_layers, model.config.num_skips) == (depth, min(depth // 2, 3))
    alphas = [1 - 0.3 * branch / (2 * depth - 1) for branch in range(2 * depth)]
    reference = Reference(weights, alphas)
    with torch.no_grad():
        assert_equal_to_reference(model(pixel_values, noise=noise).logits, reference.pretrain(pixel_values, noise))
        in_order = torch.arange(GRID * GRID).expand(3, -1)
        assert_equal_to_reference(model.vit(pixel_values)[0], reference.encode(pixel_values, in_order)[0])
    card = ModelCard.load(tmp_path / "out" / "README.md")
    assert card.data.license == "cc-by-nc-4.0"
    assert "xiao7199/decayed_Identity_shortcuts" in card.text and "checkpoint.pth" in card.text
    assert str(tmp_path) not in card.content
    assert all(f"{name}.fc.0.weight" in card.text for name in dropped)
    for text in (printed, card.text):  # assumptions and fields set by hand are recorded
        assert "Assumed, because the file does not tell: norm_pix_loss=False, mask_ratio=0.75." in text
        assert "Set by hand: shortcut_decay=0.7" in text


def test_training_arguments_in_the_file_are_used(tmp_path):
    arguments = argparse.Namespace(min_decay=0.65, norm_pix_loss=True, mask_ratio=0.6)
    torch.save({"model": timm_weights(4, released=True), "args": arguments}, tmp_path / "c.pth")
    convert("released-mae", tmp_path / "c.pth", tmp_path / "out", HEAD_FIELDS)
    config = DecayedViTMAEConfig.from_pretrained(tmp_path / "out")
    assert (config.shortcut_decay, config.norm_pix_loss, config.mask_ratio) == (0.65, True, 0.6)


@pytest.mark.parametrize("wrapped", ["plain", "model", "module", "state_dict", "safetensors"])
def test_fb_mae_pretraining(wrapped, tmp_path, pixel_values, noise):
    weights = timm_weights(4)
    file = tmp_path / ("c.safetensors" if wrapped == "safetensors" else "c.pth")
    if wrapped == "safetensors":
        save_file(weights, file)
    elif wrapped == "state_dict":
        torch.save(
            {"state_dict": {f"_orig_mod.{name}": tensor for name, tensor in weights.items()}, "args": None}, file
        )
    elif wrapped == "module":
        torch.save({f"module.{name}": tensor for name, tensor in weights.items()}, file)
    else:
        torch.save({"model": weights} if wrapped == "model" else weights, file)
    convert("fb-mae", file, tmp_path / "out", HEAD_FIELDS)
    model = DecayedViTMAEForPreTraining.from_pretrained(tmp_path / "out").eval()
    with torch.no_grad():
        expected = Reference(weights, [1.0] * 8).pretrain(pixel_values, noise)
        assert_equal_to_reference(model(pixel_values, noise=noise).logits, expected)


def test_fb_mae_encoder_alone(tmp_path, pixel_values):
    weights = timm_weights(4, decoder=False)
    torch.save(weights, tmp_path / "c.pth")
    convert("fb-mae", tmp_path / "c.pth", tmp_path / "out", {"num_attention_heads": HEADS})
    model = DecayedViTMAEModel.from_pretrained(tmp_path / "out").eval()
    reference = Reference(weights, [1.0] * 8)
    expected = reference.norm("norm", reference.encode(pixel_values, torch.arange(16).expand(3, -1))[0])
    with torch.no_grad():
        assert_equal_to_reference(model(pixel_values)[0], expected)


@pytest.mark.parametrize("average_pooling", [False, True])
def test_fb_mae_fine_tuned(average_pooling, tmp_path, pixel_values):
    weights = timm_weights(4, decoder=False, classes=7, average_pooling=average_pooling)
    weights["pos_embed"] = torch.randn(1, 17, WIDTH)  # fine-tuning trains the table, the class token's row too
    torch.save({"model": weights}, tmp_path / "c.pth")
    convert("fb-mae", tmp_path / "c.pth", tmp_path / "out", {"num_attention_heads": HEADS})
    model = DecayedViTMAEForImageClassification.from_pretrained(tmp_path / "out").eval()
    reference = Reference(weights, [1.0] * 8)
    tokens = reference.encode(pixel_values, torch.arange(16).expand(3, -1))[0]
    pooled = (
        reference.norm("fc_norm", tokens[:, 1:].mean(1)) if average_pooling else reference.norm("norm", tokens)[:, 0]
    )
    with torch.no_grad():
        assert_equal_to_reference(model(pixel_values).logits, reference.linear("head", pooled))


def old_names(state):
    """The names of transformers before 5: `encoder.layer`, `attention.attention.query`, ..."""
    renamed = {}
    for name, tensor in state.items():
        name = name.replace("vit.layers.", "vit.encoder.layer.")
        for new, old in (
            ("attention.q_proj", "attention.attention.query"),
            ("attention.k_proj", "attention.attention.key"),
            ("attention.v_proj", "attention.attention.value"),
            ("attention.o_proj", "attention.output.dense"),
            ("mlp.fc1", "intermediate.dense"),
            ("mlp.fc2", "output.dense"),
        ):
            name = name.replace(new, old)
        renamed[name] = tensor
    return renamed


@pytest.mark.parametrize("names", ["stock", "old", "new", "old_pickle"])
def test_vit_mae_folders(names, tmp_path, pixel_values, noise):
    theirs = random_weights(ViTMAEForPreTraining(ViTMAEConfig(**TINY_SIZES))).eval()
    theirs.save_pretrained(tmp_path / "theirs")
    state = {name: tensor.contiguous() for name, tensor in theirs.state_dict().items()}
    if names == "new":
        save_file(state, tmp_path / "theirs" / "model.safetensors", metadata={"format": "pt"})
    elif names == "old":
        save_file(old_names(state), tmp_path / "theirs" / "model.safetensors", metadata={"format": "pt"})
        assert "vit.encoder.layer.0.attention.attention.query.weight" in load_file(
            tmp_path / "theirs" / "model.safetensors"
        )
    elif names == "old_pickle":
        (tmp_path / "theirs" / "model.safetensors").unlink()
        torch.save(old_names(state), tmp_path / "theirs" / "pytorch_model.bin")
    convert("vit-mae", tmp_path / "theirs", tmp_path / "ours")
    folders = ["ours"] if names == "old_pickle" else ["ours", "theirs"]  # from_pretrained converts too, but no pickles
    for folder in folders:
        ours = DecayedViTMAEForPreTraining.from_pretrained(tmp_path / folder).eval()
        assert all(torch.equal(state[name], tensor) for name, tensor in ours.state_dict().items())
        torch.testing.assert_close(ours(pixel_values, noise=noise).loss, theirs(pixel_values, noise=noise).loss)


def test_fields_set_on_a_vit_mae(tmp_path):
    ViTMAEModel(ViTMAEConfig(**TINY_SIZES)).save_pretrained(tmp_path / "theirs")
    (tmp_path / "theirs" / "README.md").write_text("---\nlicense: apache-2.0\n---\n# Theirs\n")
    convert("vit-mae", tmp_path / "theirs", tmp_path / "ours", {"shortcut_decay": 0.8, "pooling": "mean"})
    config = DecayedViTMAEModel.from_pretrained(tmp_path / "ours").config
    assert (config.shortcut_decay, config.pooling) == (0.8, "mean")
    assert ModelCard.load(tmp_path / "ours" / "README.md").data.license == "apache-2.0"


def test_the_image_processor_is_copied(tmp_path):
    ViTMAEModel(ViTMAEConfig(**TINY_SIZES)).save_pretrained(tmp_path / "theirs")
    ViTImageProcessorPil(size={"height": 32, "width": 32}, image_mean=[0.5] * 3).save_pretrained(tmp_path / "theirs")
    convert("vit-mae", tmp_path / "theirs", tmp_path / "ours")
    convert("decayed-mae", tmp_path / "ours", tmp_path / "back")
    for folder in ("ours", "back"):
        assert AutoImageProcessor.from_pretrained(tmp_path / folder).image_mean == pytest.approx([0.5] * 3)


def test_the_image_processor_of_grey_images_becomes_a_stock_one(tmp_path):
    convert("decayed-mae", ROOT / "model_cards" / "plain-mae-fashion-mnist", tmp_path / "back")
    processor = json.loads((tmp_path / "back" / "preprocessor_config.json").read_text())
    assert processor["image_processor_type"] == "ViTImageProcessor" and "auto_map" not in processor


def test_a_missing_file_is_no_repository(tmp_path):
    with pytest.raises(ConversionError, match="No checkpoint at 'checkpoints/mae_pretrain.pth'"):
        convert("fb-mae", "checkpoints/mae_pretrain.pth", tmp_path / "out")


@pytest.mark.parametrize(
    "classes", [(DecayedViTMAEModel, ViTMAEModel), (DecayedViTMAEForPreTraining, ViTMAEForPreTraining)]
)
def test_back_to_vit_mae(classes, tmp_path, pixel_values, noise):
    ours = random_weights(classes[0](DecayedViTMAEConfig.plain(**TINY_SIZES, norm_pix_loss=True))).eval()
    ours.save_pretrained(tmp_path / "ours")
    convert("decayed-mae", tmp_path / "ours", tmp_path / "theirs")
    theirs, info = classes[1].from_pretrained(tmp_path / "theirs", output_loading_info=True)
    assert not any(info.values())
    assert json.loads((tmp_path / "theirs" / "config.json").read_text())["model_type"] == "vit_mae"
    torch.testing.assert_close(ours(pixel_values, noise=noise)[0], theirs(pixel_values, noise=noise)[0])


@pytest.mark.parametrize(
    "fields,reason",
    [
        ({"shortcut_decay": 0.6}, "shortcut_decay=0.6"),
        ({"encoder_decoder_skips": True}, "encoder_decoder_skips=True"),
        ({"final_norm": False}, "final_norm=False"),
        ({"residual_form": "scale_both"}, "residual_form='scale_both'"),
        ({"shortcut_schedule": "learned"}, "shortcut_schedule='learned'"),
        ({"image_size": (32, 16)}, r"image_size=\(32, 16\)"),
    ],
)
def test_back_to_vit_mae_is_refused_for_another_network(fields, reason):
    with pytest.raises(ConversionError, match=f"Only the plain preset .* this model has {reason}"):
        to_vit_mae(DecayedViTMAEForPreTraining(DecayedViTMAEConfig.plain(**{**TINY_SIZES, **fields})))


@pytest.mark.slow
def test_repositories_of_the_hub(tmp_path):
    """In another process, because the address of the Hub is read when its library is imported."""
    theirs = ViTMAEModel(ViTMAEConfig(**TINY_SIZES))
    for name in ("tiny", "pickled"):
        theirs.save_pretrained(tmp_path / "hub" / "facebook" / name)
    (tmp_path / "hub/facebook/pickled/model.safetensors").unlink()
    torch.save(theirs.state_dict(), tmp_path / "hub/facebook/pickled/pytorch_model.bin")
    torch.save({"model": timm_weights(4, released=True)}, tmp_path / "hub/facebook/tiny/checkpoint.pth")
    heads = [f"--set={name}={value}" for name, value in {**HEAD_FIELDS, "shortcut_decay": 0.6}.items()]
    checkpoints = [
        ["vit-mae", "facebook/tiny"],
        ["vit-mae", "facebook/pickled"],
        ["released-mae", "facebook/tiny/checkpoint.pth", *heads],
        ["released-mae", "facebook/tiny"],
        ["vit-mae", "facebook/tiny/model.safetensors"],
        ["vit-mae", "facebook/absent"],
    ]
    words = [
        ["convert", "--from", kind, "--checkpoint", name, "--output", str(tmp_path / str(number)), *options]
        for number, (kind, name, *options) in enumerate(checkpoints)
    ]
    code = "import json, sys; from hf_decayed.cli import main; [main(words) for words in json.loads(sys.argv[1])]"
    with serve(tmp_path / "hub") as server:
        hub = {"HF_ENDPOINT": server.url, "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path / "cache")}
        result = subprocess.run(
            [sys.executable, "-c", code, json.dumps(words)], env={**os.environ, **hub}, capture_output=True, text=True
        )
    assert result.stdout.count("Downloaded from https://huggingface.co/facebook/") == 3, result.stderr[-2000:]
    errors = [line for line in result.stderr.splitlines() if line.startswith("hf-decayed convert: ")]
    assert len(errors) == 3 and "name it, as in facebook/tiny/checkpoint.pth" in errors[0]
    assert "name facebook/tiny alone" in errors[1] and "'facebook/absent' is neither a local folder" in errors[2]
    for number in range(2):
        ours = DecayedViTMAEModel.from_pretrained(tmp_path / str(number))
        assert torch.equal(ours.layers[0].mlp.fc1.weight, theirs.layers[0].mlp.fc1.weight)
    assert "`checkpoint.pth`, SHA-256" in (tmp_path / "2" / "README.md").read_text()


# Bad input: one line, exit code 2, nothing written.


def run(tmp_path, capsys, *arguments):
    before = sorted(tmp_path.rglob("*"))
    code = main(["convert", *map(str, arguments)])
    error = capsys.readouterr().err
    assert code == 2 and error.count("\n") == 1 and error.startswith("hf-decayed convert: ")
    assert sorted(tmp_path.rglob("*")) == before
    return error


def test_bad_input(tmp_path, capsys):
    weights = timm_weights(4, released=True)
    good = tmp_path / "good.pth"
    torch.save({"model": weights}, good)
    heads = [f"--set={name}={value}" for name, value in HEAD_FIELDS.items()]
    decay = "--set=shortcut_decay=0.6"

    def fail(checkpoint, *options, kind="released-mae", output=tmp_path / "out"):
        return run(tmp_path, capsys, "--from", kind, "--checkpoint", checkpoint, "--output", output, *options)

    assert "No checkpoint at" in fail(tmp_path / "absent.pth")
    assert "does not tell num_attention_heads, decoder_num_attention_heads, shortcut_decay" in fail(good)
    assert "--set shortcut_decay=..." in fail(good, *heads)
    assert "did you mean 'shortcut_decay'" in fail(good, "--set=shortcut_deacy=0.6")
    assert "must lie in [0, 1], got 1.5" in fail(good, *heads, "--set=shortcut_decay=1.5")
    assert "'skip.0.mask_token' marks kind 'released-mae'" in fail(good, kind="fb-mae")
    assert "has no config.json" in fail(good, kind="vit-mae")
    assert "exists already" in fail(good, *heads, decay, output=tmp_path)

    renamed = dict(weights)
    renamed["blocks.1.attn.stray"] = renamed.pop("blocks.1.attn.proj.weight")
    torch.save(renamed, tmp_path / "renamed.pth")
    error = fail(tmp_path / "renamed.pth", *heads, decay)
    assert "Missing: ['vit.layers.1.attention.o_proj.weight']" in error
    assert "Unknown: ['vit.layers.1.attention.stray']" in error

    wrong = {**weights, "decoder_norm.weight": torch.ones(25)}
    torch.save(wrong, tmp_path / "wrong.pth")
    assert "decoder.decoder_norm.weight (25,) instead of (24,)" in fail(tmp_path / "wrong.pth", *heads, decay)

    class Trap:
        def __reduce__(self):
            return (open, (str(tmp_path / "sprung"), "w"))

    torch.save({"model": weights, "extra": Trap()}, tmp_path / "trap.pth")
    assert "Python objects, which are not loaded: it names" in fail(tmp_path / "trap.pth", *heads, decay)
    assert not (tmp_path / "sprung").exists()
    (tmp_path / "cut.pth").write_bytes(good.read_bytes()[:1000])
    assert "damaged" in fail(tmp_path / "cut.pth", *heads, decay)
    (tmp_path / "cut.safetensors").write_bytes(b"1234")
    assert "damaged" in fail(tmp_path / "cut.safetensors", *heads, decay)
    torch.save({"model": {"a": 1}}, tmp_path / "numbers.pth")
    assert "holds no state dict" in fail(tmp_path / "numbers.pth", *heads, decay)
    torch.save([1, 2], tmp_path / "list.pth")
    assert "holds no state dict" in fail(tmp_path / "list.pth", *heads, decay)


def test_odd_files_get_one_sentence(tmp_path, capsys):
    weights = timm_weights(4)

    def fail(change, kind="fb-mae", **more):
        torch.save({"model": {**weights, **change}, **more}, tmp_path / "odd.pth")
        flags = [f"--set={name}={value}" for name, value in HEAD_FIELDS.items()]
        return run(
            tmp_path,
            capsys,
            "--from",
            kind,
            "--checkpoint",
            tmp_path / "odd.pth",
            "--output",
            tmp_path / "out",
            *flags,
        )

    torch.save({}, tmp_path / "odd.pth")
    assert "holds no state dict" in fail({7: torch.ones(1)})
    assert "'patch_embed.proj.weight' must have 4 dimensions, got shape (3, 4)" in fail(
        {"patch_embed.proj.weight": torch.ones(3, 4)}
    )
    assert "Unknown: ['vit.layers.x.y']" in fail({"blocks.x.y": torch.ones(1)})
    del weights["decoder_blocks.0.mlp.fc1.weight"]
    assert "'decoder_blocks.0.mlp.fc1.weight' is missing" in fail({})
    folder = tmp_path / "folder"
    folder.mkdir()
    for text in ("[1, 2]", '{"model_type": "vit'):
        (folder / "config.json").write_text(text)
        error = run(tmp_path, capsys, "--from", "vit-mae", "--checkpoint", folder, "--output", tmp_path / "out")
        assert "config.json of" in error and "is damaged" in error


def test_an_interrupted_conversion_leaves_nothing(tmp_path, monkeypatch):
    torch.save(timm_weights(4), tmp_path / "c.pth")
    monkeypatch.setattr(ModelCard, "save", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        convert("fb-mae", tmp_path / "c.pth", tmp_path / "out", HEAD_FIELDS)
    assert [path.name for path in tmp_path.iterdir()] == ["c.pth"]


def test_help(capsys):
    assert main([]) == 0
    explained = capsys.readouterr().out
    assert "alpha * x + f(x)" in explained and "from nothing to a repository" in explained
    commands = re.findall(r"^    (\w+) +\w", explained, re.MULTILINE)
    assert commands == "train prepare convert evaluate report features latents sample segment card publish".split()
    for command in commands:
        with pytest.raises(SystemExit) as stopped:
            main([command, "--help"])
        shown = capsys.readouterr().out
        assert stopped.value.code == 0 and re.search(rf"examples?:\n(.*\n)*? .*{command} ", shown)


COMMAND = """
import sys
sys.argv[0] = "bin/hf-decayed"
from hf_decayed.cli import main
try:
    main(sys.argv[1:])
except SystemExit:
    pass
slow = {"torch", "transformers", "diffusers", "huggingface_hub"} & sys.modules.keys()
"""


def test_help_and_version_import_no_library():
    check = COMMAND + "print('slow imports:', *slow)"
    for flag, text in (("--help", "publish "), ("--version", f"hf_decayed {hf_decayed.__version__}")):
        done = subprocess.run(
            [sys.executable, "-c", check, flag], capture_output=True, text=True, cwd=ROOT, check=True
        )
        assert text in done.stdout and done.stdout.endswith("slow imports:\n")


@pytest.mark.slow
def test_a_command_registers_the_models():
    check = COMMAND + "from transformers import AutoConfig; print(AutoConfig.for_model('decayed_vit_mae').model_type)"
    words = [sys.executable, "-c", check, "card", "--help"]
    done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.endswith("decayed_vit_mae\n")


@pytest.mark.parametrize(
    "words, sentence",
    [
        (
            ["convert", "--from", "keras", "--checkpoint", "x", "--output", "y"],
            "argument --from: invalid choice: 'keras'",
        ),
        (["nonsense"], "argument COMMAND: invalid choice: 'nonsense'"),
        (["sample", "x", "--output", "y", "--num", "many"], "argument --num: invalid int value: 'many'"),
        (["publish", "x"], "the following arguments are required: --repo_id"),
    ],
)
def test_wrong_arguments_take_one_line(words, sentence, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(words)
    error = capsys.readouterr().err
    assert stopped.value.code == 2 and error.count("\n") == 1 and sentence in error


@pytest.mark.parametrize("command", [["sample"], ["card"], ["publish", "--repo_id", "user/mine"]])
@pytest.mark.parametrize("model", ["/nowhere", "outputs/nothing"])
def test_missing_folders_take_one_line(command, model, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    output = ["--output", "samples"] if command == ["sample"] else []
    assert main([command[0], model, *command[1:], *output]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and model in error and len(error) < 200
    assert not list(tmp_path.iterdir())


# Diffusion: weights of our model under the official names must be converted back to the same model.


def fused(state, prefix):
    names = [name for name in ("weight", "bias") if f"{prefix}to_q.{name}" in state]
    return {f"qkv.{name}": torch.cat([state[f"{prefix}to_{letter}.{name}"] for letter in "qkv"]) for name in names}


def official_block(state, prefix, skip_name):
    names = {"norm1": "norm1", "norm2": "norm2", "fc1": "mlp.fc1", "fc2": "mlp.fc2", "attn.to_out.0": "attn.proj"}
    names |= {"modulation": "adaLN_modulation.1", "skip_projection": skip_name}
    block = {f"attn.{name}": tensor for name, tensor in fused(state, f"{prefix}attn.").items()}
    for ours, theirs in names.items():
        for name in ("weight", "bias"):
            if f"{prefix}{ours}.{name}" in state:
                block[f"{theirs}.{name}"] = state[f"{prefix}{ours}.{name}"]
    return block


def uvit_weights(**arguments):
    sizes = {"sample_size": 8, "hidden_size": 32, "num_layers": 4, "num_attention_heads": 4, "shortcut_decay": 1.0}
    model = random_weights(DecayedUViT2DModel(**{**sizes, **arguments})).eval()
    state, weights = model.state_dict(), {}
    outer = {"patch_embedding": "patch_embed.proj", "time_mlp.0": "time_embed.0", "time_mlp.2": "time_embed.2"}
    outer |= {
        "class_embedding": "label_emb",
        "norm_out": "norm",
        "proj_out": "decoder_pred",
        "conv_out": "final_layer",
    }
    for ours, theirs in outer.items():
        weights |= {f"{theirs}.{n}": state[f"{ours}.{n}"] for n in ("weight", "bias") if f"{ours}.{n}" in state}
    weights["pos_embed"] = state["position_embedding"]
    for block in ("in_blocks.0.", "in_blocks.1.", "mid_block.", "out_blocks.0.", "out_blocks.1."):
        weights |= {block + name: tensor for name, tensor in official_block(state, block, "skip_linear").items()}
    return model, weights


def sit_weights(released, **arguments):
    sizes = {"sample_size": 8, "hidden_size": 32, "num_layers": 4, "num_attention_heads": 4, "num_classes": 6}
    variant = {"encoder_decoder_skips": released, "shortcut_decay": 0.8 if released else 1.0}
    model = random_weights(DecayedSiTTransformer2DModel(**{**sizes, **variant, **arguments})).eval()
    state, weights = model.state_dict(), {}
    outer = {"patch_embedding": "x_embedder.proj", "time_mlp.0": "t_embedder.mlp.0", "time_mlp.2": "t_embedder.mlp.2"}
    outer |= {"class_embedding": "y_embedder.embedding_table", "proj_out": "final_layer.linear"}
    outer |= {"modulation_out": "final_layer.adaLN_modulation.1"}
    for ours, theirs in outer.items():
        weights |= {f"{theirs}.{n}": state[f"{ours}.{n}"] for n in ("weight", "bias") if f"{ours}.{n}" in state}
    weights["pos_embed"] = state["position_embedding"]
    for number in range(4):
        prefix = f"blocks.{number}." if not released else f"{('enc', 'dec')[number // 2]}_blocks.{number % 2}."
        block = official_block(state, f"transformer_blocks.{number}.", "skip")
        weights |= {prefix + name: tensor for name, tensor in block.items()}
    return model, weights


@pytest.mark.parametrize(
    "arguments, fields",
    [
        ({"in_channels": 3}, {}),
        ({"in_channels": 4, "num_classes": 6, "time_embedding_mlp": True, "qkv_bias": True}, {}),
        ({"in_channels": 4, "num_classes": 6, "final_conv": False}, {"shortcut_decay": 0.9}),
    ],
)
def test_uvit(arguments, fields, tmp_path):
    model, weights = uvit_weights(**arguments, **fields)
    torch.save(weights, tmp_path / "nnet_ema.pth")
    summary = convert("uvit", tmp_path / "nnet_ema.pth", tmp_path / "out", {"num_attention_heads": 4, **fields})
    assert "DecayedUViTPipeline written" in summary and "Licence of the weights: mit." in summary
    pipeline = DiffusionPipeline.from_pretrained(tmp_path / "out", trust_remote_code=True)
    config = pipeline.unet.config
    latent = arguments["in_channels"] == 4
    assert config.time_input == ("timestep_plus_one" if latent else "continuous")
    assert pipeline.config.latent_scale == (0.18215 if latent else None) and ("VAE" in summary) == latent
    model.register_to_config(time_input=config.time_input)
    sample, labels = torch.randn(2, arguments["in_channels"], 8, 8), torch.tensor([0, 6]) if latent else None
    with torch.no_grad():
        assert torch.equal(pipeline.unet(sample, 7, labels).sample, model(sample, 7, labels).sample)
    if not latent:  # noise levels of the VP SDE, at the times the network is called with
        levels = pipeline.scheduler.alphas_cumprod[[0, 499, 999]]
        times = torch.tensor([0.001, 0.5, 1.0])
        torch.testing.assert_close(levels, torch.exp(-(0.1 * times + 9.95 * times**2)), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("released", [False, True])
def test_sit(released, tmp_path):
    """From what its training writes: the EMA of the weights beside weights, optimizer and arguments."""
    model, weights = sit_weights(released, learned_sigma=True)
    others = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
    contents = {"model": others, "ema": weights, "opt": {"state": {}}, "args": argparse.Namespace(seed=0)}
    torch.save(contents, tmp_path / "0400000.pt")
    kind, fields = ("released-sit", {"shortcut_decay": 0.8}) if released else ("sit", {})
    if released:
        with pytest.raises(ConversionError, match="does not tell num_attention_heads, shortcut_decay: give --set"):
            convert(kind, tmp_path / "0400000.pt", tmp_path / "out")
    convert(kind, tmp_path / "0400000.pt", tmp_path / "out", {"num_attention_heads": 4, **fields})
    pipeline = DiffusionPipeline.from_pretrained(tmp_path / "out", trust_remote_code=True)
    sample, labels = torch.randn(2, 4, 8, 8), torch.tensor([0, 6])
    with torch.no_grad():
        assert torch.equal(pipeline.transformer(sample, 0.3, labels).sample, model(sample, 0.3, labels).sample)


def test_uvit_without_a_null_class(tmp_path):
    """As the official networks of ImageNet at 64 pixels: every row of the class table is a class."""
    model, weights = uvit_weights(num_classes=6)
    torch.save({**weights, "label_emb.weight": weights["label_emb.weight"][:6]}, tmp_path / "nnet.pth")
    summary = convert("uvit", tmp_path / "nnet.pth", tmp_path / "out", {"num_attention_heads": 4})
    assert "6 classes and no null class" in summary and "give --set num_classes=5" in summary
    table = DecayedUViT2DModel.from_pretrained(tmp_path / "out", subfolder="unet").class_embedding.weight
    assert torch.equal(table[:6], model.class_embedding.weight[:6]) and not table[6].any()
    # The row of zeros in its place must not be sampled with.
    pipeline = DiffusionPipeline.from_pretrained(tmp_path / "out", trust_remote_code=True)
    for arguments in ({"class_labels": 1, "guidance_scale": 2.0}, {"batch_size": 2}):
        with pytest.raises(ValueError, match="trained with a class for every image"):
            pipeline(**arguments, num_inference_steps=1)
    assert pipeline(1, num_inference_steps=1, output_type="pt").images.isfinite().all()


def test_diffusion_checkpoints_are_refused(tmp_path):
    _, weights = uvit_weights()
    torch.save({name: tensor for name, tensor in weights.items() if "out_blocks.1.norm2" not in name}, tmp_path / "a")
    with pytest.raises(ConversionError, match=r"Missing: \['out_blocks.1.norm2.bias', 'out_blocks.1.norm2.weight'\]"):
        convert("uvit", tmp_path / "a", tmp_path / "out", {"num_attention_heads": 4})
    with pytest.raises(ConversionError, match="no checkpoint of willisma/SiT: it lacks x_embedder.proj.weight"):
        convert("sit", tmp_path / "a", tmp_path / "out")
    with pytest.raises(
        ConversionError, match="'shortcut_decays' is not a field of the config; did you mean 'shortcut_decay'"
    ):
        convert("uvit", tmp_path / "a", tmp_path / "out", {"shortcut_decays": 0.5})
    _, weights = sit_weights(False)
    torch.save({name: tensor for name, tensor in weights.items() if "y_embedder" not in name}, tmp_path / "b")
    with pytest.raises(ConversionError, match="it lacks y_embedder.embedding_table.weight"):
        convert("sit", tmp_path / "b", tmp_path / "out")
    torch.save({**weights, "x_embedder.proj.weight": torch.zeros(32, 16)}, tmp_path / "c")
    with pytest.raises(ConversionError, match=r"should be a convolution, and has shape \(32, 16\)"):
        convert("sit", tmp_path / "c", tmp_path / "out")
    assert not (tmp_path / "out").exists()
