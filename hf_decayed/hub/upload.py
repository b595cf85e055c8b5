"""Uploads the folder of a finished run."""

from pathlib import Path

from accelerate import Accelerator
from huggingface_hub import HfApi

from ..errors import DataError


def create_repository(name: str | None, accelerator: Accelerator) -> str | None:
    """A repository to upload to; made before training, so that a missing right is found out then."""
    if not name or not accelerator.is_main_process:
        return None
    try:
        return HfApi().create_repo(name, exist_ok=True).repo_id
    except Exception as error:  # the client raises whatever its HTTP library does
        raise DataError(f"The repository '{name}' cannot be made: {error}") from error


def upload_run(repository: str, folder: Path, trackers: str) -> None:
    """Uploads what a run has made, in one commit; not what belongs to this machine."""
    left_out = ["checkpoints/*", "arguments.json", f"{trackers}/*"]  # the last: what trackers wrote, with local paths
    try:
        HfApi().upload_folder(repo_id=repository, folder_path=folder, ignore_patterns=left_out)
    except Exception as error:
        again = " ".join(f"--exclude '{pattern}'" for pattern in left_out)
        raise DataError(
            f"Trained and saved, but not uploaded ({error}); try `hf upload {repository} {folder} . {again}`."
        ) from error
    print(f"uploaded to {repository}")
