"""Attention layers of a vision model, and grids of patches: what a recording has to know about a model."""

import inspect
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ..errors import UserError


def transformers_attention(model: PreTrainedModel) -> dict[str, nn.Module]:
    """Attention modules over images by name: those that use the attention interface with the config of their model.

    The decoder of a masked autoencoder is left out: it only runs under masking, where the tokens are no grid.
    """
    modules = dict(model.named_modules())
    attention = {}
    for name, module in modules.items():
        code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
        if code is None or "ALL_ATTENTION_FUNCTIONS" not in code.co_names or "decoder" in name.split("."):
            continue
        parents = [modules[parent] for parent in ancestor_names(name)]
        owner = next(parent for parent in parents if isinstance(parent, PreTrainedModel))
        # Text towers have no patches.
        if module.config is owner.config and getattr(module.config, "patch_size", None) is not None:
            attention[name] = module
    if not attention:
        raise UserError(
            f"{type(model).__name__} has no attention over image patches that can be recorded: none of its modules uses "
            "transformers' attention interface and has a `patch_size` in its config."
        )
    return attention


def diffusers_attention(model: nn.Module) -> dict[str, nn.Module]:
    """Self-attention modules by name, in the order of computation."""
    from diffusers import ModelMixin
    from diffusers.models.attention import AttentionModuleMixin
    from diffusers.models.attention_processor import Attention

    if not isinstance(model, ModelMixin):
        raise UserError(
            "record_attention takes a model of transformers or diffusers (of a pipeline: its `unet` or `transformer`), "
            f"got {type(model).__name__}."
        )
    attention = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, (Attention, AttentionModuleMixin)) and not getattr(module, "is_cross_attention", False)
    }
    if not attention:
        raise UserError(f"{type(model).__name__} has no self-attention layers.")
    # U-Nets of diffusers define their middle block after the upward ones.
    return dict(sorted(attention.items(), key=lambda item: item[0].startswith("up_blocks.")))


def choose_layers(names: list[str], layers: int | str | Iterable[int | str] | None) -> list[str]:
    """The names that `layers` chooses, in the order of the model."""
    if layers is None:
        return names
    chosen: set[str] = set()
    for layer in layers if isinstance(layers, Iterable) and not isinstance(layers, str) else [layers]:
        if isinstance(layer, str):
            matches = [name for name in names if name == layer or name.startswith(layer + ".")]
            if not matches:
                raise UserError(
                    f"`layers` names '{layer}', which has no recordable attention; there are {', '.join(names)}."
                )
            chosen.update(matches)
        elif isinstance(layer, int) and -len(names) <= layer < len(names):
            chosen.add(names[layer])
        else:
            raise UserError(
                f"`layers` must be names, or integers in [{-len(names)}, {len(names) - 1}] for a model with {len(names)} "
                f"attention layers, got {layer!r}."
            )
    if not chosen:
        raise UserError("`layers` must choose at least one layer.")
    return [name for name in names if name in chosen]


def ancestor_names(name: str) -> list[str]:
    """`layers.0.attention` -> itself, `layers.0`, `layers` and the model, whose name is empty."""
    parts = name.split(".")
    return [".".join(parts[:length]) for length in range(len(parts), -1, -1)] if name else [""]


def block_name(name: str, modules: dict[str, nn.Module]) -> str:
    """The block that an attention module is in: the nearest member of a `ModuleList`, or else its parent."""
    candidates = ancestor_names(name)
    pairs = zip(candidates, candidates[1:])
    return next((child for child, parent in pairs if isinstance(modules[parent], nn.ModuleList)), candidates[1])


def config_values(modules: Iterable[nn.Module], name: str) -> Iterator[Any]:
    """Values of a config field, in the order of the modules, without `None`."""
    for module in modules:
        value = getattr(getattr(module, "config", None), name, None)
        if value is not None:
            yield value


def patch_size_of(modules: Iterable[nn.Module]) -> tuple[int, int] | None:
    """Height and width of a patch by the first config that has them."""
    for value in config_values(modules, "patch_size"):
        height, width = value if isinstance(value, (list, tuple)) else (value, value)
        return height, width
    return None


def check_image_size(shape: torch.Size, patch_size: tuple[int, int] | None) -> None:
    if patch_size is not None and (shape[2] < patch_size[0] or shape[3] < patch_size[1]):
        raise UserError(
            f"An image of {shape[2]} x {shape[3]} pixels is smaller than a patch of {patch_size[0]} x {patch_size[1]}."
        )


def check_patch_order(embeddings: nn.Module, args: tuple, output) -> None:
    """Raises if a masked autoencoder drops patches or changes their order."""
    tokens, _, ids_restore = output
    if ids_restore is None:
        return
    num_patches = ids_restore.shape[1]
    if not torch.equal(ids_restore, torch.arange(num_patches, device=ids_restore.device).expand_as(ids_restore)):
        raise UserError(
            f"The encoder sees {tokens.shape[1] - 1} of {num_patches} patches in the order of their noise, not as a grid: "
            "record the encoder without masking (DecayedViTMAEModel without `noise` and `mask_ratio`; ViTMAEModel with "
            "`config.mask_ratio=0.0` and rising `noise`)."
        )
    if tokens.shape[1] - 1 != num_patches:
        raise UserError(
            f"The encoder sees {tokens.shape[1] - 1} of {num_patches} patches, not a whole grid: record it without masking."
        )
