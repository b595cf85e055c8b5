"""Images: sources, decoding, transforms, datasets, latents."""
