"""A trained masked autoencoder in decayed form: the same function, to continue training with decay.

With P_k the product of the alphas up to addition k, x = P_k * u obeys `x <- alpha_k * x + P_k * f(norm(x))` where u obeys
`u <- u + f(norm(u))`: the last layer of every branch takes the factor P_k, and the final norm does not see the scale.
"""

import copy
from itertools import accumulate
from operator import mul

import torch

from ..errors import UserError
from ..models.modeling_decayed_vit_mae import DecayedViTMAEForPreTraining


def continue_with_decay(model: DecayedViTMAEForPreTraining, **fields) -> DecayedViTMAEForPreTraining:
    """A model with the config fields `fields` that computes what `model` does.

    Skips from encoder to decoder are added if `model` has none, unless `fields` say otherwise: their output starts at
    zero, and training can use them as the released architecture does. Raises `UserError` if the function cannot be
    kept.
    """
    if not model.config.final_norm or model.config.encoder_decoder_skips:
        raise UserError(
            "The function can be kept only if a norm stands behind the encoder and no skips leave it, as in ViTMAE: what reads "
            "tokens without a norm sees their scale."
        )
    config = copy.deepcopy(model.config)
    for name, value in {"encoder_decoder_skips": True, **fields}.items():
        setattr(config, name, value)
    config.validate()
    if config.residual_form != "decay" or config.shortcut_schedule == "learned":
        raise UserError(
            "The function can be kept with residual_form 'decay' and a shortcut_schedule that is not learned, got "
            f"'{config.residual_form}' and '{config.shortcut_schedule}'."
        )
    if config.effective_decay() == 0:
        raise UserError(
            "A shortcut with an alpha of 0 drops what was there before: choose a `shortcut_decay` above 0."
        )
    decayed = DecayedViTMAEForPreTraining._from_config(
        config, attn_implementation=model.config._attn_implementation, dtype=model.dtype
    )
    load_weights(decayed, model.state_dict())
    scale_branches(decayed, model.vit.shortcut_alphas())
    return decayed


def load_weights(decayed: DecayedViTMAEForPreTraining, weights: dict[str, torch.Tensor]) -> None:
    """Copies all weights; only skips may be new."""
    expected = decayed.state_dict()
    new = {name for name in expected if name not in weights and not name.startswith("decoder.skips.")}
    other_shapes = {name for name in weights if name not in expected or expected[name].shape != weights[name].shape}
    if new or other_shapes:
        raise UserError(
            f"The function cannot be kept with another architecture; other weights: {', '.join(sorted(new | other_shapes))}."
        )
    decayed.load_state_dict(weights, strict=False)


@torch.no_grad()
def scale_branches(decayed: DecayedViTMAEForPreTraining, old_alphas: list[tuple[float, float]]) -> None:
    new_alphas = decayed.config.shortcut_alphas()
    ratios = [new / old for new_pair, old_pair in zip(new_alphas, old_alphas) for new, old in zip(new_pair, old_pair)]
    layers = [layer for block in decayed.vit.layers for layer in (block.attention.o_proj, block.mlp.fc2)]
    for layer, scale in zip(layers, accumulate(ratios, mul)):
        layer.weight *= scale
        layer.bias *= scale
