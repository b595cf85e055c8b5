"""Compares declared copies with their sources. Files that travel to the Hub alone cannot import what they share:

    # Copied from hf_decayed.models.unet_decayed_uvit.DecayedUViTAttention with UViT->SiT

stands above a function, class, method or constant that has to equal its source after the replacements. Comparison is by
syntax tree, docstrings included; comments and line breaks may differ. Code of the shipped checkpoints in `model_cards/` is a
copy of the package's, byte for byte.

    python tests/check_copies.py          # lists the copies that differ
    python tests/check_copies.py --fix    # rewrites them from their sources
"""

import argparse
import ast
import re
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path


ROOT = Path(__file__).parents[1]
FIX = "python tests/check_copies.py --fix"
HEADER = re.compile(r"^ *# Copied from (?P<source>[\w.]+)(?: with (?P<replacements>\S+))?$")


class CopyError(Exception):
    """A header that names no source, or that stands above nothing."""


@dataclass
class Copy:
    """A declared copy: lines `start` to `end` of a file, the first of them below the header."""

    file: Path
    name: str
    start: int
    end: int
    source: str
    replacements: list[tuple[str, str]]


def line_range(node: ast.stmt) -> tuple[int, int]:
    """First and last line of a statement, counted from 0, last exclusive, with its decorators."""
    first = min([node.lineno, *(decorator.lineno for decorator in getattr(node, "decorator_list", []))])
    return first - 1, node.end_lineno


def definitions(tree: ast.AST, prefix: str = "") -> dict[str, ast.stmt]:
    """Functions, classes, methods and constants by qualified name."""
    nodes = {}
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            nodes[prefix + node.name] = node
            nodes |= definitions(node, f"{prefix}{node.name}.") if isinstance(node, ast.ClassDef) else {}
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            nodes[prefix + node.targets[0].id] = node
    return nodes


def list_copies(file: Path) -> list[Copy]:
    """The declared copies of a file, top to bottom."""
    text = file.read_text()
    by_first_line = {line_range(node)[0]: (name, node) for name, node in definitions(ast.parse(text)).items()}
    copies = []
    for number, line in enumerate(text.splitlines()):
        header = HEADER.match(line)
        if header is None:
            continue
        if number + 1 not in by_first_line:
            raise CopyError(f"{file}:{number + 1}: no function, class or constant stands below `{line.strip()}`.")
        name, node = by_first_line[number + 1]
        pairs = [pair.split("->") for pair in (header["replacements"] or "").split(",") if pair]
        copies.append(Copy(file, name, *line_range(node), header["source"], [(old, new) for old, new in pairs]))
    return copies


def source_text(copy: Copy, root: Path) -> str:
    """What the copy should be: its source, unindented, after the replacements."""
    parts = copy.source.split(".")
    for length in range(len(parts) - 1, 0, -1):
        file = root.joinpath(*parts[:length]).with_suffix(".py")
        if file.exists():
            text = file.read_text()
            node = definitions(ast.parse(text)).get(".".join(parts[length:]))
            if node is not None:
                start, end = line_range(node)
                text = textwrap.dedent("\n".join(text.splitlines()[start:end]))
                for old, new in copy.replacements:
                    text = text.replace(old, new)
                return text
    raise CopyError(
        f"{copy.file}:{copy.start}: `{copy.name}` is declared a copy of {copy.source}, which does not exist."
    )


def syntax(text: str) -> str:
    """The syntax tree as text, without positions."""
    return ast.dump(ast.parse(text))


def differs(copy: Copy, root: Path) -> bool:
    text = "\n".join(copy.file.read_text().splitlines()[copy.start : copy.end])
    return syntax(textwrap.dedent(text)) != syntax(source_text(copy, root))


def find_differences(root: Path = ROOT) -> list[Copy]:
    """All declared copies of the package that differ from their sources."""
    files = sorted((root / "hf_decayed").rglob("*.py"))
    return [copy for file in files for copy in list_copies(file) if differs(copy, root)]


def rewrite(copy: Copy, root: Path) -> None:
    """Puts the source in the place of the copy, at the copy's indentation."""
    lines = copy.file.read_text().splitlines()
    indentation = re.match(" *", lines[copy.start])[0]
    lines[copy.start : copy.end] = textwrap.indent(source_text(copy, root), indentation).splitlines()
    copy.file.write_text("\n".join(lines) + "\n")


def fix(root: Path = ROOT) -> list[Copy]:
    """Rewrites one copy at a time, because lines move, until none differs: a source may be a copy itself."""
    fixed = []
    while differences := find_differences(root):
        copy = differences[0]
        if sum((copy.file, copy.name) == (other.file, other.name) for other in fixed) > 2:
            raise CopyError(f"{copy.file}: `{copy.name}` still differs from {copy.source}: do they copy each other?")
        rewrite(copy, root)
        fixed.append(copy)
    return fixed


def outdated_code(root: Path = ROOT) -> dict[Path, Path]:
    """Code files of shipped checkpoints that differ from the package's file of the same name: file -> the package's."""
    rooms = (root / "hf_decayed" / "models", root / "hf_decayed" / "pipelines")
    package = {file.name: file for room in rooms for file in room.glob("*.py")}
    shipped = [file for folder in (root / "model_cards").glob("*-*") for file in sorted(folder.rglob("*.py"))]
    return {file: package[file.name] for file in shipped if file.read_text() != package[file.name].read_text()}


def describe(copy: Copy, root: Path = ROOT) -> str:
    return f"{copy.file.relative_to(root)}: `{copy.name}` differs from {copy.source}"


def main(arguments: list[str] | None = None, root: Path = ROOT) -> int:
    parser = argparse.ArgumentParser(description="Compares declared copies with their sources.")
    parser.add_argument("--fix", action="store_true", help="rewrite the copies that differ")
    options = parser.parse_args(arguments)
    try:
        copies = fix(root) if options.fix else find_differences(root)
    except CopyError as error:
        print(error, file=sys.stderr)
        return 2
    for copy in copies:
        print(describe(copy, root) + (": rewritten" if options.fix else f": run `{FIX}`"))
    shipped = outdated_code(root)
    for file, ours in shipped.items():
        if options.fix:
            file.write_text(ours.read_text())
        print(
            f"{file.relative_to(root)} differs from the package's" + (": copied" if options.fix else f": run `{FIX}`")
        )
    return 1 if (copies or shipped) and not options.fix else 0


if __name__ == "__main__":
    sys.exit(main())
