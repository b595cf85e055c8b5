"""`decay_shortcuts`: decayed identity shortcuts in models of transformers, diffusers, this package and the user."""

from torch import nn

from ..errors import UserError
from .carrier import decayed_stacks, install, settings_alphas, update
from .folding import checked_factors, fold_stacks, install_saving, remove_stacks, require_decay, scale_parameters
from .own_models import decay_own_model, find_own_model, fold_own_model, require_own_stack, set_own_decay
from .schedule import DecaySettings, check_choices, check_value, resolve_decay
from .stacks import find_part, find_stack, hidden_states_refusal


__all__ = ["decay_shortcuts", "fold_shortcuts", "remove_decay", "set_shortcut_decay", "shortcut_alphas"]


def decay_shortcuts(
    model: nn.Module,
    shortcut_decay: float | str = "auto",
    schedule: str = "linear",
    granularity: str = "sublayer",
    scope: str = "both",
    blocks: dict[type, list[tuple[str, ...]]] | None = None,
    keep_function: bool = False,
    part: str = "",
) -> nn.Module:
    """Multiplies the identity shortcuts of a model by alphas that fall with depth, `x <- alpha * x + f(x)`, in place.

    Parameters, their names and the arguments of `forward` do not change; `shortcut_decay=1.0` changes no bit. Copies,
    `torch.compile`, gradient checkpointing and adapters work as before. `save_pretrained` writes folded weights, which a
    stock class loads: see [`fold_shortcuts`].

    Args:
        model (`nn.Module`):
            A model of transformers (ViT, DeiT, DINOv2, DINOv3, CLIP and SigLIP towers, BEiT, ViTMAE, Swin, GPT-2, Llama,
            ConvNeXt, ResNet) or diffusers (DiT, PixArt, SD3, Flux, UNet2D), alone or in a larger model; or one of this
            package (MAE, SiT, U-ViT, ResNet) that has no decay yet, whose config then says what it is.
        shortcut_decay (`float` or `"auto"`, defaults to `"auto"`):
            Alpha of the last addition, in (0, 1]. `"auto"` makes the product of all alphas 3e-3.
        schedule (`str`, defaults to `"linear"`): `linear`, `cosine` or `constant`.
        granularity (`str`, defaults to `"sublayer"`): Whether depth grows with every addition, or with every block (`layer`).
        scope (`str`, defaults to `"both"`): `both`, or only the `attention` or `mlp` branches.
        blocks (`dict`, *optional*):
            Branches of pre-norm blocks that this package does not know, in the order in which they run: the module
            that reads the stream, the module whose output is added, and for folding the branch's last layer.
            `{MyBlock: [("norm1", "attn", "attn.proj"), ("norm2", "mlp", "mlp.fc2")]}`. This is checked with the first
            input of each block (unless the block is compiled).
        keep_function (`bool`, defaults to `False`):
            Scales the weights of the branches so that the model's outputs stay the same, to continue training a public
            checkpoint with decay.
        part (`str`, *optional*):
            Name of the submodule to decay, for models with several residual stacks, such as `vision_model`.

    Returns the model.

    >>> model = decay_shortcuts(AutoModel.from_pretrained("facebook/dinov2-base"), 0.6)
    """
    check_choices(shortcut_decay, schedule, granularity, scope)
    own_model = find_own_model(find_part(model, part))
    if own_model is not None:
        if blocks is not None:
            raise UserError(f"`blocks` is for blocks that are not known; those of {type(own_model).__name__} are.")
        decay_own_model(own_model, shortcut_decay, schedule, granularity, scope, keep_function)
        return model
    if decayed_stacks(find_part(model, part)):
        raise UserError(
            f"{type(model).__name__} is decayed already: use `set_shortcut_decay`, or `remove_decay` first."
        )
    stack = find_stack(find_part(model, part), blocks)
    stack.fold_refusal = stack.fold_refusal or hidden_states_refusal(model, stack.modules)
    value = resolve_decay(stack.blocks, shortcut_decay, schedule, granularity, scope)
    settings = DecaySettings(
        shortcut_decay=value,
        schedule=schedule,
        granularity=granularity,
        scope=scope,
        keep_function=bool(keep_function),
        num_blocks=len(stack.blocks),
        fold_refusal=stack.fold_refusal,
        raw_output=stack.raw_output,
    )
    if keep_function:
        scale_parameters(checked_factors(stack, settings), inverse=True)
    install(stack, settings)
    install_saving(model)
    return model


def fold_shortcuts(model: nn.Module) -> nn.Module:
    """Turns a decayed model, in place, into a stock model of the same class whose outputs are the same.

    Weights of the branches are divided by the decay that the stream has passed. Everything after the final norm is as
    before, to the precision of the weights and the eps of the norms; hidden states, and last hidden states of models
    without a final norm, come out divided by the product of the alphas. A model of `decay_shortcuts(...,
    keep_function=True)` folds exactly. SiT and U-ViT of this package become networks with `shortcut_decay=1.0`; for
    encoders with skips or without a final norm see [`stock_model`]. Fold a `copy.deepcopy(model)` to continue training
    the decayed one.

    Raises `UserError` for models that read their stream without a norm (ResNet, UNet2D), for quantised or sharded
    weights, unmerged adapters, and if float16 would overflow. Returns the model.

    >>> fold_shortcuts(model).save_pretrained("stock")
    """
    own_model = find_own_model(find_part(model))
    if own_model is not None:
        fold_own_model(own_model)
    else:
        fold_stacks(model)
    return model


def remove_decay(model: nn.Module) -> nn.Module:
    """Gives a decayed model plain shortcuts again, in place; its weights stay, so its outputs change.

    To keep what the model computes, see [`fold_shortcuts`]. Returns the model.
    """
    own_model = find_own_model(find_part(model))
    if own_model is not None:
        set_own_decay(own_model, 1.0)
    else:
        remove_stacks(model)
    return model


def set_shortcut_decay(model: nn.Module, value: float) -> None:
    """Sets the `shortcut_decay` of a decayed model, in (0, 1], for example in a warm-up from 1; the weights stay.

    A compiled model is compiled again for new values.
    """
    check_value(value)
    own_model = find_own_model(find_part(model))
    if own_model is not None:
        set_own_decay(own_model, float(value))
        return
    for stack, settings in require_decay(model):
        if settings.keep_function:
            raise UserError("With `keep_function=True` the weights depend on the decay: it cannot be changed.")
        settings.shortcut_decay = float(value)
        update(stack, settings)


def shortcut_alphas(model: nn.Module) -> list[tuple[float, ...]]:
    """Alphas of every block of a decayed model, first block first, one for each of its additions."""
    own_model = find_own_model(find_part(model))
    if own_model is not None:
        return [tuple(alphas) for alphas in require_own_stack(own_model).alphas]
    stacks = require_decay(model)
    return [tuple(alphas) for stack, settings in stacks for alphas in settings_alphas(stack, settings)]
