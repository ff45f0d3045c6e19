"""The run folder: names, logs that resume, checkpoints, progress, devices and seeds."""

import io
import json
import math
import random

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("tensorboard")

from retrieval_gym.nn import run as run_module  # noqa: E402
from retrieval_gym.nn.run import Run, check_finite, resolve_device, seed_everything  # noqa: E402


@pytest.fixture
def run(tmp_path):
    run = Run.create(tmp_path / "runs", "ChainRetrieval-Synthetic-v0", "pqn", 1, {"lr": 0.1})
    yield run
    run.close()


def lines(run):
    return [json.loads(line) for line in (run.directory / "metrics.jsonl").read_text().splitlines()]


def scalars(run, name):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run.directory)).Reload()
    return [(event.step, event.value) for event in events.Scalars(name)]


def test_names_are_unique_and_safe(tmp_path):
    runs = [Run.create(tmp_path, "retrieval_gym:../Chain/v0", "p q n", 3, {}) for _ in range(3)]
    names = [run.directory.name for run in runs]
    assert len(set(names)) == 3
    assert all(run.directory.parent == tmp_path for run in runs)
    assert all(name.startswith("retrieval_gym-..-Chain-v0__p-q-n__3__") for name in names)


def test_configuration_round_trip(tmp_path):
    config = {"lr": 1e-4, "path": tmp_path, "name": "é", "none": None, "betas": (0.9, 0.98), "n": np.int64(3)}
    run = Run.create(tmp_path, "env", "agent", 0, config)
    expected = {"lr": 1e-4, "path": str(tmp_path), "name": "é", "none": None, "betas": [0.9, 0.98], "n": 3}
    assert run.config == expected == Run.open(run.directory).config
    versions = json.loads((run.directory / "versions.json").read_text())
    assert versions["torch"] == torch.__version__ and versions["numpy"] == np.__version__


def test_configuration_that_is_not_json_makes_no_folder(tmp_path):
    for value, message in ((object(), "object"), (math.nan, "not JSON")):
        with pytest.raises(ValueError, match=message):
            Run.create(tmp_path / "runs", "env", "agent", 0, {"x": value})
    assert not (tmp_path / "runs").exists()


def test_opening_what_is_no_run(tmp_path, run):
    with pytest.raises(FileNotFoundError, match="no run folder"):
        Run.open(tmp_path / "absent")
    with pytest.raises(ValueError, match="is not a run folder"):
        Run.open(tmp_path)
    for content in ("{", "[1]"):
        (run.directory / "config.json").write_text(content)
        with pytest.raises(ValueError, match=r"config\.json"):
            Run.open(run.directory)


def test_logged_values_reach_both_files(run):
    run.log({"losses/q": torch.tensor(0.5), "charts/SPS": np.float32(2)}, 10)
    run.log({"losses/q": math.nan}, 20)
    run.close()
    assert lines(run) == [{"step": 10, "losses/q": 0.5, "charts/SPS": 2.0}, {"step": 20, "losses/q": None}]
    assert scalars(run, "losses/q")[0] == (10, 0.5)


def train(run, start, stop, save_at=()):
    """Log two lines a step from a state that only the steps make; a checkpoint falls between the two."""
    for step in range(start, stop):
        run.log({"losses/q": 1 / (1 + step)}, step)
        if step in save_at:
            run.save("last", {"step": step})
        run.log({"eval/return": step}, step)


def test_resumed_metrics_equal_uninterrupted_ones(tmp_path):
    whole = Run.create(tmp_path, "env", "agent", 0, {})
    train(whole, 0, 9)
    broken = Run.create(tmp_path, "env", "agent", 0, {})
    train(broken, 0, 7, save_at=(2, 4))
    with open(broken.directory / "metrics.jsonl", "a") as file:
        file.write('{"step": 7, "los')  # killed in the middle of a line
    broken.close()
    resumed = Run.open(broken.directory)
    step = resumed.load("last")["step"]
    resumed.log({"eval/return": step}, step)
    train(resumed, step + 1, 9)
    whole.close()
    resumed.close()
    assert (resumed.directory / "metrics.jsonl").read_bytes() == (whole.directory / "metrics.jsonl").read_bytes()
    assert scalars(resumed, "eval/return") == scalars(whole, "eval/return") == [(i, float(i)) for i in range(9)]


def test_reading_a_run_changes_nothing(run):
    train(run, 0, 5, save_at=(1,))
    before = (run.directory / "metrics.jsonl").read_bytes()
    opened = Run.open(run.directory)
    assert opened.load("last") == {"step": 1}
    opened.close()
    assert (run.directory / "metrics.jsonl").read_bytes() == before


def test_loading_during_a_run_cuts_nothing(run):
    train(run, 0, 3, save_at=(0,))
    run.save("best", {"step": 2})
    run.load("last")
    run.load("best")
    run.log({"test/return": 1.0}, 3)
    assert [line["step"] for line in lines(run)] == [0, 0, 1, 1, 2, 2, 3]


def test_opening_to_append_without_a_checkpoint_cuts_nothing(run):
    train(run, 0, 3)
    opened = Run.open(run.directory)
    opened.log({"test/return": 1.0}, 3)
    opened.close()
    assert [line["step"] for line in lines(run)] == [0, 0, 1, 1, 2, 2, 3]


def test_lost_metrics_are_said(run, capsys):
    train(run, 0, 3, save_at=(2,))
    (run.directory / "metrics.jsonl").write_text("")
    opened = Run.open(run.directory)
    opened.load("last")
    opened.log({"losses/q": 1.0}, 3)
    opened.close()
    assert "bytes since the checkpoint; appending" in capsys.readouterr().out
    assert lines(run) == [{"step": 3, "losses/q": 1.0}]


def test_a_damaged_last_gives_way_to_the_one_before(run, capsys):
    for step in (1, 2):
        run.save("last", {"step": step})
    path = run.directory / "checkpoints" / "last.pt"
    for damage in (lambda: path.write_bytes(path.read_bytes()[:50]), path.unlink):
        damage()
        assert run.load("last") == {"step": 1}
        printed = capsys.readouterr().out
        assert str(path) in printed and "last.previous.pt" in printed
    path.with_name("last.previous.pt").unlink()
    with pytest.raises(FileNotFoundError, match="start a new run"):
        run.load("last")


def test_unknown_checkpoint_names(run):
    for call in (lambda: run.save("first", {}), lambda: run.load("first")):
        with pytest.raises(ValueError, match="unknown checkpoint 'first': choose one of last, best"):
            call()


def test_json_is_strict_and_atomic(run):
    run.write_json("eval.json", {"recall": 0.5})
    with pytest.raises(ValueError, match=r"eval\.json is not JSON"):
        run.write_json("eval.json", {"recall": math.inf})
    assert json.loads((run.directory / "eval.json").read_text()) == {"recall": 0.5}
    assert not list(run.directory.glob("*.tmp"))


def test_folders_that_cannot_be_written(tmp_path, run):
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match=r"cannot write .*file/runs: Not a directory; free some space or choose"):
        Run.create(tmp_path / "file" / "runs", "env", "agent", 0, {})
    run.log({"x": 1.0}, 0)
    (run.directory / "metrics.jsonl").unlink()
    (run.directory / "metrics.jsonl").mkdir()
    with pytest.raises(OSError, match=r"cannot write .*metrics\.jsonl: Is a directory"):
        run.log({"x": 1.0}, 1)


def test_plain_progress_is_sparse_and_ends_with_the_last_step(run, capsys, monkeypatch):
    clock = iter(np.arange(0, 100, 0.5))
    now = [0.0]
    monkeypatch.setattr(run_module.time, "monotonic", lambda: now[0])
    for step in range(1, 41):
        now[0] = float(next(clock))
        run.progress(step, 40, {"charts/episodic_return": step / 40})
    printed = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in printed] == ["1/40", "11/40", "21/40", "31/40", "40/40"]
    assert printed[-1] == "step 40/40  episodic_return 1"
    assert [line.split("  ")[1] for line in printed[1:4]] == ["0:00:14 left", "0:00:10 left", "0:00:04 left"]


def test_bar_in_a_terminal(run, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    terminal = Terminal()
    monkeypatch.setattr("sys.stdout", terminal)
    for step in (5, 10):
        run.progress(step, 10, {"losses/q": 0.25})
    run.close()
    assert "q 0.25" in terminal.getvalue() and "10/10" in terminal.getvalue()
    assert terminal.getvalue().count("\n") == 1


def test_seeds_repeat_every_generator():
    def draws():
        return random.random(), np.random.random(), torch.rand(1).item()

    seed_everything(7)
    first = draws()
    assert draws() != first
    seed_everything(7)
    assert draws() == first
    seed_everything(8)
    assert all(a != b for a, b in zip(draws(), first, strict=True))
    for seed in (-1, 2**32):
        with pytest.raises(ValueError, match=f"seed {seed} is out of range"):
            seed_everything(seed)


@pytest.mark.parametrize(
    ("cuda", "mps", "expected"), [(True, True, "cuda"), (False, True, "mps"), (False, False, "cpu")]
)
def test_devices(monkeypatch, cuda, mps, expected):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)
    assert resolve_device("auto") == torch.device(expected)
    assert resolve_device("cpu") == torch.device("cpu")
    if not cuda:
        with pytest.raises(ValueError, match="device 'cuda' is not available here"):
            resolve_device("cuda")
    with pytest.raises(ValueError, match="unknown device 'tpu': choose one of auto, cpu, cuda, mps"):
        resolve_device("tpu")


def test_losses_that_are_not_finite_stop_the_run():
    check_finite(0.5, "update 3")
    for loss in (math.nan, math.inf):
        with pytest.raises(
            FloatingPointError, match=f"the loss is {loss} at update 3: .*last good checkpoint was kept"
        ):
            check_finite(loss, "update 3")
