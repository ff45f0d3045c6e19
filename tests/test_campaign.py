"""Comparisons: each training runs once, a stopped one goes on, and figures are paired by question and seed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")

from retrieval_gym.nn.campaign import Pool, threads_of, train_once

AGENT = """
import json, os, pathlib, sys
flags = sys.argv[1:]
resumed = "--resume" in flags
run = pathlib.Path(flags[1]) if resumed else pathlib.Path(flags[flags.index("--runs") + 1]) / "the-run"
run.mkdir(exist_ok=True)
(run / "config.json").write_text("{}")
with (run / "calls").open("a") as calls:
    calls.write(json.dumps({"flags": flags, "threads": os.environ["OMP_NUM_THREADS"]}) + "\\n")
print("said something")
if "--stop" in flags:
    sys.exit("no more")
(run / "eval.json").write_text("{}")
"""


@pytest.fixture
def agent(tmp_path: Path) -> Path:
    script = tmp_path / "agent.py"
    script.write_text(AGENT)
    return script


def calls(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "calls").read_text().splitlines()]


@pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="memory is read from /proc")
def test_a_training_runs_once(agent, tmp_path):
    ballast = np.ones(2**26)  # half a gigabyte of this process, not of the training
    folder = tmp_path / "arm-1"
    run = train_once(agent, ["--seed", "1"], folder, threads=3)
    assert run == folder / "the-run"
    assert calls(run) == [{"flags": ["--seed", "1", "--runs", str(folder)], "threads": "3"}]
    assert (folder / "log.txt").read_text() == "said something\n"
    assert 0 < json.loads((folder / "memory.json").read_text())["peak_gigabytes"] < 0.4 < ballast.nbytes / 2**30
    assert train_once(agent, ["--seed", "1"], folder, threads=3) == run
    assert len(calls(run)) == 1


def test_a_training_that_stopped_goes_on(agent, tmp_path):
    folder = tmp_path / "arm-1"
    with pytest.raises(RuntimeError, match=r"agent\.py stopped in .*arm-1: see .*log\.txt"):
        train_once(agent, ["--stop"], folder, threads=1)
    run = train_once(agent, ["--stop"], folder, threads=1)
    assert [call["flags"][0] for call in calls(run)] == ["--stop", "--resume"]
    assert (run / "eval.json").is_file()
    assert "no more" in (folder / "log.txt").read_text()


def test_figures_are_pooled_and_paired():
    rng, pool = np.random.default_rng(0), Pool()
    ours, theirs = rng.random((2, 3, 40))
    for mine, yours in zip(ours, theirs, strict=True):
        pool.add("ours", "R@5", mine, np.arange(40))
        pool.add("theirs", "R@5", yours, np.arange(40))
    assert pool.keys() == [("ours", "R@5"), ("theirs", "R@5")]
    assert pool.by_seed("ours", "R@5") == pytest.approx(ours.mean(axis=1).tolist())
    assert pool.estimate("ours", "R@5").mean == pytest.approx(ours.mean())
    paired = pool.estimate("ours", "R@5", minus="theirs")
    assert paired.mean == pytest.approx((ours - theirs).mean())
    # Resampled by question, all seeds together: the standard error is that of the questions' means.
    error = (ours - theirs).mean(axis=0).std() / np.sqrt(40)
    assert paired.high - paired.low == pytest.approx(2 * 1.96 * error, rel=0.15)


def test_the_report_stands_each_arm_beside_the_baseline():
    pool, questions = Pool(), np.arange(2)
    for arm, seeds in {"plain": ([0.0, 0.0], [1.0, 0.0]), "better": ([1.0, 0.0], [1.0, 1.0])}.items():
        for values in seeds:
            pool.add(arm, "score", np.array(values), questions)
            pool.add(arm, "other", np.array(values), questions)
    text, values = pool.report("plain", ["score"], [1, 101])
    assert values.keys() == {"score"} and values["score"].keys() == {"plain", "better"}
    better = values["score"]["better"]
    assert better["mean"]["mean"] == 0.75 and better["minus_plain"]["mean"] == 0.5 and better["by_seed"] == [0.5, 1.0]
    assert values["score"]["plain"]["minus_plain"] is None
    header, plain, row = text.splitlines()
    assert header.split()[:3] == ["measure", "arm", "mean"] and header.split()[-2:] == ["1", "101"]
    assert plain.split()[:2] == ["score", "plain"] and row.split()[:3] == ["score", "better", "0.750"]
    assert row.split()[-2:] == ["0.500", "1.000"]


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="the system does not limit a process's cores")
def test_threads_are_those_of_the_cores_that_may_be_used():
    program = (
        "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
        "from retrieval_gym.nn.campaign import threads_of; print(threads_of(1), threads_of(3))"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    assert run.stdout.split() == ["1", "1"]
    assert threads_of(1) == len(os.sched_getaffinity(0)) and threads_of(10**6) == 1
