"""Uploads the folder of a finished run."""

from pathlib import Path

from accelerate import Accelerator
from huggingface_hub import HfApi

from ..errors import UserError
from .staging import LOCAL_ONLY, is_tracker


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
    local = sorted(LOCAL_ONLY | {trackers} | {path.name for path in Path(folder).iterdir() if is_tracker(path)})
    # At any depth: in these patterns a star stands for folders too.
    ignored = [f"{place}{name}" for name in local for place in ("", "*/")]
    ignored += [f"{pattern}/*" for pattern in ignored] + [".*", "*/.*"]
    try:
        HfApi().upload_folder(repo_id=repository, folder_path=folder, ignore_patterns=ignored)
    except Exception as error:
        flags = " ".join(f"--exclude '{pattern}'" for pattern in ignored)
        raise UserError(
            f"Trained and saved, but not uploaded ({error}); try `hf upload {repository} {folder} . {flags}`."
        ) from error
    print(f"uploaded to {repository}")
