"""``retrieval_gym play``: a person, or a simple agent, picks passages in the terminal."""

from __future__ import annotations

import argparse
import sys
from typing import Any

import gymnasium as gym
import numpy as np

from retrieval_gym.commands.common import LARGEST_SEED, check_env_id, check_number, parse_env_kwargs
from retrieval_gym.datasets import RetrievalDataset
from retrieval_gym.envs import ChainRetrievalEnv
from retrieval_gym.registration import ENVIRONMENTS
from retrieval_gym.rendering import snippet

AGENTS = ("random", "bm25", "oracle")
READ = 1_000  # characters of a candidate: a person picks by what it says
NUM_HITS = 10


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add the subcommand ``play``."""
    parser = subparsers.add_parser("play", help="pick passages yourself, or watch an agent", description=__doc__)
    parser.add_argument("id", help="environment id, such as ChainRetrieval-Synthetic-v0")
    parser.add_argument("--split", default="train", help="train, dev or test (default: train)")
    parser.add_argument("--question", type=int, help="index of the question (default: drawn at random)")
    parser.add_argument("--agent", choices=AGENTS, help="who plays (default: you)")
    parser.add_argument("--seed", type=int, help="seed of the questions drawn and of the random agent")
    parser.add_argument("--episodes", type=int, default=1, help="number of episodes (default: 1)")
    parser.add_argument(
        "--env-kwargs", nargs="*", default=[], metavar="KEY=VALUE", help="environment arguments, such as max_steps=3"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Play the episodes; return 0, also when the player leaves early."""
    if args.episodes < 1:
        raise ValueError(f"--episodes must be at least 1, got {args.episodes}")
    check_number("--seed", args.seed, LARGEST_SEED, 0)
    if args.agent is None and sys.stdin is None:
        raise ValueError(f"standard input is closed, so you cannot play: add --agent {AGENTS[0]}, say")
    env_id, kwargs = check_env_id(args.id), parse_env_kwargs(args.env_kwargs)
    if "dataset" not in {**ENVIRONMENTS[env_id], **kwargs}:
        raise ValueError(f"{env_id} needs a dataset: add --env-kwargs dataset=synthetic, say")
    fixed = sorted({"split", "render_mode"} & kwargs.keys())
    if fixed:
        raise ValueError(f"--env-kwargs cannot set {fixed[0]!r}: play prints the episode, and --split has its own flag")
    env = gym.make(env_id, split=args.split, render_mode="human", **kwargs)
    game = env.unwrapped
    assert isinstance(game, ChainRetrievalEnv)
    check_number("--question", args.question, len(game.dataset) - 1, 0)
    player = _Person(game) if args.agent is None else _Agent(game, args.agent, args.seed or 0)
    options = None if args.question is None else {"question": args.question}
    returns: list[float] = []
    for episode in range(args.episodes):
        if episode:
            print()
        env.reset(seed=args.seed if episode == 0 else None, options=options)
        total = _play_episode(env, player)
        if total is None:
            print("Goodbye.")
            break
        returns.append(total)
        print(f"Return: {total:g}")
    if len(returns) > 1:
        print(f"\nMean return of {len(returns)} episodes: {np.mean(returns):.3f}")
    env.close()
    return 0


def _play_episode(env: gym.Env, player: _Person | _Agent) -> float | None:
    """Return the return of one episode, or None when the player leaves."""
    total, ended = 0.0, False
    player.begin()
    while not ended:
        action = player.act()
        if action is None:
            return None
        _, reward, ended, _, _ = env.step(np.int64(action))
        total += float(reward)
    return total


class _Agent:
    """Picks what a retriever ranks first."""

    def __init__(self, game: ChainRetrievalEnv, name: str, seed: int) -> None:
        from retrieval_gym.retrieval import make_retriever

        self._game = game
        self._retriever = make_retriever(name, game.dataset, seed=seed)

    def begin(self) -> None:
        """Nothing to prepare: a retriever has no memory."""

    def act(self) -> int | None:
        """Return the best action; with nothing left to pick, one that is invalid."""
        states = self._game.states
        best = int(self._retriever.search(states, 1)[0][0, 0])
        if best < 0:
            return 0
        return best if states.pool is None else int(np.flatnonzero(states.pool[0] == best)[0])


class _Person:
    """Asks for a number at the terminal; over a whole corpus also for words to search."""

    def __init__(self, game: ChainRetrievalEnv) -> None:
        self._game = game
        self._search: _WordSearch | None = None

    def begin(self) -> None:
        """List the candidates, or say how to search."""
        pool = self._game.states.pool
        if pool is None:
            print(f"The corpus has {len(self._game.dataset.corpus)} passages: search by words, then pick by number.")
            return
        for number, passage in enumerate(pool[0][pool[0] >= 0].tolist()):
            print(f"  [{number}] {snippet(self._game.dataset, passage, READ)}")

    def act(self) -> int | None:
        """Return the action typed, or None to leave; ask again until there is one."""
        pool = self._game.states.pool
        size = len(self._game.dataset.corpus) if pool is None else int((pool >= 0).sum())
        ask = f"Pick 0-{size - 1} (q quits): " if pool is not None else "Words or a passage number (q quits): "
        while True:
            try:
                typed = input(ask).strip()
            except EOFError:
                print()
                return None
            if typed.lower() in {"q", "quit"}:
                return None
            if typed.isascii() and typed.isdigit():
                digits = typed.lstrip("0") or "0"
                if len(digits) <= len(str(size)) and int(digits) < size:  # int refuses thousands of digits
                    return int(digits)
                print(f"There is no passage {typed:.20}: the last one is {size - 1}.")
            elif pool is None and typed:
                self._print_hits(typed)
            else:
                print("Type the number of a passage, or q to leave.")

    def _print_hits(self, words: str) -> None:
        if self._search is None:
            self._search = _WordSearch(self._game.dataset)
        hits = self._search.hits(words)
        for passage in hits:
            print(f"  [{passage}] {snippet(self._game.dataset, passage, READ)}")
        if not hits:
            print("No passage holds any of these words.")


class _WordSearch:
    """BM25 over a corpus, for queries typed by a person."""

    def __init__(self, dataset: RetrievalDataset) -> None:
        try:
            import bm25s
        except ImportError as error:
            raise ValueError("searching by words needs bm25s: pip install 'retrieval-gym[bm25]'") from error
        self._bm25s: Any = bm25s
        self._size = len(dataset.corpus)
        tokens = bm25s.tokenize(dataset.corpus.texts(range(self._size)), show_progress=False)
        self._index = bm25s.BM25()
        self._index.index(tokens, show_progress=False)

    def hits(self, words: str) -> list[int]:
        """Return the ids of at most ten passages that hold any of the words, best first."""
        query = self._bm25s.tokenize([words], return_ids=False, show_progress=False)
        ids, scores = self._index.retrieve(query, k=min(NUM_HITS, self._size), show_progress=False)
        return ids[0][scores[0] > 0].tolist()
