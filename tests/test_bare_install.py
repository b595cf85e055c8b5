"""Without any extra, every module can be imported and every command runs, or says in one sentence which extra it needs.

The processes here see only what `pip install hf_decayed` installs.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, distribution

import pytest
from check_structure import PACKAGE, ROOT, declared_packages, installed_packages, read_pyproject
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name


CARDS = ROOT / "model_cards"
MATPLOTLIB_SENTENCE = "Plots need matplotlib: pip install 'hf_decayed[training]'."
# Python reads this at its start. The packages are not found, rather than found and broken, because libraries look for
# optional packages with `find_spec`.
SITE_CUSTOMIZE = """
import sys
from importlib.machinery import PathFinder


class BareFinder(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in {hidden!r} else super().find_spec(name, path, target)


sys.meta_path[sys.meta_path.index(PathFinder)] = BareFinder
"""


def base_distributions() -> set[str]:
    """Canonical names of the base dependencies, of their dependencies, and so on."""
    seen: set[tuple[str, str]] = set()
    pending = [
        (canonicalize_name(Requirement(entry).name), "") for entry in read_pyproject()["project"]["dependencies"]
    ]
    while pending:
        name, extra = pending.pop()
        if (name, extra) in seen:
            continue
        seen.add((name, extra))
        try:
            requirements = [Requirement(entry) for entry in distribution(name).requires or []]
        except PackageNotFoundError:  # it is for another platform
            continue
        for requirement in requirements:
            if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
                pending += [(canonicalize_name(requirement.name), extra) for extra in ("", *requirement.extras)]
    return {name for name, _ in seen}


def hidden_packages() -> set[str]:
    """Import names of all packages that are installed here, and that a plain installation would not have."""
    base = base_distributions() | {canonicalize_name(PACKAGE)}
    installed = installed_packages()
    hidden = {name for name, owners in installed.items() if not owners & base}
    return hidden | (declared_packages()[1] - installed.keys())


def test_packages_of_the_extras_are_hidden():
    hidden, (base, optional) = hidden_packages(), declared_packages()
    assert optional <= hidden and {"matplotlib", "scipy", "pytest", "_pytest"} <= hidden
    assert not hidden & {*base, PACKAGE, "requests", "fsspec", "tokenizers"}


# Commands and scripts run one after another in one process, because starting one takes longer than what most of them do.
RUN_COMMANDS = """
import contextlib, io, json, runpy, sys
from pathlib import Path
from hf_decayed.cli import main

file = Path(sys.argv[1])
results = {}
for name, (script, arguments) in json.loads(file.read_text()).items():
    sys.argv = [script or "hf-decayed", *arguments]
    output, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
        try:
            code = runpy.run_path(script, run_name="__main__") if script else main(arguments)
        except SystemExit as exit:
            code = exit.code or 0
    results[name] = {"code": code, "output": output.getvalue(), "errors": errors.getvalue()}
file.write_text(json.dumps(results, default=str))
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    """`python(*arguments)` runs Python without the extras; returns the process, which must have ended well."""
    folder = tmp_path_factory.mktemp("bare")
    (folder / "sitecustomize.py").write_text(SITE_CUSTOMIZE.format(hidden=hidden_packages()))

    def run(*arguments):
        process = subprocess.run(
            [sys.executable, *map(str, arguments)],
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)])},
            capture_output=True,
            text=True,
        )
        assert process.returncode == 0, (process.stdout + process.stderr)[-3000:]
        return process

    return run


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where the commands write; with a copy of a pipeline, whose code is this package's of today."""
    folder = tmp_path_factory.mktemp("commands")
    pipeline = shutil.copytree(CARDS / "decayed-uvit-fashion-mnist", folder / "pipeline")
    shutil.copy(ROOT / PACKAGE / "pipelines" / "pipeline_decayed_uvit.py", pipeline)
    shutil.copy(ROOT / PACKAGE / "models" / "unet_decayed_uvit.py", pipeline / "unet")
    return folder


@pytest.fixture(scope="module")
def results(python, folder):
    """Exit code, standard output and standard error of every command and script, by name."""
    pipeline, sit, mae = folder / "pipeline", CARDS / "decayed-sit-fashion-mnist", CARDS / "decayed-mae-fashion-mnist"
    repository, few_steps = ["--repo_id", "user/decayed-uvit"], ["--num_inference_steps", 2]
    cache = ["--features_dir", folder / "features"]
    commands = {
        "help": ["--help"],
        "sample": ["sample", sit, "--num", 2, *few_steps, "--output", folder / "samples"],
        "card": ["card", pipeline, *repository, "--license", "mit"],
        "publish": ["publish", pipeline, *repository, "--dry_run"],
        "evaluate": ["evaluate", mae, "--max_train_samples", 100, "--max_eval_samples", 50, *cache]
        + ["--output", folder / "features.json"],
        "blocks": [
            "evaluate",
            sit,
            "--metrics",
            "knn",
            "--blocks",
            "transformer_blocks.0",
            "--noise_levels",
            "0.5",
            *cache,
        ]
        + ["--max_train_samples", 50, "--max_eval_samples", 25, "--output", folder / "blocks.json"],
        "inception": ["evaluate", sit, "--feature_net", "inception", "--num_samples", 10, *few_steps, *cache]
        + ["--samples_dir", folder / "inception", "--output", folder / "inception.json"],
    }
    runs = {name: (None, list(map(str, arguments))) for name, arguments in commands.items()}
    for script in training_scripts():
        model = [str(mae)] if script.stem in ("finetune", "linear_probe") else []
        runs[script.name] = (str(script), [*model, "--output_dir", str(folder / script.stem)])
    (folder / "runs.json").write_text(json.dumps(runs))
    python("-c", RUN_COMMANDS, folder / "runs.json")
    return json.loads((folder / "runs.json").read_text())


def training_scripts():
    """Scripts that train, by what they call."""
    return [path for path in sorted((ROOT / "training").glob("*.py")) if " = Run(" in path.read_text()]


def test_extras_are_not_found(python):
    source = "import sys, importlib.util; print([name for name in sys.argv[1:] if importlib.util.find_spec(name)])"
    assert python("-c", source, *declared_packages()[1]).stdout == "[]\n"


def test_every_module_is_imported(python):
    assert re.match(r"\d{2,} modules imported", python(ROOT / "tests" / "import_all.py").stdout)


@pytest.mark.parametrize(
    "name, output",
    [
        ("help", "COMMAND"),
        ("sample", "2 samples"),
        ("card", "written: "),
        ("publish", "nothing was pushed to user/decayed-uvit"),
        ("evaluate", "knn"),
        ("blocks", f"no picture: {MATPLOTLIB_SENTENCE}"),
    ],
)
def test_command_works(results, folder, name, output):
    result = results[name]
    assert result["code"] == 0, result["errors"]
    assert output in result["output"]


def test_fid_says_what_it_needs(results, folder):
    """In one sentence, before it draws samples."""
    result = results["inception"]
    assert result["code"] == 2 and len(result["errors"].splitlines()) == 1
    assert "pip install 'hf_decayed[fid]'" in result["errors"]
    assert not (folder / "inception").exists()


@pytest.mark.parametrize("script", training_scripts(), ids=lambda path: path.name)
def test_training_script_says_what_it_needs(results, folder, script):
    """In one sentence, before it does any work."""
    result = results[script.name]
    assert result["code"] == 2
    assert result["errors"] == f"{script.name}: {MATPLOTLIB_SENTENCE}\n"
    assert not (folder / script.stem).exists()


def test_all_training_scripts_are_covered():
    assert {"mae", "uvit", "sit", "finetune", "linear_probe", "resnet"} <= {path.stem for path in training_scripts()}
