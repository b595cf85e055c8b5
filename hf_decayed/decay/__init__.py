"""The decay for models of other people: any residual stack of transformers or diffusers, and blocks that a user names."""
