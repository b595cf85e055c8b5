"""The documentation: links lead somewhere, every page is in the site, examples run, commands are understood."""

import importlib
import re
import shlex
from pathlib import Path

import pytest
import yaml

from hf_decayed.cli import main
from hf_decayed.data.inspection import ImageKind
from hf_decayed.evaluation.arguments import parse_arguments as parse_evaluation


ROOT = Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs").glob("*.md"))


def page_ids(path):
    return path.stem


@pytest.mark.parametrize("page", PAGES, ids=page_ids)
def test_links_lead_somewhere(page):
    for link in re.findall(r"\]\(([^)#\s]+)", page.read_text()):
        assert link.startswith("http") or (page.parent / link).exists(), link


def test_the_site_has_every_page():
    def pages(entries):
        for entry in entries:
            for content in entry.values():
                yield from [content] if isinstance(content, str) else pages(content)

    navigation = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    assert sorted(pages(navigation)) == [page.name for page in PAGES]


def test_the_api_reference_names_what_exists():
    for name in re.findall(r"^::: ([\w.]+)$", (ROOT / "docs" / "api.md").read_text(), re.MULTILINE):
        module, _, attribute = name.rpartition(".")
        imported = importlib.import_module(name if attribute.islower() else module)
        assert attribute.islower() or hasattr(imported, attribute), name


@pytest.mark.parametrize("name", ["quick_start", "training", "diffusion", "evaluation"])
def test_examples_run(name, tmp_path, monkeypatch):
    """Python blocks of a page, in order, in a folder with the shipped checkpoints."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model_cards").symlink_to(ROOT / "model_cards")
    names = {}
    for block in re.findall(r"```python\n(.*?)```", (ROOT / "docs" / f"{name}.md").read_text(), re.DOTALL):
        exec(compile(block, name, "exec"), names)


@pytest.mark.parametrize("page", PAGES, ids=page_ids)
def test_commands_are_understood(page, capsys, monkeypatch):
    """Lines that call a script or `hf-decayed`; scripts parse their flags, commands have the flags that are used."""
    monkeypatch.setattr("hf_decayed.run.arguments.own_images", lambda options: ImageKind(True, 480, 640))
    blocks = re.findall(r"```bash\n(.*?)```", page.read_text(), re.DOTALL)
    for line in "\n".join(blocks).replace("\\\n", " ").splitlines():
        if match := re.search(r"training/(\w+)\.py(.*)", line):
            assert importlib.import_module(match[1]).parse_arguments(shlex.split(match[2], comments=True))
        elif line.startswith("hf-decayed evaluate"):
            parse_evaluation(shlex.split(line, comments=True)[2:])
        elif line.startswith("hf-decayed"):
            words = shlex.split(line, comments=True)
            with pytest.raises(SystemExit):
                main([words[1], "--help"])
            described = capsys.readouterr().out
            for flag in (word for word in words if word.startswith("--")):
                assert flag in described, line
