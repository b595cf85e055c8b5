"""Checkpoints of the MAE code bases, which use timm's names."""

import dataclasses
import math
import re
from functools import partial
from pathlib import Path

import torch
from transformers import PreTrainedModel

from ...models.configuration_decayed_vit_mae import PLAIN, DecayedViTMAEConfig
from ...models.modeling_decayed_vit_mae import (
    DecayedViTMAEForImageClassification,
    DecayedViTMAEForPreTraining,
    DecayedViTMAEModel,
)
from ._format import ConversionError, Format, check_known, load_weights, read_weights


# timm's names -> ours. Fused matrices are split afterwards.
TIMM_NAMES = {
    r"^cls_token$": "vit.embeddings.cls_token",
    r"^pos_embed$": "vit.embeddings.position_embeddings",
    r"^patch_embed\.proj\.": "vit.embeddings.patch_embeddings.projection.",
    r"^blocks\.": "vit.layers.",
    r"^norm\.": "vit.layernorm.",
    r"^decoder_blocks\.": "decoder.decoder_layers.",
    r"^(mask_token$|decoder_)": r"decoder.\1",
    r"^skip\.": "decoder.skips.",
    r"^head\.": "classifier.",
    r"\.norm1\.": ".layernorm_before.",
    r"\.norm2\.": ".layernorm_after.",
    r"\.attn\.": ".attention.",
    r"\.attention\.proj\.": ".attention.o_proj.",
}

# Shapes do not tell the number of heads; these are the ones of the published widths.
HEADS_BY_WIDTH = {384: 6, 768: 12, 1024: 16, 1280: 16}
DECODER_HEADS_BY_WIDTH = {512: 16}


def config_fields() -> set[str]:
    return {field.name for field in dataclasses.fields(DecayedViTMAEConfig)} | {"num_labels", "id2label", "label2id"}


def read_mae(name: str, checkpoint: Path, fields: dict) -> tuple[PreTrainedModel, list[str]]:
    """Model with the weights of a MAE code base, and notes about the conversion."""
    weights, arguments = read_weights(checkpoint)
    check_weights(name, weights)
    config = timm_config(name, weights, arguments, fields)
    # The released L and H models hold skips for decoder layers that do not exist; they were never trained.
    unused = re.compile(r"skip\.(\d+)\.")
    dropped = [key for key in weights if (match := unused.match(key)) and int(match[1]) >= config.num_skips]
    converted = rename_weights({key: weights[key] for key in weights if key not in dropped}, config.hidden_size)
    if "classifier.weight" in converted:
        model_class = DecayedViTMAEForImageClassification
    elif "decoder.decoder_pred.weight" in converted:
        model_class = DecayedViTMAEForPreTraining
    else:
        model_class = DecayedViTMAEModel
        converted = {key.removeprefix("vit."): tensor for key, tensor in converted.items()}
    notes = []
    if dropped:
        notes.append(f"Dropped, because no decoder layer uses them: {', '.join(dropped)}.")
    assumed = [field for field in ("norm_pix_loss", "mask_ratio") if field not in {**arguments, **fields}]
    if assumed and model_class is DecayedViTMAEForPreTraining:
        values = ", ".join(f"{field}={getattr(config, field)}" for field in assumed)
        notes.append(f"Assumed, because the file does not tell: {values}.")
    return load_weights(model_class(config), converted), notes


def check_weights(name: str, weights: dict[str, torch.Tensor]) -> None:
    """Refuses a checkpoint of another format, or with tensors from which no config can be read."""
    dimensions = {"cls_token": 3, "pos_embed": 3, "patch_embed.proj.weight": 4, "blocks.0.mlp.fc1.weight": 2}
    if "decoder_pred.weight" in weights:
        dimensions |= {"decoder_pred.weight": 2, "decoder_blocks.0.mlp.fc1.weight": 2}
    for key, number in dimensions.items():
        if key not in weights:
            raise ConversionError(f"Not a checkpoint of kind '{name}': '{key}' is missing.")
        if weights[key].ndim != number:
            raise ConversionError(f"'{key}' must have {number} dimensions, got shape {tuple(weights[key].shape)}.")
    if ("skip.0.mask_token" in weights) != (name == "released-mae"):
        raise ConversionError(
            f"Not a checkpoint of kind '{name}': 'skip.0.mask_token' marks kind 'released-mae', and it is "
            f"{'there' if name != 'released-mae' else 'missing'}."
        )


def rename_weights(weights: dict[str, torch.Tensor], hidden_size: int) -> dict[str, torch.Tensor]:
    """The same tensors under our names, with fused matrices split."""
    converted = {}
    for key, tensor in weights.items():
        for pattern, replacement in TIMM_NAMES.items():
            key = re.sub(pattern, replacement, key)
        if ".qkv." in key:
            for part, piece in zip(("q_proj", "k_proj", "v_proj"), tensor.chunk(3)):
                converted[key.replace("qkv", part)] = piece.contiguous()
        elif key.endswith(".fc.0.weight"):
            # The released skip concatenates encoder tokens and decoder tokens, in this order.
            skip = key.removesuffix("fc.0.weight")
            converted[f"{skip}encoder_projection.weight"] = tensor[:, :hidden_size].contiguous()
            converted[f"{skip}decoder_projection.weight"] = tensor[:, hidden_size:].contiguous()
        else:
            key = key.replace(".fc.0.bias", ".encoder_projection.bias").replace(".fc.2.", ".output_projection.")
            converted[key] = tensor
    return converted


def timm_config(name: str, weights: dict[str, torch.Tensor], arguments: dict, fields: dict) -> DecayedViTMAEConfig:
    """Config read from the shapes and the stored training arguments; `fields` adds or overrides."""

    def depth(prefix):
        numbers = [int(match[1]) for key in weights if (match := re.match(rf"{prefix}\.(\d+)\.", key))]
        return 1 + max(numbers)

    hidden_size, num_channels, *patch_size = weights["patch_embed.proj.weight"].shape
    known = {
        "hidden_size": hidden_size,
        "num_channels": num_channels,
        "patch_size": patch_size[0] if patch_size[0] == patch_size[1] else patch_size,
        "num_hidden_layers": depth("blocks"),
        "num_attention_heads": HEADS_BY_WIDTH.get(hidden_size),
        "intermediate_size": weights["blocks.0.mlp.fc1.weight"].shape[0],
        "qkv_bias": "blocks.0.attn.qkv.bias" in weights,
        "norm_pix_loss": arguments.get("norm_pix_loss", False),
        "mask_ratio": arguments.get("mask_ratio", 0.75),
    }
    side = math.isqrt(weights["pos_embed"].shape[1] - 1)
    known["image_size"] = [side * patch_size[0], side * patch_size[1]]
    if patch_size[0] == patch_size[1]:
        known["image_size"] = side * patch_size[0]
    if side**2 != weights["pos_embed"].shape[1] - 1:
        known["image_size"] = None
    if "decoder_pred.weight" in weights:
        decoder_hidden_size = weights["decoder_pred.weight"].shape[1]
        known |= {
            "decoder_hidden_size": decoder_hidden_size,
            "decoder_num_hidden_layers": depth("decoder_blocks"),
            "decoder_num_attention_heads": DECODER_HEADS_BY_WIDTH.get(decoder_hidden_size),
            "decoder_intermediate_size": weights["decoder_blocks.0.mlp.fc1.weight"].shape[0],
        }
    if name == "released-mae":
        known["shortcut_decay"] = arguments.get("min_decay")
    else:
        known |= {**PLAIN, "layer_norm_eps": 1e-6}
    if "fc_norm.weight" in weights:  # fine-tuned with average pooling
        known |= {"final_norm": False, "pooling": "patch_mean"}
    if "head.weight" in weights:
        known["num_labels"] = weights["head.weight"].shape[0]
    known |= fields
    check_known(known)
    return DecayedViTMAEConfig(**known)


FORMATS = [
    Format(
        name="released-mae",
        text="the authors' decayed MAE (xiao7199/decayed_Identity_shortcuts)",
        licence="cc-by-nc-4.0",
        read=partial(read_mae, "released-mae"),
        fields=config_fields,
    ),
    Format(
        name="fb-mae",
        text="facebookresearch/mae, pretraining or fine-tuning",
        licence="cc-by-nc-4.0",
        read=partial(read_mae, "fb-mae"),
        fields=config_fields,
    ),
]
