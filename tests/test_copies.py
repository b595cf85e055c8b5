"""Files that travel to the Hub alone: their copies are declared and equal, and their public names are listed."""

import ast
import importlib
from collections import defaultdict
from pathlib import Path

import check_copies
import pytest
from diffusers import DiffusionPipeline, ModelMixin, SchedulerMixin
from transformers import ImageProcessingMixin, Pipeline, PreTrainedConfig, PreTrainedModel

import hf_decayed


ROOT = Path(__file__).parents[1]
PUBLISHED = sorted(
    file
    for room in ("models", "pipelines")
    for file in (ROOT / "hf_decayed" / room).glob("*.py")
    if file.stat().st_size
)

SOURCE = '''
LIMIT = 3


def scale(value):
    """Scaled by the limit."""
    return LIMIT * value  # a comment is not compared


class OneNorm:
    @property
    def name(self):
        return "one"

    def norm(self, values):
        """Of One.

        A second paragraph.
        """
        return max(
            values
        )
'''

COPIES = '''
# Copied from hf_decayed.source.LIMIT
LIMIT = 3


# Copied from hf_decayed.source.scale
def scale(value):
    """Scaled by the limit."""

    return LIMIT * value


class TwoNorm:
    # Copied from hf_decayed.source.OneNorm.name with one->two
    @property
    def name(self):
        return "two"

    # Copied from hf_decayed.source.OneNorm.norm with One->Two
    def norm(self, values):
        """Of Two.

        A second paragraph.
        """
        return max(values)
'''


@pytest.fixture
def package(tmp_path):
    (tmp_path / "hf_decayed").mkdir()
    (tmp_path / "hf_decayed" / "source.py").write_text(SOURCE)
    (tmp_path / "hf_decayed" / "copies.py").write_text(COPIES)
    return tmp_path


def test_declared_copies_equal_their_sources():
    differences = [check_copies.describe(copy) for copy in check_copies.find_differences()]
    assert not differences, "\n".join([*differences, f"Run `{check_copies.FIX}`."])


def test_equal_copies_pass(package):
    assert len(check_copies.list_copies(package / "hf_decayed" / "copies.py")) == 4
    assert check_copies.main([], package) == 0


@pytest.mark.parametrize(
    "old, new, name",
    [
        ("LIMIT = 3", "LIMIT = 4", "LIMIT"),
        ("LIMIT * value", "LIMIT + value", "scale"),
        ("Scaled by the limit", "Scaled", "scale"),
        ('return "two"', 'return "one"', "TwoNorm.name"),
        ("    @property\n", "", "TwoNorm.name"),
        ("A second paragraph.", "Another paragraph.", "TwoNorm.norm"),
        ("max(values)", "min(values)", "TwoNorm.norm"),
        ("def norm(self, values)", "def size(self, values)", "TwoNorm.size"),
    ],
)
def test_a_changed_copy_is_reported_and_fixed(old, new, name, package, capsys):
    copies = package / "hf_decayed" / "copies.py"
    assert COPIES.count(old) == 1
    copies.write_text(COPIES.replace(old, new))
    assert check_copies.main([], package) == 1
    report = capsys.readouterr().out
    assert f"hf_decayed/copies.py: `{name}` differs from hf_decayed.source." in report
    assert "run `python tests/check_copies.py --fix`" in report

    assert check_copies.main(["--fix"], package) == 0
    assert f"`{name}`" in capsys.readouterr().out
    assert check_copies.main([], package) == 0
    # Rewritten are only the lines of the copy.
    assert ast.dump(ast.parse(copies.read_text())) == ast.dump(ast.parse(COPIES))
    assert copies.read_text().count("# Copied from") == 4


def test_a_changed_source_changes_its_copies_and_their_copies(package):
    third = package / "hf_decayed" / "a_third.py"
    third.write_text(COPIES.split("class")[0].replace("hf_decayed.source", "hf_decayed.copies"))
    source = package / "hf_decayed" / "source.py"
    source.write_text(SOURCE.replace("return LIMIT * value", "return LIMIT - value"))
    assert check_copies.main(["--fix"], package) == 0
    for file in ("copies.py", "a_third.py"):
        assert "return LIMIT - value  # a comment is not compared" in (package / "hf_decayed" / file).read_text()


@pytest.mark.parametrize(
    "old, new, message",
    [
        (
            "source.scale",
            "source.scales",
            "`scale` is declared a copy of hf_decayed.source.scales, which does not exist",
        ),
        (
            "source.scale",
            "sources.scale",
            "`scale` is declared a copy of hf_decayed.sources.scale, which does not exist",
        ),
        ("source.scale\n", "source.scale\n\n", "no function, class or constant stands below"),
    ],
)
def test_a_wrong_header_is_reported(old, new, message, package, capsys):
    (package / "hf_decayed" / "copies.py").write_text(COPIES.replace(old, new))
    for arguments in ([], ["--fix"]):
        assert check_copies.main(arguments, package) == 2
        assert message in capsys.readouterr().err


def test_copies_of_each_other_end_with_a_message(package, capsys):
    (package / "hf_decayed" / "one.py").write_text("# Copied from hf_decayed.two.LIMIT with 1->11\nLIMIT = 1\n")
    (package / "hf_decayed" / "two.py").write_text("# Copied from hf_decayed.one.LIMIT\nLIMIT = 1\n")
    assert check_copies.main(["--fix"], package) == 2
    assert "do they copy each other?" in capsys.readouterr().err


def test_equal_functions_of_published_files_are_declared():
    """The same function of three statements or more in two files is a copy, and says so."""
    declared = {(copy.file, copy.name) for file in PUBLISHED for copy in check_copies.list_copies(file)}
    files = defaultdict(list)
    for file in PUBLISHED:
        for name, node in check_copies.definitions(ast.parse(file.read_text())).items():
            is_declared = {(file, name), (file, name.rpartition(".")[0])} & declared  # itself, or the whole class
            if isinstance(node, ast.FunctionDef) and len(node.body) > 2 and not is_declared:
                files[ast.dump(node)].append(f"{file.name}: {name}")
    assert [names for names in files.values() if len(names) > 1] == []


@pytest.mark.parametrize("file", PUBLISHED, ids=lambda file: file.stem)
def test_public_classes_are_listed(file):
    """`__all__` can be read without importing the file, and holds its configs, models, processors, pipelines, schedulers."""
    module = importlib.import_module(f"hf_decayed.{file.parent.name}.{file.stem}")
    kinds = (PreTrainedConfig, PreTrainedModel, ImageProcessingMixin, Pipeline)
    kinds += (ModelMixin, DiffusionPipeline, SchedulerMixin)
    classes = [value for value in vars(module).values() if isinstance(value, type) and issubclass(value, kinds)]
    public = {cls.__name__ for cls in classes if cls.__module__ == module.__name__}
    public = sorted(name for name in public if not name.endswith("PreTrainedModel"))  # bases of the models
    names = hf_decayed._read_constants(file).get("__all__", [])
    assert names == sorted(names) and [name for name in names if isinstance(getattr(module, name), type)] == public
    assert all(getattr(hf_decayed, name) is getattr(module, name) for name in names)
