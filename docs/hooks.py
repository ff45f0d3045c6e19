"""MkDocs hooks: pages say in comments what is put in at build time, and links may leave ``docs/``, as on GitHub.

``<!-- environments -->`` and ``<!-- datasets -->`` become tables made from the code;
``<!-- section agents/README.md pqn.py -->`` becomes the section of that file whose heading names `pqn.py`.
"""

from __future__ import annotations

import inspect
import posixpath
import re
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
# What the site shows of a file outside docs/ that a page links to.
PAGES = {"README.md": "index.md", "agents/README.md": "agents/index.md"}

_DIRECTIVE = re.compile(r"^<!-- (environments|datasets|section \S+ \S+) -->$", re.MULTILINE)
# Code comes first, so that what looks like a link in it stays.
_LINK = re.compile(
    r"^(?P<indent> *)(?P<fence>```+).*?^(?P=indent)(?P=fence)[ ]*$|`[^`]+`|\[(?P<text>[^\]]*)\]\((?P<target>[^)\s]+)\)",
    re.MULTILINE | re.DOTALL,
)


def on_page_markdown(markdown: str, /, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Put in what the page asks for, and make its links to files outside ``docs/`` work.

    Raises:
        ValueError: when a section that a page asks for is not there.
        FileNotFoundError: when a link leads to a file that is not there.
    """
    source = page.file.src_uri
    markdown = rewrite_links(markdown, posixpath.join("docs", source), source, config.repo_url)
    return _DIRECTIVE.sub(lambda match: _put_in(match[1].split(), source, config.repo_url), markdown)


def _put_in(words: list[str], source: str, repo_url: str | None) -> str:
    if words[0] == "section":
        return rewrite_links(section(words[1], words[2]), words[1], source, repo_url)
    return environment_table() if words[0] == "environments" else dataset_table()


def rewrite_links(markdown: str, written_in: str, page: str, repo_url: str | None) -> str:
    """Make the relative links of a text right for the page that shows it.

    Args:
        markdown: the text.
        written_in: the file that holds it, from the repository's root; its links are relative to this file.
        page: the page that shows it, from ``docs/``.
        repo_url: the repository's address; where there is none, a file's path stands in place of a link.

    Raises:
        FileNotFoundError: when there is no such file.
    """
    replace = partial(_rewrite, written_in=written_in, page=page, repo_url=repo_url)
    return _LINK.sub(replace, markdown)


def _rewrite(match: re.Match[str], *, written_in: str, page: str, repo_url: str | None) -> str:
    if match["target"] is None or re.match(r"[a-z]+:|#", match["target"]):
        return match[0]
    target, _, anchor = match["target"].partition("#")
    path = posixpath.normpath(posixpath.join(posixpath.dirname(written_in), target))
    if not (ROOT / path).exists():
        raise FileNotFoundError(f"{written_in} links to {match['target']}: there is no {path}")
    if path in PAGES or path.startswith("docs/"):
        anchor = f"#{anchor}" if anchor and path not in PAGES else ""
        shown = PAGES.get(path, path.removeprefix("docs/"))
        return f"[{match['text']}]({posixpath.relpath(shown, posixpath.dirname(page) or '.')}{anchor})"
    if repo_url:
        return f"[{match['text']}]({repo_url.rstrip('/')}/blob/HEAD/{path}{'#' + anchor if anchor else ''})"
    return f"{match['text']} (`{path}` in the repository)"


def section(path: str, name: str) -> str:
    """Return a section of a Markdown file, its headings one level up.

    Args:
        path: the file, from the repository's root.
        name: what the section's heading of level 2 names in backquotes.

    Raises:
        ValueError: when there is no such heading.
    """
    lines, inside, fenced = [], False, False
    for line in (ROOT / path).read_text(encoding="utf-8").splitlines():
        fenced ^= line.lstrip().startswith("```")
        heading = not fenced and re.match("#+ ", line)
        if heading and len(heading[0]) <= len("## "):
            inside = heading[0] == "## " and f"`{name}`" in line
        if inside:
            lines.append(line[1:] if heading else line)
    if not lines:
        raise ValueError(f"{path} has no section '## `{name}`': correct the comment that asks for it, or the heading")
    return "\n".join(lines)


def environment_table() -> str:
    """Return the registered ids as a Markdown table."""
    from retrieval_gym.registration import ENVIRONMENTS

    rows = [["id", "`dataset`", "`max_steps`", "other arguments"]]
    for env_id, kwargs in ENVIRONMENTS.items():
        others = {key: value for key, value in kwargs.items() if key not in ("dataset", "max_steps")}
        dataset = f"`{kwargs['dataset']}`" if "dataset" in kwargs else "yours to give"
        other = ", ".join(f"`{key}={value!r}`" for key, value in others.items())
        rows.append([f"`{env_id}`", dataset, str(kwargs["max_steps"]), other])
    return _table(rows)


def dataset_table() -> str:
    """Return the datasets, their modules' own description and their options as a Markdown table."""
    from retrieval_gym.datasets.load import LOADERS

    rows = [["`dataset`", "what it is", "options"]]
    for name, loader in LOADERS.items():
        module_name, _, function = loader.partition(":")
        module = import_module(module_name)
        described = (module.__doc__ or import_module(module_name.rpartition(".")[0]).__doc__ or "").split("\n\n")[0]
        known = inspect.signature(getattr(module, function)).parameters
        options = ", ".join(f"`{option}`" for option in known if option not in ("split", "path"))
        rows.append([f"`{name}`", described.replace("``", "`").replace("\n", " ").replace("|", r"\|"), options])
    return _table(rows)


def _table(rows: list[list[str]]) -> str:
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]])
