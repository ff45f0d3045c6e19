"""The needles of RULER's needle-in-a-haystack tasks: keys, values, sentences and questions."""

from __future__ import annotations

from collections.abc import Callable
from uuid import UUID

from retrieval_gym.datasets.synthetic.draws import Draws

KINDS = ("words", "numbers", "uuids")
ROLES = ("train", "dev", "test", "haystack")  # no two of them share a key that is a word or a number
NOISE = (
    "The grass is green.",
    "The sky is blue.",
    "The sun is yellow.",
    "Here we go.",
    "There and back again.",
)

# 100 x 100 pairs.
_ADJECTIVES = (
    "able ample amber ancient bold brave brief bright brisk broad bronze busy calm careful charming cheerful chilly "
    "civil clean clever coastal copper cosy crimson crisp curious dainty daring deep distant dusty eager early earnest "
    "eastern easy elegant faithful famous fancy fertile festive fierce fine fluffy formal fragile frank fresh gentle "
    "giant glad golden graceful grand grateful hardy hidden hollow honest humble idle jolly keen kind lively lofty "
    "loyal lucky lunar mellow merry mighty misty modest noble northern patient polite proud quick quiet rapid rare "
    "rustic scarlet serene silver simple sleepy solemn steady sunny tender tidy tiny vivid wise"
).split()
_NOUNS = (
    "acorn anchor apron arrow badge bakery barrel basket beacon bell bench blanket bottle bridge bucket button cabin "
    "cable camera candle canoe canyon carpet castle cellar chapel cherry chimney circle cliff clock cloud comet "
    "compass cottage cradle crown curtain desert diary drum eagle ember falcon feather fence ferry fiddle forest "
    "fountain gallery garland glacier glove guitar hammer harbor harvest helmet island jacket kettle ladder lagoon "
    "lantern ledger lemon lobster locket magnet mantle marble market meadow mirror mitten needle oyster paddle parcel "
    "pebble pepper piano pillow planet pocket quarry ribbon river saddle sailor satchel shelter spindle temple thimble "
    "tunnel valley violin walnut"
).split()


def draw_key(kind: str, role: str, draws: Draws) -> str:
    """Draw a key of one of ``KINDS`` for one of ``ROLES``."""
    share, shares = ROLES.index(role), len(ROLES)
    if kind == "words":
        return _pair(share + shares * draws.below(len(_ADJECTIVES) * len(_NOUNS) // shares))
    if kind == "numbers":
        return str(1_000_000 + share + shares * draws.below(9_000_000 // shares))
    return _uuid(draws)


def draw_value(kind: str, draws: Draws) -> str:
    """Draw a value of one of ``KINDS``: a pair of words, a number of seven digits, or a UUID."""
    if kind == "words":
        return _pair(draws.below(len(_ADJECTIVES) * len(_NOUNS)))
    return str(1_000_000 + draws.below(9_000_000)) if kind == "numbers" else _uuid(draws)


def draw_distinct(draw: Callable[[], str], count: int) -> list[str]:
    """Draw until there are ``count`` different strings, in the order of their first draw."""
    drawn: dict[str, None] = {}
    while len(drawn) < count:
        drawn[draw()] = None
    return list(drawn)


def needle(key: str, value: str, kind: str) -> str:
    """Return the sentence that tells a key's value, whose kind is one of ``KINDS``."""
    return f"One of the special magic {kind} for {key} is: {value}."


def ask(keys: list[str], kind: str, plural: bool) -> str:
    """Return the question for the values of these keys; ``plural`` where there are several."""
    listed = keys[0] if len(keys) == 1 else f"{', '.join(keys[:-1])}, and {keys[-1]}"
    what = f"What are all the special magic {kind}" if plural else f"What is the special magic {kind[:-1]}"
    return f"{what} for {listed} mentioned in the provided text?"


def _pair(index: int) -> str:
    adjective, noun = divmod(index, len(_NOUNS))
    return f"{_ADJECTIVES[adjective]}-{_NOUNS[noun]}"


def _uuid(draws: Draws) -> str:
    bits = 0
    for _ in range(4):
        bits = bits << 32 | draws.below(2**32)
    return str(UUID(int=bits, version=4))
