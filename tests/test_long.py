import itertools
import json
import random
import re
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import gymnasium as gym
import pytest
from gymnasium.utils.env_checker import check_env

from retrieval_gym.datasets import RetrievalDataset, load_dataset
from retrieval_gym.datasets.long import MAX_USES, bare, plain
from retrieval_gym.datasets.sources import report_dropped
from retrieval_gym.registration import ENVIRONMENTS

LONG = ["ChainRetrieval-2WikiLong-v0", "ChainRetrieval-HotpotQALong-v0"]

# HotpotQA by hand: who is named where decides which questions link.
ARTICLES = {
    "Alpha Dawn": "Alpha Dawn is a film by Bela Corvin.",
    "Bela Corvin": "Bela Corvin, a director, married Dana Elme.",
    "Dana Elme": "Dana Elme was born in Fernholt.",
    "Fernholt": "Fernholt lies below Castle Grau.",
    "Castle Grau": "Castle Grau stands above the Ister.",
    "Kilo Lane": "Kilo Lane is a street in Mercy. Its painter is Bela Corvin.",
    "Mercy (town)": "Mercy is a town of Nora Opal.",
    "Mercy (novel)": "Mercy is a novel.",
    "Nora Opal": "Nora Opal founded Mercy.",
    "Yes (band)": "Yes is a band of Quill Rook.",
    "Quill Rook": "Quill Rook plays the drums.",
}


def hotpot(key: str, text: str, gold: str, answer: str, **fields: str) -> dict:
    titles = gold.split(" > ")
    context = [[title, [ARTICLES[title]]] for title in [*titles, "Mercy (novel)"]]
    facts = [[title, 0] for title in titles]
    return {"_id": key, "question": text, "answer": answer, "context": context, "supporting_facts": facts, **fields}


HOTPOT = [
    hotpot("film", "Who, a husband of Dana, made the film Alpha Dawn?", "Alpha Dawn > Bela Corvin", "Bela Corvin"),
    # The order of supporting_facts means nothing: the question names Bela Corvin.
    hotpot("wife", "Where was the wife of Bela Corvin born?", "Dana Elme > Bela Corvin", "Fernholt", type="bridge"),
    hotpot("castle", "What flows below the castle of Fernholt?", "Fernholt > Castle Grau", "Ister", type="unknown"),
    # Leads on to Mercy, but which of the two?
    hotpot("street", "Where is the painter of Kilo Lane at home?", "Kilo Lane > Bela Corvin", "Mercy"),
    hotpot("town", "Who is the founder of Mercy (town) by trade?", "Mercy (town) > Nora Opal", "mayor"),
    # Not what the answers "yes" are about.
    hotpot("band", "What plays the man in Yes (band)?", "Yes (band) > Quill Rook", "drums"),
    # Each of these is no leg.
    hotpot("compare", "Is Alpha Dawn like it?", "Alpha Dawn > Bela Corvin", "yes", type="comparison"),
    hotpot("both", "Did Bela Corvin make Alpha Dawn?", "Alpha Dawn > Bela Corvin", "yes"),
    hotpot("neither", "Who made it?", "Alpha Dawn > Bela Corvin", "Bela Corvin"),
    hotpot("longer", "Who runs the New Fernholt Hotel?", "Fernholt > Castle Grau", "Ister"),
    hotpot("twice", "Is Fernholt in Fernholt?", "Fernholt > Castle Grau", "Ister"),
    hotpot("tells", "What Ister flows below Fernholt?", "Fernholt > Castle Grau", "Ister"),
    hotpot("unnamed", "Who reads in Castle Grau?", "Castle Grau > Nora Opal", "Nora Opal"),
    hotpot("three", "What has Kilo Lane?", "Kilo Lane > Mercy (town) > Nora Opal", "Nora Opal"),
]


@pytest.fixture(autouse=True)
def fresh_report() -> None:
    report_dropped.cache_clear()


@pytest.fixture
def hotpot_folder(tmp_path: Path) -> Path:
    (tmp_path / "hotpotqa").mkdir()
    write_json(tmp_path / "hotpotqa/hotpot_dev_distractor_v1.json", HOTPOT)
    return tmp_path


def write_json(file: Path, records: object) -> None:
    file.write_text(json.dumps(records), encoding="utf-8")


def titles(dataset: RetrievalDataset, gold: tuple[int, ...]) -> list[str]:
    return [dataset.corpus[i].title for i in gold]


def by_id(dataset: RetrievalDataset) -> dict[str, tuple[str, list[str], tuple[str, ...]]]:
    return {q.id: (q.text, titles(dataset, q.gold), q.answers) for q in dataset.questions}


def test_hotpotqa_by_hand(hotpot_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dataset = load_dataset("hotpotqa-long", "dev", path=hotpot_folder)
    made = "the answer to: Who, a husband of Dana, made the film Alpha Dawn?"
    assert by_id(dataset) == {
        "film+wife": (
            f"Where was the wife of [{made}] born?",
            ["Alpha Dawn", "Bela Corvin", "Dana Elme"],
            ("Fernholt",),
        ),
        "wife+castle": (
            "What flows below the castle of [the answer to: Where was the wife of Bela Corvin born?]?",
            ["Bela Corvin", "Dana Elme", "Fernholt", "Castle Grau"],
            ("Ister",),
        ),
        "film+wife+castle": (
            f"What flows below the castle of [the answer to: Where was the wife of [{made}] born?]?",
            ["Alpha Dawn", "Bela Corvin", "Dana Elme", "Fernholt", "Castle Grau"],
            ("Ister",),
        ),
    }
    assert all(q.ordered and q.hops == len(q.gold) for q in dataset.questions)
    assert dataset.pools is None and dataset.name == "hotpotqa-long" and dataset.licence == "CC BY-SA 4.0"
    assert {(p.title, p.text) for p in dataset.corpus} == set(ARTICLES.items())
    assert dataset.dropped == {
        "that compare": 1,
        "that do not name their first passage alone": 2,
        "that name their first passage twice, or as a part of a longer name": 2,
        "whose answer or second passage stands in the question": 1,
        "whose second passage is not named in the first": 1,
        "with other than two gold passages": 1,
    }
    assert "hotpotqa-long dev: left out 8 questions" in capsys.readouterr().err


def test_a_composed_question_that_gives_a_passage_away_is_left_out(
    hotpot_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = hotpot("film", "Who, of Dana Elme, made the film Alpha Dawn?", "Alpha Dawn > Bela Corvin", "Bela Corvin")
    write_json(hotpot_folder / "hotpotqa/hotpot_dev_distractor_v1.json", [told, *HOTPOT[1:3]])
    dataset = load_dataset("hotpotqa-long", "dev", path=hotpot_folder)
    assert set(by_id(dataset)) == {"wife+castle"}
    reason = "composed ones that name a later passage or the answer"
    assert dataset.dropped == {reason: 2}
    assert f"left out 2 questions: 2 {reason}" in capsys.readouterr().err


def test_composed_questions_do_not_repeat(hotpot_folder: Path) -> None:
    copy = HOTPOT[1] | {"_id": "copy"}
    reworded = HOTPOT[1] | {"_id": "reworded", "question": "In which place was the wife of Bela Corvin born?"}
    write_json(hotpot_folder / "hotpotqa/hotpot_dev_distractor_v1.json", [HOTPOT[0], HOTPOT[1], copy, reworded])
    dataset = load_dataset("hotpotqa-long", "dev", path=hotpot_folder)
    assert len(dataset) == 1 and dataset.dropped == {"composed ones that repeat another": 2}


# 2WikiMultihopQA: a random world of people, films and towns; a title in four has parentheses.


def person(i: int) -> str:
    return f"Name{i} Family{i}" + (f" (born {1500 + i})" if i % 4 == 0 else "")


def short(title: str) -> str:
    return title.split(" (")[0]


def make_world(seed: int, people: int = 48) -> dict[str, list[tuple[str, str]]]:
    """Return each title's facts: relation and title or value."""
    rng = random.Random(seed)
    world: dict[str, list[tuple[str, str]]] = {}
    for i in range(people):
        facts = [("place of birth", f"Town{rng.randrange(12)}")]
        if i >= 4:
            father, mother = rng.sample(range(i), 2)
            facts += [("father", person(father)), ("mother", person(mother)), ("educated at", f"School{i % 5}")]
        world[person(i)] = facts
    for i in range(people // 3):
        world[f"Film Number{i} (film)"] = [("director", person(rng.randrange(people)))]
    for i in range(12):
        world[f"Town{i}"] = [("founded by", person(rng.randrange(people)))]
    return world


def article(world: dict[str, list[tuple[str, str]]], title: str) -> list[str]:
    return [f"{short(title)} is described here.", *(f"The {r} is {short(value)}." for r, value in world[title])]


def wiki_records(seed: int, count: int = 90) -> list[dict]:
    world = make_world(seed)
    chains = [
        (a, r, b, s, c) for a in world for r, b in world[a] if b in world for s, c in world[b] if len({a, b, c}) == 3
    ]
    rng = random.Random(seed)
    records = []
    for n, (a, r, b, s, c) in enumerate(rng.sample(chains, count)):
        context = list(dict.fromkeys([*rng.sample(list(world), 4), a, b]))
        rng.shuffle(context)
        records.append(
            {
                "_id": f"s{seed}q{n}",
                "type": rng.choice(["compositional", "inference"]),
                "question": f"What is the {s} of the {r} of {a.replace('born', 'Born')}?",
                "answer": short(c),
                "context": [[title, article(world, title)] for title in context],
                "supporting_facts": [[a, 1], [b, 1]],
                "evidences": [[short(a), r, short(b)], [short(b), s, short(c)]],
            }
        )
    records.append(
        records[0] | {"_id": "other", "type": "comparison", "question": "Which?", "evidences": [["a", "b", "c"]]}
    )
    return records


@pytest.fixture(scope="module")
def wiki_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    (folder / "2wiki").mkdir()
    for split, seed in (("train", 1), ("dev", 2)):
        write_json(folder / f"2wiki/{split}.json", wiki_records(seed))
    return folder


def gold_titles(record: dict) -> list[str]:
    return [title for title, _ in record["supporting_facts"]]


def words(text: str) -> str:
    return " ".join(re.sub(r"[^a-z0-9]", " ", text.lower()).split())


def stands_in(name: str, text: str) -> bool:
    return re.search(rf"\b{re.escape(words(name))}\b", words(text)) is not None


@pytest.mark.parametrize("split", ["train", "dev"])
def test_every_composed_question_holds_what_is_guaranteed(wiki_folder: Path, split: str) -> None:
    dataset = load_dataset("2wiki-long", split, path=wiki_folder)
    records = {r["_id"]: r for r in json.loads((wiki_folder / f"2wiki/{split}.json").read_text())}
    assert set(dataset.hops.tolist()) == {3, 4, 5} and len(dataset) > 60
    assert len({q.text for q in dataset.questions}) == len({q.id for q in dataset.questions}) == len(dataset)
    assert len({(q.gold, q.answers) for q in dataset.questions}) == len(dataset)
    for question in dataset.questions:
        parts = [records[key] for key in question.id.split("+")]  # so all are of this split
        passages = [dataset.corpus[i] for i in question.gold]
        assert question.ordered and question.hops == len(set(question.gold)) == len(question.gold)
        assert question.answers == (parts[-1]["answer"],)
        assert stands_in(short(passages[0].title), question.text)
        for i, passage in enumerate(passages[1:]):
            assert not stands_in(short(passage.title), question.text)
            assert any(stands_in(short(passage.title), before.text) for before in passages[: i + 1])
        assert not stands_in(question.answers[0], question.text)
        # The chain is that of the parts, one after the other, a passage that two share told once.
        chain = [title for part in parts for title in gold_titles(part)]
        assert [p.title for p in passages] == [title for title, _ in itertools.groupby(chain)]
    for hops in (3, 4, 5):
        of_hops = [q for q in dataset.questions if q.hops == hops]
        assert max(Counter(key for q in of_hops for key in q.id.split("+")).values()) <= MAX_USES


def test_every_link_is_found(wiki_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the cap, every sequence of questions that the rule allows is composed once; brute force over pairs."""
    monkeypatch.setattr("retrieval_gym.datasets.long.MAX_USES", 10**9)
    dataset = load_dataset("2wiki-long", "dev", path=wiki_folder, hops=[3, 4])
    records = json.loads((wiki_folder / "2wiki/dev.json").read_text())[:-1]
    paths = []
    for first, second in itertools.permutations(records, 2):
        a, b = gold_titles(first), gold_titles(second)
        if a[1] == b[0]:
            paths.append((first, [*a, b[1]], second))
        elif first["answer"] == short(b[0]):
            paths.append((first, [*a, *b], second))
    for first, second, third in itertools.permutations(records, 3):
        a, b, c = map(gold_titles, (first, second, third))
        if a[1] == b[0] and b[1] == c[0]:
            paths.append((first, [*a, b[1], c[1]], third))
    expected = set()
    for first, gold, last in paths:
        named = [short(title) for title in [*gold[1:], last["answer"]] if stands_in(short(title), first["question"])]
        if len(set(gold)) == len(gold) and not named:
            expected.add((tuple(gold), last["answer"]))
    assert {(tuple(titles(dataset, q.gold)), q.answers[0]) for q in dataset.questions} == expected
    assert len(dataset) == len(expected) > 100


def test_wording_of_shared_passages_and_answers(tmp_path: Path) -> None:
    articles = {
        "Dawn": "Dawn was directed by Ana.",
        "Ana": "Ana, taught by Boris, has a mother, Cleo.",
        "Boris": "Boris studied in Delft.",
        "Cleo (singer)": "Cleo and Egon are siblings.",
        "Egon": "Egon works for Fritz.",
        "Delft": "Delft is a part of Hague.",
        "Hague": "Hague belongs to Ilse.",
    }

    def record(key: str, question: str, first: str, relation: str, second: str, then: str, answer: str) -> dict:
        return {
            "_id": key,
            "type": "compositional",
            "question": question,
            "answer": answer,
            "context": [[title, [articles[title]]] for title in (first, second)],
            "supporting_facts": [[first, 0], [second, 0]],
            # The Hub's layout.
            "evidences": {"fact": [first, second], "relation": [relation, then], "entity": [second, answer]},
        }

    records = [
        record("a", "Who is the mother of the director of Dawn?", "Dawn", "director", "Ana", "mother", "Cleo"),
        record("b", "Where did Ana's teacher study?", "Ana", "student of", "Boris", "educated at", "Delft"),
        record("c", "Who made Cleo (Singer) rich?", "Cleo (singer)", "sibling", "Egon", "employer", "Fritz"),
        record("d", "Who lives in Delft now?", "Delft", "part of", "Hague", "owner", "Ilse"),
    ]
    write_json(tmp_path / "train.json", records)
    dataset = load_dataset("2wiki-long", path=tmp_path)
    assert {key: text for key, (text, _, _) in by_id(dataset).items()} == {
        "a+b": "Where did [the director of Dawn]'s teacher study?",
        "a+c": "Who made [the mother of the director of Dawn] rich?",
        "b+d": "Who lives in [the place of education of the teacher of Ana] now?",
        "a+b+d": "Who lives in [the place of education of the teacher of the director of Dawn] now?",
    }


def test_names() -> None:
    assert plain("Müller &amp; Söhne: “Ænd”") == " muller sohne ænd "
    assert [bare(t) for t in ("Mercy (town)", "(500) Days", "A  &amp; B", "(x)")] == [
        "Mercy",
        "(500) Days",
        "A & B",
        "(x)",
    ]


def test_same_arguments_same_questions(wiki_folder: Path) -> None:
    def load(**options: object) -> RetrievalDataset:
        return load_dataset("2wiki-long", "dev", path=wiki_folder, **options)

    everything = load()
    assert load().questions == everything.questions
    other = load(seed=1)
    assert other.questions != everything.questions
    assert {q.id for q in other.questions} != {q.id for q in everything.questions}  # the cap binds, so choices differ
    for hops in (3, 4, 5):
        assert {q.id for q in load(hops=[hops]).questions} == {q.id for q in everything.questions if q.hops == hops}
    few = load(num_questions=9)
    assert few.questions == everything.questions[:9] and Counter(few.hops.tolist()) == {3: 3, 4: 3, 5: 3}
    with pytest.raises(ValueError, match=rf"{len(everything)} questions of .* fewer than num_questions=100000"):
        load(num_questions=100_000)


def test_splits_share_the_corpus_and_no_source_question(wiki_folder: Path) -> None:
    train, dev = (load_dataset("2wiki-long", split, path=wiki_folder) for split in ("train", "dev"))
    assert train.corpus.fingerprint == dev.corpus.fingerprint
    assert train.corpus.fingerprint == load_dataset("2wiki", "dev", path=wiki_folder, form="corpus").corpus.fingerprint
    sources = [{key for q in dataset.questions for key in q.id.split("+")} for dataset in (train, dev)]
    assert not sources[0] & sources[1]


def test_gold_is_looked_up_in_another_corpus(wiki_folder: Path, tmp_path: Path) -> None:
    union = load_dataset("2wiki-long", "dev", path=wiki_folder)
    rows = [{"id": f"p{i}", "title": p.title, "text": p.text} for i, p in enumerate(reversed(union.corpus[:]))]
    (tmp_path / "corpus.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    dataset = load_dataset("2wiki-long", "dev", path=wiki_folder, corpus=tmp_path)
    assert by_id(dataset) == by_id(union) and dataset.questions[0].gold != union.questions[0].gold
    (tmp_path / "2wiki-long_dev.jsonl").write_text("{}\n")
    with pytest.raises(ValueError, match=r"2wiki-long_dev\.jsonl: 2wiki-long composes its questions itself"):
        load_dataset("2wiki-long", "dev", path=wiki_folder, corpus=tmp_path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hops": [2]}, r"hops=\[2\]: choose some of \(3, 4, 5\)"),
        ({"hops": []}, r"hops=\[\]: choose some"),
        ({"hops": 3.5}, "hops=3.5: choose some"),
        ({"num_questions": 0}, "num_questions=0: ask for at least 1"),
        ({"seed": -1}, "seed=-1: give a whole number"),
        ({"form": "pool"}, "takes no option 'form'"),
    ],
)
def test_bad_arguments(wiki_folder: Path, options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_dataset("2wiki-long", "dev", path=wiki_folder, **options)


def test_one_number_of_hops_needs_no_list(wiki_folder: Path) -> None:
    assert set(load_dataset("2wiki-long", "dev", path=wiki_folder, hops=4).hops.tolist()) == {4}


@pytest.mark.parametrize(
    ("evidences", "message"),
    [
        (None, "field 'evidences' is missing"),
        ([["a", "b"]], "field 'evidences' must hold triples of strings"),
        ({"fact": ["a"], "relation": ["b"], "entity": []}, "field 'evidences' must hold triples of strings"),
        ({"fact": ["a"]}, "evidences: field 'relation' is missing"),
    ],
)
def test_malformed_evidences(wiki_folder: Path, tmp_path: Path, evidences: object, message: str) -> None:
    records = json.loads((wiki_folder / "2wiki/dev.json").read_text())
    write_json(tmp_path / "dev.json", [records[0], records[1] | {"evidences": evidences}])
    with pytest.raises(ValueError, match=f"record 2.*{message}"):
        load_dataset("2wiki-long", "dev", path=tmp_path)


def test_nothing_to_compose_counts_what_was_tried(hotpot_folder: Path) -> None:
    write_json(hotpot_folder / "hotpotqa/hotpot_dev_distractor_v1.json", [HOTPOT[0], HOTPOT[2], HOTPOT[6]])
    message = (
        r"0 questions of \[3, 4, 5\] hops can be composed\. Of 3 questions in .*, 2 are .*'that compare': 1.* 0 pairs"
    )
    with pytest.raises(ValueError, match=message):
        load_dataset("hotpotqa-long", "dev", path=hotpot_folder)
    with pytest.raises(FileNotFoundError, match=r"hotpot_train_v1\.1\.json"):
        load_dataset("hotpotqa-long", "train", path=hotpot_folder)


def test_hubs_stay_fast(tmp_path: Path) -> None:
    """600 questions that all lead to one town, 600 that all start there: 360,000 pairs, of which the cap lets 2,400."""
    articles = {f"Person A{i}": f"Person A{i} knows Friend B{i}." for i in range(600)}
    articles |= {f"Friend B{i}": "He lives in Hubtown." for i in range(600)}
    articles |= {"Hubtown": "Hubtown has " + ", ".join(f"House C{i}" for i in range(600))}
    articles |= {f"House C{i}": f"Built by Mason D{i}." for i in range(600)}
    pairs = [(f"Where lives the friend of Person A{i}?", f"Person A{i}", f"Friend B{i}", "Hubtown") for i in range(600)]
    pairs += [(f"Who built house {i} of Hubtown?", "Hubtown", f"House C{i}", f"Mason D{i}") for i in range(600)]
    records = [
        {
            "_id": str(n),
            "question": text,
            "answer": answer,
            "context": [[first, [articles[first]]], [second, [articles[second]]]],
            "supporting_facts": [[first, 0], [second, 0]],
        }
        for n, (text, first, second, answer) in enumerate(pairs)
    ]
    write_json(tmp_path / "hotpot_train_v1.1.json", records)
    start = time.process_time()
    dataset = load_dataset("hotpotqa-long", path=tmp_path)
    assert time.process_time() - start < 20
    assert dataset.hops.tolist() == [4] * 2_400
    assert set(Counter(key for q in dataset.questions for key in q.id.split("+")).values()) == {MAX_USES}


# The environments


@pytest.fixture(params=LONG)
def long_env(request: pytest.FixtureRequest, wiki_folder: Path, hotpot_folder: Path) -> tuple[str, dict]:
    folder = wiki_folder if "2Wiki" in request.param else hotpot_folder
    return request.param, {"split": "dev", "path": str(folder)}


@pytest.mark.filterwarnings("error")
def test_check_env(long_env: tuple[str, dict]) -> None:
    env_id, kwargs = long_env
    check_env(gym.make(env_id, **kwargs).unwrapped)


def test_an_oracle_completes_every_chain(long_env: tuple[str, dict]) -> None:
    env_id, kwargs = long_env
    env = gym.make(env_id, **kwargs)
    dataset = env.get_wrapper_attr("dataset")
    assert env.get_wrapper_attr("max_steps") == ENVIRONMENTS[env_id]["max_steps"] == 6
    for i, question in enumerate(dataset.questions):
        observation, _ = env.reset(options={"question": i})
        assert observation["question"] == question.text
        for step, passage in enumerate(question.gold, start=1):
            _, reward, terminated, _, info = env.step(passage)
            last = step == len(question.gold)
            assert (reward, terminated, info["complete"]) == (float(last), last, last)


# Real data


def test_real_2wiki_part(real_file: Callable[[str], Path]) -> None:
    folder = real_file("2wiki/dev.json").parent
    dataset = load_dataset("2wiki-long", "dev", path=folder)
    for question in dataset.questions:
        passages = [dataset.corpus[i] for i in question.gold]
        assert 3 <= len(set(question.gold)) == question.hops <= 5
        assert not any(stands_in(bare(p.title), question.text) for p in passages[1:])
