"""Invented names: a stem that only one split uses, and a second word that tells the members of a family apart."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import product

from retrieval_gym.datasets.synthetic.draws import Draws

SPLITS = ("train", "dev", "test")
FAMILY = 3  # entities of one type that share a stem: the look-alikes


@dataclass(frozen=True, slots=True)
class NameStyle:
    """How names of one type look: ``pattern`` joins a stem, built from syllables, and a word."""

    pattern: str
    starts: str
    middles: str
    ends: str
    words: tuple[str, ...]


def _given_names() -> tuple[str, ...]:
    starts = "Al Ber Cor Dar El Fen Gar Hel Is Jor Kel Lor Mar Nor Os Per Rol Sel Tar Ul Vor Wil Yor Zan".split()
    ends = "dric mira vin sanne gard lia mund nora bert wen thea rik dora len mas tine".split()
    return tuple(a + b for a, b in product(starts, ends))


STYLES = {
    "person": NameStyle(
        "{word} {stem}",
        "Ab Bran Cald Drum Esk Farn Gost Hark Inger Jasp Kov Lind Mor Nev Ox Prat Quar Rav Sten Trev Uld Vask Wex "
        "Yarl Zim Black Copper Frost Gold Hazel Iron Lark Marsh Night Otter Pepper Rain Silver Swan Tinder Under "
        "Wolf Amber Bram Cinder Dagger Elder Flint Grim Holly Ivory Juniper Kestrel Lavender Maple Nettle Oak "
        "Plum Rook Saffron",
        "a e i o u ar en il or un",
        "berg cott dale feld gill hurst kin low man quist rad son ton vick ward zer mont bridge stone wood shaw "
        "worth stead brook ridge croft thorpe smith wright maker singer heart finger hand foot horn bell lock "
        "rose tree leaf grave house garth kirk lund mark ness pool rider sen skov strom tail thwaite vale wall "
        "wick wing yard",
        _given_names(),
    ),
    "city": NameStyle(
        "{stem} {word}",
        "Ash Bel Crom Dun Elk Fal Glen Hal Ivel Kil Lang Mel Nar Orm Pel Ros Sal Thorn Ul Wyn Bar Cor Don Ever "
        "Fox Grey Hart Inver Kings Lady Milk North Owl Queens Red South Tarn West",
        "a e i o ber den mar ster ver win",
        "bury by combe ford gate ham holm leigh mere more port stead stow worth burgh chester cliff den haven "
        "hithe hurst lade minster mouth ness pool rock sea thorpe tide ton water well wharf",
        tuple(
            "Abbey Bay Bridge Castle Cliffs Corner Cove Crossing Docks Falls Fields Green Harbour Heath Hill Hollow "
            "Island Junction Landing Market Meadows Mills Moor Point Quay Ridge Sands Shore Springs Vale".split()
        ),
    ),
    "country": NameStyle(
        "{word} of {stem}",
        "Ar Bal Cas Dal Er Gal Hes Il Jan Kar Lu Mol Nab Or Pal Qu Ras Sar Tal Ur Van Zal",
        "ba cu da go la mi no ra sto ti va zu",
        "adia onia aland elia imark uria apura istan itania ovia arra ombe uay esh abwe inea",
        tuple(
            "Kingdom Republic Duchy Commonwealth Principality Federation Empire Sultanate Emirate Confederacy Realm "
            "Dominion Protectorate Union Electorate Margravate Khanate Caliphate League Territory".split()
        ),
    ),
    "company": NameStyle(
        "{stem} {word}",
        "Acme Brio Cento Dexo Electro Flu Grav Hydro Ixo Kryo Lumo Magno Nexo Omni Proto Quanta Syn Tri Ultra Vo "
        "Xan Zo Aero Bio Chrono Duro Ferro Geo",
        "ba co di fa lo mi na po ro ta vi",
        "corp dyne flex gen lux max nix plex ric sol tek tron vex form graph line mark matic pact point scope "
        "star sys therm ware wave works zone",
        tuple(
            "Airlines Batteries Brewing Cables Ceramics Chemicals Clocks Engines Foods Furniture Glassworks Insurance "
            "Ironworks Lenses Logistics Motors Optics Papers Pianos Pumps Radios Railways Robotics Shipping Steel "
            "Telegraph Textiles Tools Toys Turbines".split()
        ),
    ),
    "college": NameStyle(
        "{stem} {word}",
        "Ald Bas Chad Dor Eth Fitz God Hart Ilk Ken Lam Mag Nor Os Pem Rad Sel Tyn Wad Win Saint Bishop Abbot Dean",
        "e i o u ber ing ley mon ran ter",
        "bourne brook chester cliffe croft don field grove hall stone thorpe wood bert cuthbert dunstan giles "
        "lawrence mund oswald ric swith wald",
        tuple(
            "Academy College Conservatory University Institute Polytechnic Seminary Lyceum School Observatory "
            "Laboratory Faculty Athenaeum Gymnasium Hospital Library".split()
        ),
    ),
    "film": NameStyle(
        "{word} {stem}",
        "Ami Bele Cami Deli Ela Fio Gio Hele Ila Jule Leo Mari Nico Ofe Paolo Rosa Sere Tea Valo Zeno Bruno Carlo "
        "Dario Enzo",
        "be ca di fe ga li mo na ra su",
        "betta cello della fina gia lina mora nella stella tina vita berto dora frida gina lucia manda nero phina "
        "rita siana tonio vanna zia",
        tuple(
            f"{a} {b}"
            for a, b in product(
                "Goodbye Waiting Dancing Running Dreaming Searching Midnight Hiding".split(),
                "for from near with without beyond".split(),
            )
        ),
    ),
    "novel": NameStyle(
        "The {word} of {stem}",
        "Ae Cy Dae Eo Fae Gwy Hae Io Kae Ly Mae Ny Oe Phae Rhy Sae Thy Vae Wy Xy Dra Gla Mor",
        "la lo ma na ne ra ri sa the va",
        "dor drim lith lune mir noth ras riel thas wyn gon hir lond mar nor phel quen rond sil thil vash zar",
        tuple(
            "Bones Candle Clockmaker Compass Cradle Crown Daughter Forest Garden Ghosts Gravedigger Key Labyrinth "
            "Lantern Letters Locksmith Map Mirror Orchard Pilgrim Prisoner Riddle River Shadow Silence Snow Sparrow "
            "Thief Tower Widow Winter Wolf".split()
        ),
    ),
    "orchestra": NameStyle(
        "{stem} {word}",
        "Ada Bor Canta Dolo Eufo Fanta Glori Harmo Lira Melo Nota Orfe Piani Rondo Sona Tempo Viva Alle",
        "ci du fi lo mi no ri so ti",
        "bel dei fon lan mus nel rex tas vox gro cor dia gala lux nova pera sta via",
        tuple(
            "Orchestra Choir Quartet Philharmonic Ensemble Sinfonia Band Trio Quintet Singers Consort Players "
            "Symphony Chorale Octet Strings".split()
        ),
    ),
    "museum": NameStyle(
        "{stem} {word}",
        "Bac Chas Dres Fres Gal Hof Jas Kras Lis Mus Pras Ros Sch Tas Vos Wes Zwin Kron Ober",
        "a e i o au ei ie",
        "bach berger dorf hagen heim hoven kamp laar meyer ninger stein weil brunn furt gart haus lingen walde",
        tuple(
            "Museum Gallery Collection Archive Planetarium Aquarium Arboretum Palace Pavilion Rotunda Mausoleum "
            "Lighthouse Theatre Cathedral Windmill Greenhouse".split()
        ),
    ),
    "festival": NameStyle(
        "{stem} {word}",
        "Aki Chi Haru Isu Kiri Mika Nobu Oka Ryo Saku Tomo Umi Wata Yori Zuki Fuji Hana Yuki",
        "da ga ha ka ma na ra sa ta ya",
        "kawa moto naga saki shima sono taka tori yama zaki gawa hara kuni mura nishi oka sawa uchi",
        tuple(
            "Festival Carnival Biennale Regatta Marathon Fair Parade Derby Tournament Pageant Rally Exhibition "
            "Championship Jubilee Congress Auction".split()
        ),
    ),
    "expedition": NameStyle(
        "{word} {stem}",
        "Atl Bor Cass Dra Eri Fro Gry Hydr Ica Jov Kra Lyr Myr Nyx Ori Pers Sir Tit Vul",
        "a e i o u an er in",
        "abos acles adeus adon akles amas anax ophon oros otes othus oxis andra antia eia eon ion ippe",
        tuple(
            "Expedition Voyage Mission Operation Crusade Caravan Traverse Survey Ascent Convoy Raid Blockade "
            "Siege Mutiny Rescue Patrol".split()
        ),
    ),
}


@cache
def stems(kind: str) -> tuple[str, ...]:
    """Return every stem of this type of entity, each once: the short ones first, then those with a middle syllable."""
    style = STYLES[kind]
    starts, middles, ends = style.starts.split(), style.middles.split(), style.ends.split()
    short = map("".join, product(starts, ends))
    return tuple(dict.fromkeys([*short, *map("".join, product(starts, middles, ends))]))


def capacity(kind: str) -> int:
    """Return how many names of this type one split has."""
    return len(stems(kind)) // len(SPLITS) * len(STYLES[kind].words)


def draw_names(kind: str, count: int, split: str, draws: Draws) -> list[tuple[str, str]]:
    """Draw distinct names of one type.

    A stem belongs to one split (its position modulo 3), so worlds of different splits share no name whatever their
    seeds. Stems are used in families of ``FAMILY``, larger only when there are too few of them; small worlds use short
    stems alone.

    Returns:
        ``count`` pairs of name and stem, in random order.

    Raises:
        ValueError: when the split has fewer than ``count`` names of this type.
    """
    style = STYLES[kind]
    if count > capacity(kind):
        raise ValueError(f"a world has at most {capacity(kind)} names of type {kind!r}, not {count}: make it smaller")
    short = len(style.starts.split()) * len(style.ends.split()) // len(SPLITS)
    families = -(-count // FAMILY)
    available = short if families <= short else len(stems(kind)) // len(SPLITS)
    families = min(available, families)
    base, extra = divmod(count, families)
    names = []
    for i, number in enumerate(draws.sample_below(available, families)):
        stem = stems(kind)[number * len(SPLITS) + SPLITS.index(split)]
        for word in draws.sample(style.words, base + (i < extra)):
            names.append((style.pattern.format(stem=stem, word=word), stem))
    return draws.shuffled(names)
