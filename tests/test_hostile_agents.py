"""The agents' scripts on hostile input, full disks and signals: one line on stderr, and nothing lost."""

import gc
import json
import os
import runpy
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from io import BytesIO
from typing import Literal

import pytest

torch = pytest.importorskip("torch")
from small_runs import AGENTS, OWN, SHARED, save_data  # noqa: E402
from test_hostile import GOOD, UNREADABLE, configured, cut, disk, folder_of  # noqa: E402, F401
from tiny import save_encoder  # noqa: E402

from retrieval_gym.nn.encoder import TextEncoder  # noqa: E402
from retrieval_gym.nn.run import Run, earlier_run  # noqa: E402
from retrieval_gym.nn.script import check_values, run_script  # noqa: E402

NAMES = ("infonce", "pao", "pqn")
LONGER = {
    "infonce": {"epochs": 2, "states": "on-policy"},
    "pao": {"epochs": 3, "batch_size": 2},
    "pqn": {"total_timesteps": 16, "eval_every": 2},
}
CLOCK = {"charts/SPS", "charts/epoch_seconds", "charts/rollout_share", "charts/mining_share"}
ODD = (
    b"\xef\xbb\xbf"
    + GOOD.replace(b"\n", b"\r\n")
    + ('{"id": "👩‍🔬", "text": "نهر \u202eالدانوب\u202c 🏳️‍🌈 \u2028\\u0000"}'.encode())
)
ASKED = "".join(json.dumps({"id": f"t{i}", "question": f"Where is {i}?", "gold_ids": ["a"]}) + "\n" for i in range(4))
QUESTION = '\ufeff{"id": "שלום", "question": "איפה \u202eהנהר\u202c 🏳️‍🌈?", "gold_ids": ["a", "b"]}\r\n'
HUGE = "1" + "0" * 30


def in_turn(*cases):
    """Give the cases to the scripts in turn: what they test is the same code for all."""
    return [(NAMES[i % len(NAMES)], *case) for i, case in enumerate(cases)]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return save_data(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    return save_encoder(tmp_path_factory.mktemp("encoder") / "tiny", layers=1)


@pytest.fixture(scope="module")
def flags(data, encoder, tmp_path_factory):
    """``flags(agent, key=value)``: a command line of the smallest run, whose embeddings are kept between tests."""
    cache = tmp_path_factory.mktemp("cache") / "embeddings"

    def make(agent, **changes):
        values = {**SHARED, **OWN[agent], "encoder": encoder, "cache_dir": cache, "env_kwargs": f"path={data}"}
        words = []
        for key, value in {**values, **changes}.items():
            words += [f"--{key.replace('_', '-')}", *([] if value is True else [str(value)])]
        return words

    return make


def execute(agent, words):
    """Run a script in this process as Python runs it; return what it exits with."""
    status = 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "excepthook", sys.excepthook)  # put back what the script sets
        patch.setattr(sys, "argv", [str(AGENTS / f"{agent}.py"), *map(str, words)])
        try:
            runpy.run_path(sys.argv[0], run_name="__main__")
        except SystemExit as stop:
            status = stop.code
    gc.collect()  # what ended it holds the run, and so its lock
    return status


@pytest.fixture
def script(capsys):
    """``script(agent, *words)``: run a script in this process; return its exit status and what it said."""

    def call(agent, *words):
        capsys.readouterr()
        status = execute(agent, words)
        shown = capsys.readouterr()
        return (1, shown.out, f"{shown.err}{status}\n") if isinstance(status, str) else (status, *shown)

    return call


@pytest.fixture
def refused(script):
    def check(message, agent, *words, status=1):
        found, _, err = script(agent, *words)
        lines = [line for line in err.splitlines() if line and "embedding passages" not in line]
        assert found == status and len(lines) == 1 and len(err) < 5_000, (found, err)
        assert lines[0].startswith(f"{agent}: ") and message in lines[0], err

    return check


def the_run(root):
    (run,) = root.iterdir()
    return run


def content(run):
    """What two equal runs have in common: report, metrics and models, less what a clock measured."""
    report = json.loads((run / "eval.json").read_text())
    for entry in report.values():
        del entry["trained"]["cost"]
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    metrics = [{name: value for name, value in line.items() if name not in CLOCK} for line in lines]
    return report, metrics, [path.read_bytes() for path in sorted(run.glob("*_encoder/model.safetensors"))]


@pytest.fixture(scope="module")
def whole(flags, tmp_path_factory):
    """``whole(agent)``: the folder of an uninterrupted run of several checkpoints, made once."""
    made = {}

    def get(agent):
        if agent not in made:
            root = tmp_path_factory.mktemp(agent)
            assert execute(agent, flags(agent, **LONGER[agent], runs=root)) == 0
            made[agent] = the_run(root)
        return made[agent]

    return get


# Flags.


@pytest.mark.parametrize(
    ("agent", "changes", "message"),
    in_turn(
        ({"encoder": "no/such/model"}, "no model at 'no/such/model'"),
        ({"encoder": ""}, "encoder is empty: give it a value; is a variable of the shell unset?"),
        ({"runs": ""}, "runs is empty"),
        ({"runs": "{data}/corpus.jsonl/runs"}, "corpus.jsonl is no folder; choose another one"),
        ({"runs": "a\udcff"}, "runs is 'a\\udcff', which is not UTF-8"),
        ({"cache_dir": ""}, "cache_dir is empty"),
        ({"env_kwargs": "path=none"}, "none is not a folder"),
        ({"env": "Nope-v0"}, "unknown environment id 'Nope-v0'"),
        ({"eval_envs": "ChainRetrieval-Custom-v0?path=none"}, "none is not a folder"),
        ({"eval_split": "test"}, "no questions for split 'test' in"),
        ({"seed": "-1"}, "seed -1 is out of range"),
        ({"seed": HUGE}, ": it must be at most 1,000,000,000,000"),
        ({"question_tokens": HUGE}, "question_tokens is 1000"),
        ({"learning_rate": "nan"}, "learning_rate is nan"),
        ({"weight_decay": "1e300"}, "weight_decay is 1e+300: it must be finite"),
        ({"selection_share": "inf"}, "selection_share is inf"),
    ),
    ids=str,
)
def test_values_that_cannot_be_are_one_line(agent, changes, message, flags, data, refused, tmp_path):
    named = {name: value.replace("{data}", str(data)) for name, value in changes.items()}
    refused(message, agent, *flags(agent, **{"runs": tmp_path / "runs", **named}))
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("agent", "words", "message"),
    in_turn(
        (["--betas", "0.9", "1"], "betas is (0.9, 1.0): each must be at least 0 and below 1"),
        (["--resume", "none"], "no run folder none"),
        (["--resume", ""], "--resume is empty"),
        (["--resume", "{data}"], "is not a run folder"),
    ),
    ids=str,
)
def test_words_that_cannot_be_are_one_line(agent, words, message, flags, data, refused, tmp_path):
    words = [word.replace("{data}", str(data)) for word in words]
    refused(message, agent, *flags(agent, runs=tmp_path / "runs"), *words)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("agent", "words", "message"),
    in_turn(
        (["--device", "tpu"], "invalid choice 'tpu' for argument '--device'. Expected one of ('auto', 'cpu', 'cuda'"),
        (["--seed", "x"], "Error parsing --seed: invalid literal for int() with base 10: 'x'"),
        (["--eval-split"], "Missing value for argument '--eval-split'"),
        (["--resume"], "argument --resume: expected one argument"),
        (["--max-grad", "1"], "Unrecognized options: --max-grad, 1, perhaps you meant --max-grad-norm"),
        (["🌊"], "Unrecognized options: 🌊"),
    ),
    ids=str,
)
def test_a_command_line_that_cannot_be_read_is_one_line_and_not_a_box(agent, words, message, refused):
    refused(message, agent, *words, status=2)


@pytest.mark.parametrize(
    ("agent", "changes", "message"),
    [
        ("pqn", {"num_steps": "1000000000"}, "total_timesteps is 8: one update takes 2000000000"),
        ("pqn", {"accumulation": "1000000000000"}, "total_timesteps is 8: one update takes 4000000000000"),
        ("pqn", {"reward": "silver"}, "unknown reward 'silver'"),
        ("pao", {"reward_model": "silver"}, "unknown reward model 'silver'"),
        ("pao", {"reward_model": "reranker:no/such/model"}, "no model at 'no/such/model'"),
        ("pao", {"reward_cache": ""}, "reward_cache is empty"),
        ("infonce", {"states": "once", "first_walker": "none"}, "no run folder none"),
        ("infonce", {"states": "once", "first_walker": ""}, "first_walker is empty"),
    ],
    ids=str,
)
def test_values_of_one_script_that_cannot_be_are_one_line(agent, changes, message, flags, refused, tmp_path):
    refused(message, agent, *flags(agent, **{"runs": tmp_path / "runs", **changes}))
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("agent", "changes"),
    [
        ("infonce", {"num_negatives": 10**12, "negative_depth": 10**12, "batch_size": 10**12}),
        ("pao", {"list_size": 10**12, "batch_size": 10**12}),
        ("pqn", {"top_k_actions": 10**12, "eval_every": 10**12, "eval_questions": 10**12}),
    ],
)
def test_more_than_there_is_means_all(agent, changes, flags, script, tmp_path):
    status, _, err = script(agent, *flags(agent, **changes, runs=tmp_path))
    assert status == 0, err
    assert (the_run(tmp_path) / "eval.json").is_file()


def test_epochs_beyond_all_time_begin_at_once(flags, script, tmp_path, monkeypatch):
    def stop(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(torch.optim.AdamW, "step", stop)
    begun = time.monotonic()
    assert script("pao", *flags("pao", epochs=10**12, runs=tmp_path))[0] == 130
    assert time.monotonic() - begun < 20


@pytest.mark.parametrize(
    "error",
    [
        MemoryError("Unable to allocate 7.28 TiB"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_too_little_memory_is_one_line(error, flags, refused, tmp_path, monkeypatch):
    def fill(*args, **kwargs):
        raise error

    monkeypatch.setattr("retrieval_gym.evaluation.evaluate", fill)
    refused("out of memory (", "pao", *flags("pao", runs=tmp_path))


def test_a_fault_of_ours_keeps_its_trace():
    def fail(args):
        raise KeyError("ours")

    with pytest.raises(KeyError, match="ours"):
        run_script("pqn", Choices, fail)


@dataclass
class Choices:
    count: int = 1
    rate: float | None = None
    kind: Literal["a", "b"] = "a"
    pair: tuple[float, float] = (0.0, 1.0)
    names: tuple[str, ...] = ()


def test_values_are_held_against_their_types():
    for good in ({}, {"rate": 1}, {"rate": 0.5}, {"kind": "b"}, {"pair": (1, 2)}, {"names": ("x", "🌊")}):
        check_values(Choices(**good))
    bad = {"count": (True, 1.0, None, "1"), "rate": (False, "x"), "kind": ("c", None), "names": ("x", ["x"], (1,))}
    bad["pair"] = ((1.0,), (1.0, 2.0, 3.0), [1.0, 2.0])
    for name, values in bad.items():
        for value in values:
            with pytest.raises(ValueError, match=rf"^{name} is .*: restore config.json, or start a new run$"):
                check_values(Choices(**{name: value}))


# Data.


@pytest.mark.parametrize("agent", NAMES)
def test_odd_text_is_trained_on_and_survives_into_the_logs(agent, flags, script, tmp_path):
    """A mark, Windows line ends, every script, no last line end; and a folder with such a name."""
    folder = folder_of(tmp_path / "נהר 🌊", ODD, QUESTION.encode())
    (folder / "questions_train.jsonl").write_text(ASKED.replace("Where", "Où 🌊 أين \u202e?"), encoding="utf-8")
    root = tmp_path / "runs 👩‍🔬"
    status, out, err = script(agent, *flags(agent, env_kwargs=f"path={folder}", runs=root))
    assert status == 0, err
    run = the_run(root)
    assert str(run) in out and json.loads((run / "config.json").read_text("utf-8"))["env_kwargs"] == [f"path={folder}"]
    assert f"ChainRetrieval-Custom-v0?path={folder}" in (run / "eval.json").read_text("utf-8")


@pytest.mark.parametrize(
    ("agent", "name"), in_turn(("empty",), ("UTF-16",), ("latin-1",), ("a long line",), ("an id twice",))
)
def test_a_corpus_that_cannot_be_read_is_one_line(agent, name, flags, refused, tmp_path):
    corpus, message = UNREADABLE[name]
    folder = folder_of(tmp_path / "data", corpus)
    (folder / "questions_train.jsonl").write_text(ASKED)
    refused(message, agent, *flags(agent, env_kwargs=f"path={folder}", runs=tmp_path / "runs"))
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("agent", "train", "message"),
    in_turn(
        ("", "questions_train.jsonl is empty"),
        (ASKED + ASKED, "question id 't0' occurs twice"),
        (ASKED + '{"id": "n", "question": "?", "gold_ids": []}', "line 5: field 'gold_ids' is empty"),
        (ASKED.splitlines()[0], "of 1 questions none is left to train on"),
        ('{"id": "q", "question": "Where is Ulm?", "gold_ids": ["a"]}\n' + ASKED, "1 of the 1 questions reported"),
    ),
)
def test_questions_that_cannot_be_trained_on_are_one_line(agent, train, message, flags, refused, tmp_path):
    folder = folder_of(tmp_path / "data")
    (folder / "questions_train.jsonl").write_text(train)
    refused(message, agent, *flags(agent, env_kwargs=f"path={folder}", runs=tmp_path / "runs"))
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("agent", ["infonce", "pqn"])
def test_more_gold_than_steps_is_refused_whichever_part_it_falls_to(agent, flags, refused, tmp_path):
    corpus = "".join(json.dumps({"id": str(i), "text": f"passage {i}"}) + "\n" for i in range(6))
    questions = [{"id": i, "question": f"{i}?", "gold_ids": ["0"]} for i in range(3)]
    questions.append({"id": "m", "question": "many?", "gold_ids": list("01234")})
    folder = folder_of(tmp_path / "data", corpus.encode(), b'{"id": "q", "question": "?", "gold_ids": ["0"]}')
    (folder / "questions_train.jsonl").write_text("".join(json.dumps(q) + "\n" for q in questions))
    for seed in (0, 3):  # kept apart for one seed or another
        refused("'m' has 5 gold passages", agent, *flags(agent, env_kwargs=f"path={folder}", seed=seed))


# Run folders that are damaged, taken or read-only.


def emptied(folder, pattern):
    for path in (folder / "checkpoints").glob(pattern):
        cut(path, 500)


DAMAGES = {
    "config.json is empty": (lambda run: cut(run / "config.json", 0), "config.json is not JSON"),
    "config.json is cut": (lambda run: cut(run / "config.json", 99), "config.json is not JSON"),
    "config.json holds nothing": (lambda run: (run / "config.json").write_text("{}"), "is not in both; start anew"),
    "a number is text": (lambda run: configured(run, seed="x"), "seed is 'x', which is not int: restore config.json"),
    "a number is null": (lambda run: configured(run, batch_size=None, num_envs=None), "start anew"),
    "a choice is unknown": (lambda run: configured(run, schedule="x"), "schedule is 'x', which is not Literal"),
    "a switch is text": (lambda run: configured(run, autocast="maybe"), "autocast is 'maybe', which is not bool"),
    "a pair lacks one": (lambda run: configured(run, betas=[0.9]), "betas is (0.9,), which is not tuple[float, float]"),
    "the encoder is gone": (lambda run: configured(run, encoder="/none/such"), "no model at '/none/such'"),
    "both are cut": (lambda run: emptied(run, "last*.pt"), "cannot read checkpoint"),
    "best is cut": (lambda run: emptied(run, "best*.pt"), "cannot read checkpoint"),
    "last is a copy of best": (
        lambda run: shutil.copy(run / "checkpoints/best.pt", run / "checkpoints/last.pt"),
        "last.pt does not fit this run (KeyError: 'fingerprints'): restore it, or start a new run",
    ),
    "no checkpoint is left": (
        lambda run: [path.unlink() for path in (run / "checkpoints").iterdir()],
        "last.pt: start a new run",
    ),
}


@pytest.mark.filterwarnings("ignore:The field")  # of tyro, in which the script's refusal takes its place
@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_run_is_one_line_and_keeps_its_report(name, whole, refused, tmp_path):
    agent = NAMES[list(DAMAGES).index(name) % 3]
    damage, message = DAMAGES[name]
    run = shutil.copytree(whole(agent), tmp_path / "run")
    damage(run)
    before = (run / "eval.json").read_bytes(), (run / "metrics.jsonl").read_bytes()
    refused(message, agent, "--resume", run)
    assert before == ((run / "eval.json").read_bytes(), (run / "metrics.jsonl").read_bytes())


@pytest.mark.skipif(sys.platform == "win32", reason="locks of files are POSIX")
def test_a_second_process_is_refused_before_any_work(whole, refused, tmp_path, monkeypatch):
    run = shutil.copytree(whole("pao"), tmp_path / "run")
    first = Run.open(run)
    first.lock()
    first.lock()  # its own lock is in nobody's way
    monkeypatch.setattr(TextEncoder, "load", None)
    refused("is being written by another process", "pao", "--resume", run)
    first.close()


@pytest.mark.parametrize("agent", NAMES)
def test_a_read_only_disk_is_one_line_before_any_work(agent, disk, flags, whole, refused, monkeypatch):  # noqa: F811
    folder = disk("read-only", "size=100m")
    run = shutil.copytree(whole(agent), folder / "run")
    subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)
    monkeypatch.setattr(TextEncoder, "load", None)
    refused("is read-only for you; choose another folder", agent, *flags(agent, runs=folder / "deep" / "runs"))
    refused("Read-only file system; free some space or choose", agent, "--resume", run)


def test_a_run_has_begun_with_its_first_whole_checkpoint(tmp_path):
    run = Run.create(tmp_path, "env", "agent", 1, {})
    (run.directory / "checkpoints" / "last.pt.tmp").write_bytes(b"half, as a kill leaves it")
    run.save("best", {"update": 0})
    assert not run.has_begun()
    run.save("last", {"update": 0})
    assert run.has_begun() and Run.open(run.directory).has_begun()


def test_the_folder_of_runs_may_be_made_later(tmp_path):
    assert earlier_run(None, tmp_path / "a" / "b") is None and not (tmp_path / "a").exists()


# Full disks.


@pytest.mark.parametrize(("agent", "size"), [("infonce", "17m"), ("pao", "6m"), ("pqn", "64k")])
def test_a_disk_that_is_full_in_training_loses_nothing(agent, size, disk, flags, whole, script, refused):  # noqa: F811
    """At a later checkpoint, at the first one of the optimiser, and at the very first."""
    folder = disk("full", f"size={size}")
    refused("No space left on device", agent, *flags(agent, **LONGER[agent], runs=folder / "runs"))
    run = the_run(folder / "runs")
    assert not list((run / "checkpoints").glob("*.tmp"))
    assert (run / "checkpoints" / "last.pt").exists() == (agent == "infonce")
    subprocess.run(["mount", "-o", "remount,size=200m", str(folder)], check=True)
    status, _, err = script(agent, "--resume", run)
    assert status == 0 and content(run) == content(whole(agent)), err


@pytest.mark.parametrize(("agent", "room"), [("infonce", 100), ("pao", 4_500), ("pqn", 6_000)])
def test_a_disk_that_is_full_in_the_end_keeps_the_checkpoints(agent, room, disk, whole, script, refused):  # noqa: F811
    """While weights are written, which is safetensors' error, a tokenizer, tokenizers' own, and the second encoder."""
    folder = disk("full", "size=200m")
    run = shutil.copytree(whole(agent), folder / "run")
    (run / "eval.json").unlink()
    for path in run.glob("*_encoder"):
        shutil.rmtree(path)
    used = os.statvfs(folder)
    used = (used.f_blocks - used.f_bfree) * used.f_frsize // 1024
    subprocess.run(["mount", "-o", f"remount,size={used + room}k", str(folder)], check=True)
    refused("_encoder: No space left on device", agent, "--resume", run)
    left = ["state_encoder"] if agent == "pqn" else []
    assert not (run / "eval.json").exists() and [path.name for path in run.glob("*_encoder*")] == left
    subprocess.run(["mount", "-o", "remount,size=200m", str(folder)], check=True)
    status, _, err = script(agent, "--resume", run)
    assert status == 0 and content(run) == content(whole(agent)), err


def test_events_that_do_not_fit_stop_the_run_and_not_a_thread(disk):  # noqa: F811
    folder = disk("full", "size=64k")
    run = Run.create(folder, "env", "agent", 1, {})
    threads = threading.active_count()
    with pytest.raises(OSError, match="cannot write .*metrics.jsonl: No space left on device"):
        for step in range(10_000):
            run.log({f"charts/{i}": float(i) for i in range(20)}, step)
    assert threading.active_count() == threads


def test_what_is_logged_is_in_the_event_file_at_once(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    first = Run.create(tmp_path, "env", "agent", 1, {})
    for step in range(4):
        first.log({"a/b": step / 3}, step)  # never closed, as after a kill
    second = Run.open(first.directory)
    second.log({"a/b": 9.0}, 2)  # a resumed run: what was logged of step 2 and later no longer counts
    events = accumulator.EventAccumulator(str(first.directory))
    events.Reload()
    told = [(event.step, round(event.value, 6)) for event in events.Scalars("a/b")]
    assert told == [(0, 0.0), (1, 0.333333), (2, 9.0)]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_output_that_cannot_be_written_is_one_line(flags, tmp_path, monkeypatch):
    with open("/dev/full", "w") as full, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", full)
        line = execute("pao", flags("pao", runs=tmp_path))
        assert os.readlink(f"/proc/self/fd/{full.fileno()}") == os.devnull  # so that Python does not complain at exit
    assert line.startswith("pao: cannot print: No space left on device; look where the output is sent")


# Signals.


def at_call(number, signum, real):
    """Return ``real`` that sends this process a signal at one of its calls, before it does its work."""
    calls = 0

    def call(*args, **kwargs):
        nonlocal calls
        calls += 1
        if calls == number:
            os.kill(os.getpid(), signum)
        return real(*args, **kwargs)

    return call


def half_written(number, signum, real):
    """Return ``torch.save`` that sends the signal half-way through one checkpoint."""
    calls = 0

    def save(payload, file):
        nonlocal calls
        calls += 1
        if calls != number:
            return real(payload, file)
        whole = BytesIO()
        real(payload, whole)
        file.write(whole.getvalue()[: whole.tell() // 2])
        file.flush()
        os.kill(os.getpid(), signum)

    return save


MOMENTS = {
    "embedding": ("retrieval_gym.nn.encoder.TextEncoder.encode", at_call, 1),
    "the untrained evaluation": ("retrieval_gym.evaluation.evaluate", at_call, 1),
    "the second update": ("torch.optim.AdamW.step", at_call, 2),
    "a checkpoint": ("torch.save", half_written, 3),
    "the report": ("retrieval_gym.nn.encoder.TextEncoder._write", at_call, 2),
}


@pytest.mark.skipif(os.name == "nt", reason="Windows sends no SIGINT to one process")
@pytest.mark.parametrize(
    ("agent", "moment"),
    [
        ("infonce", "the untrained evaluation"), ("infonce", "the second update"), ("infonce", "a checkpoint"),
        ("pao", "embedding"), ("pao", "a checkpoint"), ("pao", "the report"),
        ("pqn", "the second update"), ("pqn", "a checkpoint"),
    ],
)  # fmt: skip
def test_a_signal_is_one_line_and_the_resumed_run_equals_a_whole_one(
    agent, moment, flags, script, whole, tmp_path, monkeypatch
):
    signum = signal.SIGINT if (NAMES.index(agent) + list(MOMENTS).index(moment)) % 2 else signal.SIGTERM
    target, make, number = MOMENTS[moment]
    owner, _, name = target.rpartition(".")
    changes = {"cache_dir": tmp_path / "cache"} if moment == "embedding" else {}
    words = flags(agent, **LONGER[agent], **changes, runs=tmp_path / "runs")
    expected = content(whole(agent))
    with monkeypatch.context() as patch:
        parent, _, leaf = owner.rpartition(".")
        holder = getattr(sys.modules[parent], leaf) if owner not in sys.modules else sys.modules[owner]
        patch.setattr(target, make(number, signum, getattr(holder, name)))
        status, _, err = script(agent, *words)
    line = [line for line in err.splitlines() if line and "embedding passages" not in line]
    how = "interrupted" if signum == signal.SIGINT else "terminated"
    assert status == 128 + signum and len(line) == 1 and line[0].startswith(f"{agent}: {how}; go on with"), err
    begun = (tmp_path / "runs").exists()
    assert begun == (moment != "embedding")
    assert line[0].endswith(f"--resume {the_run(tmp_path / 'runs')}" if begun else "the same command"), err
    assert not list(tmp_path.glob("runs/*/checkpoints/*.tmp"))
    status, _, err = script(agent, *(["--resume", the_run(tmp_path / "runs")] if begun else words))
    assert status == 0 and content(the_run(tmp_path / "runs")) == expected, err


@pytest.mark.skipif(os.name == "nt", reason="Windows sends no SIGINT to one process")
def test_ctrl_c_while_torch_loads_is_one_line(tmp_path):
    (tmp_path / "torch.py").write_text("import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(9)\n")
    command = [sys.executable, str(AGENTS / "pqn.py")]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(tmp_path)}, capture_output=True, text=True)
    assert done.returncode == -signal.SIGINT and done.stderr.startswith("pqn: interrupted; "), done.stderr
    assert done.stderr.count("\n") == 1


def test_a_missing_package_is_one_line(tmp_path):
    (tmp_path / "tyro.py").write_text("raise ImportError('No module named tyro')\n")
    command = [sys.executable, str(AGENTS / "pao.py")]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(tmp_path)}, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (1, "pao: No module named tyro\n")
