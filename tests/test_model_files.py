"""Folders of models are whole or not there, whenever writing ends."""

import os
from contextlib import nullcontext

import pytest

pytest.importorskip("torch")

from retrieval_gym.nn import model_files  # noqa: E402


@pytest.mark.parametrize("renames", [0, 1, 2])
def test_an_interruption_leaves_the_old_folder_or_the_new_one(tmp_path, monkeypatch, renames):
    target = tmp_path / "model"
    target.mkdir()
    (target / "weights").write_text("old")
    real, calls = os.rename, []

    def rename(source, destination):
        calls.append(source)
        if len(calls) == renames + 1:
            raise KeyboardInterrupt
        real(source, destination)

    monkeypatch.setattr(model_files.os, "rename", rename)
    with pytest.raises(KeyboardInterrupt) if renames < 2 else nullcontext():
        model_files.replace_folder(target, lambda folder: (folder / "weights").write_text("new"))
    assert (target / "weights").read_text() == ("new" if renames == 2 else "old")
    assert os.listdir(tmp_path) == ["model"]
