"""``retrieval_gym report``: one self-contained HTML page about finished runs."""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from pathlib import Path

from retrieval_gym.commands.common import LARGEST_SEED, check_number
from retrieval_gym.commands.folders import check_run
from retrieval_gym.commands.retrievers import BATCH_SIZE, SEED, check_outputs
from retrieval_gym.files import write_text
from retrieval_gym.report.data import CHAINS, collect
from retrieval_gym.report.page import check_installed, render
from retrieval_gym.report.runs import READ


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add the subcommand and its arguments."""
    parser = subparsers.add_parser(
        "report",
        help="make one HTML page about finished runs",
        description="Play finished runs and the encoders that they started from, and write settings, learning curves, "
        "metrics, state mismatch, cost and every chain to one HTML page that loads nothing.",
    )
    add = parser.add_argument
    add("runs", nargs="+", metavar="RUN", help="folder of a finished run of any agent; two stand side by side")
    add("--out", default="report.html", metavar="FILE.html", help="the page (default: report.html)")
    add("--split", default="dev", choices=("train", "dev", "test"), help="what is asked (default: dev)")
    add("--limit", type=int, help="ask a random sample of this many questions of each environment")
    add("--seed", type=int, default=SEED, help="of the samples (default: 0)")
    add(
        "--chains",
        type=int,
        default=CHAINS,
        help=f"questions of each environment that can be browsed, a random sample of those asked (default: {CHAINS}); "
        "fewer where their texts would make the page too large",
    )
    add("--no-untrained", action="store_true", help="leave out the encoders that the runs started from")
    add("--batch-size", type=int, default=BATCH_SIZE, help=f"questions searched at once (default: {BATCH_SIZE})")
    add("--device", default="auto", help="auto, cpu, cuda or mps (default: auto)")
    add("--cache-dir", metavar="DIR", help="where corpus embeddings are kept (default: nowhere)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Collect, lay out and write; return the exit status."""
    _check(args)
    model = collect(
        args.runs,
        split=args.split,
        limit=args.limit,
        seed=args.seed,
        chains=args.chains,
        batch_size=args.batch_size,
        device=args.device,
        cache_dir=args.cache_dir,
        untrained=not args.no_untrained,
    )
    page = render(model, command=_command(args), made=time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()))
    write_text(args.out, page)
    for label, specs in model["left_out"].items():
        print(f"left out, since not every run reports on it: {', '.join(specs)} ({label})", file=sys.stderr)
    print(f"{args.out}: {len(page.encode()) / 2**20:.1f} MB")
    return 0


def _check(args: argparse.Namespace) -> None:
    """Refuse, before any work, what could not be done."""
    check_installed()
    check_number("--seed", args.seed, LARGEST_SEED, 0)
    for folder in args.runs:
        check_run(folder)
    check_outputs({"--out": args.out}, [str(Path(folder) / name) for folder in args.runs for name in READ])


def _command(args: argparse.Namespace) -> str:
    """Return the command line that makes this page, defaults left out."""
    words = ["retrieval_gym", "report", *args.runs, "--out", args.out, "--split", args.split]
    for flag, value, default in (
        ("--limit", args.limit, None),
        ("--seed", args.seed, SEED),
        ("--chains", args.chains, CHAINS),
        ("--batch-size", args.batch_size, BATCH_SIZE),
        ("--device", args.device, "auto"),
        ("--cache-dir", args.cache_dir, None),
    ):
        words += [flag, str(value)] if value != default else []
    return shlex.join(words + ["--no-untrained"] * args.no_untrained)
