"""`decay_shortcuts`: decayed identity shortcuts in models of transformers, diffusers, and of the user."""

from torch import nn

from ..errors import UserError
from .carrier import decayed_stacks, install, settings_alphas, update
from .families import has_module
from .folding import checked_factors, install_saving, require_decay, scale_parameters
from .schedule import DecaySettings, check_choices, check_value, resolve_decay
from .stacks import find_stack


__all__ = ["decay_shortcuts", "set_shortcut_decay", "shortcut_alphas"]


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
            ConvNeXt, ResNet) or diffusers (DiT, PixArt, SD3, Flux, UNet2D), alone or in a larger model.
        shortcut_decay (`float` or `"auto"`, defaults to `"auto"`):
            Alpha of the last addition, in (0, 1]. `"auto"` makes the product of all alphas 3e-3.
        schedule (`str`, defaults to `"linear"`): `linear`, `cosine` or `constant`.
        granularity (`str`, defaults to `"sublayer"`): Whether depth grows with every addition, or with every block (`layer`).
        scope (`str`, defaults to `"both"`): `both`, or only the `attention` or `mlp` branches.
        blocks (`dict`, *optional*):
            Branches of pre-norm blocks that are not known, in the order in which they run: the module that reads the stream,
            the module whose output is added, and for folding the branch's last layer.
            `{MyBlock: [("norm1", "attn", "attn.proj"), ("norm2", "mlp", "mlp.fc2")]}`. Whether this is true is tried with
            the first input of each block (not if that is compiled).
        keep_function (`bool`, defaults to `False`):
            Scales the weights of the branches so that the model computes what it did, in order to train a public
            checkpoint further with decay.
        part (`str`, *optional*):
            Name of the submodule to decay, for models with several residual stacks, such as `vision_model`.

    Returns the model.

    >>> model = decay_shortcuts(AutoModel.from_pretrained("facebook/dinov2-base"), 0.6)
    """
    if not isinstance(model, nn.Module):
        raise UserError(f"`model` must be a torch module, got {type(model).__name__}.")
    check_choices(shortcut_decay, schedule, granularity, scope)
    if decayed_stacks(find_part(model, part)):
        raise UserError(
            f"{type(model).__name__} is decayed already: use `set_shortcut_decay`, or `remove_decay` first."
        )
    stack = find_stack(find_part(model, part), blocks)
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


def find_part(model: nn.Module, part: str) -> nn.Module:
    if not has_module(model, part):
        names = ", ".join(name for name, _ in model.named_children())
        raise UserError(f"{type(model).__name__} has no `part` '{part}'; its own are: {names}.")
    return model.get_submodule(part)


def set_shortcut_decay(model: nn.Module, value: float) -> None:
    """Sets the `shortcut_decay` of a decayed model, in (0, 1], such as for a warm-up from 1; the weights stay.

    A compiled model is compiled again for new values.
    """
    check_value(value)
    for stack, settings in require_decay(model):
        if settings.keep_function:
            raise UserError("With `keep_function=True` the weights depend on the decay: it cannot be changed.")
        settings.shortcut_decay = float(value)
        update(stack, settings)


def shortcut_alphas(model: nn.Module) -> list[tuple[float, ...]]:
    """Alphas of every block of a decayed model, first block first, one for each of its additions."""
    stacks = require_decay(model)
    return [tuple(alphas) for stack, settings in stacks for alphas in settings_alphas(stack, settings)]
