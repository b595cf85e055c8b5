"""Checks what CONTRIBUTING.md promises of the source: which room imports which, what is never imported or loaded.

    python tests/check_structure.py     # one sentence for every fault

Imports are read from the syntax tree, those inside of functions included; nothing is imported.
"""

import ast
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib.metadata import distributions
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name


if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # comes with pytest


ROOT = Path(__file__).parents[1]
PACKAGE = "hf_decayed"
# A room imports rooms of earlier lines; those of one line do not import one another.
ORDER = [
    ["errors", "command_line", "precision", "provenance"],
    ["models", "pipelines", "losses"],
    ["kinds", "decay"],
    ["plots"],
    ["data"],
    ["evaluation"],
    ["spectral"],
    ["hub"],
    ["run"],
    ["cli"],
]
LEVELS = {room: level for level, rooms in enumerate(ORDER) for room in rooms}
PUBLISHED_ROOMS = ("models", "pipelines", "losses")  # files that work without the rest of the package
UNRESTRICTED = ("__init__", "_deprecated", "metrics")  # may import anything; no room imports them
# Files that handle parsed options. The last one meets them as data: other people's checkpoints contain them.
OPTION_FILES = (
    "hf_decayed/cli.py",
    "hf_decayed/command_line.py",
    "hf_decayed/data/arguments.py",
    "hf_decayed/evaluation/__main__.py",
    "hf_decayed/evaluation/arguments.py",
    "hf_decayed/run/arguments.py",
    "hf_decayed/hub/formats/_format.py",
)
PICKLE_LOADERS = ("load", "loads", "Unpickler")
MAX_FUNCTION_LINES = 80
# Import names that differ from the name of the distribution, which may not be installed.
IMPORT_NAMES = {"pillow": "PIL", "pyyaml": "yaml", "scikit-learn": "sklearn"}


@dataclass(frozen=True)
class Import:
    """One imported name: `from ..data.sources import take_subset` has the module `hf_decayed.data.sources`."""

    module: str
    name: str | None
    relative_level: int
    in_function: bool
    line: int

    @property
    def top_level(self) -> str:
        return self.module.split(".")[0]


def read_imports(source: str, file: str) -> list[Import]:
    """All imports of a source text; `file` is its path from the root of the repository, which relative imports need."""
    package = file.split("/")[:-1]

    def visit(node: ast.AST, in_function: bool) -> Iterator[Import]:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, None, 0, in_function, node.lineno)
        elif isinstance(node, ast.ImportFrom):
            parents = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*parents, *([node.module] if node.module else [])])
            for alias in node.names:
                yield Import(module, alias.name, node.level, in_function, node.lineno)
        in_function = in_function or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        for child in ast.iter_child_nodes(node):
            yield from visit(child, in_function)

    return list(visit(ast.parse(source), False))


def room_of(file: str) -> str:
    """`hf_decayed/data/sources.py` -> `data`, `hf_decayed/plots.py` -> `plots`."""
    return file.removesuffix(".py").split("/")[1]


def imported_room(statement: Import) -> str | None:
    """The room that an import reaches; `None` for other packages, and for the version, which every room may import."""
    parts = [*statement.module.split("."), *([statement.name] if statement.name else [])]
    if parts[0] != PACKAGE or parts[1:] == ["__version__"]:
        return None
    return parts[1] if len(parts) > 1 and parts[1] in (*LEVELS, *UNRESTRICTED) else "__init__"


def check_direction(source: str, file: str) -> list[str]:
    """Imports that the order of the rooms forbids."""
    room = room_of(file)
    if room in UNRESTRICTED:
        return []
    if room not in LEVELS:
        return [f"{file} is in no room: add '{room}' to ORDER in tests/check_structure.py and to CONTRIBUTING.md."]
    imports = read_imports(source, file)
    if room in PUBLISHED_ROOMS:
        return check_published_file(imports, file)
    errors = []
    for statement in imports:
        other = imported_room(statement)
        where = f"{file}:{statement.line}"
        if other is None or other == room:
            continue
        if other in UNRESTRICTED:
            errors.append(
                f"{where}: '{room}' imports {PACKAGE}.{other}: import from the module that defines the name."
            )
        elif LEVELS[other] == LEVELS[room]:
            errors.append(f"{where}: '{room}' imports '{other}', which is beside it: neither may import the other.")
        elif LEVELS[other] > LEVELS[room]:
            errors.append(
                f"{where}: '{room}' imports '{other}', which comes after it: move what both need into an earlier room."
            )
    return errors


def check_published_file(imports: list[Import], file: str) -> list[str]:
    """Models, pipelines and losses import siblings only, and files of diffusers not even those."""
    uses_diffusers = any(statement.top_level == "diffusers" for statement in imports)
    folder = ".".join(file.split("/")[:-1])
    errors = []
    for statement in imports:
        if imported_room(statement) is None:
            continue
        where, module = f"{file}:{statement.line}", statement.module
        if statement.relative_level != 1 or module.rpartition(".")[0] != folder:
            errors.append(
                f"{where}: imports {module}; a published file imports its siblings alone, as `from .sibling import name`."
            )
        elif uses_diffusers:
            errors.append(
                f"{where}: imports {module}; a file of diffusers is downloaded alone: copy under a `# Copied from` header."
            )
    return errors


def check_cycles(sources: dict[str, str]) -> list[str]:
    """Rooms that import one another in a circle, and modules that do so while they are imported."""
    restricted = {file: source for file, source in sources.items() if room_of(file) not in UNRESTRICTED}
    cycles = [find_cycle(room_graph(restricted)), find_cycle(module_graph(restricted))]
    return [f"These import one another in a circle: {' -> '.join(cycle)}." for cycle in cycles if cycle]


def room_graph(sources: dict[str, str]) -> dict[str, set[str]]:
    graph: dict[str, set[str]] = {}
    for file, source in sources.items():
        rooms = {room for statement in read_imports(source, file) if (room := imported_room(statement))}
        graph.setdefault(room_of(file), set()).update(rooms - {room_of(file)})
    return graph


def module_graph(sources: dict[str, str]) -> dict[str, set[str]]:
    """Imports inside of functions are left out: they run later."""
    modules = {file.removesuffix(".py").removesuffix("/__init__").replace("/", "."): file for file in sources}
    graph = {}
    for module, file in modules.items():
        imports = [statement for statement in read_imports(sources[file], file) if not statement.in_function]
        targets = {f"{statement.module}.{statement.name}" for statement in imports}
        targets |= {statement.module for statement in imports if f"{statement.module}.{statement.name}" not in modules}
        graph[module] = (targets & modules.keys()) - {module}
    return graph


def find_cycle(graph: dict[str, set[str]]) -> list[str] | None:
    """A path that ends where it begins, or `None`."""
    finished: set[str] = set()

    def visit(node: str, path: list[str]) -> list[str] | None:
        if node in path:
            return [*path[path.index(node) :], node]
        if node in finished:
            return None
        for neighbour in sorted(graph.get(node, ())):
            if cycle := visit(neighbour, [*path, node]):
                return cycle
        finished.add(node)
        return None

    return next((cycle for node in sorted(graph) if (cycle := visit(node, []))), None)


def check_options(source: str, file: str) -> list[str]:
    """Mentions of `argparse.Namespace` outside of the files that parse flags."""
    if file in OPTION_FILES:
        return []
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Attribute)]
    lines = [node.lineno for node in nodes if ast.unparse(node) == "argparse.Namespace"]
    imports = read_imports(source, file)
    lines += [
        statement.line for statement in imports if (statement.module, statement.name) == ("argparse", "Namespace")
    ]
    return [f"{file}:{line}: handles parsed options; library functions take the values they need." for line in lines]


def check_pickles(source: str, file: str) -> list[str]:
    """Imports and calls that could load a pickle."""
    errors = []
    for statement in read_imports(source, file):
        names_loader = statement.top_level in ("pickle", "torch") and statement.name in PICKLE_LOADERS
        if statement.top_level in ("joblib", "dill", "cloudpickle") or names_loader:
            errors.append(f"{file}:{statement.line}: imports from {statement.module} what loads pickles.")
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        function, where = ast.unparse(node.func), f"{file}:{node.lineno}"
        keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
        if function in [f"pickle.{loader}" for loader in PICKLE_LOADERS] or function.endswith(".read_pickle"):
            errors.append(f"{where}: {function} loads a pickle, which can run any code.")
        elif function == "torch.load" and keywords.get("weights_only") != "True":
            errors.append(f"{where}: torch.load without `weights_only=True` can run any code.")
        elif function in ("np.load", "numpy.load") and keywords.get("allow_pickle", "False") != "False":
            errors.append(f"{where}: {function} with `allow_pickle` can run any code.")
    return errors


def check_function_lengths(source: str, file: str) -> list[str]:
    """Long functions of a script; `main` may be long, because it reads from top to bottom."""
    errors = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name != "main":
            lines = (node.end_lineno or 0) - node.lineno + 1
            if lines > MAX_FUNCTION_LINES:
                errors.append(
                    f"{file}:{node.lineno}: `{node.name}` has {lines} lines, more than {MAX_FUNCTION_LINES}."
                )
    return errors


def check_requirements(source: str, file: str, base: set[str], optional: set[str]) -> list[str]:
    """Packages that a module needs when it is imported, and that a plain installation may not have."""
    errors = []
    for statement in read_imports(source, file):
        name = statement.top_level
        if statement.in_function or name in base or name in sys.stdlib_module_names or name == PACKAGE:
            continue
        reason = "an optional extra: import it in the function that needs it" if name in optional else "not declared"
        errors.append(f"{file}:{statement.line}: imports {name}, which is {reason}.")
    return errors


def read_sources(*folders: str) -> dict[str, str]:
    """Source texts by path from the root of the repository."""
    files = sorted(file for folder in folders for file in (ROOT / folder).rglob("*.py"))
    return {file.relative_to(ROOT).as_posix(): file.read_text() for file in files}


def read_pyproject() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def extra_requirements() -> list[str]:
    """The requirements of all extras, without those that name another extra of this package."""
    extras = read_pyproject()["project"]["optional-dependencies"].values()
    return [entry for extra in extras for entry in extra if Requirement(entry).name != PACKAGE]


@cache
def installed_packages() -> dict[str, set[str]]:
    """Distributions by import name, from their files: `packages_distributions` of Python 3.10 misses many."""
    packages: dict[str, set[str]] = {}
    for distribution in distributions():
        modules = [file for file in distribution.files or [] if file.suffix in (".py", ".so", ".pyd")]
        owner = canonicalize_name(distribution.metadata["Name"])
        for name in {file.parts[0].split(".")[0] for file in modules}:
            if name.isidentifier() and name != "__pycache__":
                packages.setdefault(name, set()).add(owner)
    return packages


def import_names(requirements: Iterable[str]) -> set[str]:
    """Names under which the packages of requirements are imported."""
    installed = installed_packages()
    names = set()
    for requirement in requirements:
        distribution = canonicalize_name(Requirement(requirement).name)
        usual_name = IMPORT_NAMES.get(distribution, distribution.replace("-", "_"))
        names |= {usual_name, *(name for name, owners in installed.items() if distribution in owners)}
    return names


def declared_packages() -> tuple[set[str], set[str]]:
    """Import names of the base dependencies, and of the packages that only extras have."""
    base = import_names(read_pyproject()["project"]["dependencies"])
    return base, import_names(extra_requirements()) - base


def collect(check, sources: dict[str, str], *arguments) -> list[str]:
    return [error for file, source in sources.items() for error in check(source, file, *arguments)]


def main() -> int:
    package, scripts = read_sources(PACKAGE), read_sources("training")
    errors = collect(check_direction, package) + check_cycles(package) + collect(check_options, package)
    errors += collect(check_requirements, package, *declared_packages())
    errors += collect(check_pickles, package | scripts) + collect(check_function_lengths, scripts)
    print("\n".join(errors) or "The structure is as CONTRIBUTING.md has it.")
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
