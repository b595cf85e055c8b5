"""Cards, publishing, conversion of other checkpoints."""
