"""What all training scripts share: flags and recipes, and the bookkeeping of a run."""

from .optimization import adamw, linear_warmup, warmup_cosine
from .records import format_loss
from .run import Run, script_main


__all__ = ["Run", "adamw", "format_loss", "linear_warmup", "script_main", "warmup_cosine"]
