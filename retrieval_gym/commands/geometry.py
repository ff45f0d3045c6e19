"""``retrieval_gym geometry``: whether training kept the shape of the query embeddings."""

from __future__ import annotations

import argparse
import json

from retrieval_gym.commands.common import MOST_RANKS, check_number
from retrieval_gym.commands.retrievers import (
    add_question_arguments,
    add_retriever_arguments,
    check_outputs,
    check_retriever_arguments,
    input_paths,
    load_questions,
    named_retriever,
)
from retrieval_gym.datasets import RetrievalDataset
from retrieval_gym.evaluation import sample_questions
from retrieval_gym.files import write_text
from retrieval_gym.geometry import (
    CLUSTERS,
    NEIGHBOURS,
    PROJECTIONS,
    Classes,
    embed_questions,
    gold_classes,
    kmeans_classes,
    project,
)
from retrieval_gym.geometry_report import GeometryReport
from retrieval_gym.plots import check_picture, geometry_figure, save_figure
from retrieval_gym.ranking import Ids

SMALLEST_MEAN = 5  # questions a class: fewer say little about where a class lies
WITHOUT_EMBEDDINGS = ("random", "bm25", "oracle")


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add the subcommand and its arguments."""
    parser = subparsers.add_parser(
        "geometry",
        help="compare the query embeddings of encoders with those of a reference",
        description="Measure classes, drift and neighbourhoods of the embeddings that retrievers give the questions "
        "alone. The first retriever is the reference.",
    )
    add_question_arguments(parser)
    add_retriever_arguments(parser, required=True)
    add = parser.add_argument
    add(
        "--classes",
        choices=("auto", "gold", "kmeans"),
        default="auto",
        help="gold: questions that share a gold passage; kmeans: clusters of the reference embeddings; auto (default): "
        f"gold where half of the questions or more are in its classes, {SMALLEST_MEAN} each on average, else kmeans",
    )
    add("--clusters", type=int, help=f"kmeans: how many (default: {CLUSTERS})")
    add(
        "--neighbours",
        type=int,
        default=NEIGHBOURS,
        help=f"how many passages and questions are a neighbourhood (default: {NEIGHBOURS})",
    )
    add(
        "--names", nargs="+", metavar="NAME", help="what the retrievers are called in table, JSON and picture, one each"
    )
    add("--out", metavar="FILE.json", help="write every figure and assumption as JSON")
    add("--picture", metavar="FILE.png|svg", help="draw the embeddings of each retriever, coloured by class")
    add(
        "--projection",
        choices=PROJECTIONS,
        help="of the picture: pca, the reference's principal components (default); tsne, fitted on all together",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Embed, write and print; return the exit status."""
    _check(args)
    dataset, steps = load_questions(args)
    questions = sample_questions(dataset, args.limit, args.seed)
    classes = _classes_by_gold(args, dataset, questions)
    clusters = CLUSTERS if args.clusters is None else args.clusters
    if classes is None and clusters > len(questions):
        raise ValueError(f"{clusters} clusters of {len(questions)} questions: give --clusters, or ask more")
    clouds = tuple(  # one retriever at a time is held in memory
        embed_questions(
            shown,
            named_retriever(name, args, dataset),
            dataset,
            questions,
            steps=steps,
            k=args.neighbours,
            batch_size=args.batch_size,
        )
        for name, shown in zip(args.retriever, args.names or args.retriever, strict=True)
    )
    if classes is None:
        classes = kmeans_classes(clouds[0].vectors, clusters, args.seed)
    report = GeometryReport(
        dataset, questions, clouds, classes, sample_seed=args.seed if len(questions) < len(dataset) else None
    )
    try:  # files first, which a closed stdout must not cost; the table also where a file cannot be written
        _write(args, report)
    finally:
        print(f"environment: {args.env}")
        print(report.table())
    return 0


def _write(args: argparse.Namespace, report: GeometryReport) -> None:
    if args.out is not None:
        text = json.dumps({"environment": args.env} | report.to_json(), indent=2, allow_nan=False, ensure_ascii=False)
        write_text(args.out, text + "\n")
    if args.picture is not None:
        method = args.projection or "pca"
        save_figure(geometry_figure(report, project(report.clouds, method, args.seed), method), args.picture)


def _classes_by_gold(args: argparse.Namespace, dataset: RetrievalDataset, questions: Ids) -> Classes | None:
    """Return the classes by gold, or None where k-means has to form them."""
    if args.classes == "kmeans":
        return None
    classes = gold_classes(dataset, questions)
    size, number = int((classes.labels >= 0).sum()), len(classes.names)
    if args.classes == "gold" and number < 2:
        raise ValueError(f"--classes gold: {classes.rule}; they must be at least 2, use --classes kmeans")
    enough = number >= 2 and 2 * size >= len(questions) and size >= SMALLEST_MEAN * number
    return classes if enough or args.classes == "gold" else None


def _check(args: argparse.Namespace) -> None:
    """Refuse, before any work, what could not be done and options that would do nothing."""
    check_retriever_arguments(args)
    for name in args.retriever:
        if name in WITHOUT_EMBEDDINGS:
            raise ValueError(f"retriever {name} has no query embeddings: name dense, dense:ENCODER or run:FOLDER")
    names = args.names or args.retriever
    if len(names) != len(args.retriever) or len(set(names)) < len(names) or not all(name.strip() for name in names):
        raise ValueError(f"--names {' '.join(names)}: give each of the {len(args.retriever)} retrievers its own name")
    if args.steps is not None:
        raise ValueError(f"--steps {args.steps} would do nothing: the embeddings are those of the questions alone")
    check_number("--neighbours", args.neighbours, MOST_RANKS)
    if args.clusters is not None and args.classes == "gold":
        raise ValueError(f"--clusters {args.clusters} would do nothing: --classes gold forms as many as there are")
    if args.projection is not None and args.picture is None:
        raise ValueError(f"--projection {args.projection} would do nothing: it is that of --picture")
    check_outputs({"--out": args.out, "--picture": args.picture}, input_paths(args))
    if args.picture is not None:
        check_picture(args.picture)
