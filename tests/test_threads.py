"""The commands and the agents set how threads wait before torch is loaded, and leave a choice of the user alone."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROBE = """
import os, runpy, sys
class Probe:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            print("policy", os.environ.get("OMP_WAIT_POLICY"))
            os._exit(0)
sys.meta_path.insert(0, Probe())
sys.argv = [{script!r}, *{arguments!r}]
runpy.run_path({script!r}, run_name="__main__")
"""


@pytest.mark.parametrize("name", ["agents/pqn.py", "agents/pao.py", "agents/infonce.py", "retrieval_gym/cli.py"])
@pytest.mark.parametrize("given", [None, "ACTIVE"])
def test_threads_sleep_before_torch_is_loaded(name, given):
    pytest.importorskip("torch")
    arguments = ["evaluate", "--env", "ChainRetrieval-Synthetic-v0", "--retriever", "dense", "--limit", "1"]
    program = PROBE.format(script=str(ROOT / name), arguments=arguments if "cli" in name else [])
    environment = {key: value for key, value in os.environ.items() if key != "OMP_WAIT_POLICY"}
    environment |= {"OMP_WAIT_POLICY": given} if given else {}
    run = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=120)
    assert run.stdout.splitlines()[-1] == f"policy {given or 'PASSIVE'}", run.stderr
