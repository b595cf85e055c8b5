"""What one attention layer computed, and its attention weights."""

import math
from dataclasses import dataclass, field

import torch

from ..errors import UserError


__all__ = ["attention_map"]


@dataclass(frozen=True)
class Windows:
    """Windows of Swin: its attention sees a padded, cyclically shifted grid that is cut into squares."""

    size: int
    shift: int

    def to_grid(self, tensor: torch.Tensor, grid: tuple[int, int]) -> torch.Tensor:
        """`(batch * windows, heads, size * size, dim)` -> `(batch, heads, height * width, dim)`, without padding."""
        height, width = grid
        rows, columns = math.ceil(height / self.size), math.ceil(width / self.size)
        tensor = tensor.unflatten(0, (-1, rows, columns)).unflatten(4, (self.size, self.size))
        tensor = tensor.permute(0, 3, 1, 4, 2, 5, 6).flatten(2, 3).flatten(3, 4)  # (batch, heads, rows, columns, dim)
        tensor = tensor.roll((self.shift, self.shift), (2, 3))[:, :, :height, :width]
        return tensor.flatten(2, 3)


@dataclass
class LayerRecord:
    """What one attention layer computed in one call of the model.

    `query`, `key`, `value` and `output` (the attention output before its projection) are `(batch, heads, tokens,
    head_dim)`; `hidden_states` (the output of the block that the layer is in) is `(batch, tokens, dim)`. Tokens are
    patches, row by row: class, register and other prefix tokens are left out, and windows are merged.

    Args:
        name (`str`): Name of the attention module in the model.
        call (`int`): Index of the model's call, counted from 0.
        grid (`tuple[int, int]`): Number of patches along height and width.
        num_prefix_tokens (`int`): Tokens before the patches, which [`attention_map`] includes.
        scaling (`float`): Factor of the dot products.
        timestep (`torch.Tensor` of shape `(batch,)`, *optional*): Timesteps of a diffusion model's call.
        windows (`Windows`, *optional*): Windows of a layer whose attention is computed in windows.
        tensors (`dict`): Tensors as the layer has them, prefix tokens and windows included. `bias` is what was added to
            the scaled dot products (relative positions, masks), in a shape that broadcasts to the attention weights.
    """

    name: str
    call: int
    grid: tuple[int, int]
    num_prefix_tokens: int
    scaling: float
    timestep: torch.Tensor | None = None
    windows: Windows | None = None
    tensors: dict[str, torch.Tensor] = field(default_factory=dict, repr=False)

    @property
    def query(self) -> torch.Tensor:
        return self.patch_tokens("query")

    @property
    def key(self) -> torch.Tensor:
        return self.patch_tokens("key")

    @property
    def value(self) -> torch.Tensor:
        return self.patch_tokens("value")

    @property
    def output(self) -> torch.Tensor:
        return self.patch_tokens("output")

    @property
    def hidden_states(self) -> torch.Tensor:
        return self.patch_tokens("hidden_states")

    def patch_tokens(self, what: str) -> torch.Tensor:
        """One of the recorded tensors, in patch order and without prefix tokens."""
        tensor = self.recorded(what)
        if self.windows is not None and what != "hidden_states":
            return self.windows.to_grid(tensor, self.grid)
        return tensor[..., self.num_prefix_tokens :, :]

    def recorded(self, what: str) -> torch.Tensor:
        """One of the recorded tensors, as the layer has it."""
        if what not in self.tensors:
            raise UserError(f"`{what}` of {self.name} was not recorded: add '{what}' to `what` of record_attention.")
        return self.tensors[what]


def attention_map(layer: LayerRecord, patches_only: bool = False) -> torch.Tensor:
    """Attention weights of a recorded layer, `(batch, heads, tokens, tokens)`, as the model computes them in eval mode.

    Args:
        layer (`LayerRecord`): A layer with `query` and `key`.
        patches_only (`bool`, defaults to `False`):
            By default, rows and columns begin with the `layer.num_prefix_tokens` prefix tokens (`map[:, :, 0, 1:]` is
            how much a class token attends to every patch). With `True` they are only patches, and the weights of
            every patch sum to one over patches.

    A layer with windows gives the weights within every window, `(batch * windows, heads, size ** 2, size ** 2)`.
    """
    query, key = layer.recorded("query").float(), layer.recorded("key").float()
    if key.shape[1] != query.shape[1]:  # grouped-query attention: several queries share a key
        key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    scores = query @ key.transpose(-1, -2) * layer.scaling
    bias = layer.tensors.get("bias")
    if bias is not None:
        scores = scores.masked_fill(~bias, -math.inf) if bias.dtype == torch.bool else scores + bias.float()
    if patches_only and layer.windows is None:
        scores = scores[..., layer.num_prefix_tokens :, layer.num_prefix_tokens :]
    return scores.softmax(dim=-1)
