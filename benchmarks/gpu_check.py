"""Does a GPU give the CPU's results, and how fast is it?

    python benchmarks/gpu_check.py --output gpu_check.json

Every part runs on the CPU and on the device and must agree within the tolerance printed beside it; then speed is
measured, as passages, queries and transitions a second, and as a share of what a large matrix product reaches on the
same device. The script downloads nothing and takes a few minutes. Exit status: 0 when every check passed, 1 when one
failed, 2 when the device is not there. ``--device cpu --quick`` runs all of it on the CPU, at small sizes.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from retrieval_gym import load_dataset
from retrieval_gym.nn.encoder import TextEncoder
from retrieval_gym.nn.index import ExactIndex
from retrieval_gym.nn.rotary import relative_positions, rotate
from retrieval_gym.nn.run import resolve_device, seed_everything
from retrieval_gym.nn.scoring import available, lambda_returns, soft_value

PQN = Path(__file__).resolve().parents[1] / "agents" / "pqn.py"


@dataclass(frozen=True)
class Sizes:
    """How much each part does."""

    matrix: int
    compared_texts: int
    timed_texts: int
    token_budgets: tuple[int, ...]
    corpus: int
    queries: int
    transitions: int
    eval_questions: int


FULL = Sizes(8192, 512, 50_000, (8_192, 65_536), 1_000_000, 1_024, 9_600, 200)
QUICK = Sizes(512, 32, 64, (2_048,), 5_000, 16, 96, 8)


class Report:
    """Collects figures and checks, and prints each as it comes."""

    def __init__(self) -> None:
        self.figures: dict[str, Any] = {}
        self.checks: list[dict[str, Any]] = []

    def figure(self, name: str, value: float | str, unit: str = "") -> None:
        """Record one measurement."""
        self.figures[name] = {"value": value, "unit": unit} if unit else value
        print(f"{name:48} {value:,.6g} {unit}" if isinstance(value, (int, float)) else f"{name:48} {value}", flush=True)

    def check(self, name: str, error: float, tolerance: float) -> None:
        """Record one comparison with the CPU: ``error`` must not exceed ``tolerance``; NaN fails."""
        passed = bool(error <= tolerance)
        self.checks.append({"name": name, "error": float(error), "tolerance": tolerance, "passed": passed})
        print(f"{name:48} error {error:.3g} (at most {tolerance:g})  {'ok' if passed else 'FAILED'}", flush=True)


def largest_difference(ours: Tensor, reference: Tensor) -> float:
    """Largest absolute difference of two tensors after moving the first to the CPU."""
    return (ours.double().cpu() - reference.double()).abs().max().item()


def seconds(call: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Shortest of some runs, after one that warms up; waits for the device before and after each."""
    wait = torch.cuda.synchronize if device.type == "cuda" else (lambda: None)
    call()
    times = []
    for _ in range(repeats):
        wait()
        start = time.perf_counter()
        call()
        wait()
        times.append(time.perf_counter() - start)
    return min(times)


def measure_peak(report: Report, device: torch.device, size: int) -> dict[str, float]:
    """FLOP/s of a square matrix product in each precision: what the shares below refer to."""
    peaks = {}
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        matrix = torch.randn(size, size, device=device, dtype=dtype)
        peaks[name] = 2 * size**3 / seconds(lambda matrix=matrix: matrix @ matrix, device, 5)
        report.figure(f"matmul {name}, {size} x {size}", peaks[name] / 1e12, "TFLOP/s")
    return peaks


def forward_flops(encoder: TextEncoder, lengths: np.ndarray) -> float:
    """Multiply-adds of one forward pass, two FLOP each, over real tokens: padding counts as waste."""
    embeddings = sum(p.numel() for p in encoder.model.get_input_embeddings().parameters())
    weights = sum(p.numel() for p in encoder.model.parameters()) - embeddings
    config = encoder.model.config
    attention = 4 * config.num_hidden_layers * config.hidden_size * (lengths.astype(np.float64) ** 2).sum()
    return 2 * weights * float(lengths.sum()) + float(attention)


def check_encoder(report: Report, device: torch.device, sizes: Sizes, peaks: dict[str, float]) -> None:
    """Embeddings in fp32 and bf16 against the CPU's in fp32; passages a second."""
    corpus = load_dataset("synthetic").corpus
    passages = corpus.texts(range(len(corpus)))
    texts = [f"{i} {passages[i % len(passages)]}" for i in range(sizes.timed_texts)]
    compared = texts[: sizes.compared_texts]
    reference = TextEncoder.load(device="cpu").encode(compared, "passage")
    encoder = TextEncoder.load(device=device)
    start = time.perf_counter()
    sequences = [encoder.sequence([tokens], "passage") for tokens in encoder.tokenize(texts, opens="passage")]
    report.figure("tokenise", len(texts) / (time.perf_counter() - start), "passages/s")
    lengths = np.fromiter(map(len, sequences), np.int64, len(sequences))
    report.figure("mean length", float(lengths.mean()), "tokens")
    flops = forward_flops(encoder, lengths)
    for name, autocast, tolerance in (("fp32", False, 1e-5), ("bf16", True, 2e-2)):
        encoder.autocast = autocast
        vectors = encoder.encode(compared, "passage")
        report.check(f"embeddings {name}", largest_difference(vectors, reference), tolerance)
        cosine = torch.nn.functional.cosine_similarity(vectors.double().cpu(), reference.double())
        report.check(f"embeddings {name}, 1 - cosine", 1 - cosine.min().item(), tolerance / 10)
        for budget in sizes.token_budgets:
            with torch.inference_mode():
                spent = seconds(lambda budget=budget: encoder.embed(sequences, token_budget=budget), device, 2)
            report.figure(f"embed {name}, {budget} tokens a batch", len(texts) / spent, "passages/s")
            report.figure(f"embed {name}, {budget} tokens a batch, share", flops / spent / peaks[name], "of matmul")
    memory(report, "encoder", device)


def check_search(report: Report, device: torch.device, sizes: Sizes) -> None:
    """Exact search: ids equal to the CPU's, ties included; queries a second.

    Coordinates are multiples of 1/8 below 1, so that inner products are exact in float32 in any order of summation and
    many scores tie: every difference is a fault. The corpus of real length is timed with the same index.
    """
    generator = torch.Generator().manual_seed(0)
    vectors = torch.randint(-7, 8, (sizes.corpus, 384), generator=generator) / 8
    queries = torch.randint(-7, 8, (sizes.queries, 384), generator=generator) / 8
    exclude = torch.randint(-1, sizes.corpus, (sizes.queries, 4), generator=generator).numpy()
    ours = ExactIndex(vectors, device=device)
    found, scores = ours.search(queries, 100, exclude)
    few = min(64, sizes.queries)
    expected, expected_scores = ExactIndex(vectors, device="cpu").search(queries[:few], 100, exclude[:few])
    different = (torch.as_tensor(found[:few]).cpu() != torch.as_tensor(expected)).double().mean().item()
    report.check(f"search ids, {sizes.corpus} passages", different, 0.0)
    scores, expected_scores = torch.as_tensor(scores[:few]), torch.as_tensor(expected_scores)
    report.check("search scores", largest_difference(scores, expected_scores), 0.0)
    on_device = queries.to(device)
    spent = seconds(lambda: ours.search(on_device, 100, exclude), device, 3)
    report.figure(f"search, {sizes.corpus} passages, top 100", sizes.queries / spent, "queries/s")
    memory(report, "search", device)


def check_functions(report: Report, device: torch.device) -> None:
    """Rotary positions, soft values and lambda-returns against the CPU."""
    generator = torch.Generator().manual_seed(0)
    vectors = torch.randn(8, 512, 384, generator=generator)
    length = torch.randint(100, 513, (8,), generator=generator)
    picked = torch.stack([torch.randperm(100, generator=generator)[:4] for _ in range(8)])
    picked[::2, 2:] = -1
    positions = relative_positions(picked, length, 512)
    ours = relative_positions(picked.to(device), length.to(device), 512)
    report.check("relative positions", largest_difference(ours, positions), 1e-5)
    for halves in (False, True):
        expected = rotate(vectors, positions, halves=halves)
        rotated = rotate(vectors.to(device), positions.to(device), halves=halves)
        report.check(f"rotation, halves={halves}", largest_difference(rotated, expected), 1e-5)
    q, mask = torch.randn(8, 512, generator=generator), torch.rand(8, 512, generator=generator) < 0.9
    for alpha in (0.005, 0.05, 0.0):
        expected = soft_value(available(q, mask), alpha)
        value = soft_value(available(q.to(device), mask.to(device)), alpha)
        report.check(f"soft value, alpha {alpha:g}", largest_difference(value, expected), 1e-5)
    rewards, dones, values = torch.rand(3, 16, 64, generator=generator).unbind()
    arguments = [rewards, (dones < 0.2).float(), values]
    expected = lambda_returns(*arguments, gamma=0.99, lam=0.5)
    returns = lambda_returns(*(x.to(device) for x in arguments), gamma=0.99, lam=0.5)
    report.check("lambda-returns", largest_difference(returns, expected), 1e-5)


def train(device: str, sizes: Sizes, root: Path, transitions: int) -> Path:
    """Run ``agents/pqn.py`` on generated questions and return its run folder, the only one in ``root``."""
    command = [sys.executable, str(PQN), "--env", "ChainRetrieval-Synthetic-v0", "--preset", "demo", "--seed", "1"]
    command += ["--device", device, "--runs", str(root), "--total-timesteps", str(transitions)]
    command += ["--eval-questions", str(sizes.eval_questions)]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{result.stderr[-2000:]}")
    (run,) = root.iterdir()
    return run


def untrained_returns(run: Path) -> Tensor:
    """Mean episodic return of the untrained encoder on each reported set."""
    content = json.loads((run / "untrained.json").read_text())
    return torch.tensor([sets["metrics"]["episodic_return"]["all"]["mean"] for sets in content.values()])


def check_training(report: Report, device: torch.device, sizes: Sizes) -> None:
    """The PQN agent end to end: the untrained score against the CPU's, and transitions a second."""
    with tempfile.TemporaryDirectory() as folder:
        ours = train(device.type, sizes, Path(folder) / "ours", sizes.transitions)
        reference = train("cpu", sizes, Path(folder) / "reference", QUICK.transitions)
        # Near-ties may fall the other way in another precision; one question in a hundred may.
        error = largest_difference(untrained_returns(ours), untrained_returns(reference))
        report.check("untrained score of agents/pqn.py", error, 0.01)
        lines = [json.loads(line) for line in (ours / "metrics.jsonl").read_text().splitlines()]
    report.figure("agents/pqn.py --preset demo", lines[-1]["charts/SPS"], "transitions/s")


def memory(report: Report, part: str, device: torch.device) -> None:
    """Record the most memory held since the last call: the device's, or on the CPU the process's since its start."""
    if device.type == "cuda":
        report.figure(f"memory, {part}", torch.cuda.max_memory_allocated() / 2**30, "GiB")
        torch.cuda.reset_peak_memory_stats()
    else:
        import resource  # not on Windows

        report.figure(f"memory up to {part}", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, "GiB")


def main() -> int:
    """Run every part and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="what to check (default: cuda)")
    parser.add_argument("--quick", action="store_true", help="small sizes, for a machine without a GPU")
    parser.add_argument("--output", type=Path, help="write figures and checks to this JSON file")
    args = parser.parse_args()
    try:
        device = resolve_device(args.device)
    except ValueError as error:
        print(f"gpu_check: {error}; --device cpu --quick runs it on the CPU", file=sys.stderr)
        return 2
    sizes, report = (QUICK if args.quick else FULL), Report()
    seed_everything(0)
    name = torch.cuda.get_device_name() if device.type == "cuda" else platform.processor() or platform.machine()
    report.figure("device", name)
    report.figure("torch", torch.__version__)
    report.figure("fp32 matrix products", torch.get_float32_matmul_precision())
    start = time.perf_counter()
    peaks = measure_peak(report, device, sizes.matrix)
    check_functions(report, device)
    check_encoder(report, device, sizes, peaks)
    check_search(report, device, sizes)
    check_training(report, device, sizes)
    report.figure("time of the whole script", time.perf_counter() - start, "s")
    if args.output:
        content = {"figures": report.figures, "checks": report.checks}
        args.output.write_text(json.dumps(content, indent=2, allow_nan=False) + "\n")
    failed = [check["name"] for check in report.checks if not check["passed"]]
    print(
        f"{len(report.checks) - len(failed)} of {len(report.checks)} checks passed"
        + "".join(f"\nfailed: {n}" for n in failed)
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
