"""bAbI stories (Weston et al. 2015, https://arxiv.org/abs/1502.05698): what a story is, and the official files."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from retrieval_gym.datasets.sources import cache_folder

TASKS = {
    1: "qa1_single-supporting-fact",
    2: "qa2_two-supporting-facts",
    3: "qa3_three-supporting-facts",
    4: "qa4_two-arg-relations",
    5: "qa5_three-arg-relations",
}
HOMEPAGE = "https://research.facebook.com/downloads/babi"
LICENCE = "CC BY 3.0"
RELEASE = "tasks_1-20_v1-2"


@dataclass(frozen=True, slots=True)
class StoryQuestion:
    """A question inside a story.

    Attributes:
        text: what is asked.
        answer: one word.
        facts: the supporting sentences in the order of the reasoning, as positions in ``Story.sentences``.
        asked_after: how many sentences of the story precede the question; the facts are among them.
    """

    text: str
    answer: str
    facts: tuple[int, ...]
    asked_after: int


@dataclass(frozen=True, slots=True)
class Story:
    """Sentences in order, and the questions asked on the way."""

    sentences: tuple[str, ...]
    questions: tuple[StoryQuestion, ...]


def read_babi(path: str | Path) -> list[Story]:
    """Read a file in bAbI's format.

    A line is ``ID text`` for a sentence and ``ID question <tab> answer <tab> IDs of the supporting sentences`` for a
    question; IDs count the lines of a story from 1, and an ID of 1 begins a new story. Blank lines are skipped.

    Raises:
        FileNotFoundError: when there is no such file.
        ValueError: when the file is not UTF-8 or holds no question, or a line has another form, an ID out of turn, or a
            supporting ID that names no earlier sentence of its story; the message names file and line.
    """
    stories: list[Story] = []
    sentences: dict[int, str] = {}
    questions: list[StoryQuestion] = []
    last = 0
    for where, line in _lines(Path(path)):
        number, text = _numbered(line, where)
        if number == 1 and (sentences or questions):
            stories.append(Story(tuple(sentences.values()), tuple(questions)))
            sentences, questions, last = {}, [], 0
        if number != last + 1:
            raise ValueError(f"{where}: line ID {number} follows {last}: IDs count the lines of a story from 1")
        last = number
        if "\t" in text:
            questions.append(_question(text, sentences, where))
        else:
            sentences[number] = text
    if sentences or questions:
        stories.append(Story(tuple(sentences.values()), tuple(questions)))
    if not any(story.questions for story in stories):
        raise ValueError(f"{path} holds no question: it needs lines such as '3 Where is Mary?<tab>garden<tab>1'")
    return stories


def _lines(path: Path) -> Iterator[tuple[str, str]]:
    with open(path, "rb") as file:
        for number, data in enumerate(file, start=1):
            where = f"{path}, line {number}"
            try:
                line = data.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise ValueError(f"{where}: not UTF-8 ({error}): convert the file to UTF-8") from error
            if line.strip():
                yield where, line.rstrip("\r\n")


def _numbered(line: str, where: str) -> tuple[int, str]:
    number, _, text = line.partition(" ")
    if not (number.isascii() and number.isdecimal()) or not text.strip():
        raise ValueError(f"{where}: must be 'ID text', got {line!r:.80}")
    return int(number), text.strip(" ")


def _question(text: str, sentences: Mapping[int, str], where: str) -> StoryQuestion:
    parts = [part.strip() for part in text.split("\t")]
    if len(parts) != 3 or not all(parts):
        raise ValueError(f"{where}: a question must be 'question<tab>answer<tab>supporting IDs', got {text!r:.80}")
    places = {number: place for place, number in enumerate(sentences)}
    facts = []
    for word in parts[2].split():
        if not (word.isascii() and word.isdecimal()) or int(word) not in places:
            raise ValueError(
                f"{where}: supporting ID {word!r} names no earlier sentence of the story; those are on lines "
                f"{', '.join(map(str, places)) or 'none'}"
            )
        facts.append(places[int(word)])
    return StoryQuestion(parts[0], parts[1], tuple(dict.fromkeys(facts)), len(sentences))


@dataclass(frozen=True)
class OfficialStories:
    """What ``load_official`` found.

    Attributes:
        stories: the stories of the split.
        source: the file.
        removed: how many questions were left out of train, as their stories stand in the dev file too.
    """

    stories: list[Story]
    source: str
    removed: int


def load_official(task: int, split: str, path: str | Path | None = None) -> OfficialStories:
    """Read the official stories of a task, English.

    The first of these is taken: for train ``en-valid-10k/qa1_train.txt``, ``en-10k/..._train.txt``,
    ``en/..._train.txt``; for dev ``en-valid-10k/qa1_valid.txt``, ``en-valid/qa1_valid.txt``; for test the ``test``
    files of ``en-valid-10k``, ``en-10k``, ``en``. The official dev stories are a part of ``en-10k``'s train file, so
    the train split leaves out each story whose sentences a dev file that is found holds too.

    Args:
        task: 1 to 5.
        split: ``"train"``, ``"dev"`` or ``"test"``.
        path: a file, or a folder that holds ``tasks_1-20_v1-2`` or its subfolders; by default ``babi`` in
            ``$RETRIEVAL_GYM_DATA``, then in the cache.

    Raises:
        FileNotFoundError: when the file is nowhere; the message names every place searched.
        ValueError: when a file is malformed.
    """
    found = _find(task, split, path)
    if found is None:
        names = " or ".join(_names(task, split))
        searched = [str(folder) if folder.exists() else f"{folder} (absent)" for folder in _bases(path)]
        if path is None and not os.environ.get("RETRIEVAL_GYM_DATA"):
            searched.insert(0, "$RETRIEVAL_GYM_DATA (not set)")
        raise FileNotFoundError(
            f"babi/{RELEASE}/{names} was not found; searched: {'; '.join(searched)}. Get {RELEASE} from {HOMEPAGE}, "
            "unpack it into DIR/babi and set RETRIEVAL_GYM_DATA=DIR, or take stories='generated', which needs no file."
        )
    stories = read_babi(found)
    held_out = _find(task, "dev", path) if split == "train" else None
    if held_out is None or held_out == found:
        return OfficialStories(stories, str(found), 0)
    known = {story.sentences for story in read_babi(held_out)}
    kept = [story for story in stories if story.sentences not in known]
    removed = sum(len(story.questions) for story in stories) - sum(len(story.questions) for story in kept)
    return OfficialStories(kept, str(found), removed)


def _names(task: int, split: str) -> list[str]:
    short, long = f"qa{task}", TASKS[task]
    if split == "dev":
        return [f"{folder}/{short}_valid.txt" for folder in ("en-valid-10k", "en-valid")]
    return [f"en-valid-10k/{short}_{split}.txt", f"en-10k/{long}_{split}.txt", f"en/{long}_{split}.txt"]


def _bases(path: str | Path | None) -> list[Path]:
    if path is not None:
        return [Path(path)]
    data = os.environ.get("RETRIEVAL_GYM_DATA")
    return [*([Path(data).expanduser() / "babi"] if data else []), cache_folder() / "babi"]


def _find(task: int, split: str, path: str | Path | None) -> Path | None:
    for base in _bases(path):
        if base.is_file():
            return base
        for file in (folder / name for folder in (base, base / RELEASE) for name in _names(task, split)):
            if file.is_file():
                return file
    return None
