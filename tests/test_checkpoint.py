"""Checkpoints survive kills and damage; random states come back bit for bit."""

import os
import random
import signal
import subprocess
import sys
import textwrap

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from retrieval_gym.nn import checkpoint  # noqa: E402

BIT_GENERATORS = [np.random.PCG64, np.random.PCG64DXSM, np.random.MT19937, np.random.Philox, np.random.SFC64]


def run_child(code, folder):
    script = "import sys; folder = sys.argv[1]\n" + textwrap.dedent(code)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", script, str(folder)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)


def test_round_trip_of_a_training_state(tmp_path):
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    scheduler.step()
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(),
        "rng": checkpoint.rng_state(),
        "best": -float("inf"),
        "step": 2**40,
        "where": ["a", (1, None, True)],
    }
    checkpoint.save_checkpoint(tmp_path / "last.pt", state)
    loaded = checkpoint.load_checkpoint(tmp_path / "last.pt")
    assert list(loaded) == list(state)
    assert loaded["best"] == -float("inf") and loaded["step"] == 2**40 and loaded["where"] == ["a", (1, None, True)]
    assert all(torch.equal(loaded["model"][key], value) for key, value in model.state_dict().items())
    moments = optimizer.state_dict()["state"][0]
    assert all(torch.equal(loaded["optimizer"]["state"][0][key], value) for key, value in moments.items())
    assert loaded["scheduler"]["_last_lr"] == scheduler.get_last_lr()
    assert sorted(os.listdir(tmp_path)) == ["last.pt"]


def test_the_one_before_is_kept(tmp_path):
    for step in range(4):
        checkpoint.save_checkpoint(tmp_path / "last.pt", {"step": step})
    assert checkpoint.load_checkpoint(tmp_path / "last.pt") == {"step": 3}
    assert checkpoint.load_checkpoint(tmp_path / "last.previous.pt") == {"step": 2}
    assert sorted(os.listdir(tmp_path)) == ["last.previous.pt", "last.pt"]


@pytest.mark.parametrize(
    "value", [np.float64(1.0), np.int64(3), np.zeros(2), object(), {1}], ids=lambda v: type(v).__name__
)
def test_what_could_not_be_read_is_not_written(tmp_path, value):
    with pytest.raises(ValueError, match=r"state\['deep'\]\[1\] is a .*, which a checkpoint cannot hold"):
        checkpoint.save_checkpoint(tmp_path / "last.pt", {"deep": [0, value]})
    assert not os.listdir(tmp_path)


KILLS = {
    "half of the file": """
        def half(payload, file):
            import io
            buffer = io.BytesIO()
            save(payload, buffer)
            file.write(buffer.getvalue()[: buffer.tell() // 2])
            file.flush()
            os.kill(os.getpid(), signal.SIGKILL)
        save, torch.save = torch.save, half
    """,
    **{
        f"{when} call {call} of os.{name}": f"""
        calls = 0
        def killed(*arguments):
            global calls
            calls += 1
            if calls == {call} and "{when}" == "before":
                os.kill(os.getpid(), signal.SIGKILL)
            original(*arguments)
            if calls == {call}:
                os.kill(os.getpid(), signal.SIGKILL)
        original, os.{name} = os.{name}, killed
    """
        for name, calls in (("link", 1), ("replace", 2))
        for call in range(1, calls + 1)
        for when in ("before", "after")
    },
}


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="needs SIGKILL")
@pytest.mark.parametrize("damaged", [False, True], ids=["last whole", "last damaged"])
def test_a_kill_leaves_a_whole_checkpoint(tmp_path, damaged):
    """All kill points in one child tree: each forked child dies at its own point of the third save."""
    code = f"""
    import os, signal, textwrap, torch
    from retrieval_gym.nn.checkpoint import save_checkpoint
    for number, kill in enumerate({list(KILLS.values())!r}):
        place = os.path.join(folder, str(number))
        os.mkdir(place)
        path = os.path.join(place, "last.pt")
        for step in (1, 2):
            save_checkpoint(path, {{"step": step, "weights": torch.full((1000,), step)}})
        if {damaged}:
            os.truncate(path, 100)
        child = os.fork()
        if child == 0:
            exec(textwrap.dedent(kill), globals())
            save_checkpoint(path, {{"step": 3, "weights": torch.full((1000,), 3)}})
            os._exit(0)
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, (number, status)
    """
    result = run_child(code, tmp_path)
    assert result.returncode == 0, result.stderr
    for number, name in enumerate(KILLS):
        folder = tmp_path / str(number)
        whole = []
        for file in ("last.pt", "last.previous.pt"):
            try:
                state = checkpoint.load_checkpoint(folder / file)
            except (ValueError, FileNotFoundError):
                continue
            assert torch.equal(state["weights"], torch.full((1000,), state["step"])), name
            whole.append(state["step"])
        oldest_useful = 1 if damaged else 2
        assert whole and max(whole) >= oldest_useful, name
        # The next save works whatever the kill left behind.
        checkpoint.save_checkpoint(folder / "last.pt", {"step": 4})
        assert checkpoint.load_checkpoint(folder / "last.pt") == {"step": 4}, name
        assert sorted(os.listdir(folder)) == ["last.previous.pt", "last.pt"], name


def test_without_hard_links(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    for step in range(3):
        checkpoint.save_checkpoint(tmp_path / "last.pt", {"step": step})
    assert checkpoint.load_checkpoint(tmp_path / "last.previous.pt") == {"step": 1}


def damage(kind, whole):
    return {
        "empty": b"",
        "truncated": whole[: len(whole) // 2],
        "a little truncated": whole[:-1],
        "text": b"hello, this is no checkpoint\n" * 50,
        "random": np.random.default_rng(0).bytes(5000),
    }[kind]


@pytest.mark.parametrize("kind", ["empty", "truncated", "a little truncated", "text", "random"])
def test_damaged_files_name_the_remedy(tmp_path, kind):
    path = tmp_path / "last.pt"
    for step in range(2):
        checkpoint.save_checkpoint(path, {"step": step, "weights": torch.arange(1000)})
    path.write_bytes(damage(kind, path.read_bytes()))
    with pytest.raises(ValueError, match=r"last\.pt .*use another checkpoint of .*: last\.previous\.pt"):
        checkpoint.load_checkpoint(path)


def test_foreign_newer_and_missing_files(tmp_path):
    path = tmp_path / "last.pt"
    torch.save({"weights": torch.ones(2)}, path)
    with pytest.raises(ValueError, match="not a checkpoint of retrieval_gym: start a new run"):
        checkpoint.load_checkpoint(path)
    torch.save({checkpoint.FORMAT_KEY: 99, "state": {}}, path)
    with pytest.raises(ValueError, match="has checkpoint format 99, this version reads 1"):
        checkpoint.load_checkpoint(path)
    with pytest.raises(FileNotFoundError, match=r"no checkpoint .*best\.pt: use another checkpoint .*last\.pt"):
        checkpoint.load_checkpoint(tmp_path / "best.pt")


def test_a_checkpoint_runs_no_code(tmp_path):
    class Bomb:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "exploded"),)

    torch.save({checkpoint.FORMAT_KEY: 1, "state": {"x": Bomb()}}, tmp_path / "last.pt")
    with pytest.raises(ValueError, match="cannot read checkpoint"):
        checkpoint.load_checkpoint(tmp_path / "last.pt")
    assert not (tmp_path / "exploded").exists()


def test_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match=r"cannot write .*last\.pt: Not a directory; free some space or choose"):
        checkpoint.save_checkpoint(tmp_path / "file" / "last.pt", {"step": 1})


def test_full_disk_keeps_the_old_checkpoint(tmp_path):
    code = """
    import os, resource, torch
    from retrieval_gym.nn.checkpoint import save_checkpoint
    path = os.path.join(folder, "last.pt")
    save_checkpoint(path, {"step": 1})
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
    save_checkpoint(path, {"step": 2, "weights": torch.zeros(100_000)})
    """
    result = run_child(code, tmp_path)
    assert result.returncode == 1
    assert "OSError: [Errno 27] cannot write" in result.stderr.splitlines()[-1] and "last.pt" in result.stderr
    assert checkpoint.load_checkpoint(tmp_path / "last.pt") == {"step": 1}
    assert os.listdir(tmp_path) == ["last.pt"]


def draws():
    return [
        [random.random() for _ in range(5)] + [random.gauss(0, 1)],
        np.random.standard_normal(5).tolist(),
        torch.randn(5).tolist(),
        torch.randperm(7).tolist(),
    ]


def test_global_random_states_come_back(tmp_path):
    random.gauss(0, 1)  # leaves a second normal draw stored in each generator
    np.random.standard_normal()
    checkpoint.save_checkpoint(tmp_path / "last.pt", {"rng": checkpoint.rng_state()})
    expected = draws()
    assert draws() != expected
    checkpoint.set_rng_state(checkpoint.load_checkpoint(tmp_path / "last.pt")["rng"])
    assert draws() == expected


@pytest.mark.parametrize("kind", BIT_GENERATORS, ids=lambda kind: kind.__name__)
def test_generator_states_come_back(tmp_path, kind):
    generator = np.random.Generator(kind(5))
    generator.integers(10, dtype=np.int32)  # leaves half a word stored
    generator.random(3)
    checkpoint.save_checkpoint(tmp_path / "last.pt", {"rng": checkpoint.generator_state(generator)})
    expected = [generator.integers(2**31, dtype=np.int32, size=3).tolist(), generator.standard_normal(4).tolist()]
    other = np.random.Generator(kind(6))
    checkpoint.set_generator_state(other, checkpoint.load_checkpoint(tmp_path / "last.pt")["rng"])
    assert [other.integers(2**31, dtype=np.int32, size=3).tolist(), other.standard_normal(4).tolist()] == expected


def test_generator_of_another_kind():
    state = checkpoint.generator_state(np.random.default_rng(0))
    with pytest.raises(ValueError, match="the state is of a PCG64 and the generator a MT19937"):
        checkpoint.set_generator_state(np.random.Generator(np.random.MT19937(0)), state)


def test_other_number_of_cuda_devices_is_said(capsys):
    state = checkpoint.rng_state()
    state["cuda"] = [*state["cuda"], torch.get_rng_state()]
    checkpoint.set_rng_state(state)
    assert "random states of" in capsys.readouterr().out


def test_config_mismatch_names_every_key(tmp_path):
    saved = {"lr": 0.1, "env": "A", "tags": ["a", "b"], "path": str(tmp_path), "old": 1}
    same = {"lr": 0.1, "env": "A", "tags": ("a", "b"), "path": tmp_path, "old": 1}
    checkpoint.check_config(saved, same)
    current = {**same, "lr": 0.2, "new": None, "env": "B"}
    del current["old"]
    with pytest.raises(ValueError) as error:
        checkpoint.check_config(saved, current, ignore=["env"])
    message = str(error.value)
    assert "lr: 0.1 in the run, 0.2 now" in message
    assert "old: 1 in the run, '(absent)' now" in message
    assert "new: '(absent)' in the run, None now" in message
    assert "env" not in message and "tags" not in message and "give the values of the run" in message
    checkpoint.check_config(saved, current, ignore={"env", "lr", "old", "new"})
