"""Uploads the folder of a finished run."""

from pathlib import Path

from accelerate import Accelerator
from huggingface_hub import HfApi

from ..errors import UserError
from .staging import is_tracker


def create_repository(name: str | None, accelerator: Accelerator) -> str | None:
    """Creates the repository to upload to, before training, so that a missing permission is known at once."""
    if not name or not accelerator.is_main_process:
        return None
    try:
        return HfApi().create_repo(name, exist_ok=True).repo_id
    except Exception as error:  # the client raises whatever its HTTP library does
        raise UserError(f"The repository '{name}' cannot be made: {error}") from error


def upload_run(repository: str, folder: Path, trackers: str = "trackers") -> None:
    """Uploads a run in one commit, without checkpoints and without what tells of this machine: flags, trackers, locks."""
    ignored = ["checkpoints/*", "arguments.json", ".*", f"{trackers}/*"]
    ignored += [
        f"{path.name}/*" for path in sorted(Path(folder).iterdir()) if path.name != trackers and is_tracker(path)
    ]
    try:
        HfApi().upload_folder(repo_id=repository, folder_path=folder, ignore_patterns=ignored)
    except Exception as error:
        flags = " ".join(f"--exclude '{pattern}'" for pattern in ignored)
        raise UserError(
            f"Trained and saved, but not uploaded ({error}); try `hf upload {repository} {folder} . {flags}`."
        ) from error
    print(f"uploaded to {repository}")
