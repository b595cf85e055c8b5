"""Errors that a user can fix, each told in one sentence."""

import os
import subprocess
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


# Waits for the end of a process, then prints a sentence.
PRINT_AFTER = """
import sys, time, psutil
try:
    process = psutil.Process(int(sys.argv[1]))
    while process.status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.05)
except psutil.NoSuchProcess:
    pass
print(sys.argv[2], file=sys.stderr)
"""


class UserError(ValueError):
    """Something that the user has to change, in one sentence that names what and how."""


class DataError(UserError):
    """A data set, or an image in it, that cannot be used as it is."""


def format_error(error: BaseException) -> str:
    """One sentence without tracebacks: PyTorch wraps errors of worker processes, strict configs wrap those of validators."""
    from huggingface_hub.errors import StrictDataclassError  # `hf-decayed --help` imports this module

    lines = str(error.__cause__ if isinstance(error, StrictDataclassError) else error).strip().splitlines()
    if lines and lines[0].startswith("Caught "):
        lines = [lines[-1].partition(": ")[2]]
    return " ".join(" ".join(lines).split()) or type(error).__name__


def print_error(command: str, error: BaseException, sentence: str | None = None) -> None:
    """Prints an error of a command on standard error, in a line of its own; without a `sentence`, the error's own."""
    from huggingface_hub.errors import StrictDataclassError

    # These carry a sentence; of other errors the type tells more than the text.
    known = isinstance(error, (ValueError, OSError, StrictDataclassError))
    line = f"{command}: {sentence or ('' if known else type(error).__name__ + ': ') + format_error(error)}"
    traceback.clear_frames(error.__traceback__)  # ends loops that the error has left, and closes their progress bars
    print(line, file=sys.stderr)
    repeat_after_launcher(line)


def repeat_after_launcher(line: str) -> None:
    """Under `accelerate launch`, which ends with a traceback of its own, prints a line again below that.

    The launcher is the parent of this process. A process in a session of its own, which torchrun does not end with its
    workers, waits for its end.
    """
    if "ACCELERATE_MIXED_PRECISION" in os.environ and os.environ.get("RANK", "0") == "0":
        command = [sys.executable, "-c", PRINT_AFTER, str(os.getppid()), line]
        subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, start_new_session=True)


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
