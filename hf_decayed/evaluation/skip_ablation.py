"""Which encoder-decoder skips a masked autoencoder lives off."""

import math

import torch


@torch.no_grad()
def skip_ablation(
    model: torch.nn.Module, pixel_values: torch.Tensor, noise: torch.Tensor, batch_size: int = 64
) -> dict[int, float]:
    """By how much the reconstruction loss rises when the decoder gets the mean of a skip instead of the skip.

    The mean is over the images of a batch, of patches over their places too, so that hardly anything of an image is left
    in it. A bottleneck that is used shows at the deepest skip; one that was given up has a rise near 0 there, however good
    the reconstructions are. With `decoder_input="latent"` the decoder still gets the encoder's output beside the skips.

    Args:
        model (`DecayedViTMAEForPreTraining`): In evaluation mode.
        pixel_values (`torch.Tensor` of shape `(number, num_channels, height, width)`):
            Normalised images, in any order but by class.
        noise (`torch.Tensor` of shape `(number, num_patches)`): Decides what is masked of each, with and without a skip.
        batch_size (`int`, defaults to 64): Images at most that a mean is taken over.

    Returns the rise by the encoder layer that the skip leaves, counted from 1, deepest first; empty without skips.
    """
    if len(noise) != len(pixel_values):
        raise ValueError(f"{len(pixel_values)} images need as many rows of noise, got {len(noise)}.")
    batches = math.ceil(len(pixel_values) / batch_size)  # of equal size: a single image would be its own mean
    layers = range(model.config.num_hidden_layers, 0, -2)[: model.config.num_skips]

    def loss_without(index: int | None) -> float:
        hook = None
        if index is not None:
            hook = model.decoder.skips[index].register_forward_pre_hook(replace_by_mean)
        try:
            losses = [
                model(images, noise=order, return_logits=False).loss * len(images)
                for images, order in zip(pixel_values.tensor_split(batches), noise.tensor_split(batches))
            ]
        finally:
            if hook is not None:
                hook.remove()
        return float(sum(losses) / len(pixel_values))

    whole = loss_without(None) if layers else 0.0
    return {layer: loss_without(index) - whole for index, layer in enumerate(layers)}


def replace_by_mean(skip: torch.nn.Module, arguments: tuple) -> tuple:
    hidden_states, encoded = arguments
    class_token, patches = encoded[:, :1], encoded[:, 1:]
    means = [each.mean(dim=(0, 1), keepdim=True).expand_as(each) for each in (class_token, patches)]
    return hidden_states, torch.cat(means, dim=1)
