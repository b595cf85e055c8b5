"""Skip ablation: which encoder-decoder skips a masked autoencoder relies on."""

import math

import torch


@torch.no_grad()
def skip_ablation(
    model: torch.nn.Module, pixel_values: torch.Tensor, noise: torch.Tensor, batch_size: int = 64
) -> dict[int, float]:
    """Increase of the reconstruction loss when one skip is replaced by its mean.

    The mean is taken over the images of a batch, and for patches over all positions too, so that hardly any information about
    an image is left. If the decoder relies on the bottleneck, the deepest skip has a large increase; an increase near 0 there
    means that the bottleneck is unused, however good the reconstructions are. With `decoder_input="latent"` the decoder still
    gets the encoder's output besides the skips.

    Args:
        model (`DecayedViTMAEForPreTraining`): In evaluation mode.
        pixel_values (`torch.Tensor` of shape `(number, num_channels, height, width)`):
            Normalised images, not sorted by class.
        noise (`torch.Tensor` of shape `(number, num_patches)`): Decides which patches are masked, the same for all skips.
        batch_size (`int`, defaults to 64): Largest number of images that a mean is taken over.

    Returns the increase by the encoder layer of the skip, counted from 1, deepest first; empty for a model without skips.
    """
    if len(noise) != len(pixel_values):
        raise ValueError(f"{len(pixel_values)} images need as many rows of noise, got {len(noise)}.")
    num_batches = math.ceil(len(pixel_values) / batch_size)  # of equal size: a single image would be its own mean
    layers = range(model.config.num_hidden_layers, 0, -2)[: model.config.num_skips]

    def loss_without(index: int | None) -> float:
        hook = None
        if index is not None:
            hook = model.decoder.skips[index].register_forward_pre_hook(replace_by_mean)
        try:
            losses = [
                model(images, noise=mask_noise, return_logits=False).loss * len(images)
                for images, mask_noise in zip(pixel_values.tensor_split(num_batches), noise.tensor_split(num_batches))
            ]
        finally:
            if hook is not None:
                hook.remove()
        return float(sum(losses) / len(pixel_values))

    full_loss = loss_without(None) if layers else 0.0
    return {layer: loss_without(index) - full_loss for index, layer in enumerate(layers)}


def replace_by_mean(skip: torch.nn.Module, arguments: tuple) -> tuple:
    """Forward pre-hook of a skip: replaces the encoder's class token and patches by their means."""
    hidden_states, encoded = arguments
    means = [tokens.mean(dim=(0, 1), keepdim=True).expand_as(tokens) for tokens in (encoded[:, :1], encoded[:, 1:])]
    return hidden_states, torch.cat(means, dim=1)
