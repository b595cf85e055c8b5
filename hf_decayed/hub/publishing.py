"""Publishes the folder of a run or of `save_pretrained` on the Hub.

    hf-decayed publish outputs/mae --repo_id user/decayed-mae --dry_run
    hf-decayed publish outputs/mae --repo_id user/decayed-mae

What a repository should hold is copied to a staging folder (`staging`), checked for secrets, paths of this machine and
unmeasured numbers (`validation`), proved to load without this package (`proof`), and pushed in one commit.
"""

import os
import shutil
import tempfile
from pathlib import Path

from huggingface_hub import HfApi
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

from .cards import STOCK_FOLDER
from .proof import check_evaluations, prove
from .secrets import has_detect_secrets
from .staging import LOCAL_ONLY, PublishingError, code_modules, list_foreign_code, set_repo_id, stage
from .stock import add_stock_model
from .validation import check_card, validate_staged


__all__ = [
    "LOCAL_ONLY",
    "PublishingError",
    "check_card",
    "check_evaluations",
    "code_modules",
    "prove",
    "publish",
    "stage",
    "validate_staged",
]


def publish(
    model_dir: str | os.PathLike,
    repo_id: str,
    private: bool = False,
    revision: str | None = None,
    message: str | None = None,
    dry_run: bool = False,
    keep: str | os.PathLike | None = None,
    trust_remote_code: bool = False,
    stock: bool = False,
) -> str:
    """Stages, checks, proves and pushes a folder; returns a report, with `dry_run` of what would be pushed.

    Nothing in `model_dir` is changed. All files come in one commit, so a push that fails can be repeated.

    Args:
        private (`bool`):
            Makes a new repository private; without it the owner's default holds. An existing public repository is refused.
        revision (`str`, *optional*): Branch to push to, created if there is none.
        keep (`str` or `PathLike`, *optional*): New folder that the staged files are copied to.
        trust_remote_code (`bool`):
            Proves and publishes code files that are not this package's own. They run in a process of their own, with your
            rights: read them first.
        stock (`bool`):
            Adds the folder `stock`: the same network as a class of transformers, which loads without `trust_remote_code`.
            One that is there already is made anew.
    """
    source = Path(model_dir)
    check_name(repo_id)
    if keep and Path(keep).exists():
        raise PublishingError(f"'{keep}' exists already: name a new folder for the staged files.")
    if keep and Path(keep).resolve().is_relative_to(source.resolve()):
        # The next publication would have all files twice.
        raise PublishingError(f"'{keep}' lies in the model's own folder: name one outside for the staged files.")
    with tempfile.TemporaryDirectory() as folder:
        staged = Path(folder) / "repository"
        stage(source, staged)
        stock = stock or (source / STOCK_FOLDER).exists()
        stock_difference = add_stock_model(source, staged, Path(folder), repo_id) if stock else 0.0
        set_repo_id(staged / "README.md", source, repo_id)
        validate_staged(staged)
        foreign_code = check_code(staged, trust_remote_code)
        difference = prove(source, staged, Path(folder))
        files = sorted(path for path in staged.rglob("*") if path.is_file())
        listing = "\n".join(f"{format_size(path):>10}  {path.relative_to(staged).as_posix()}" for path in files)
        if keep:
            shutil.copytree(staged, keep)  # before the push, whose report must not be lost to a full disk
        try:
            result = (
                f"nothing was pushed to {repo_id}" if dry_run else push(staged, repo_id, private, revision, message)
            )
        except PublishingError:
            if keep:
                shutil.rmtree(keep)
            raise
    remarks = [f"loads without hf_decayed and gives what the source gives (largest difference {difference:.1e})"]
    if stock:
        remarks.append(
            f"'{STOCK_FOLDER}' gives the same without any code of ours (largest difference {stock_difference:.1e})"
        )
    if foreign_code:
        remarks.append(f"code that is not of this package: {', '.join(foreign_code)}")
    if not has_detect_secrets():
        remarks.append("secrets: own patterns only, `pip install 'hf_decayed[publish]'` adds those of detect-secrets")
    return f"{listing}\n{len(files)} files, {'; '.join([*remarks, result])}"


def check_name(repo_id: str) -> None:
    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        raise PublishingError(str(error)) from error
    if "/" not in repo_id:
        raise PublishingError(
            f"The card shows where to load the model from, so the owner is needed too: USER/{repo_id}."
        )


def check_code(staged: Path, trust_remote_code: bool) -> list[str]:
    """Lists code that is not this package's own; refuses it, before it runs, unless the user trusts it."""
    foreign_code = list_foreign_code(staged)
    if foreign_code and not trust_remote_code:
        raise PublishingError(
            f"The folder holds code that is not this package's, and nothing of it was run: {'; '.join(foreign_code)}. Save the "
            "model again, or read that code and give --trust_remote_code."
        )
    return foreign_code


def push(staged: Path, repo_id: str, private: bool, revision: str | None, message: str | None) -> str:
    """Pushes all files in one commit; files of earlier commits stay, and are listed."""
    api = HfApi()
    try:
        api.create_repo(repo_id, private=private or None, exist_ok=True)
        if private and not api.repo_info(repo_id).private:
            raise PublishingError(
                "it exists already, and is public: make it private (`hf repos settings`), or choose another"
            )
        if revision:
            api.create_branch(repo_id, branch=revision, exist_ok=True)
        earlier = set(api.list_repo_files(repo_id, revision=revision)) - {".gitattributes"}
    except Exception as error:  # the client raises whatever its HTTP library does
        raise PublishingError(f"Not pushed to '{repo_id}', where no file was changed: {error}") from error
    try:
        commit = api.upload_folder(
            repo_id=repo_id,
            folder_path=staged,
            revision=revision,
            commit_message=message or f"Publish {repo_id.split('/')[-1]}",
        )
    except Exception as error:
        raise PublishingError(
            f"The push to '{repo_id}' failed; a commit is complete or absent, so the same command can be repeated: {error}"
        ) from error
    left = sorted(earlier - {path.relative_to(staged).as_posix() for path in staged.rglob("*")})
    remark = f" (also there, from before: {', '.join(left)}; `hf repos delete-files` removes them)" if left else ""
    return f"pushed to {repo_id}{remark}: pin revision {commit.oid}"


def format_size(path: Path) -> str:
    size = path.stat().st_size
    return f"{size / 1e6:.1f} MB" if size >= 1e5 else f"{size / 1e3:.1f} kB"
