"""The house rules, read from the source with ``ast``: one-way imports, light imports, sizes, names.

Arrows point one way, jobs -> workers -> hybridflow -> placement (docs/architecture.md says why).
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
LAYERS = ("placement", "hybridflow", "workers", "jobs")  # each may import itself and those to its left
ROLES = ("actor", "critic", "data", "reference", "reward", "rollout")
MAX_FILE_LINES, MAX_FUNCTION_LINES, MAX_ROLE_LINES, MAX_PROGRAM_LINES = 400, 60, 200, 150


class Import(NamedTuple):
    """One import as written: by which file, of which module, in which line, and whether inside a function."""

    file: Path
    module: str
    line: int
    in_function: bool

    def __str__(self) -> str:
        return f"{self.file.relative_to(ROOT)}:{self.line} imports {self.module}"


def module_name(file: Path) -> str:
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def sources() -> dict[str, Path]:
    """Every module of the four packages."""
    files = (file for layer in LAYERS for file in sorted((ROOT / layer).rglob("*.py")))
    return {module_name(file): file for file in files}


@cache
def tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"), str(file))


@cache
def imports() -> list[Import]:
    return [found for file in sources().values() for found in _imports_in(tree(file), file, False)]


def _imports_in(node: ast.AST, file: Path, in_function: bool) -> list[Import]:
    found = []
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            found += [Import(file, alias.name, child.lineno, in_function) for alias in child.names]
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0, f"{file}:{child.lineno}: imports are absolute here"
            module = child.module or ""
            for alias in child.names:  # `from package import module` means the module
                name = f"{module}.{alias.name}"
                found.append(Import(file, name if name in sources() else module, child.lineno, in_function))
        else:
            inside = in_function or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            found += _imports_in(child, file, inside)
    return found


def layer_of(module: str) -> str:
    return module.split(".")[0]


def room_of(file: Path) -> str:
    """``workers.megatron`` for a file in that folder, else the layer."""
    return ".".join(file.relative_to(ROOT).parts[:-1][:2])


def test_arrows_point_one_way():
    wrong = [
        str(found)
        for found in imports()
        if layer_of(found.module) in LAYERS
        and LAYERS.index(layer_of(found.module)) > LAYERS.index(layer_of(module_name(found.file)))
    ]
    assert not wrong, "\n".join(wrong)


def test_no_cycles():
    graph: dict[str, set[str]] = {name: set() for name in sources()}
    for found in imports():
        if layer_of(found.module) in LAYERS:
            graph[module_name(found.file)].add(found.module)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"modules import each other: {' -> '.join(error.args[1])}")


def test_own_packages_are_imported_at_the_top():
    wrong = [str(found) for found in imports() if found.in_function and layer_of(found.module) in LAYERS]
    assert not wrong, "inside a function (load by name through hybridflow/loading.py instead):\n" + "\n".join(wrong)


@pytest.mark.parametrize("engine", ["megatron", "vllm"])
def test_engines_stay_in_their_rooms(engine):
    """Only workers/megatron imports megatron, only workers/vllm imports vllm."""
    wrong = [
        str(found)
        for found in imports()
        if layer_of(found.module) == engine and room_of(found.file) != f"workers.{engine}"
    ]
    assert not wrong, "\n".join(wrong)


def test_the_two_engine_rooms_never_meet():
    pairs = {"workers.megatron": "workers.vllm", "workers.vllm": "workers.megatron"}
    wrong = [
        str(found)
        for found in imports()
        if (other := pairs.get(room_of(found.file))) and (found.module + ".").startswith(other + ".")
    ]
    assert not wrong, "\n".join(wrong)


def test_what_is_loaded_by_name_exists():
    """Every "module:name" literal of ours names a module that defines that name."""
    wrong = []
    for file in sources().values():
        for node in ast.walk(tree(file)):
            if not (isinstance(node, ast.Constant) and isinstance(node.value, str)):
                continue
            match = re.fullmatch(rf"((?:{'|'.join(LAYERS)})(?:\.\w+)+):(\w+)", node.value)
            if match and match[2] not in defined_names(match[1]):
                wrong.append(f"{file.relative_to(ROOT)}:{node.lineno}: {node.value}")
    assert not wrong, "\n".join(wrong)


def defined_names(module: str) -> set[str]:
    if module not in sources():
        return set()
    names: set[str] = set()
    for node in tree(sources()[module]).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
        elif isinstance(node, ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in node.names}
    return names


def test_files_are_short():
    limits = {ROOT / "workers" / f"{role}.py": MAX_ROLE_LINES for role in ROLES}
    limits[ROOT / "jobs" / "ppo.py"] = MAX_PROGRAM_LINES
    counts = {file: len(file.read_text(encoding="utf-8").splitlines()) for file in sources().values()}
    wrong = [
        f"{file.relative_to(ROOT)}: {count} lines, at most {limits.get(file, MAX_FILE_LINES)}"
        for file, count in counts.items()
        if count > limits.get(file, MAX_FILE_LINES)
    ]
    assert not wrong, "\n".join(wrong)


def test_functions_are_short():
    wrong = [
        f"{file.relative_to(ROOT)}:{node.lineno}: {node.name} has {lines} lines, at most {MAX_FUNCTION_LINES}"
        for file in sources().values()
        for node in ast.walk(tree(file))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (lines := (node.end_lineno or 0) - node.lineno + 1) > MAX_FUNCTION_LINES
    ]
    assert not wrong, "\n".join(wrong)


def test_files_are_named_for_what_they_hold():
    banned = {"utils", "util", "common", "helpers", "misc"}
    assert not [str(file) for file in sources().values() if file.stem in banned]


def test_text_is_ascii_and_finished():
    wrong = []
    for file in sources().values():
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
            if not line.isascii() or re.search(r"\b(TODO|FIXME|XXX)\b", line):
                wrong.append(f"{file.relative_to(ROOT)}:{number}: {line.strip()}")
    assert not wrong, "\n".join(wrong)


def test_no_path_of_one_machine():
    wrong = [
        f"{file.relative_to(ROOT)}:{node.lineno}: {node.value[:60]!r}"
        for file in sources().values()
        for node in ast.walk(tree(file))
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and re.search(r"(^|[\s'\"=:])/(work|root|home|Users)/", node.value)
    ]
    assert not wrong, "\n".join(wrong)


def loaded_after(code: str, heavy: tuple[str, ...]) -> set[str]:
    """Which of the heavy packages a fresh interpreter has loaded after running ``code``."""
    probe = f"{code}\nimport sys; print(','.join(m for m in {heavy!r} if m in sys.modules))"
    done = subprocess.run([sys.executable, "-c", probe], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.splitlines()[-1].split(",")) - {""}


def test_the_command_line_starts_without_torch_or_ray():
    heavy = ("torch", "ray", "transformers", "megatron", "vllm")
    assert not loaded_after("import jobs.cli", heavy), "`hybridflow --help` must answer in two seconds"


def test_role_files_are_light():
    """The driver imports them for their methods; engines are loaded in the workers."""
    code = "\n".join(f"import workers.{role}" for role in ROLES)
    assert not loaded_after(code, ("torch", "transformers", "megatron", "vllm"))


def test_algorithms_need_torch_for_losses_only():
    """Advantages are computed in a data process, which has no use for torch."""
    assert not loaded_after("import hybridflow.algorithms.advantages", ("torch", "ray", "megatron", "vllm"))
