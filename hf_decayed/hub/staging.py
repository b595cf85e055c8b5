"""Copies what a model repository holds from the folder of a run, and refuses what it must not hold."""

import importlib
import importlib.metadata
import importlib.util
import json
import os
import pickletools
import re
import shutil
import stat
from collections import Counter
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path

from ..errors import UserError
from ..kinds import find_kind, list_kinds, read_json, read_text
from .cards import PLACEHOLDER


# What runs leave beside the model; it is not published.
LOCAL_ONLY = {
    "arguments.json",
    "checkpoints",
    "evaluated",
    "identity.json",
    "reconstructions",
    "runs",
    "samples",
    "trackers",
}
EVENT_FILES = "events.out.tfevents.*"  # of TensorBoard: a folder with such files is a tracker's, whatever its name
PUBLISHED = {".safetensors", ".json", ".jsonl", ".py", ".md", ".png", ".txt", ".yaml"}
LIBRARIES = {"diffusers", "transformers"}
PUBLISHED_NAMES = {"LICENSE", "NOTICE"}
PICKLES = {".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".joblib", ".npy"}
# How pickles of protocol 2 and later begin, the archives that torch.save writes, and arrays, which may hold pickles.
PICKLED = re.compile(rb"\x80[\x02-\x05]|PK\x03\x04|\x93NUMPY")
KEY_FILES = re.compile(
    r"^(\.env.*|\.netrc|id_(rsa|dsa|ecdsa|ed25519).*|.*\.(pem|key|p12|pfx)|.*(token|secret|credential).*)$",
    re.IGNORECASE,
)
TOKENIZER_FILES = re.compile(r"^(tokenizer.*|special_tokens_map|added_tokens)\.json$")  # no secrets


class PublishingError(UserError):
    """What prevents publishing, in one sentence."""


def stage(source: Path, staged: Path) -> None:
    """Copies the files of a repository; refuses by name what may not be published."""
    if not (source / "config.json").exists() and not (source / "model_index.json").exists():
        raise PublishingError(f"'{source}' holds neither a model (config.json) nor a pipeline (model_index.json).")
    files = list(list_files(source))  # all of them, so that links and pipes are refused before any file is opened
    for path in files:
        name = path.relative_to(source)
        if any(is_key_file(part) for part in name.parts):
            raise PublishingError(f"'{name}' looks like a file of keys or tokens: move it out of '{source}'.")
        if path.suffix.lower() in PICKLES or is_pickle(path):
            raise PublishingError(
                f"'{name}' is a pickle, or may be one, and runs code when it is loaded: save weights as safetensors, and "
                f"move it out of '{source}'."
            )
        if path.suffix.lower() not in PUBLISHED and path.name not in PUBLISHED_NAMES:
            raise PublishingError(f"A model repository holds no files like '{name}': move it out of '{source}'.")
        (staged / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, staged / name, follow_symlinks=False)
    # Diffusers records the path that a component was loaded from.
    for config in [*staged.rglob("*config.json"), *staged.glob("model_index.json")]:
        content = read_json(config)
        if content.pop("_name_or_path", None) is not None:
            config.write_text(json.dumps(content, indent=2) + "\n")
    if not list(staged.rglob("*.safetensors")):
        raise PublishingError(f"'{source}' holds no weights (.safetensors).")
    add_pipelines(staged)
    for module in code_modules(staged):
        if not list(staged.rglob(f"{module}.py")):  # a component's code lies in the component's folder
            raise PublishingError(f"'{module}.py', which the config names, is missing: save the model again.")
    # The first line of a model's card loads the processor.
    if not (staged / "model_index.json").exists() and not (staged / "preprocessor_config.json").exists():
        raise PublishingError("There is no image processor (preprocessor_config.json): save one beside the model.")
    if not (staged / "LICENSE").exists():  # of the code; the card gives that of the weights
        (staged / "LICENSE").write_text(package_licence())
    if not (staged / "README.md").exists():
        raise PublishingError(f"'{source}' has no card (README.md): write one with `hf-decayed card`.")


def list_files(source: Path) -> Iterator[Path]:
    """Files that would be published; links, pipes, devices and sockets are refused. Opens nothing."""
    local = LOCAL_ONLY | {path.name for path in source.iterdir() if is_tracker(path)}
    for folder, subfolders, names in os.walk(source, onerror=raise_error):
        relative = Path(folder).relative_to(source)
        subfolders[:] = sorted(name for name in subfolders if not is_local(relative / name, local))
        for name in [*subfolders, *sorted(names)]:
            path = Path(folder, name)
            if is_local(relative / name, local):
                continue
            mode = path.lstat().st_mode
            if stat.S_ISLNK(mode):
                raise PublishingError(
                    f"'{relative / name}' is a symbolic link: put the file itself there, or remove it."
                )
            if stat.S_ISREG(mode):
                yield path
            elif not stat.S_ISDIR(mode):
                raise PublishingError(f"'{relative / name}' is a pipe, device or socket, and no file: remove it.")


def raise_error(error: OSError) -> None:
    raise error


def is_local(name: Path, local: set[str]) -> bool:
    """Whether a file or folder stays on this machine: what runs leave, caches, hidden files other than those of keys."""
    if name.parts[0] in local or "__pycache__" in name.parts:
        return True
    return any(part.startswith(".") for part in name.parts) and not any(is_key_file(part) for part in name.parts)


def is_tracker(path: Path) -> bool:
    """Whether a folder holds files of TensorBoard, as those do that older versions named after the script."""
    return path.is_dir() and not path.is_symlink() and any(path.rglob(EVENT_FILES))


def is_key_file(name: str) -> bool:
    return bool(KEY_FILES.match(name)) and not TOKENIZER_FILES.match(name)


def is_pickle(path: Path) -> bool:
    """Whether a file is a pickle under any name; one of protocol 0 or 1 has no header, so its instructions are read."""
    with path.open("rb") as file:
        beginning = file.read(1 << 20)
    if PICKLED.match(beginning):
        return True
    imports = False
    try:
        for opcode, argument, _ in pickletools.genops(beginning):
            if opcode.name in ("GLOBAL", "INST"):
                # Of ordinary text that can be read as a pickle, hardly any names a module and a class.
                imports = imports or bool(re.fullmatch(r"[A-Za-z_][\w.]* [A-Za-z_][\w.]*", str(argument)))
            if imports and opcode.name in ("INST", "REDUCE", "OBJ", "NEWOBJ", "BUILD", "STOP"):
                return True
    except Exception:  # text is no pickle, and breaks off in many ways
        return False
    return False


def add_pipelines(folder: Path) -> None:
    """Puts the transformers pipelines of a model's kind beside it: their code, and their entries in its config."""
    config = read_json(folder / "config.json")
    architectures = config.get("architectures")
    kind = find_kind(str(architectures[0])) if isinstance(architectures, list) and architectures else None
    for name in kind.pipelines if kind else ():
        module = importlib.import_module(name)
        file = Path(str(module.__file__))
        shutil.copyfile(file, folder / file.name)
        others = config.get("custom_pipelines")
        config["custom_pipelines"] = {**(others if isinstance(others, dict) else {}), **module.CUSTOM_PIPELINES}
        (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def code_modules(staged: Path) -> set[str]:
    """Modules that the configs of a repository load code from; code of other repositories is refused."""
    modules = set()
    for config in sorted([*staged.rglob("*config.json"), *staged.glob("model_index.json")]):
        name, content = config.relative_to(staged).as_posix(), read_json(config)
        references = code_references(content, name)
        # Transformers downloads a kernel, which is native code, for an attention that is named like a repository.
        kernels = [value for key, value in content.items() if "attn_implementation" in key and "/" in str(value)]
        if kernels:
            raise PublishingError(f"'{name}' takes code from another repository, the attention kernel {kernels[0]!r}.")
        if name in ("config.json", "model_index.json"):
            modules |= {reference.partition(".")[0] for reference in references}
        if name == "model_index.json":  # the pipeline's code, and that of components
            pairs = [value for value in content.values() if isinstance(value, list) and len(value) == 2]
            modules |= {pair[0] for pair in pairs if all(isinstance(part, str) for part in pair)} - LIBRARIES
    if not modules:
        raise PublishingError(
            "The config names no code, so nobody could load the model without this package: save it with "
            "`save_pretrained` of hf_decayed."
        )
    if misnamed := [module for module in modules if not module.isidentifier()]:
        raise PublishingError(f"'model_index.json' must name modules of its folder, got {misnamed[0]!r}.")
    return modules


def code_references(content: dict, name: str) -> list[str]:
    """What `auto_map` and `custom_pipelines` of a config name, as `module.Class`; code of other repositories is refused."""
    classes = content.get("auto_map") or {}
    if not isinstance(classes, dict) or not all(isinstance(value, (str, type(None))) for value in classes.values()):
        raise PublishingError(f"`auto_map` in '{name}' must name code by class, got {classes!r}.")
    pipelines = content.get("custom_pipelines") or {}
    entries = list(pipelines.values()) if isinstance(pipelines, dict) else [pipelines]
    if not all(isinstance(entry, dict) and isinstance(entry.get("impl"), str) for entry in entries):
        raise PublishingError(f"`custom_pipelines` in '{name}' must name code by task, got {pipelines!r}.")
    fields = {
        "auto_map": [value for value in classes.values() if value],
        "custom_pipelines": [entry["impl"] for entry in entries],
    }
    for field, references in fields.items():
        if foreign := [reference for reference in references if "--" in reference]:
            raise PublishingError(f"'{name}' takes code from another repository, {foreign[0]}: save the model again.")
        if misnamed := [reference for reference in references if not re.fullmatch(r"[A-Za-z_]\w*\.\w+", reference)]:
            raise PublishingError(f"`{field}` in '{name}' must name a module and a class, got {misnamed[0]!r}.")
    return [reference for references in fields.values() for reference in references]


def list_foreign_code(staged: Path) -> list[str]:
    """Code files that are not this package's own, with what is different."""
    own_files = package_code()
    foreign = []
    for path in sorted(path for path in staged.rglob("*") if path.suffix.lower() == ".py"):
        name, lines = path.relative_to(staged).as_posix(), read_text(path).split("\n")
        if path.name not in own_files:
            foreign.append(f"'{name}' is not a file of this package")
            continue
        expected = read_text(own_files[path.name]).split("\n")
        if lines != expected:
            first = next(i for i, (a, b) in enumerate(zip_longest(lines, expected), 1) if a != b)
            added, removed = Counter(lines) - Counter(expected), Counter(expected) - Counter(lines)
            number = max(added.total(), removed.total(), 1)  # lines in another order are neither added nor removed
            foreign.append(f"'{name}' differs from this package's in {number} lines, first in line {first}")
    return foreign


def package_code() -> dict[str, Path]:
    """The code files that are published with the weights, by name."""
    modules = {module for kind in list_kinds().values() for module in kind.modules.values()}
    specs = filter(None, map(importlib.util.find_spec, modules))
    folders = {Path(spec.origin).parent for spec in specs if spec.origin}
    return {path.name: path for folder in sorted(folders) for path in folder.glob("*.py")}


def package_licence() -> str:
    """The licence of a clone, or of an installed package, whose metadata hold it."""
    clone = Path(__file__).parents[2]
    if (clone / "pyproject.toml").exists():
        return (clone / "LICENSE").read_text()
    return importlib.metadata.distribution("hf_decayed").read_text("licenses/LICENSE") or ""


def set_repo_id(card: Path, source: Path, repo_id: str) -> None:
    """Makes the card's lines that load the model from a placeholder, or from its local folder, load it from the Hub."""
    text = read_text(card)
    for name in (PLACEHOLDER, str(source), "/".join(source.absolute().parts[-2:])):
        text = text.replace(f'from_pretrained("{name}"', f'from_pretrained("{repo_id}"')
    names = re.findall(r'from_pretrained\("([^"]+)"', text)
    if names and repo_id not in names:
        raise PublishingError(
            f"The card shows how to load '{names[0]}', not '{repo_id}': write it again with `hf-decayed card --repo_id`."
        )
    card.write_text(text)
