"""The floors of the house: a file imports files below it, never above; kernels stand alone."""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# Bottom to top. A name is a file or a folder of peagle_jax; it may import those before it.
# A new file or folder takes its place here before it is imported anywhere.
FLOORS = (
    "errors",
    "files",
    "json_values",
    "markdown",
    "durable_lines",
    "config",
    "metrics",
    "mesh_shape",
    "hosts",
    "sharding",
    "compile_cache",
    "prompt_lines",
    "channels",
    "text",
    "models",
    "convert",
    "tokenizer",
    "decoding",
    "batching",
    "step_costs",
    "prospects",
    "outlook",
    "runner",
    "serving",
    "training",
    "api",
    "bench",
    "plan",
    "commands",
    "cli",
    "__main__",
)


def module_name(path: Path, root: Path = ROOT) -> str:
    """Dotted name of a source file, packages without `.__init__`."""
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def sources(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def imports(tree: ast.AST, *, run_at_import: bool = False) -> Iterator[str]:
    """Every module that a file names in an import.

    `from a import b` gives both `a` and `a.b`, as `b` may be a module. With
    `run_at_import`, only what runs when the file itself is imported: not the bodies of
    functions, nor `if TYPE_CHECKING`.
    """
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"relative import at line {node.lineno}"
            assert node.module is not None
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif run_at_import and (
            isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            or is_type_checking(node)
        ):
            continue
        else:
            yield from imports(node, run_at_import=run_at_import)


def floor_of(module: str) -> str | None:
    """The floor of a peagle_jax module, None for the package itself and for others."""
    package, _, rest = module.partition(".")
    return rest.partition(".")[0] if package == "peagle_jax" and rest else None


def floor_violations(module: str, source: str) -> list[str]:
    """Imports of `source`, standing at `module`, that reach a floor above its own."""
    own = floor_of(module)
    assert own is not None
    return [
        f"{module} imports {name}"
        for name in imports(ast.parse(source))
        if (floor := floor_of(name)) in FLOORS and FLOORS.index(floor) > FLOORS.index(own)
    ]


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def test_every_file_has_a_floor():
    found = {floor_of(module_name(path)) for path in sources("peagle_jax")} - {None}
    assert found - set(FLOORS) == set()
    assert {"errors", "config", "cli"} <= found


def test_files_import_only_lower_floors():
    violations = [
        violation
        for path in sources("peagle_jax")
        if floor_of(module_name(path)) is not None
        for violation in floor_violations(module_name(path), path.read_text(encoding="utf-8"))
    ]
    assert violations == []


@pytest.mark.parametrize(
    ("module", "source", "count"),
    [
        ("peagle_jax.models.cache", "from peagle_jax.decoding import verify", 2),
        ("peagle_jax.models.cache", "def f():\n    import peagle_jax.api", 1),
        ("peagle_jax.decoding.verify", "from peagle_jax.models import cache", 0),
        ("peagle_jax.errors", "from peagle_jax import config", 1),
        ("peagle_jax.cli", "import peagle_jax.commands.generate", 0),
    ],
)
def test_the_floor_check_itself(module, source, count):
    assert len(floor_violations(module, source)) == count


def test_no_import_cycles():
    """Within a folder too, files are built on one another in one direction."""
    paths = sources("peagle_jax") + sources("pallas_kernels")
    names = {module_name(path) for path in paths}
    graph = {
        module_name(path): {name for name in imports(parse(path)) if name in names}
        # A package's __init__ may gather its own files; that they then are inside it is no cycle.
        - set(itertools.accumulate(module_name(path).split("."), "{}.{}".format))
        for path in paths
        if path.name != "__init__.py"
    }

    done: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, " -> ".join((*trail, name))
        if name in done:
            return
        for below in sorted(graph.get(name, ())):
            visit(below, (*trail, name))
        done.add(name)

    for name in sorted(graph):
        visit(name, ())


def test_kernels_do_not_know_the_library():
    for path in sources("pallas_kernels"):
        roots = {name.partition(".")[0] for name in imports(parse(path))}
        assert "peagle_jax" not in roots, path


@pytest.mark.parametrize("package", ["peagle_jax", "pallas_kernels"])
def test_torch_is_never_imported_with_the_library(package):
    for path in sources(package):
        roots = {name.partition(".")[0] for name in imports(parse(path), run_at_import=True)}
        assert "torch" not in roots, path


def test_imports_that_run_are_told_from_those_that_wait():
    tree = ast.parse(
        "import a\n"
        "if TYPE_CHECKING:\n    import b\n"
        "try:\n    import c\nexcept ImportError:\n    pass\n"
        "def f():\n    import d\n"
        "class C:\n    import e\n"
    )
    assert list(imports(tree, run_at_import=True)) == ["a", "c", "e"]
    assert list(imports(tree)) == ["a", "b", "c", "d", "e"]


@pytest.mark.parametrize("package", ["peagle_jax", "pallas_kernels"])
def test_the_readme_names_every_file(package) -> None:
    tree = (ROOT / "README.md").read_text()
    missing = [
        str(path.relative_to(ROOT))
        for path in sources(package)
        if path.name != "__init__.py" and not re.search(rf"[ ,]{re.escape(path.name)}[ ,]", tree)
    ]
    assert not missing
