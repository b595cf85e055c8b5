"""Which encoder-decoder skips a masked autoencoder lives off."""

import torch


@torch.no_grad()
def skip_use(
    model: torch.nn.Module, pixel_values: torch.Tensor, noise: torch.Tensor, batch_size: int = 64
) -> dict[int, float]:
    """By how much the reconstruction loss rises when the decoder gets the mean of a skip instead of the skip.

    The mean is over the images of a batch, of patches over their places too: nothing of an image is left in it. A bottleneck that is used shows at the
    deepest skip; one that was given up has a rise near 0 there, however good the reconstructions are.

    Args:
        model (`DecayedViTMAEForPreTraining`): In evaluation mode.
        pixel_values (`torch.Tensor` of shape `(number, num_channels, height, width)`): Normalised images.
        noise (`torch.Tensor` of shape `(number, num_patches)`): Decides what is masked, the same for all.

    Returns the rise by the encoder layer that the skip leaves, counted from 1, deepest first; empty without skips.
    """
    layers = range(model.config.num_hidden_layers, 0, -2)[: model.config.num_skips]

    def loss_without(index: int | None) -> float:
        hook = None
        if index is not None:
            hook = model.decoder.skips[index].register_forward_pre_hook(without_the_image)
        try:
            losses = [
                model(images, noise=order, return_logits=False).loss * len(images)
                for images, order in zip(pixel_values.split(batch_size), noise.split(batch_size))
            ]
        finally:
            if hook is not None:
                hook.remove()
        return float(sum(losses) / len(pixel_values))

    whole = loss_without(None) if layers else 0.0
    return {layer: loss_without(index) - whole for index, layer in enumerate(layers)}


def without_the_image(skip: torch.nn.Module, arguments: tuple) -> tuple:
    hidden_states, encoded = arguments
    class_token, patches = encoded[:, :1], encoded[:, 1:]
    means = [each.mean(dim=(0, 1), keepdim=True).expand_as(each) for each in (class_token, patches)]
    return hidden_states, torch.cat(means, dim=1)
