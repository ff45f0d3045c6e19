import ast
import subprocess
import sys
from pathlib import Path

import pytest

import retrieval_gym

ROOT = Path(retrieval_gym.__file__).parent
HEAVY = ("torch", "transformers", "sentence_transformers", "peft", "faiss", "bm25s", "datasets", "pyarrow", "scipy")
MODULES = sorted(ROOT.rglob("*.py"))


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


class Imports(ast.NodeVisitor):
    """Collects absolute names of imported modules; ``eager`` are those that importing the file runs."""

    def __init__(self, source: str) -> None:
        self.eager: set[str] = set()
        self.lazy: set[str] = set()
        self._current = self.eager
        self.visit(ast.parse(source))

    def visit_Import(self, node: ast.Import) -> None:
        self._current.update(alias.name for alias in node.names)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        assert node.level == 0, "imports are absolute in this package"
        # ``from package import module`` names the module, and a plain name only adds a longer spelling.
        self._current.update([node.module, *(f"{node.module}.{alias.name}" for alias in node.names)])

    def visit_If(self, node: ast.If) -> None:
        if "TYPE_CHECKING" not in ast.unparse(node.test):
            self.generic_visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        before, self._current = self._current, self.lazy
        self.generic_visit(node)
        self._current = before

    visit_AsyncFunctionDef = visit_FunctionDef  # type: ignore[assignment]


def imports(path: Path) -> Imports:
    return Imports(path.read_text(encoding="utf-8"))


def starts(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


def test_the_collector_tells_eager_from_lazy_and_type_checking():
    found = Imports(
        "import a.b\nfrom c import d\nif TYPE_CHECKING:\n    import e\nif x:\n    import f\n"
        "def g():\n    import h\nclass K:\n    import i\n    def m(self):\n        from n import o\n"
    )
    assert found.eager == {"a.b", "c", "c.d", "f", "i"} and found.lazy == {"h", "n", "n.o"}


def test_importing_the_package_imports_nothing_heavy():
    code = f"import retrieval_gym, retrieval_gym.envs, sys; print([m for m in {HEAVY!r} if m in sys.modules])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]" and run.stderr == ""


def test_importing_the_package_registers_its_ids():
    code = (
        "import gymnasium, retrieval_gym.registration as r\n"
        "print(all(i in gymnasium.registry for i in r.ENVIRONMENTS), len(r.ENVIRONMENTS) > 5)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["True", "True"]


@pytest.mark.parametrize("name", ["mdp", "rewards"])
def test_the_rules_of_the_game_need_numpy_only(name):
    found = imports(ROOT / f"{name}.py")
    allowed = sys.stdlib_module_names | {"numpy"}
    outside = {m for m in found.eager | found.lazy if m.split(".")[0] not in allowed}
    assert {m for m in outside if not starts(m, "retrieval_gym.mdp") and m != "retrieval_gym"} == set()


@pytest.mark.parametrize("path", MODULES, ids=module_name)
def test_who_may_import_whom(path):
    name, found = module_name(path), imports(path)
    everything = found.eager | found.lazy
    forbidden = ["agents", "examples", "tests", "benchmarks"]
    if starts(name, "retrieval_gym.datasets"):
        forbidden.append("retrieval_gym.envs")
    if starts(name, "retrieval_gym.nn"):
        forbidden.append("retrieval_gym.envs")
    assert {m for m in everything if any(starts(m, package) for package in forbidden)} == set()
    if not starts(name, "retrieval_gym.nn"):
        torch_based = ("torch", "transformers", "sentence_transformers", "peft", "retrieval_gym.nn")
        assert {m for m in found.eager if any(starts(m, package) for package in torch_based)} == set()


@pytest.mark.parametrize("path", sorted((ROOT / "envs").glob("*.py")), ids=module_name)
def test_environments_import_the_game_and_nothing_else_of_the_package(path):
    allowed = ("mdp", "datasets", "rewards", "spaces", "rendering", "envs")
    ours = {m for m in imports(path).eager | imports(path).lazy if starts(m, "retrieval_gym")} - {"retrieval_gym"}
    assert {m for m in ours if not any(starts(m, f"retrieval_gym.{part}") for part in allowed)} == set()
