"""Errors that a user can fix, each told in one sentence."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from huggingface_hub.errors import StrictDataclassError


class UserError(ValueError):
    """Something that the user has to change, in one sentence that names what and how."""


class DataError(UserError):
    """A data set, or an image in it, that cannot be used as it is."""


def format_error(error: BaseException) -> str:
    """One sentence without tracebacks: PyTorch wraps errors of worker processes, strict configs wrap those of validators."""
    lines = str(error.__cause__ if isinstance(error, StrictDataclassError) else error).strip().splitlines()
    if lines and lines[0].startswith("Caught "):
        lines = [lines[-1].partition(": ")[2]]
    return " ".join(" ".join(lines).split()) or type(error).__name__


@contextmanager
def explain_loading_errors(model: str) -> Iterator[None]:
    """Says that a model is neither a local folder nor a reachable repository, without the libraries' advice."""
    try:
        yield
    except OSError as error:
        if Path(model).exists():
            raise
        sentence = format_error(error)
        unreachable = "connect to" in sentence or "offline" in sentence
        reason = "the Hub cannot be reached" if unreachable else sentence
        raise UserError(
            f"'{model}' is neither a local folder nor a repository that could be loaded: {reason}"
        ) from error
