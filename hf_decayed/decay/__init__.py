"""The decay for other people's models: residual stacks of transformers or diffusers, and blocks that a user names."""
