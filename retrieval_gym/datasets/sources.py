"""Where files come from: an explicit path, ``$RETRIEVAL_GYM_DATA``, the cache, the Hub."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

SPLITS = ("train", "dev", "test")


@dataclass(frozen=True)
class Source:
    """One dataset's files, under their official names and as the Hub has them.

    Attributes:
        folder: the folder that holds the dataset's files inside a data folder.
        files: official file name of each split, looked for in ``folder``, and directly in a folder that the caller
            names, with and without ``.gz``. Where all splits share texts, ``"corpus"`` and ``"queries"`` stand in for
            splits in a source of their own.
        hub_repo: a dataset repository on the Hub.
        hub_revision: the pinned commit of that repository.
        hub_files: the files of each split in that repository, in order; a split that has none has no labelled
            official release.
        homepage: where people get the official files.
        licence: under which terms.
    """

    folder: str
    files: Mapping[str, str]
    hub_repo: str
    hub_revision: str
    hub_files: Mapping[str, tuple[str, ...]]
    homepage: str
    licence: str


def _musique(kind: str) -> Source:
    files = {split: f"musique_{kind}_v1.0_{split}.jsonl" for split in SPLITS}
    return Source(
        folder="musique",
        files=files,
        hub_repo="bdsaglam/musique",
        hub_revision="22873a405dd809893b22ada0b499299fb612d2df",
        hub_files={split: (files[split],) for split in ("train", "dev")},
        homepage="https://github.com/StonyBrookNLP/musique",
        licence="CC BY 4.0",
    )


def _beir(name: str, licence: str, revision: str, texts_revision: str, splits: tuple[str, ...]) -> dict[str, Source]:
    """Return the source of a dataset's qrels, one file a split, and that of its texts, two files for all splits.

    The Hub has them in two repositories: the qrels as TSV, the texts as Parquet.
    """
    homepage = "https://github.com/beir-cellar/beir"
    qrels = Source(
        folder=name,
        files={split: f"qrels/{split}.tsv" for split in SPLITS},
        hub_repo=f"BeIR/{name}-qrels",
        hub_revision=revision,
        hub_files={split: (f"{split}.tsv",) for split in splits},
        homepage=homepage,
        licence=licence,
    )
    kinds = ("corpus", "queries")
    texts = Source(
        folder=name,
        files={kind: f"{kind}.jsonl" for kind in kinds},
        hub_repo=f"BeIR/{name}",
        hub_revision=texts_revision,
        hub_files={kind: (f"{kind}/{kind}-00000-of-00001.parquet",) for kind in kinds},
        homepage=homepage,
        licence=licence,
    )
    return {name: qrels, f"{name}_texts": texts}


SOURCES: dict[str, Source] = {
    "musique": _musique("ans"),
    "musique_full": _musique("full"),
    "hotpotqa": Source(
        folder="hotpotqa",
        files={
            "train": "hotpot_train_v1.1.json",
            "dev": "hotpot_dev_distractor_v1.json",
            "test": "hotpot_test_distractor_v1.json",
        },
        hub_repo="hotpotqa/hotpot_qa",
        hub_revision="1908d6afbbead072334abe2965f91bd2709910ab",
        hub_files={
            "train": ("distractor/train-00000-of-00002.parquet", "distractor/train-00001-of-00002.parquet"),
            "dev": ("distractor/validation-00000-of-00001.parquet",),
        },
        homepage="https://hotpotqa.github.io",
        licence="CC BY-SA 4.0",
    ),
    "2wiki": Source(
        folder="2wiki",
        files={split: f"{split}.json" for split in SPLITS},
        hub_repo="framolfese/2WikiMultihopQA",
        hub_revision="fe713bfbd1afbca1a65246741a75890405d56a3a",
        hub_files={
            "train": ("data/train-00000-of-00002.parquet", "data/train-00001-of-00002.parquet"),
            "dev": ("data/validation-00000-of-00001.parquet",),
        },
        homepage="https://github.com/Alab-NII/2wikimultihop",
        licence="Apache-2.0",
    ),
    **_beir(
        "scifact",
        licence="claims CC BY 4.0, abstracts ODC-By",
        revision="2938d17dc3b09882fdb8c12bbbe2e2dc0e75a029",
        texts_revision="b3b5335604bf5ee3c4447671af975ea25143d4f5",
        splits=("train", "test"),
    ),
    **_beir(
        "msmarco",
        licence="MS MARCO terms, for research that is not commercial",
        revision="253fbf8a3f8d4a0932b63882b5162bedc84779f5",
        texts_revision="a918e0d11a77ed33f42f29d98340b655593b96ad",
        splits=SPLITS,
    ),
}


@dataclass(frozen=True)
class Found:
    """The files of one split.

    Attributes:
        files: what to read, in order.
        place: the file, the data folder or ``hf://`` address they were found at, for people.
        siblings: the files of every split at the same place, this one among them, in the order train, dev, test.
    """

    files: tuple[Path, ...]
    place: str
    siblings: Mapping[str, tuple[Path, ...]]


def cache_folder() -> Path:
    """Return ``$RETRIEVAL_GYM_CACHE``, or ``~/.cache/retrieval_gym``."""
    return Path(os.environ.get("RETRIEVAL_GYM_CACHE") or "~/.cache/retrieval_gym").expanduser()


def find_local(
    name: str,
    split: str,
    path: str | Path | None = None,
    revision: str | None = None,
    siblings: bool = False,
    hub_only: bool = False,
) -> Found | None:
    """Return the files of a split without any download, or None where there are none.

    Args:
        name: a key of ``SOURCES``.
        split: ``"train"``, ``"dev"`` or ``"test"``.
        path: the only file or folder to look at; by default ``$RETRIEVAL_GYM_DATA``, then the cache.
        revision: see ``find``.
        siblings: whether a Hub download counts only when it is there in every split.
        hub_only: whether a Hub download alone counts.
    """
    source = SOURCES[name]
    found = None if hub_only else _found_in_folders(source, split, path)
    if found or path is not None:
        return found
    found = _found_in_cache(source, split, revision)
    return found if found and not (siblings and source.hub_files.keys() - found.siblings.keys()) else None


def find(
    name: str,
    split: str,
    path: str | Path | None = None,
    revision: str | None = None,
    siblings: bool = False,
    hub_only: bool = False,
) -> Found:
    """Return the files of a split from the first place that has them.

    The places are ``path`` alone when it is given, else ``$RETRIEVAL_GYM_DATA``, the cache and the Hub in this order.
    ``HF_ENDPOINT`` names another Hub; with ``HF_HUB_OFFLINE=1`` the Hub is not asked. A download lands in the cache in
    one step, so a file that is there is whole.

    Args:
        name: a key of ``SOURCES``.
        split: ``"train"``, ``"dev"`` or ``"test"``.
        path: the only file or folder to look at.
        revision: commit, tag or branch on the Hub; by default ``$RETRIEVAL_GYM_HUB_REVISION``, else the pinned commit.
        siblings: whether to fetch the other splits as well when this one comes from the Hub.
        hub_only: whether to look at earlier downloads and the Hub alone, for files that must come from where others
            came from.

    Raises:
        FileNotFoundError: when the files are nowhere; the message names the file, every place and the remedy.
    """
    source = SOURCES[name]
    if found := find_local(name, split, path, revision, siblings, hub_only):
        return found
    if path is not None:
        searched = [str(path) if Path(path).exists() else f"{path} (absent)"]
        raise FileNotFoundError(_missing(source, split, searched, revision))
    found = _found_in_cache(source, split, revision)
    wanted = list(source.hub_files) if siblings and split in source.hub_files else [split]
    absent = [each for each in wanted if found is None or each not in found.siblings]
    searched = [] if hub_only else [_describe(folder, source) for folder in _folders(None)]
    if not hub_only and not os.environ.get("RETRIEVAL_GYM_DATA"):
        searched.insert(0, "$RETRIEVAL_GYM_DATA (not set)")
    if reason := _why_no_hub(source, split):
        raise FileNotFoundError(_missing(source, absent[0], [*searched, f"the Hub ({reason})"], revision))
    try:
        return _download(source, split, wanted, revision)
    except ConnectionError as error:
        raise FileNotFoundError(_missing(source, absent[0], [*searched, f"the Hub ({error})"], revision)) from error


@cache
def report_dropped(name: str, split: str, dropped: tuple[tuple[str, int], ...], what: str = "questions") -> None:
    """Say on stderr, once a process, what loading a split left out and why.

    Args:
        name: the dataset's name.
        split: the split.
        dropped: (reason, number) pairs; nothing is printed when there are none.
        what: what was left out.
    """
    if dropped:
        reasons = ", ".join(f"{count} {reason}" for reason, count in dropped)
        total = sum(count for _, count in dropped)
        print(f"retrieval_gym: {name} {split}: left out {total} {what}: {reasons}", file=sys.stderr)


def _folders(path: str | Path | None) -> list[Path]:
    if path is not None:
        return [Path(path)]
    data = os.environ.get("RETRIEVAL_GYM_DATA")
    return [*([Path(data).expanduser()] if data else []), cache_folder()]


def _found_in_folders(source: Source, split: str, path: str | Path | None) -> Found | None:
    if path is not None and Path(path).is_file():
        return Found((Path(path),), str(path), {split: (Path(path),)})
    for folder in _folders(path):
        # Only a folder that the caller names may hold the files directly: a name such as dev.json says little.
        bases = [folder / source.folder, *([folder] if path is not None else [])]
        splits = {each: files for each in source.files if (files := _files_in(bases, source, each))}
        if split in splits:
            return Found(splits[split], str(folder), splits)
    return None


def _found_in_cache(source: Source, split: str, revision: str | None) -> Found | None:
    folder = _hub_folder(source, revision)
    splits = {each: files for each in source.hub_files if (files := _hub_files_in(folder, source, each))}
    return Found(splits[split], _hub_place(source, revision), splits) if split in splits else None


def _describe(folder: Path, source: Source) -> str:
    """Return the folder's name with the splits that are there, for people."""
    there = [each for each in source.files if _files_in([folder / source.folder], source, each)]
    return f"{folder} (has {', '.join(there)})" if there else str(folder)


def _files_in(bases: list[Path], source: Source, split: str) -> tuple[Path, ...]:
    for base in bases:
        for file in (base / source.files[split], base / f"{source.files[split]}.gz"):
            if file.is_file():
                return (file,)
        if files := _hub_files_in(base, source, split):
            return files
    return ()


def _hub_files_in(folder: Path, source: Source, split: str) -> tuple[Path, ...]:
    files = tuple(folder / file for file in source.hub_files.get(split, ()))
    return files if all(file.is_file() for file in files) else ()


def _revision(source: Source, revision: str | None) -> str:
    return revision or os.environ.get("RETRIEVAL_GYM_HUB_REVISION") or source.hub_revision


def _hub_folder(source: Source, revision: str | None) -> Path:
    return cache_folder() / "hub" / source.hub_repo.replace("/", "--") / _revision(source, revision).replace("/", "--")


def _hub_place(source: Source, revision: str | None) -> str:
    return f"hf://datasets/{source.hub_repo}@{_revision(source, revision)}"


def _why_no_hub(source: Source, split: str) -> str | None:
    """Return why the Hub is not asked, or None when it is."""
    if split not in source.hub_files:
        return f"not asked: no labelled {split} split is published"
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in {"1", "ON", "YES", "TRUE"}:
        return "not asked: HF_HUB_OFFLINE is set"
    try:
        import huggingface_hub  # noqa: F401
    except ImportError:
        return "not asked: it needs pip install 'retrieval-gym[data]'"
    return None


def _download(source: Source, split: str, wanted: list[str], revision: str | None) -> Found:
    target = _hub_folder(source, revision)
    target.mkdir(parents=True, exist_ok=True)
    for name in (name for each in wanted for name in source.hub_files[each]):
        if (target / name).is_file():
            continue
        print(f"retrieval_gym: fetching {source.hub_repo}/{name} from the Hub", file=sys.stderr)
        with tempfile.TemporaryDirectory(dir=target) as folder:
            fetched = _fetch(source.hub_repo, name, _revision(source, revision), folder)
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            os.replace(fetched, target / name)
    files = {each: tuple(target / name for name in source.hub_files[each]) for each in wanted}
    return Found(files[split], _hub_place(source, revision), files)


def _fetch(repo: str, name: str, revision: str, folder: str) -> str:
    """Fetch one file into ``folder`` and return its path; whatever goes wrong on the way is a ``ConnectionError``."""
    from huggingface_hub import constants, hf_hub_download
    from huggingface_hub.utils import get_session

    endpoint = os.environ.get("HF_ENDPOINT") or constants.ENDPOINT
    try:
        get_session().head(endpoint, timeout=5)  # hf_hub_download retries for half a minute when nobody answers
        return hf_hub_download(repo, name, repo_type="dataset", revision=revision, local_dir=folder, endpoint=endpoint)
    except Exception as error:  # the HTTP library below, and so its errors, differ between versions
        detail = " ".join(str(error).split())[:200] or type(error).__name__
        raise ConnectionError(f"{endpoint} did not give {repo}/{name} at {revision}: {detail}") from error


def _missing(source: Source, split: str, searched: list[str], revision: str | None) -> str:
    name = f"{source.folder}/{source.files[split]}"
    message = f"{name} (or .gz) was not found; searched: {'; '.join(searched)}. "
    if split not in source.hub_files:
        return message + (
            f"No labelled {split} split is published ({source.homepage}): use "
            f"{' or '.join(f'split={each!r}' for each in source.hub_files)}, or put a labelled file there."
        )
    return message + (
        f"Get the official file from {source.homepage} and set RETRIEVAL_GYM_DATA to the folder above "
        f"{source.folder}/, or run: hf download {source.hub_repo} {' '.join(source.hub_files[split])} "
        f"--repo-type dataset --revision {_revision(source, revision)} --local-dir DIR/{source.folder} "
        "and set RETRIEVAL_GYM_DATA=DIR"
    )
