"""What is installed, what scripts import, and that no file names a place outside the repository."""

import ast
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "retrieval_gym"
AGENTS = sorted((ROOT / "agents").glob("*.py"))
SCRIPTS = [*AGENTS, *sorted((ROOT / "examples").glob("*.py")), *sorted((ROOT / "benchmarks").glob("*.py"))]
TEXT = {".py", ".md", ".toml", ".yaml", ".yml", ".cff", ".cfg", ".txt", ".json", ".jsonl"}
TEXT_NAMES = {"Makefile", "LICENSE", "run", ".gitignore"}
SKIPPED = re.compile(r"^(\.venv|\.git|\..*_cache|\.hypothesis|\.cache|build|dist|site|runs|.*\.egg-info|__pycache__)$")


def repository_files():
    for folder, folders, files in os.walk(ROOT):
        folders[:] = [name for name in folders if not SKIPPED.match(name)]
        yield from (Path(folder) / name for name in files if Path(name).suffix in TEXT or name in TEXT_NAMES)


def imported(path):
    """Return the dotted names that a file imports, anywhere in it."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


def test_wheel_holds_the_package_and_nothing_else(tmp_path):
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        ".",
        "--no-deps",
        "--no-build-isolation",
        "-q",
        "-w",
        str(tmp_path),
    ]
    build = tmp_path / "source"
    build.mkdir()
    for name in (
        "pyproject.toml",
        "README.md",
        "LICENSE",
        "retrieval_gym",
        "agents",
        "examples",
        "benchmarks",
        "tests",
    ):
        (build / name).symlink_to(ROOT / name)
    subprocess.run(command, cwd=build, check=True, capture_output=True, text=True)
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names} == {"retrieval_gym", f"{wheel.name.split('-py3')[0]}.dist-info"}
    packed = {name for name in names if name.endswith(".py")}
    assert "retrieval_gym/py.typed" in names
    assert packed == {str(path.relative_to(ROOT)) for path in PACKAGE.rglob("*.py")}
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_every_folder_of_the_package_is_a_package():
    for folder in {path.parent for path in PACKAGE.rglob("*.py")}:
        assert (folder / "__init__.py").exists(), folder


def test_agents_is_no_package():
    assert AGENTS and not (ROOT / "agents" / "__init__.py").exists()


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_scripts_never_import_each_other(script):
    others = {path.stem for path in SCRIPTS} | {"agents", "examples", "benchmarks", "tests"}
    names = imported(script)
    assert names and not {name.split(".")[0] for name in names} & others


def test_no_file_names_a_place_outside_the_repository():
    data = "shared" + "/data"
    outside = re.compile("|".join(["/work" + "/", "/root" + "/", r"/home/\w", r"\." + "library", data]))
    read = 0
    for path in repository_files():
        text = path.read_text(encoding="utf-8")
        if path == ROOT / ".ci" / "run":
            text = text.replace(f'$(dirname "$PWD")/{data}', "")
        found = outside.search(text)
        assert not found, f"{path.relative_to(ROOT)} names {found.group()!r}"
        read += 1
    assert read > 50


def test_style_files_agree_with_the_package():
    import retrieval_gym

    assert f"\nversion: {retrieval_gym.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"\n## [{retrieval_gym.__version__}]" in (ROOT / "CHANGELOG.md").read_text()
    assert os.access(ROOT / ".ci" / "run", os.X_OK)


def test_an_old_python_is_refused(tmp_path):
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\n[ "$1" = --version ] && echo Python 3.8.1 && exit\nexit 1\n')
    python.chmod(0o755)
    command = ["make", "-B", "install", f"PYTHON={python}"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 2
    assert "Python 3.8.1 is too old: retrieval_gym needs Python 3.10 or newer" in result.stderr


def test_the_environments_are_there_after_a_plain_import_and_in_a_folder_named_as_the_package(tmp_path):
    (tmp_path / "retrieval_gym").mkdir()
    program = "import retrieval_gym; print(retrieval_gym.envs.ChainRetrievalEnv.__name__); retrieval_gym.nothing"
    run = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert run.stdout == "ChainRetrievalEnv\n" and "has no attribute 'nothing'" in run.stderr
