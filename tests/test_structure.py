"""The package keeps its structure: directions of imports, declared dependencies, types; and the checks find faults."""

import fnmatch
import re
import runpy
import subprocess
import sys

import pytest
import yaml
from check_structure import (
    OPTION_FILES,
    ORDER,
    PACKAGE,
    ROOT,
    check_cycles,
    check_direction,
    check_function_lengths,
    check_options,
    check_pickles,
    check_requirements,
    collect,
    declared_packages,
    extra_requirements,
    find_cycle,
    module_graph,
    read_pyproject,
    read_sources,
    room_graph,
)
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name


SOURCES = read_sources(PACKAGE)
MAKE_TARGETS = {"style", "test", "slow", "lowest", "fix-copies", "docs"}


def fail_with(errors: list[str]) -> None:
    """One sentence for every fault, without a traceback of the check."""
    if errors:
        pytest.fail("\n".join(errors), pytrace=False)


def test_rooms_import_earlier_rooms_only():
    assert len(SOURCES) > 50
    fail_with(collect(check_direction, SOURCES))


def test_nothing_imports_in_a_circle():
    fail_with(check_cycles(SOURCES))


def test_parsed_options_stay_with_the_parsers():
    assert all((ROOT / file).exists() for file in OPTION_FILES)
    fail_with(collect(check_options, SOURCES))


def test_modules_import_base_dependencies_only():
    base, optional = declared_packages()
    assert {"torch", "yaml", "PIL"} <= base and {"matplotlib", "sklearn", "torch_fidelity", "pytest"} <= optional
    fail_with(collect(check_requirements, SOURCES, base, optional))


def test_no_pickles_are_loaded():
    fail_with(collect(check_pickles, SOURCES | read_sources("training")))


def test_functions_of_scripts_are_short():
    fail_with(collect(check_function_lengths, read_sources("training")))


def test_types():
    """Mypy, as pyproject.toml configures it."""
    result = subprocess.run([sys.executable, "-m", "mypy"], cwd=ROOT, capture_output=True, text=True)
    fail_with([] if result.returncode == 0 else [result.stdout + result.stderr])


def test_type_checker_finds_errors(tmp_path):
    """A wrong argument of our own function, which takes and returns what libraries define."""
    (tmp_path / "wrong.py").write_text(
        "from hf_decayed.models.shortcut_decay import effective_decay\n\n\neffective_decay('twelve', 0.6)\n"
    )
    result = subprocess.run(
        [sys.executable, "-m", "mypy", "--config-file", "pyproject.toml", str(tmp_path / "wrong.py")],
        cwd=ROOT,
        env={"MYPYPATH": str(ROOT), "MYPY_CACHE_DIR": str(tmp_path / "cache")},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 1, result.stdout + result.stderr
    assert 'wrong.py:4: error: Argument 1 to "effective_decay"' in result.stdout


def read_pins(file: str) -> dict[str, str]:
    pins = [line.split("==") for line in (ROOT / file).read_text().splitlines() if not line.startswith("#")]
    return {canonicalize_name(name): version for name, version in pins}


def test_lower_bounds_are_the_lowest_set():
    pins, constraints = read_pins("tests/lowest_versions.txt"), read_pins("constraints.txt")
    project = read_pyproject()["project"]
    extras = project["optional-dependencies"]
    for requirement in map(Requirement, [*project["dependencies"], *extras["training"], *extras["test"]]):
        name = canonicalize_name(requirement.name)
        if name in ("mypy", "ruff"):  # what they find depends on their version
            assert pins[name] == constraints[name]
        elif requirement.name != PACKAGE:
            assert str(requirement.specifier) == f">={pins.get(name)}", f"{requirement}: lowest_versions.txt differs"


def test_constraints_pin_every_requirement():
    pins = read_pins("constraints.txt")
    for requirement in map(Requirement, [*read_pyproject()["project"]["dependencies"], *extra_requirements()]):
        name = canonicalize_name(requirement.name)
        if name != "torch-fidelity":  # it downloads its weights, so the tests do without it
            assert name in pins, f"constraints.txt has no {name}"
            assert requirement.specifier.contains(pins[name]), f"constraints.txt has {name} {pins[name]}"


def test_package_data_is_complete():
    """Every file of the package that is no module is in the wheel, and every pattern matches something."""
    patterns = read_pyproject()["tool"]["setuptools"]["package-data"][PACKAGE]
    folder = ROOT / PACKAGE
    files = [path.relative_to(folder) for path in folder.rglob("*") if path.is_file() and path.suffix != ".pyc"]
    for pattern in patterns:
        assert fnmatch.filter(map(str, files), pattern), f"no file of the package matches '{pattern}'"
    for file in files:
        is_module = file.suffix == ".py" and (folder / file).with_name("__init__.py").exists()
        is_data = any(fnmatch.fnmatch(str(file), pattern) for pattern in patterns)
        assert is_module or is_data, f"'{file}' is missing from package-data in pyproject.toml"


def test_contributing_shows_the_rooms_and_the_commands():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    picture = re.search(r"<!-- rooms -->\n(.*?)<!-- end -->", text, re.DOTALL)[1]
    lines = re.findall(r"^    (?:< )?([a-z_]+(?:, [a-z_]+)*)  ", picture, re.MULTILINE)
    assert [line.split(", ") for line in lines] == ORDER
    assert make_targets() >= MAKE_TARGETS
    assert set(re.findall(r"\bmake ([a-z-]+)", text)) == make_targets()
    for link in re.findall(r"\]\(([^)#]+)\)", text):
        assert link.startswith("http") or (ROOT / link).exists(), link


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def test_workflow_calls_targets_that_exist():
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "tests.yml").read_text())
    steps = [step["run"] for job in workflow["jobs"].values() for step in job["steps"] if "run" in step]
    targets = {target for step in steps for target in re.findall(r"\bmake ([a-z-]+)", step)}
    assert targets and targets <= make_targets()


# The checks find faults in made-up sources.


@pytest.mark.parametrize(
    "file, source, sentence",
    [
        ("hf_decayed/data/sources.py", "from ..run.run import Run", "'data' imports 'run', which comes after it"),
        ("hf_decayed/data/sources.py", "def load():\n    import hf_decayed.hub.cards", "'data' imports 'hub'"),
        ("hf_decayed/evaluation/knn.py", "from .. import cli", "'evaluation' imports 'cli'"),
        ("hf_decayed/hub/formats/mae.py", "from ...run import Run", "'hub' imports 'run'"),
        ("hf_decayed/errors.py", "from .command_line import boolean", "which is beside it"),
        ("hf_decayed/plots.py", "from .data import sources", "'plots' imports 'data'"),
        ("hf_decayed/run/run.py", "from hf_decayed import DecayedViTMAEConfig", "hf_decayed.__init__"),
        ("hf_decayed/run/run.py", "from .._deprecated import MOVED", "hf_decayed._deprecated"),
        ("hf_decayed/models/shortcut_decay.py", "from ..errors import UserError", "siblings alone"),
        ("hf_decayed/models/shortcut_decay.py", "from hf_decayed.models.a import b", "siblings alone"),
        ("hf_decayed/models/shortcut_decay.py", "from . import a", "siblings alone"),
        ("hf_decayed/losses/rate.py", "from ..models.a import b", "siblings alone"),
        ("hf_decayed/pipelines/a.py", "import diffusers\nfrom .b import c", "downloaded alone"),
        (
            "hf_decayed/pipelines/a.py",
            "def f():\n    from diffusers import d\n    from .b import c",
            "downloaded alone",
        ),
        ("hf_decayed/attic/a.py", "", "is in no room: add 'attic'"),
        ("hf_decayed/utils.py", "", "is in no room: add 'utils'"),
    ],
)
def test_forbidden_import_is_found(file, source, sentence):
    (error,) = check_direction(source, file)
    assert error.startswith(file) and sentence in error and error.endswith(".")


@pytest.mark.parametrize(
    "file, source",
    [
        ("hf_decayed/run/run.py", "from ..data.sources import take_subset\nfrom .records import MetricsFile"),
        ("hf_decayed/provenance.py", "from . import __version__"),
        ("hf_decayed/models/modeling.py", "import torch\nfrom .shortcut_decay import effective_decay"),
        ("hf_decayed/metrics/knn/knn.py", "from hf_decayed.cli import main"),
        ("hf_decayed/_deprecated.py", "from .cli import main"),
        ("hf_decayed/data/sources.py", "from datasets import load_dataset"),
    ],
)
def test_allowed_import_is_accepted(file, source):
    assert check_direction(source, file) == []


def test_cycle_of_modules_is_found():
    sources = {
        "hf_decayed/data/a.py": "from .b import x",
        "hf_decayed/data/b.py": "from .c import x",
        "hf_decayed/data/c.py": "from . import a",
    }
    assert find_cycle(module_graph(sources)) == [f"hf_decayed.data.{name}" for name in "abca"]
    assert "hf_decayed.data.a -> hf_decayed.data.b" in check_cycles(sources)[0]
    sources["hf_decayed/data/c.py"] = "def f():\n    from . import a"
    assert check_cycles(sources) == []


def test_cycle_of_rooms_is_found():
    sources = {
        "hf_decayed/data/a.py": "from ..hub.b import x",
        "hf_decayed/hub/b.py": "def f():\n    import hf_decayed.data",
    }
    assert find_cycle(room_graph(sources)) == ["data", "hub", "data"]
    assert check_cycles(sources) == ["These import one another in a circle: data -> hub -> data."]


def test_parsed_options_are_found():
    source = "import argparse\n\n\ndef load(options: argparse.Namespace): ..."
    assert "hf_decayed/data/a.py:4" in check_options(source, "hf_decayed/data/a.py")[0]
    assert check_options("from argparse import Namespace", "hf_decayed/data/a.py")
    assert not check_options(source, "hf_decayed/run/arguments.py")


@pytest.mark.parametrize(
    "source",
    [
        "pickle.load(file)",
        "from pickle import loads",
        "from torch import load",
        "import joblib",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "np.load(path, allow_pickle=True)",
        "pandas.read_pickle(path)",
    ],
)
def test_pickle_is_found(source):
    assert len(check_pickles(source, "training/a.py")) == 1


@pytest.mark.parametrize(
    "source", ["torch.load(path, weights_only=True)", "np.load(path)", "import pickletools", "json.load(file)"]
)
def test_safe_loading_is_accepted(source):
    assert check_pickles(source, "training/a.py") == []


def test_long_function_is_found():
    source = "def {}():\n" + 80 * "    x = 1\n"
    assert "`parse` has 81 lines" in check_function_lengths(source.format("parse"), "training/a.py")[0]
    assert check_function_lengths(source.format("main"), "training/a.py") == []


def test_undeclared_import_is_found():
    file, base, optional = "hf_decayed/a.py", {"torch"}, {"matplotlib"}
    (error,) = check_requirements("import matplotlib.pyplot", file, base, optional)
    assert "matplotlib, which is an optional extra" in error
    (error,) = check_requirements("try:\n    import attrs\nexcept ImportError:\n    pass", file, base, optional)
    assert "attrs, which is not declared" in error
    assert check_requirements("import torch.nn, json\n\n\ndef f():\n    import matplotlib", file, base, optional) == []


def test_links_of_the_readme_lead_to_the_repository_on_pypi():
    absolute_links = runpy.run_path(str(ROOT / "setup.py"))["absolute_links"]
    repository = "https://example.org/user/hf_decayed"
    absolute = absolute_links((ROOT / "README.md").read_text(), repository)
    assert not [
        target for target in re.findall(r"\]\(([^)\s]+)\)", absolute) if not target.startswith(("https:", "#"))
    ]
    targets = re.findall(rf"(!?)\[[^\]]*\]\({repository}/(\w+)/main/([^)#\s]+)", absolute)
    assert len(targets) > 20 and {kind for picture, kind, _ in targets if picture} == {"raw"}
    assert all((ROOT / target).exists() for _, _, target in targets)
    badge = "[![License](https://img.shields.io/license)](LICENSE)"
    assert absolute_links(badge, repository) == badge.replace("(LICENSE)", f"({repository}/blob/main/LICENSE)")
