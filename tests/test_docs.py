"""The site: its pages and its navigation, the code that they hold, the tables made from code, and a strict build."""

import contextlib
import importlib.util
import io
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest

import retrieval_gym  # noqa: F401 - registers the environments
from retrieval_gym.cli import main

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
BLOCK = re.compile(r'^```python title="(\w+\.py)"\n(.*?)^```$', re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def hooks():
    spec = importlib.util.spec_from_file_location("docs_hooks", DOCS / "hooks.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def blocks(page):
    return dict(BLOCK.findall((DOCS / page).read_text(encoding="utf-8")))


def run_block(page, name, **settings):
    """Run a block as a script, constants set to other values; return its names and what it printed."""
    code = blocks(page)[name]
    for old, new in settings.items():
        assert old in code, f"{name} has no {old!r}"
        code = code.replace(old, new)
    namespace = {"__name__": "__main__"}
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, name, "exec"), namespace)
    return namespace, printed.getvalue()


def nav_pages(items):
    for item in items:
        for value in item.values() if isinstance(item, dict) else [item]:
            if isinstance(value, list):
                yield from nav_pages(value)
            else:
                yield value


def test_the_navigation_holds_every_page_once():
    yaml = pytest.importorskip("yaml", reason="PyYAML reads mkdocs.yml")
    listed = list(nav_pages(yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]))
    written = [path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")]
    assert sorted(listed) == sorted(written)


def test_every_agent_has_a_page_and_a_section():
    scripts = {path.stem for path in (ROOT / "agents").glob("*.py")}
    assert scripts == {path.stem for path in (DOCS / "agents").glob("*.md")} - {"index"}


def test_a_section_is_that_of_the_readme_one_level_up(hooks):
    text = (ROOT / "agents/README.md").read_text(encoding="utf-8")
    parts = re.split(r"^(?=## `)", text, flags=re.MULTILINE)[1:]  # no fence of this file holds such a line
    for part in parts:
        name = re.match(r"## `([\w.]+)`", part)[1]
        made = hooks.section("agents/README.md", name)
        assert made.strip() == re.sub(r"^##(#*) ", r"#\1 ", part, flags=re.MULTILINE).strip()
    assert len(parts) >= 3


def test_a_section_that_is_not_there_is_an_error(hooks):
    with pytest.raises(ValueError, match="no section '## `nothing.py`'"):
        hooks.section("agents/README.md", "nothing.py")


@pytest.mark.parametrize(
    ("written_in", "page", "text", "expected"),
    [
        ("docs/long.md", "long.md", "[a](../agents/README.md#results)", "[a](agents/index.md)"),
        ("docs/agents/x.md", "agents/x.md", "[a](../../README.md)", "[a](../index.md)"),
        ("agents/README.md", "agents/pqn.md", "[a](../docs/long.md#x)", "[a](../long.md#x)"),
        ("docs/long.md", "long.md", "[a](diagnose.md)", "[a](diagnose.md)"),
        ("docs/long.md", "long.md", "[a](#here) [b](https://x.org/y.md)", "[a](#here) [b](https://x.org/y.md)"),
        ("docs/long.md", "long.md", "`[a](nowhere.md)`", "`[a](nowhere.md)`"),
        ("docs/long.md", "long.md", "```\n[a](nowhere.md)\n```", "```\n[a](nowhere.md)\n```"),
        ("docs/long.md", "long.md", "[`a`](../LICENSE)", "[`a`](https://x.org/r/blob/HEAD/LICENSE)"),
    ],
)
def test_links_of_a_page(hooks, written_in, page, text, expected):
    assert hooks.rewrite_links(text, written_in, page, "https://x.org/r/") == expected


def test_without_an_address_a_file_is_named_by_its_path(hooks):
    made = hooks.rewrite_links("see [the terms](../LICENSE).", "docs/long.md", "long.md", None)
    assert made == "see the terms (`LICENSE` in the repository)."


def test_a_link_to_a_file_that_is_not_there_is_an_error(hooks):
    with pytest.raises(FileNotFoundError, match=r"docs/long.md links to \.\./nowhere.md"):
        hooks.rewrite_links("[a](../nowhere.md)", "docs/long.md", "long.md", None)


def cells(table):
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in table.splitlines()]


def test_the_table_of_ids_is_the_registry(hooks):
    """Gymnasium's own registry says what an id stands for."""
    rows = cells(hooks.environment_table())[2:]
    shown = {row[0].strip("`"): row for row in rows}
    assert set(shown) == {name for name in gym.registry if name.startswith("ChainRetrieval")}
    for name, (_, dataset, max_steps, others) in shown.items():
        kwargs = dict(gym.spec(name).kwargs)
        assert int(max_steps) == kwargs.pop("max_steps")
        assert dataset.strip("`") == kwargs.pop("dataset", "yours to give")
        assert others == ", ".join(f"`{key}={value!r}`" for key, value in kwargs.items())


def test_every_dataset_is_described(hooks):
    rows = {row[0].strip("`"): row for row in cells(hooks.dataset_table())[2:]}
    datasets = {gym.spec(name).kwargs.get("dataset") for name in gym.registry if name.startswith("ChainRetrieval")}
    assert datasets - {None} <= set(rows)
    assert all(len(row) == 3 and row[1] for row in rows.values())
    assert "`hard_distractors`" in rows["synthetic"][2] and "`corpus`" in rows["musique"][2]


def test_blocks_of_extending_are_short_and_all_run_here():
    found = blocks("extending.md")
    assert set(found) == {"rivers.py", "costly.py", "fusion.py", "reinforce.py"}
    assert all(code.count("\n") < 60 for code in found.values())
    text = (DOCS / "extending.md").read_text(encoding="utf-8")
    assert text.count("```python") == len(found), "a block without a title is not run"


def test_a_new_dataset():
    pytest.importorskip("bm25s")
    _, text = run_block("extending.md", "rivers.py")
    assert re.search(r"^candidates: 4 passages, each question's own pool$", text, re.MULTILINE), text
    assert re.search(r"^all_gold_picked +all +2 ", text, re.MULTILINE), text


def test_a_new_reward():
    """The oracle finds everything: recall 1, less one price for each of 2 to 4 picks."""
    _, text = run_block("extending.md", "costly.py")
    assert float(re.search(r"return of the oracle: (\S+)", text)[1]) in (0.9, 0.85, 0.8)


def test_a_new_retriever(tmp_path, monkeypatch, capsys):
    pytest.importorskip("bm25s")
    text = (DOCS / "extending.md").read_text(encoding="utf-8")
    command = re.search(r"^retrieval_gym (evaluate .* fusion:make .*)$", text, re.MULTILINE)[1].split()
    (tmp_path / "fusion.py").write_text(blocks("extending.md")["fusion.py"], encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert not main(command)
    table = capsys.readouterr().out
    row = re.search(r"^recall@5 +all +100 +(\d\.\d+) \[.*?\] +(\d\.\d+) \[", table, re.MULTILINE)
    assert row, table
    assert float(row[2]) > 5 / 16 + 0.1, "5 of 16 candidates at random hold 5/16 of the gold"


def test_fusion_adds_reciprocal_ranks():
    """By hand: places 1 and 3 of passage 7, 2 and 1 of passage 3, 3 of passage 5 and 2 of passage 9."""
    names, _ = run_block("extending.md", "fusion.py")

    class Fixed:
        def __init__(self, ids):
            self.ids = np.full((1, names["DEPTH"]), -1)
            self.ids[0, : len(ids)] = ids

        def search(self, states, k):
            return self.ids, np.zeros((1, k), np.float32)

    ids, scores = names["Fusion"]([Fixed([7, 3, 5]), Fixed([3, 9, 7])]).search(None, 5)
    assert ids.tolist() == [[3, 7, 9, 5, -1]]
    np.testing.assert_allclose(scores[0, :4], [1 / 62 + 1 / 61, 1 / 61 + 1 / 63, 1 / 62, 1 / 63], rtol=1e-6)


def test_a_new_agent(tmp_path):
    """Tiny settings: what it scores means nothing, but training moves the head and leaves the encoder alone."""
    torch = pytest.importorskip("torch")
    from tiny import save_encoder

    settings = {
        " = 400, 32, 4, 100, 0.05, 1e-3": " = 6, 4, 4, 2, 0.05, 1e-1",
        '"sentence-transformers/all-MiniLM-L6-v2"': repr(str(save_encoder(tmp_path / "encoder"))),
    }
    names, text = run_block("extending.md", "reinforce.py", **settings)
    assert re.search(r"^metric +hops +questions +untrained +REINFORCE", text, re.MULTILINE), text
    assert "steps: 4\n" in text
    assert not torch.equal(names["head"].weight, torch.eye(names["encoder"].dim))
    assert all(weight.grad is None for weight in names["encoder"].parameters())


def test_the_game_of_the_quickstart():
    _, text = run_block("quickstart.md", "play.py")
    assert re.search(r"^(Complete|Incomplete): \d of \d gold passages", text, re.MULTILINE), text


def test_the_comparison_of_the_protocol():
    pytest.importorskip("bm25s")
    _, text = run_block("evaluation.md", "compare.py")
    found = re.search(r"([+-]\d\.\d+) \[([+-]\d\.\d+), ([+-]\d\.\d+)\], p = (\d\.\d+)$", text)
    difference, low, high, p = map(float, found.groups())
    assert low <= difference <= high and 0 < p <= 1


class Requests(HTMLParser):
    """Collects what a browser would fetch from elsewhere."""

    def __init__(self):
        super().__init__()
        self.found = []

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        address = attrs.get("href") if tag == "link" else attrs.get("src")
        if address and re.match(r"(https?:)?//", address):
            self.found.append(address)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    for package in ("mkdocs", "material", "mkdocstrings", "mkdocstrings_handlers"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed: pip install -e '.[docs]'")
    folder = tmp_path_factory.mktemp("docs") / "site"
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    result = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    return folder


def test_the_site_holds_what_the_code_says(site):
    ids = (site / "environments.html").read_text(encoding="utf-8")
    assert all(f"<code>{name}</code>" in ids for name in gym.registry if name.startswith("ChainRetrieval"))
    assert "Pick, one at a time, the passages" in (site / "environments/chain_retrieval.html").read_text("utf-8")
    assert "soft Q-learning over text embeddings" in (site / "agents/pqn.html").read_text("utf-8")
    assert "complete_at_k" in (site / "api.html").read_text("utf-8")


def test_the_site_asks_no_other_server(site):
    pages = list(site.rglob("*.html"))
    assert len(pages) > 20
    for page in pages:
        parser = Requests()
        parser.feed(page.read_text(encoding="utf-8"))
        assert parser.found == [], page
