"""Closed forms on clouds made by hand, loops in plain Python, and the command on a tiny world."""

import itertools
import json
import math

import numpy as np
import pytest
from conftest import make_dataset

from retrieval_gym.cli import main
from retrieval_gym.commands import geometry as command
from retrieval_gym.datasets import Corpus, Question, RetrievalDataset
from retrieval_gym.geometry import (
    Classes,
    Cloud,
    anisotropy,
    dispersion,
    effective_rank,
    embed_questions,
    gold_classes,
    intra_class_distances,
    kmeans_classes,
    nearest_rows,
    overlap,
    project,
    separation,
)
from retrieval_gym.geometry_report import GeometryReport
from retrieval_gym.ranking import rank

E = np.eye(3)


def ids(*values):
    return np.array(values, np.int64)


def unit(vectors):
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def draw(size, dim=5, seed=0):
    return unit(np.random.default_rng(seed).normal(size=(size, dim)))


class Points:
    """A retriever made of query and passage vectors."""

    def __init__(self, queries, passages):
        self.queries, self.passages = queries, passages

    def encode_states(self, states):
        return self.queries[states.question]

    def search(self, states, k):
        scores = self.encode_states(states) @ self.passages.T
        if states.pool is not None:
            scores = np.take_along_axis(scores, np.maximum(states.pool, 0), axis=1)
        return rank(states, scores, k)


def world(questions=12, passages=30, pool=None):
    """Questions without words, each with the gold passage of its number modulo 3."""
    corpus = Corpus([f"p{i}" for i in range(passages)], ["text"] * passages)
    asked = [Question(f"q{i}", "?", (i % 3,)) for i in range(questions)]
    pools = None if pool is None else [np.arange(size, dtype=np.int64) for size in pool]
    return RetrievalDataset("points", "dev", corpus, asked, pools)


def make_report(*retrievers, dataset=None, classes=None, k=4, batch_size=5):
    dataset = world() if dataset is None else dataset
    questions = np.arange(len(dataset), dtype=np.int64)
    clouds = tuple(
        embed_questions(f"system {i}", each, dataset, questions, steps=2, k=k, batch_size=batch_size)
        for i, each in enumerate(retrievers)
    )
    return GeometryReport(dataset, questions, clouds, gold_classes(dataset, questions) if classes is None else classes)


def test_two_points_of_one_class():
    cloud, labels = E[:2], ids(0, 0)
    assert intra_class_distances(cloud, labels).tolist() == [0.5, 0.5]  # the centroid is (1/2, 1/2, 0)
    assert dispersion(cloud, labels) is None and separation(cloud, labels) is None
    assert anisotropy(cloud) == 0 and effective_rank(cloud) == pytest.approx(2)


def test_two_classes_that_are_points_are_separate():
    cloud, labels = np.stack([E[0], E[0], -E[0]]), ids(0, 0, 1)
    assert intra_class_distances(cloud, labels).tolist() == [0, 0, 0]
    assert dispersion(cloud, labels) == pytest.approx(4) and separation(cloud, labels) == pytest.approx(1)


def test_classes_on_each_other_are_not_separate():
    cloud, labels = np.stack([E[0], E[1], E[0], E[1]]), ids(0, 0, 1, 1)
    assert dispersion(cloud, labels) == pytest.approx(0) and separation(cloud, labels) == pytest.approx(0)


def test_a_collapsed_cloud_is_one_line():
    cloud, labels = np.tile(draw(1), (6, 1)), ids(0, 0, 0, 1, 1, 1)
    assert effective_rank(cloud) == pytest.approx(1) and anisotropy(cloud) == pytest.approx(1)
    assert intra_class_distances(cloud, labels) == pytest.approx(np.zeros(6))
    assert dispersion(cloud, labels) == pytest.approx(0) and separation(cloud, labels) is None


def test_effective_rank_of_known_singular_values():
    cloud = np.stack([E[0], E[0], E[0], E[0], E[1]])  # singular values 2 and 1
    assert effective_rank(cloud) == pytest.approx(3 / 2 ** (2 / 3))
    assert effective_rank(E) == pytest.approx(3)


def test_figures_equal_loops_in_plain_python():
    cloud, labels = draw(9), ids(0, 1, -1, 0, 2, 1, 0, -1, 2)
    members = {c: [i for i in range(9) if labels[i] == c] for c in range(3)}
    centroids = {c: sum(cloud[i] for i in rows) / len(rows) for c, rows in members.items()}
    expected = [math.dist(cloud[i], centroids[labels[i]]) ** 2 for i in range(9) if labels[i] >= 0]
    np.testing.assert_allclose(intra_class_distances(cloud, labels), expected)
    between = [math.dist(centroids[a], centroids[b]) ** 2 for a, b in itertools.combinations(range(3), 2)]
    assert dispersion(cloud, labels) == pytest.approx(sum(between) / 3)
    cosines = [cloud[a] @ cloud[b] for a, b in itertools.combinations(range(9), 2)]
    assert anisotropy(cloud) == pytest.approx(sum(cosines) / 36)
    # The variance within and that of the centroids, weighted by size, add up to the whole.
    mean = sum(cloud[i] for rows in members.values() for i in rows) / 7
    weighted = sum(len(rows) * math.dist(centroids[c], mean) ** 2 for c, rows in members.items()) / 7
    assert separation(cloud, labels) == pytest.approx(weighted / (weighted + sum(expected) / 7))
    near = [sorted((j for j in range(9) if j != i), key=lambda j: -cloud[i] @ cloud[j])[:3] for i in range(9)]
    assert nearest_rows(cloud, 3).tolist() == near


def test_overlap_counts_sets_and_ignores_padding():
    assert overlap(ids([3, 1, 2], [5, 7, -1]), ids([1, 4, 3], [7, -1, -1])).tolist() == [2 / 3, 1 / 2]


def test_an_encoder_is_like_itself():
    retriever = Points(draw(12), draw(30, seed=1))
    figures = make_report(retriever, retriever).figures["system 1"]
    assert figures["drift"].mean == pytest.approx(0, abs=1e-12)
    for key in ("passage_overlap", "query_overlap"):
        assert (figures[key].mean, figures[key].low, figures[key].high) == (1, 1, 1)
    assert figures["intra_class_variance_difference"].mean == 0


def test_a_rotation_of_everything_moves_queries_and_nothing_else():
    queries, passages = draw(12), draw(30, seed=1)
    turn, _ = np.linalg.qr(np.random.default_rng(2).normal(size=(5, 5)))
    report = make_report(Points(queries, passages), Points(queries @ turn, passages @ turn))
    before, after = report.figures.values()
    for key in ("intra_class_variance", "dispersion", "separation", "anisotropy", "effective_rank", "norm"):
        ours, theirs = (getattr(figures[key], "mean", figures[key]) for figures in (before, after))
        assert ours == pytest.approx(theirs), key
    assert after["passage_overlap"].mean == after["query_overlap"].mean == 1
    expected = np.mean([1 - q @ (q @ turn) for q in queries])
    assert after["drift"].mean == pytest.approx(expected) and expected > 0.1


def test_length_changes_the_norm_alone():
    queries, passages = draw(12), draw(30, seed=1)
    before, after = make_report(Points(queries, passages), Points(7 * queries, passages)).figures.values()
    assert (before["norm"].mean, after["norm"].mean) == (pytest.approx(1), pytest.approx(7))
    assert after["drift"].mean == pytest.approx(0, abs=1e-12) and after["passage_overlap"].mean == 1
    assert after["intra_class_variance"].mean == pytest.approx(before["intra_class_variance"].mean)


def test_overlap_is_less_among_other_passages():
    queries = draw(12)
    report = make_report(Points(queries, draw(30, seed=1)), Points(queries, draw(30, seed=2)))
    figures = report.figures["system 1"]
    assert figures["passage_overlap"].mean < 0.4 and figures["query_overlap"].mean == 1
    assert figures["passage_overlap"].low < figures["passage_overlap"].mean < figures["passage_overlap"].high


def test_small_pools_say_nothing_about_passages():
    dataset = world(pool=[3, 4, 5, 6] * 3)
    queries = draw(12)
    systems = Points(queries, draw(30, seed=1)), Points(queries, draw(30, seed=2))
    assert make_report(*systems, dataset=dataset).figures["system 1"]["passage_overlap"].questions == 6
    every = make_report(*systems, dataset=dataset, k=6)
    assert every.figures["system 1"]["passage_overlap"].mean is None
    assert "passage overlap with system 0" in every.table()


def test_questions_that_share_a_gold_passage_are_a_class():
    classes = gold_classes(make_dataset("corpus"), np.arange(5, dtype=np.int64))
    # Ulm is gold of three questions; Curie, Warsaw and Wisla of two each, and Curie has the lowest id.
    assert classes.labels.tolist() == [0, 0, 1, 1, 0] and classes.names == ("Ulm", "Curie")
    alone = gold_classes(make_dataset("corpus"), ids(0, 3))
    assert alone.labels.tolist() == [-1, -1] and alone.names == ()


def test_kmeans_finds_blobs_and_repeats_itself():
    pytest.importorskip("sklearn")
    truth = np.repeat([0, 1, 2], [9, 5, 3])
    cloud = unit(E[truth] + 0.05 * np.random.default_rng(0).normal(size=(17, 3)))
    classes = kmeans_classes(5 * cloud, clusters=3, seed=4)
    assert classes.labels.tolist() == truth.tolist() and "seed 4" in classes.rule
    noise = draw(60)
    assert kmeans_classes(noise, seed=1).labels.tolist() == kmeans_classes(noise, seed=1).labels.tolist()
    with pytest.raises(ValueError, match="4 clusters of 3 distinct embeddings: choose from 2 to 3"):
        kmeans_classes(np.repeat(E, 2, axis=0), clusters=4)


@pytest.mark.parametrize("method", ["pca", "tsne"])
def test_projections_repeat_themselves_and_share_axes(method):
    pytest.importorskip("sklearn")
    first, second = draw(12), draw(12, seed=1)
    clouds = [Cloud(name, v, ids(*[[0]] * 12)) for name, v in (("a", first), ("b", second), ("c", 2 * first))]
    points = project(clouds, method, seed=3)
    assert [each.shape for each in points] == [(12, 2)] * 3
    for ours, again in zip(points, project(clouds, method, seed=3), strict=True):
        np.testing.assert_array_equal(ours, again)
    if method == "pca":
        values, axes = np.linalg.eigh(np.cov(first.T))
        expected = (second - first.mean(axis=0)) @ axes[:, [-1, -2]]
        np.testing.assert_allclose(np.abs(points[1]), np.abs(expected), atol=1e-9)
        np.testing.assert_allclose(points[2], points[0], atol=1e-12)


def test_the_picture_shows_every_question_in_its_class():
    pytest.importorskip("matplotlib")
    from retrieval_gym.plots import COLOURS, REST, geometry_figure

    labels = ids(0, 0, 0, 1, 1, -1, -1, 0, 1, 1, 0, -1)
    passages = draw(30, seed=1)
    classes = Classes(labels, ("left", "right"), "by hand")
    report = make_report(Points(draw(12), passages), Points(draw(12, seed=3), passages), classes=classes)
    points = [draw(12, 2, seed=seed) for seed in (5, 6)]
    figure = geometry_figure(report, points, "pca")
    for axes, cloud, placed in zip(figure.axes, report.clouds, points, strict=True):
        assert axes.get_title().startswith(cloud.name)
        assert f"variance {report.figures[cloud.name]['intra_class_variance'].mean:.3f}" in axes.get_title()
        drawn = {each.get_label(): each for each in axes.collections}
        for label, name in ((-1, "other questions"), (0, "left"), (1, "right")):
            np.testing.assert_allclose(drawn[name].get_offsets(), placed[labels == label])
    from matplotlib.colors import to_hex

    colours = {each.get_label(): to_hex(each.get_facecolor()[0]).upper() for each in figure.axes[0].collections}
    assert colours == {"other questions": REST, "left": COLOURS[0], "right": COLOURS[1]}


def test_what_does_not_fit_is_refused():
    good = Points(draw(12), draw(30, seed=1))
    lost = draw(12)
    lost[7] = 0
    with pytest.raises(ValueError, match="embedding of question 7 has length 0.0, as 1 of 12"):
        make_report(good, Points(lost, draw(30)))
    with pytest.raises(ValueError, match="compare encoders with one dimension"):
        make_report(good, Points(draw(12, 4), draw(30, 4)))
    with pytest.raises(ValueError, match="2 questions make no cloud: ask at least 3"):
        make_report(good, dataset=world(questions=2))
    with pytest.raises(ValueError, match="every class a question"):
        make_report(good, classes=Classes(np.zeros(12, np.int64), ("a", "b"), ""))
    with pytest.raises(ValueError, match="that are one point or line cannot be drawn"):
        project([Cloud("a", np.tile(E[:1], (5, 1)), ids(*[[0]] * 5))])
    with pytest.raises(ValueError, match="unknown projection 'umap'"):
        project([Cloud("a", draw(5), ids(*[[0]] * 5))], "umap")


ENV = ["--env", "ChainRetrieval-Synthetic-v0", "--env-kwargs", "num_questions=24"]


def call(*arguments):
    return main(["geometry", *ENV, *map(str, arguments)])


@pytest.fixture(scope="module")
def encoders(tmp_path_factory):
    tiny = pytest.importorskip("tiny")
    folder = tmp_path_factory.mktemp("encoders")
    return [f"dense:{tiny.save_encoder(folder / str(seed), seed=seed)}" for seed in (0, 1)]


def test_the_command_reports_and_draws(encoders, tmp_path, capsys):
    for needed in ("sklearn", "matplotlib"):
        pytest.importorskip(needed)
    written = []
    for number in range(2):
        out, picture = tmp_path / f"{number}.json", tmp_path / f"{number}.png"
        arguments = ["--device", "cpu", "--limit", 20, "--clusters", 3, "--classes", "kmeans", "--neighbours", 5]
        assert call("--retriever", *encoders, *arguments, "--out", out, "--picture", picture) == 0
        assert picture.read_bytes().startswith(b"\x89PNG")
        written.append(json.loads(out.read_text()))
    assert written[0] == written[1]
    report, text = written[0], capsys.readouterr().out
    assert "20 of 24, a random sample with seed 0" in text and f"drift from {encoders[0]}" in text
    assert report["protocol"]["classes"] == "3 k-means clusters of the reference embeddings, seed 0"
    reference, other = report["systems"]
    assert reference["norm"]["mean"] == pytest.approx(1, abs=1e-5) and "drift" not in reference
    assert other["drift"]["questions"] == 20 and 0 < other["drift"]["mean"] <= 2
    assert 1 <= other["effective_rank"] <= 20 and 0 <= other["passage_overlap"]["mean"] < 1


def test_systems_can_be_given_names(encoders, tmp_path, capsys):
    pytest.importorskip("sklearn")
    out, names = tmp_path / "report.json", ["untrained", "PAO"]
    arguments = ["--device", "cpu", "--limit", 20, "--clusters", 3, "--classes", "kmeans", "--names", *names]
    assert call("--retriever", *encoders, *arguments, "--out", out) == 0
    assert [system["name"] for system in json.loads(out.read_text())["systems"]] == names
    text = capsys.readouterr().out
    assert "drift from untrained" in text and encoders[0] not in text


def test_the_command_embeds_the_questions_alone(encoders, monkeypatch):
    pytest.importorskip("sklearn")
    from retrieval_gym.nn.encoder import TextEncoder

    reports = []
    monkeypatch.setattr(
        command, "GeometryReport", lambda *a, **k: reports.append(GeometryReport(*a, **k)) or reports[0]
    )
    assert call("--retriever", encoders[0], "--device", "cpu", "--classes", "kmeans", "--clusters", 2) == 0
    texts = [question.text for question in reports[0].dataset.questions]
    expected = TextEncoder.load(encoders[0].removeprefix("dense:")).encode(texts, "query")
    np.testing.assert_allclose(reports[0].clouds[0].vectors, expected.numpy(), atol=1e-5)


@pytest.mark.parametrize(
    ("sizes", "rule"), [((9, 9, 6), "gold"), ((9, 2), "kmeans"), ((4, 4, 4, 4, 4, 4), "kmeans"), ((24,), "kmeans")]
)
def test_classes_by_gold_where_these_say_much(tmp_path, sizes, rule, monkeypatch):
    pytest.importorskip("sklearn")
    gold = [i for i, size in enumerate(sizes) for _ in range(size)]
    gold += range(len(sizes), len(sizes) + 24 - len(gold))  # the rest alone with theirs
    passages = [{"id": f"p{i}", "text": f"passage {i}"} for i in range(30)]
    questions = [{"id": f"q{i}", "question": f"question {i}", "gold_ids": [f"p{g}"]} for i, g in enumerate(gold)]
    for name, rows in (("corpus", passages), ("questions", questions)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    maker = lambda name, args, dataset: Points(draw(24), draw(30, seed=1))  # noqa: E731
    monkeypatch.setattr(command, "named_retriever", maker)
    out = tmp_path / "report.json"
    where = ["--env", "ChainRetrieval-Custom-v0", "--env-kwargs", f"path={tmp_path}"]
    assert main(["geometry", *where, "--retriever", "dense", "--out", str(out)]) == 0
    protocol = json.loads(out.read_text())["protocol"]
    expected = f"{len(sizes)} of questions that share a gold passage; 0 questions are in none"
    assert protocol["classes"] == (
        expected if rule == "gold" else "6 k-means clusters of the reference embeddings, seed 0"
    )
    assert main(["geometry", *where, "--retriever", "dense", "--classes", "gold"]) == (2 if len(sizes) == 1 else 0)


def test_more_clusters_than_questions_are_refused_before_any_model_is_loaded(monkeypatch, capsys):
    monkeypatch.setattr(command, "named_retriever", lambda *given: pytest.fail("a model was loaded"))
    where = ["--env", "ChainRetrieval-Synthetic-v0", "--limit", "4"]
    assert main(["geometry", *where, "--retriever", "dense"]) == 2
    assert "6 clusters of 4 questions: give --clusters, or ask more" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--retriever", "dense", "--names", "a", "b"], "--names a b: give each of the 1 retrievers its own name"),
        (
            ["--retriever", "dense", "dense:x", "--names", "a", "a"],
            "--names a a: give each of the 2",
        ),
        (["--retriever", "bm25"], "retriever bm25 has no query embeddings"),
        (["--retriever", "dense", "--steps", "2"], "--steps 2 would do nothing"),
        (["--retriever", "dense", "--projection", "tsne"], "--projection tsne would do nothing"),
        (["--retriever", "dense", "--classes", "gold", "--clusters", "3"], "--clusters 3 would do nothing"),
        (["--retriever", "dense", "--neighbours", "0"], "--neighbours must be at least 1, got 0"),
        (["--retriever", "dense", "--picture", "a.gif"], "cannot tell the format of the picture a.gif"),
        (["--retriever", "retrieval_gym.retrieval:RandomRetriever"], "(RandomRetriever) has no encode_states"),
    ],
)
def test_bad_input_prints_one_line_and_returns_2(capsys, arguments, message):
    assert call(*arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and message in captured.err and captured.err.count("\n") == 1
