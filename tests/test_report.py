"""The report page: what it collects, against scorer, diagnosis and the runs' own reports; and what it prints."""

import argparse
import dataclasses
import importlib.util
import json
import re
import shlex
import shutil
import sys
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("jinja2")
import small_runs  # noqa: E402
from small_runs import AGENTS, train, write_jsonl  # noqa: E402

from retrieval_gym import mdp  # noqa: E402
from retrieval_gym.cli import main as cli  # noqa: E402
from retrieval_gym.commands import report as command  # noqa: E402
from retrieval_gym.evaluation import evaluate  # noqa: E402
from retrieval_gym.nn.reporting import load_reported  # noqa: E402
from retrieval_gym.nn.trained import load_run  # noqa: E402
from retrieval_gym.report.chains import collect_chains  # noqa: E402
from retrieval_gym.report.curves import draw_curves, running_mean, tick_text, ticks  # noqa: E402
from retrieval_gym.report.data import collect  # noqa: E402
from retrieval_gym.report.page import embedded_json, render  # noqa: E402
from retrieval_gym.report.runs import agent_flags, flag_table, read_runs  # noqa: E402
from retrieval_gym.report.untrained import find_untrained  # noqa: E402

ATTACK = "Ulm</script><img src=x onerror=\"document.title='owned'\"><!-- & 'q'"
ARABIC, EMOJI = "نهر الدانوب يمر في أولم", "The Vistula 🌊 ends in the Baltic 👩‍🔬."
TITLES = ["Einstein", "Ulm", "Danube", "Curie", "Warsaw", "Wisła", "", "الدانوب", "Nile", "Elbe", "Rhine", "Alps"]
TEXTS = [
    "Albert Einstein was born in Ulm.", ATTACK, "The Danube ends in the Black Sea.", "Marie Curie was born in Warsaw.",
    "Warsaw lies on the Vistula.", EMOJI, "A passage without a title.", ARABIC, "The Nile ends in the Mediterranean.",
    "The Elbe ends in the North Sea.", "The Rhine ends in the North Sea.", "Long. " * 500,
]  # fmt: skip
DEV = 45


def questions(count, first):
    """Questions of one to three hops with pools of eight, told apart by their number."""
    asked = []
    for i in range(count):
        pool = [(first + i + step) % len(TITLES) for step in range(8)]
        gold = pool[: 1 + i % 3]
        text = f"Where does river {first + i} end?" if i else ATTACK
        asked.append({
            "id": f"q{first + i}", "question": text, "gold_ids": [f"p{g}" for g in gold], "answers": [f"answer {i}"],
            "pool_ids": [f"p{p}" for p in pool],
        })  # fmt: skip
    return asked


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    passages = [{"id": f"p{i}", "title": TITLES[i], "text": TEXTS[i]} for i in range(len(TITLES))]
    write_jsonl(folder / "corpus.jsonl", passages)
    write_jsonl(folder / "questions_train.jsonl", questions(8, 100))
    write_jsonl(folder / "questions_dev.jsonl", questions(DEV, 0))
    return folder


@pytest.fixture(scope="module")
def runs(data, tmp_path_factory):
    """Finished runs of pqn.py and infonce.py on the same environment."""
    return [str(train(agent, tmp_path_factory.mktemp(agent), data)) for agent in ("pqn", "infonce")]


@pytest.fixture(scope="module")
def model(runs):
    return collect(runs, device="cpu")


@pytest.fixture(scope="module")
def page(model):
    return render(model, command="retrieval_gym report", made="now")


def moved(run, folder, **changes):
    """Copy a run and change its configuration."""
    shutil.copytree(run, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    return str(folder)


def run_command(*words):
    """Run the subcommand as the command line does."""
    parser = argparse.ArgumentParser()
    command.add_parser(parser.add_subparsers())
    args = parser.parse_args(["report", *map(str, words)])
    return args.run(args)


# What is collected.


def test_figures_are_those_of_the_scorer_and_of_the_runs_own_reports(model, runs):
    (environment,) = model["environments"]
    dataset, steps = load_reported(environment["spec"], "dev")
    names = [system["name"] for system in model["systems"]]
    for position, folder in enumerate(runs):
        i = next(i for i, system in enumerate(model["systems"]) if system["run"] == position)
        direct = evaluate(load_run(folder, dataset), dataset, steps=steps, name=names[i])
        shown = environment["evaluations"][i]
        assert shown["metrics"] == direct.summary() and shown["protocol"] == direct.protocol
        assert {k: v for k, v in shown["cost"].items() if "milli" not in k} == {
            k: v for k, v in direct.cost.items() if "milli" not in k
        }
        # The run scored the untrained encoder before it trained, and itself at its end, by other code.
        (own,) = json.loads(Path(folder, "eval.json").read_text()).values()
        start = environment["evaluations"][model["systems"][i]["start"]]["metrics"]
        for metric, value in own["untrained"].items():
            assert start[metric]["all"]["mean"] == pytest.approx(value, abs=1e-12)
            difference = next(each for each in environment["differences"] if each["of"] == i)
            assert difference["metrics"][metric]["all"] == pytest.approx(own["difference"][metric], abs=1e-12)


def test_mismatch_is_that_of_diagnose(runs, data, tmp_path):
    shown = collect(runs, device="cpu", untrained=False)["environments"][0]["mismatch"]
    out = tmp_path / "mismatch.json"
    named = [f"run:{folder}" for folder in runs]
    words = ["diagnose", "--env", "ChainRetrieval-Custom-v0", "--env-kwargs", f"path={data}", "--device", "cpu"]
    assert cli([*words, "--retriever", *named, "--out", str(out)]) == 0
    direct = json.loads(out.read_text())
    for ours, theirs in zip(shown["own_chains"], direct["own_chains"], strict=True):
        assert {**ours, "name": ""} == {**theirs, "name": ""}
    for ours, theirs in zip(shown["same_states"]["systems"], direct["same_states"]["systems"], strict=True):
        assert {**ours, "name": ""} == {**theirs, "name": ""}
    assert any(cell["all"]["states"] for each in shown["own_chains"] for cell in each["holds_wrong"].values())


def test_both_runs_stand_side_by_side(model, page):
    assert [run["agent"] for run in model["runs"]] == ["pqn", "infonce"]
    assert [system["run"] for system in model["systems"]] == [None, None, 0, 1]  # other limits, so another start each
    (environment,) = model["environments"]
    pairs = [(each["of"], each["minus"]) for each in environment["differences"]]
    assert pairs == [(2, 0), (3, 1), (3, 2)]
    losses = {figure["name"]: [line["run"] for line in figure["lines"]] for figure in model["curves"]}
    assert losses["eval/all_gold_picked"] == [0, 1] and losses["losses/td"] == [0] and losses["losses/info_nce"] == [1]
    assert "pqn, seed 1 beside infonce, seed 1" in page
    places, *cut = environment["notes"]
    assert places == "10 places hold every candidate (at most 8), so @10 says nothing here"
    assert len(cut) == 4 and all("texts (passages, questions, states) at its own limits" in note for note in cut)


def test_runs_that_started_from_the_same_share_it(runs, tmp_path):
    again = moved(runs[1], tmp_path / "again", seed=7)
    model = collect([runs[1], again], device="cpu", limit=5, seed=3)
    assert [system["name"] for system in model["systems"]] == ["untrained", "infonce, seed 1", "infonce, seed 7"]
    assert model["environments"][0]["protocol"]["questions"] == f"5 of {DEV}, a random sample with seed 3"
    assert "--limit 5 --seed 3" in model["environments"][0]["score_again"]
    (identical,) = (each for each in model["environments"][0]["differences"] if (each["of"], each["minus"]) == (2, 1))
    assert all(cell["mean"] == 0 for groups in identical["metrics"].values() for cell in groups.values())


def test_the_command_that_scores_again_does(model, runs, tmp_path):
    (environment,) = model["environments"]
    program, *words = shlex.split(environment["score_again"])
    out = tmp_path / "scores.json"
    assert program == "retrieval_gym" and cli([*words, "--device", "cpu", "--out", str(out)]) == 0
    again = json.loads(out.read_text())["evaluations"]
    assert [each["metrics"] for each in again] == [each["metrics"] for each in environment["evaluations"][2:]]


def test_a_trained_action_encoder_starts_from_the_named_one(data, tmp_path, monkeypatch):
    monkeypatch.setitem(small_runs.OWN, "pqn", {**small_runs.OWN["pqn"], "action_encoder": "train"})
    run = train("pqn", tmp_path, data)
    (own,) = json.loads((run / "eval.json").read_text()).values()
    (environment,) = collect([str(run)], device="cpu")["environments"]
    for metric, value in own["untrained"].items():
        assert environment["evaluations"][0]["metrics"][metric]["all"]["mean"] == pytest.approx(value, abs=1e-12)
    small_runs.save_encoder(tmp_path / "tiny", seed=5)
    with pytest.raises(ValueError, match="not what .* was started with.*--no-untrained"):
        collect([str(run)], device="cpu")
    assert [s["name"] for s in collect([str(run)], device="cpu", untrained=False)["systems"]] == ["pqn, seed 1"]


def test_the_untrained_queries_of_pao_have_the_length_that_training_gave_them(runs, data, tmp_path):
    dataset, _ = load_reported(f"ChainRetrieval-Custom-v0?path={data}", "dev")
    states = mdp.dataset_states(dataset, np.arange(5), 4)
    for changes, unit in (({"no_normalize": True}, False), ({"normalize": True}, True), ({}, True)):
        config = {"objective": "pao", "normalize": False, "no_normalize": False, **changes}
        run = moved(runs[1], tmp_path / f"{len(list(tmp_path.iterdir()))}", **config)
        made = find_untrained(run, "cpu").make(dataset, tmp_path / "cache")
        norms = made.encode_states(states).norm(dim=1)
        assert bool((abs(norms - 1) < 1e-4).all()) is unit


def test_one_step_environments_have_measures_of_rankings(runs, data, tmp_path):
    pytest.importorskip("ir_measures")
    run = moved(runs[1], tmp_path / "one", env_kwargs=[f"path={data}", "max_steps=1"])
    write_jsonl(data / "questions_test.jsonl", [q for q in questions(12, 0) if len(q["gold_ids"]) == 1])
    model = collect([run], device="cpu", split="test")
    (environment,) = model["environments"]
    assert environment["steps"] == 1 and environment["mismatch"] is None
    assert {"nDCG@10", "R@5", "R@50", "RR@10"} <= environment["evaluations"][0]["metrics"].keys()
    assert all(len(picks) == 8 for q in environment["chains"]["questions"] for picks in q["picks"])  # whole pools
    html = render(model, command="", made="")
    assert "Rankings, question by question" in html and "State mismatch" not in html


def test_chains_are_those_of_the_records(runs, data):
    dataset, steps = load_reported(f"ChainRetrieval-Custom-v0?path={data}", "dev")
    evaluation = evaluate(load_run(runs[0], dataset), dataset, steps=steps)
    chains = collect_chains([evaluation], limit=10_000, budget=10**9)
    records = {record["id"]: record for record in evaluation.records()}
    assert len(chains["questions"]) == chains["total"] == DEV
    for question in chains["questions"]:
        record = records[question["id"]]
        picks = question["picks"][0]
        key = {(TITLES[i], TEXTS[i][:2000]): f"p{i}" for i in range(len(TITLES))}
        told = [key[tuple(chains["passages"][p][:2])] for p, _, _ in picks]
        assert told == record["picked"] and [place > 0 for _, _, place in picks] == record["picked_is_gold"]
        assert [key[tuple(chains["passages"][p][:2])] for p in question["gold"]] == record["gold"]
        assert [question["gold"][place - 1] for p, _, place in picks if place] == [p for p, _, place in picks if place]
        assert [score for _, score, _ in picks] == pytest.approx(record["scores"], abs=5e-5)
    assert [cut for _, text, cut in chains["passages"] if text.startswith("Long")] == [True]


def test_chains_are_capped_by_number_and_by_size(runs, data):
    dataset, steps = load_reported(f"ChainRetrieval-Custom-v0?path={data}", "dev")
    evaluation = evaluate(load_run(runs[0], dataset), dataset, steps=steps)
    some = collect_chains([evaluation], limit=7, budget=10**9, seed=1)
    other = collect_chains([evaluation], limit=7, budget=10**9, seed=2)
    ids = [question["id"] for question in some["questions"]]
    assert len(ids) == 7 and some["total"] == DEV and ids != [question["id"] for question in other["questions"]]
    small = collect_chains([evaluation], limit=10_000, budget=9_000)
    assert 1 <= len(small["questions"]) < DEV
    assert len(json.dumps(small["questions"], ensure_ascii=False).encode()) < 9_000
    assert len(collect_chains([evaluation], limit=5, budget=1)["questions"]) == 1


# Flags, curves.


@pytest.mark.parametrize("agent", ["pqn", "infonce", "pao"])
def test_flags_and_defaults_are_those_of_the_scripts(agent):
    spec = importlib.util.spec_from_file_location(agent, AGENTS / f"{agent}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[agent] = module
    try:
        spec.loader.exec_module(module)
    finally:
        del sys.modules[agent]
    flags = agent_flags(agent)
    assert {name: flag.default for name, flag in flags.items()} == json.loads(
        json.dumps({field.name: field.default for field in dataclasses.fields(module.Args)})
    )
    if agent == "pqn":
        assert flags["lam"].name == "--lambda" and flags["num_envs"].name == "--num-envs"


def test_flags_that_differ_are_listed(runs, monkeypatch, tmp_path):
    records = read_runs(runs)
    rows = {row["flag"]: row for row in flag_table(records)["rows"]}
    assert rows["--learning-rate"]["values"] == ["0.001", "0.001"]
    assert rows["--learning-rate"]["defaults"] == ["1.5e-05", "none"]
    assert rows["--num-envs"] == {"flag": "--num-envs", "values": ["2", None], "defaults": ["12", None]}
    assert "--lambda" not in {row["flag"] for row in flag_table(records[:1])["rows"]}  # at its default
    monkeypatch.setattr("retrieval_gym.report.runs.agent_flags", lambda agent: None)
    table = flag_table(records[:1])
    assert table["unknown"] == ["pqn"] and len(table["rows"]) == len(records[0].config)


def test_labels_tell_runs_apart(runs, tmp_path):
    assert [run.label for run in read_runs(runs)] == ["pqn, seed 1", "infonce, seed 1"]
    again = moved(runs[0], tmp_path / "again")
    assert [run.label for run in read_runs([runs[0], again])] == [runs[0].rsplit("/", 1)[1], "again"]
    assert read_runs([again])[0].started is None
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d UTC", read_runs(runs)[0].started)


@pytest.mark.parametrize(
    ("low", "high", "wanted"),
    [
        (0.625, 0.925, [0.6, 0.7, 0.8, 0.9, 1.0]),
        (0, 115200, [0, 50000, 100000, 150000]),
        (-0.3, 0.3, [-0.4, -0.2, 0, 0.2, 0.4]),
        (2e-7, 6e-5, [0, 2e-5, 4e-5, 6e-5]),
        (1, 1, [0, 0.2, 0.4, 0.6, 0.8, 1]),
        (-3, -3, [-3, -2, -1, 0]),
        (0, 0, [0, 0.2, 0.4, 0.6, 0.8, 1]),
    ],
)
def test_ticks_are_round_and_enclose(low, high, wanted):
    assert ticks(low, high) == pytest.approx(wanted, abs=1e-12)


def test_ticks_are_told_shortly():
    assert [tick_text(v) for v in (0.1, 50000.0, 2e-5, 0, -1.5, 2.5e6)] == [
        "0.1",
        "50,000",
        "2e-5",
        "0",
        "-1.5",
        "2.5M",
    ]


def test_running_mean_is_a_convolution():
    values = np.random.default_rng(0).normal(size=40)
    ones = np.ones(7)
    by_hand = np.convolve(values, ones, "same") / np.convolve(np.ones(40), ones, "same")
    assert running_mean(values, 7) == pytest.approx(by_hand)


def test_long_curves_are_pooled_and_smoothed(runs):
    (run,) = read_runs(runs[:1])
    steps = list(range(1, 1001))
    run = dataclasses.replace(
        run, curves={"losses/td": (steps, [float(s % 2) for s in steps]), "eval/x": ([10, 20], [0.0, 1.0])}
    )
    first, second = draw_curves([run])
    assert [first["name"], second["name"]] == ["eval/x", "losses/td"]
    (line,) = first["lines"]
    assert line["path"] == "M500.0 1000.0L1000.0 0.0" and line["points"] == [[500.0, 1000.0], [1000.0, 0.0]]
    assert line["mean_path"] == "" and line["pooled"] == 1
    (line,) = second["lines"]
    assert (
        line["pooled"] == 3 and len(line["steps"]) == 334 and line["steps"][:2] == [3, 6] and line["steps"][-1] == 1000
    )
    assert line["values"][:2] == [pytest.approx(2 / 3, abs=1e-4), pytest.approx(1 / 3, abs=1e-4)]
    assert line["mean_path"].count("L") == 333 and (line["lowest"], line["highest"], line["last"]) == (0, 1, 0)


# The page.


class Tags(HTMLParser):
    """Tags with their attributes, and the content of scripts."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.scripts, self.inside = [], [], False
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self.inside = tag == "script"
        if self.inside:
            self.scripts.append("")

    def handle_endtag(self, tag):
        self.inside = self.inside and tag != "script"

    def handle_data(self, text):
        if self.inside:
            self.scripts[-1] += text


def test_texts_of_the_data_stay_texts(page, model):
    found = Tags(page)
    assert not [tag for tag, _ in found.tags if tag in {"img", "iframe", "object", "embed", "link", "base"}]
    assert len(found.scripts) == 2
    assert not [name for _, attrs in found.tags for name in attrs if name.startswith("on")]
    assert not set("<>&") & set(found.scripts[0])
    browsed = json.loads(found.scripts[0])
    assert browsed["environments"][0]["passages"] == model["environments"][0]["chains"]["passages"]
    texts = {text for _, text, _ in browsed["environments"][0]["passages"]}
    assert {ATTACK, ARABIC, EMOJI} <= texts
    assert json.loads(embedded_json("</script>\u2028<!--")) == "</script>\u2028<!--"


def test_attacks_through_names_of_runs_and_environments_stay_texts(model):
    bad = json.loads(json.dumps(model))
    bad["runs"][0]["label"] = bad["systems"][2]["name"] = bad["runs"][0]["folder"] = ATTACK
    bad["environments"][0]["spec"] = bad["curves"][0]["name"] = bad["runs"][0]["config"] = ATTACK
    bad["flags"]["rows"][0]["values"][0] = bad["environments"][0]["tables"]["evaluation"] = ATTACK
    found = Tags(render(bad, command=ATTACK, made=ATTACK))
    assert not [tag for tag, _ in found.tags if tag == "img"] and len(found.scripts) == 2


def test_the_page_loads_nothing(page):
    found = Tags(page)
    for _, attrs in found.tags:
        assert "src" not in attrs and attrs.get("href", "#").startswith("#")
    (style,) = re.findall(r"<style>(.*?)</style>", page, re.S)
    assert "url(" not in style and "@import" not in style
    (policy,) = [attrs["content"] for _, attrs in found.tags if attrs.get("http-equiv") == "Content-Security-Policy"]
    assert policy.startswith("default-src 'none';")
    assert not re.search(r"https?://", found.scripts[1])


def test_the_page_stands_without_its_script(page, model):
    assert page.count('<path class="line') >= len(model["curves"])
    assert '<figure class="curve" id="curve-0">' in page and '<figure class="curve" id="curve-1" hidden>' in page
    mean = model["environments"][0]["evaluations"][2]["metrics"]["support_f1"]["all"]["mean"]
    assert f"<b>{mean:.3f}</b>" in page
    for line in ("ties", "stopping", "exact match", "intervals"):
        assert f"<dt>{line}</dt>" in page


# The command.


def test_the_command_writes_one_page(runs, tmp_path, capsys):
    out = tmp_path / "page.html"
    assert run_command(runs[0], "--out", out, "--device", "cpu", "--chains", 3, "--limit", 9) == 0
    html = out.read_text(encoding="utf-8")
    assert html.startswith("<!DOCTYPE html>") and html.rstrip().endswith("</html>")
    assert "3 of the 9 questions, a random sample (<code>--chains 3</code>)" in html
    assert "--limit 9 --chains 3 --device cpu" in html
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]
    assert "page.html: 0." in capsys.readouterr().out


def test_runs_of_different_environments(runs, data, tmp_path):
    elsewhere = moved(runs[1], tmp_path / "elsewhere", env_kwargs=[f"path={data}", "max_steps=3"])
    with pytest.raises(ValueError, match="no environment in common .*max_steps=3.*make a page of each"):
        collect([runs[0], elsewhere], device="cpu")
    here = f"ChainRetrieval-Custom-v0?path={data}"
    both = moved(runs[1], tmp_path / "both", eval_envs=[f"{here}&max_steps=3", here])
    model = collect([runs[0], both], device="cpu", limit=3)
    assert [each["spec"] for each in model["environments"]] == [here]
    assert model["left_out"] == {"infonce, seed 1": [f"{here}&max_steps=3"]}
    two = collect([both], device="cpu", limit=3)
    html = render(two, command="", made="")
    assert [each["steps"] for each in two["environments"]] == [3, 4] and "Environment 2 of 2" in html


def test_refusals_leave_no_file(runs, tmp_path):
    unfinished = moved(runs[1], tmp_path / "unfinished")
    (tmp_path / "unfinished" / "eval.json").unlink()
    torn = moved(runs[1], tmp_path / "torn")
    (tmp_path / "torn" / "metrics.jsonl").write_text('{"step": 1, "losses/x": 0.5}\n{"step"')
    started = moved(runs[0], tmp_path / "started")
    shutil.rmtree(tmp_path / "started" / "action_encoder")
    (tmp_path / "empty").mkdir()
    out = tmp_path / "page.html"
    for words, error, match in (
        ([tmp_path / "nowhere"], FileNotFoundError, "no run folder"),
        ([tmp_path / "empty"], ValueError, "not a run folder"),
        ([unfinished], FileNotFoundError, "has no eval.json: finish the run first"),
        ([started], FileNotFoundError, "has no action_encoder: finish the run first"),
        ([torn], ValueError, "metrics.jsonl, line 2"),
        ([runs[0], runs[0]], ValueError, "named twice"),
        ([runs[0], "--chains", "0"], ValueError, "chains is 0"),
        ([runs[0], "--limit", "0"], ValueError, "limit is 0"),
        ([runs[0], "--seed", "-1"], ValueError, "--seed"),
    ):
        with pytest.raises(error, match=match):
            run_command(*words, "--out", out, "--device", "cpu")
    for target, error in ((tmp_path / "no" / "page.html", FileNotFoundError), (tmp_path, ValueError)):
        with pytest.raises(error, match="cannot write|not the name of a file"):
            run_command(runs[0], "--out", target, "--device", "cpu")
    with pytest.raises(ValueError, match="would replace a file that is read"):
        run_command(runs[0], "--out", f"{runs[0]}/eval.json", "--device", "cpu")
    assert not out.exists() and not list(tmp_path.glob("*.tmp"))
