"""Recording of queries, keys, values, attention outputs and hidden states of vision models.

>>> with record_attention(model, layers=[-2, -1]) as record:
...     model(pixel_values)
>>> record.layers[-1].query.shape  # (batch, heads, height * width, head_dim)
>>> attention_map(record.layers[-1])  # the attention weights of the last layer

In transformers, the model's own attention function is wrapped (`AttentionInterface`); in diffusers, the call of
`scaled_dot_product_attention` inside each attention module is observed. Both see queries and keys after rotary
positions and normalisation, which hooks on the projections do not, and neither changes the output by a bit.
"""

import inspect
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from ..errors import UserError
from .attention_layers import (
    ancestor_names,
    block_name,
    check_image_size,
    check_patch_order,
    choose_layers,
    config_values,
    diffusers_attention,
    patch_size_of,
    transformers_attention,
)
from .layer_records import LayerRecord, Windows


__all__ = ["record_attention"]

WHAT = ("query", "key", "value", "output", "hidden_states")
IMAGE_ARGUMENTS = ("pixel_values", "sample", "hidden_states")
MAX_EXTRA_TOKENS = (
    2  # besides registers: class and distillation tokens of encoders, time and class of diffusion models
)

_recording_numbers = itertools.count()  # nested recordings need attention functions of different names


@contextmanager
def record_attention(
    model: nn.Module,
    layers: int | str | Iterable[int | str] | None = None,
    what: str | Iterable[str] = ("query", "key", "value"),
    device: str | torch.device | None = "cpu",
    memory_limit: float | None = 4.0,
) -> Iterator["AttentionRecord"]:
    """Records the self-attention over image patches in all calls of `model` inside the `with` block.

    The model's outputs stay the same bit by bit, and nothing stays in the model after the block. Cross-attention and
    attention over text are not recorded.

    Args:
        model (`nn.Module`): A vision model of transformers, or a U-Net or transformer of diffusers.
        layers (`int`, `str` or several, *optional*):
            Indices, negative ones counted from the last layer, or names of modules: `-1`, `"layers.3"`, `"mid_block"`.
            By default all layers.
        what (`str` or several): Some of `query`, `key`, `value`, `output` and `hidden_states`, see [`LayerRecord`].
        device (`str`, *optional*, defaults to `"cpu"`): Where the record is stored. `None` is where the model computes it.
        memory_limit (`float`, *optional*, defaults to 4.0):
            In gigabytes (1e9 bytes). A call whose record would exceed it raises an error that says how much it needs,
            and its record is not stored. `None` is no limit. `record.estimate(...)` gives the number beforehand.

    Returns:
        An [`AttentionRecord`]. `record.layers` is a list of [`LayerRecord`], in the order in which they were computed;
        several calls, such as the steps of a diffusion model, are appended.

    >>> with record_attention(pipeline.unet, layers="mid_block", what="value") as record:
    ...     pipeline(num_inference_steps=10)
    >>> [(layer.name, layer.timestep) for layer in record.layers]
    """
    record = AttentionRecord(model, layers, what, device, memory_limit)
    with ExitStack() as cleanup:
        record.attach(cleanup)
        yield record
    if not record.layers:
        raise UserError(
            "Nothing was recorded: call the model that was passed to record_attention inside of the `with` block; only "
            "self-attention over image patches is recorded."
        )


class AttentionRecord:
    """The recorded layers of a model, see [`record_attention`]."""

    def __init__(self, model, layers, what, device, memory_limit):
        self.what = check_what(what)
        if memory_limit is not None and not (isinstance(memory_limit, (int, float)) and memory_limit > 0):
            raise UserError(f"`memory_limit` must be a positive number of gigabytes or None, got {memory_limit!r}.")
        self.model, self.device, self.memory_limit = model, device, memory_limit
        self.layers: list[LayerRecord] = []
        self.memory = 0  # in bytes
        modules = dict(model.named_modules()) if isinstance(model, nn.Module) else {}
        self.is_transformers = isinstance(model, PreTrainedModel)
        candidates = transformers_attention(model) if self.is_transformers else diffusers_attention(model)
        self.names = choose_layers(list(candidates), layers)
        self._name_of = {candidates[name]: name for name in self.names}
        self._blocks = {name: modules[block_name(name, modules)] for name in self.names}
        # The module itself first, the model last.
        self._ancestors = {name: [modules[parent] for parent in ancestor_names(name)] for name in self.names}
        self._image_shapes: dict[nn.Module, torch.Size] = {}
        self._window_grids: dict[nn.Module, tuple[int, int]] = {}
        self._call: list[LayerRecord] = []
        self._call_memory, self._num_calls = 0, 0
        self._timestep: Any = None
        self._is_attached = self._is_called = self._only_counts = False

    def estimate(self, *args, **kwargs) -> int:
        """Bytes that the record of one call takes. It calls the model with these arguments, and stores nothing."""
        if not self._is_attached:
            raise UserError("`estimate` works inside of the `with record_attention(...)` block.")
        self._only_counts = True
        try:
            with torch.no_grad():
                self.model(*args, **kwargs)
        finally:
            self._only_counts = False
        return self._call_memory

    def attach(self, cleanup: ExitStack) -> None:
        """Adds hooks and attention functions to the model; `cleanup` removes them."""
        self._is_attached = True
        cleanup.callback(setattr, self, "_is_attached", False)
        parents = dict.fromkeys(itertools.chain.from_iterable(self._ancestors.values()))
        hooks = [self.model.register_forward_pre_hook(self.begin_call, with_kwargs=True)]
        hooks += [module.register_forward_pre_hook(self.note_shapes, with_kwargs=True) for module in parents]
        for module in self.model.modules():
            # Masked autoencoders of transformers, ours, and copies that came with a checkpoint.
            if type(module).__name__.endswith("ViTMAEEmbeddings"):
                hooks.append(module.register_forward_hook(check_patch_order))
        for hook in hooks:
            cleanup.callback(hook.remove)
        if self.is_transformers:
            self.wrap_attention_functions(cleanup)
        else:
            self.observe_attention_modules(cleanup)
        # Last, because the block may be the attention module itself, and its layer has to be in the record first.
        if "hidden_states" in self.what:
            for name in self.names:
                cleanup.callback(self._blocks[name].register_forward_hook(self.block_hook(name)).remove)
        cleanup.callback(self.model.register_forward_hook(self.end_call).remove)

    def wrap_attention_functions(self, cleanup: ExitStack) -> None:
        """Registers attention functions that call the model's own, and record."""
        owners = [module for module in self.model.modules() if isinstance(module, PreTrainedModel)]
        implementations = [(owner.config, owner.config._attn_implementation) for owner in owners]

        def restore() -> None:
            for config, implementation in implementations:
                config._attn_implementation = implementation

        cleanup.callback(restore)
        for config in unique_configs(self._name_of):
            previous = config._attn_implementation
            name = f"recorded_attention_{next(_recording_numbers)}"
            AttentionInterface.register(name, self.attention_function(previous))
            cleanup.callback(AttentionInterface._global_mapping.pop, name)  # there is no public way to unregister
            if previous in AttentionMaskInterface._global_mapping:
                AttentionMaskInterface.register(name, AttentionMaskInterface._global_mapping[previous])
                cleanup.callback(AttentionMaskInterface._global_mapping.pop, name)
            owner = next(owner for owner in owners if owner.config is config)
            owner.set_attn_implementation(name)

    def attention_function(self, previous: str | None) -> Callable:
        """A function for `AttentionInterface` that calls the implementation `previous`, and records."""

        def recorded_attention(module, query, key, value, attention_mask=None, **kwargs):
            results = previous_function(module, previous)(module, query, key, value, attention_mask, **kwargs)
            if module in self._name_of:
                tensors = {"query": query, "key": key, "value": value, "output": results[0].transpose(1, 2)}
                bias = add_biases(attention_mask, kwargs.get("position_bias"))
                self.add(self._name_of[module], tensors, bias, kwargs.get("scaling"))
            return results

        return recorded_attention

    def observe_attention_modules(self, cleanup: ExitStack) -> None:
        """Hooks on attention modules of diffusers that observe the functions called by their processors."""
        for module, name in self._name_of.items():
            observer = AttentionObserver(self, name, module.heads)
            cleanup.callback(module.register_forward_pre_hook(observer.begin, with_kwargs=True).remove)
            # Called after exceptions too, so that the observer never outlives the module's call.
            cleanup.callback(module.register_forward_hook(observer.end, always_call=True).remove)

    def begin_call(self, model: nn.Module, args: tuple, kwargs: dict) -> None:
        self._call, self._call_memory, self._is_called = [], 0, True
        self._image_shapes.clear()
        self._window_grids.clear()
        self._timestep = bind_arguments(model, args, kwargs).get("timestep")

    def end_call(self, model: nn.Module, args: tuple, output) -> None:
        self._is_called = False
        if self._only_counts:
            return
        if self.exceeds_limit():
            raise UserError(
                f"Recording {', '.join(self.what)} of {len(self.names)} layers needs "
                f"{(self.memory + self._call_memory) / 1e9:.3g} GB with this call, more than `memory_limit` "
                f"({self.memory_limit:g} GB): choose fewer `layers`, less in `what`, a smaller batch or fewer calls."
            )
        self.layers += self._call
        self.memory += self._call_memory
        self._num_calls += 1

    def note_shapes(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        """Remembers the image that a module gets, and the grid that a layer with windows gets."""
        image = args[0] if args else next((kwargs[name] for name in IMAGE_ARGUMENTS if name in kwargs), None)
        self._image_shapes.pop(module, None)
        if isinstance(image, torch.Tensor) and image.ndim == 4:
            self._image_shapes[module] = image.shape
        if hasattr(module, "window_size") and hasattr(module, "shift_size"):
            grid = bind_arguments(module, args, kwargs).get("input_dimensions")
            if grid is not None:
                self._window_grids[module] = (int(grid[0]), int(grid[1]))
        if module is self.model and self.is_transformers and module in self._image_shapes:
            check_image_size(self._image_shapes[module], patch_size_of([module]))

    def block_hook(self, name: str) -> Callable:
        def record_hidden_states(block: nn.Module, args: tuple, output) -> None:
            layer = next((layer for layer in reversed(self._call) if layer.name == name), None)
            if self._is_called and layer is not None:
                hidden_states = output if isinstance(output, torch.Tensor) else output[0]
                if hidden_states.ndim == 4:  # (batch, dim, height, width)
                    hidden_states = hidden_states.flatten(2).transpose(1, 2)
                self.store(layer, "hidden_states", hidden_states)

        return record_hidden_states

    def add(self, name: str, tensors: dict[str, torch.Tensor], bias: torch.Tensor | None, scaling: float | None):
        """Adds one layer to the record of the running call."""
        query, key = tensors["query"], tensors["key"]
        if not self._is_called or query.shape[2] != key.shape[2]:
            return
        batch_size, (grid, num_prefix_tokens, windows) = self.layout(name, query)
        timestep = None
        if self._timestep is not None:
            timestep = (
                torch.as_tensor(self._timestep).detach().float().flatten().expand(batch_size).to("cpu", copy=True)
            )
        scaling = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
        layer = LayerRecord(name, self._num_calls, grid, num_prefix_tokens, scaling, timestep, windows)
        self._call.append(layer)
        for what in self.what:
            if what in tensors:
                self.store(layer, what, tensors[what])
        if bias is not None and {"query", "key"} <= set(self.what):
            self.store(layer, "bias", without_expansion(bias))

    def layout(self, name: str, query: torch.Tensor) -> tuple[int, tuple[tuple[int, int], int, Windows | None]]:
        """Batch size of the call, and grid, number of prefix tokens and windows of a layer."""
        batch_size, num_tokens = query.shape[0], query.shape[2]
        block = self._blocks[name]
        modules = self._ancestors[name]
        image_module = next((module for module in modules if module in self._image_shapes), None)
        if image_module is None:
            raise UserError(
                f"The grid of {name} is not known: the model was not called with images of shape (batch, channels, "
                "height, width)."
            )
        num_images, _, height, width = self._image_shapes[image_module]
        if block in self._window_grids:
            return num_images, (self._window_grids[block], 0, Windows(int(block.window_size), int(block.shift_size)))
        above = modules[modules.index(image_module) :]
        patch_height, patch_width = patch_size_of(above) or (1, 1)  # U-Nets attend to pixels
        grid = (height // patch_height, width // patch_width)
        num_prefix_tokens = num_tokens - math.prod(grid)
        num_registers = next((value for value in config_values(above, "num_register_tokens")), 0)
        if batch_size != num_images or not 0 <= num_prefix_tokens <= MAX_EXTRA_TOKENS + num_registers:
            raise UserError(
                f"The tokens of {name} are not a grid of patches: {batch_size} x {num_tokens} tokens for {num_images} "
                f"images of {grid[0]} x {grid[1]} patches. Choose other `layers`."
            )
        return num_images, (grid, num_prefix_tokens, None)

    def store(self, layer: LayerRecord, what: str, tensor: torch.Tensor) -> None:
        """Copies a tensor into the record, or only counts its bytes."""
        self._call_memory += tensor.numel() * tensor.element_size()
        if self._only_counts or self.exceeds_limit():
            for earlier in self._call:
                earlier.tensors.clear()
        else:  # a copy: the model may change the tensor in place, and a view would hold all of its storage
            layer.tensors[what] = tensor.detach().to(self.device or tensor.device, copy=True)

    def exceeds_limit(self) -> bool:
        return self.memory_limit is not None and self.memory + self._call_memory > self.memory_limit * 1e9


class AttentionObserver(TorchFunctionMode):
    """Observes the attention that a processor of diffusers computes while its module runs.

    Processors differ in what they do to queries and keys, and end in one call of `scaled_dot_product_attention`, or of
    `baddbmm` (scores) and `bmm` (output) in the older ones.
    """

    def __init__(self, record: AttentionRecord, name: str, heads: int):
        super().__init__()
        self.record, self.name, self.heads = record, name, heads
        self.is_active = False
        self.observed: list[tuple[dict[str, torch.Tensor], torch.Tensor | None, float | None]] = []
        self.scores: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, float] | None = None

    def begin(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        arguments = bind_arguments(module, args, kwargs)
        if arguments.get("encoder_hidden_states") is None:  # otherwise it is cross-attention
            self.is_active, self.observed, self.scores = True, [], None
            self.__enter__()

    def end(self, module: nn.Module, args: tuple, output) -> None:
        if not self.is_active:
            return
        self.__exit__(None, None, None)
        observed, self.observed, self.scores, self.is_active = self.observed, [], None, False
        if output is None:  # after an exception
            return
        if len(observed) != 1:
            raise UserError(
                f"The attention of {self.name} cannot be recorded with {type(module.get_processor()).__name__}: use the "
                "default attention processors and backend, without slicing or caching."
            )
        tensors, bias, scaling = observed[0]
        if tensors["query"].ndim == 3:  # (batch * heads, tokens, head_dim)
            tensors = {what: tensor.unflatten(0, (-1, self.heads)) for what, tensor in tensors.items()}
            bias = None if bias is None else bias.unflatten(0, (-1, self.heads))
        self.record.add(self.name, tensors, bias, scaling)

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        output = function(*args, **kwargs)
        if function is F.scaled_dot_product_attention:
            self.observe_fused(output, *args, **kwargs)
        elif function is torch.baddbmm:
            self.observe_scores(*args, **kwargs)
        elif function is torch.bmm and self.scores is not None:
            self.observe_output(output, *args)
        return output

    def observe_fused(
        self, output, query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False
    ) -> None:
        if is_causal:
            attn_mask = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).tril()
        tensors = {"query": query, "key": key, "value": value, "output": output}
        self.observed.append((tensors, attn_mask, scale))

    def observe_scores(self, bias, query, transposed_key, *, beta=1, alpha=1) -> None:
        self.scores = (query, transposed_key.transpose(1, 2), None if beta == 0 else bias, alpha)

    def observe_output(self, output, probabilities, value) -> None:
        assert self.scores is not None
        query, key, bias, scaling = self.scores
        self.scores = None
        tensors = {"query": query, "key": key, "value": value, "output": output}
        self.observed.append((tensors, bias, scaling))


def check_what(what: str | Iterable[str]) -> tuple[str, ...]:
    names = (what,) if isinstance(what, str) else tuple(what)
    for name in names:
        if name not in WHAT:
            raise UserError(f"`what` must be some of {', '.join(WHAT)}, got {name!r}.")
    if not names:
        raise UserError(f"`what` must name at least one of {', '.join(WHAT)}.")
    return names


def unique_configs(modules: Iterable[Any]) -> list[Any]:
    return list({id(module.config): module.config for module in modules}.values())


def previous_function(module: nn.Module, implementation: str | None) -> Callable:
    """The attention function that a module of transformers would call; the eager one is not registered."""
    names = inspect.unwrap(type(module).forward).__globals__
    return names["ALL_ATTENTION_FUNCTIONS"].get_interface(implementation, names.get("eager_attention_forward"))


def bind_arguments(module: nn.Module, args: tuple, kwargs: dict) -> dict[str, Any]:
    """Arguments of a module's call by name."""
    return inspect.signature(module.forward).bind_partial(*args, **kwargs).arguments


def add_biases(mask: torch.Tensor | None, position_bias: torch.Tensor | None) -> torch.Tensor | None:
    """One tensor for the mask and the position bias of an attention function."""
    if mask is None or position_bias is None:
        return position_bias if mask is None else mask
    return position_bias.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else position_bias + mask


def without_expansion(tensor: torch.Tensor) -> torch.Tensor:
    """Expanded dimensions with their one row, so that a copy is not larger than what the model stores."""
    for dimension, (size, stride) in enumerate(zip(tensor.shape, tensor.stride())):
        if size > 1 and stride == 0:
            tensor = tensor.narrow(dimension, 0, 1)
    return tensor
