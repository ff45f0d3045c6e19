"""What do a corpus and questions of my own look like? Sixty passages about a town that does not exist, in two files.

python examples/own_corpus/make_corpus.py FOLDER

writes corpus.jsonl, questions_train.jsonl (30) and questions_dev.jsonl (10) to FOLDER; the very files lie beside this
script. Each question names one thing and asks for another, two or three passages further on.
"""

import json
import sys
from pathlib import Path

PEOPLE = {  # name: (craft, taught by, something else)
    "Odile Marrow": ("baker", "Hanne Tolliver", "She was born in the mill and sleeps with the window open."),
    "Bastian Creel": ("net maker", "Ruud Ansgar", "He keeps a tame cormorant called Bishop."),
    "Hanne Tolliver": ("pastry cook", "Mabel Quist", "Her plum cake won the county medal three years running."),
    "Ruud Ansgar": ("boat builder", "Piet Lorrimer", "He lost two fingers to a bandsaw and never speaks of it."),
    "Mabel Quist": ("herbalist", "Ysolde Brandt", "She can name every plant on the dunes."),
    "Piet Lorrimer": ("stonemason", "Corvin Haste", "His mark, a small owl, is cut into every lintel he set."),
    "Ysolde Brandt": ("apothecary", "Tamsin Vole", "She writes her receipts in green ink."),
    "Corvin Haste": ("architect", "Edda Marchbank", "He drew his plans on the backs of tide tables."),
    "Tamsin Vole": ("bookbinder", "Edda Marchbank", "She owns the oldest printed map of the estuary."),
    "Edda Marchbank": ("surveyor", "Lorcan Fitch", "She measured the whole coast on foot."),
    "Lorcan Fitch": ("clockmaker", "Wilmot Dray", "He has been late for nothing in forty years."),
    "Wilmot Dray": ("bell founder", "Gerda Pell", "He is deaf in the left ear."),
    "Gerda Pell": ("carpenter", "Piet Lorrimer", "She plays the hurdy-gurdy at funerals."),
    "Sable Onwick": ("glass blower", "Lorcan Fitch", "She came to town with a travelling circus."),
}  # fmt: skip
SHOPS = {  # name: (what it is, owner, street)
    "The Copper Kettle": ("tea room", "Mabel Quist", "Tern Street"),
    "Halfpenny Loaf": ("bakery", "Odile Marrow", "Cooper's Row"),
    "Bishop's Nets": ("chandlery", "Bastian Creel", "Wharf Lane"),
    "The Sugared Plum": ("sweet shop", "Hanne Tolliver", "Tern Street"),
    "Green Ink": ("pharmacy", "Ysolde Brandt", "Saltgate"),
    "The Marbled Page": ("bookshop", "Tamsin Vole", "Lantern Alley"),
    "Second Hand": ("clock and watch shop", "Lorcan Fitch", "Bellmaker's Hill"),
    "Dove and Tail": ("furniture shop", "Gerda Pell", "Cooper's Row"),
    "The Blue Bottle": ("glass shop", "Sable Onwick", "Lantern Alley"),
    "Level and Chain": ("map shop", "Edda Marchbank", "Kelp Walk"),
}
STREETS = {  # name: (what stands at its end, something else)
    "Tern Street": ("the Old Customs House", "Terns nest on its chimneys every May."),
    "Cooper's Row": ("the Malt Tower", "The smell of beer has never left its cobbles."),
    "Wharf Lane": ("the Rope Hall", "It floods twice a year."),
    "Saltgate": ("the Moot House", "Carts of salt once paid their toll here."),
    "Lantern Alley": ("the Glass Chapel", "It is too narrow for a cart."),
    "Bellmaker's Hill": ("the Carillon", "Its steps number one hundred and eight."),
    "Kelp Walk": ("the Tide Observatory", "The town dries its seaweed on the railings."),
    "Ferry Stairs": ("the Quernmouth Lighthouse", "They lead straight down into the water."),
}
LANDMARKS = {  # name: (builder, year, something else)
    "the Old Customs House": ("Corvin Haste", 1784, "A gilded herring turns on its roof."),
    "the Malt Tower": ("Piet Lorrimer", 1811, "Swifts live in its upper windows."),
    "the Rope Hall": ("Gerda Pell", 1802, "At three hundred paces it is the longest room in the county."),
    "the Moot House": ("Corvin Haste", 1769, "Its floor is paved with ship's ballast."),
    "the Glass Chapel": ("Sable Onwick", 1827, "No two of its panes have the same colour."),
    "the Carillon": ("Wilmot Dray", 1798, "It plays a different tune for every tide."),
    "the Tide Observatory": ("Edda Marchbank", 1820, "A brass float in its cellar rises and falls with the sea."),
    "the Quernmouth Lighthouse": ("Piet Lorrimer", 1775, "Its lamp burned whale oil until the whales stayed away."),
    "the Almshouse": ("Gerda Pell", 1815, "Each of its nine doors is painted by whoever lives behind it."),
    "the Reading Room": ("Tamsin Vole", 1833, "Talking is allowed there on Sundays only."),
}
CLUBS = {  # name: (founder, where it meets, day)
    "the Society of Early Risers": ("Odile Marrow", "the Reading Room", "Monday"),
    "the Cormorant Club": ("Bastian Creel", "the Rope Hall", "Friday"),
    "the Dune Walkers": ("Mabel Quist", "the Almshouse", "Saturday"),
    "the Guild of Knots": ("Ruud Ansgar", "the Old Customs House", "Wednesday"),
    "the Lamplighters": ("Sable Onwick", "the Glass Chapel", "Thursday"),
    "the Ringers": ("Wilmot Dray", "the Carillon", "Tuesday"),
    "the Chartists": ("Edda Marchbank", "the Tide Observatory", "Sunday"),
    "the Green Table": ("Ysolde Brandt", "the Moot House", "Thursday"),
}
BOATS = {  # name: (skipper, what she does)
    "Merry Widow": ("Bastian Creel", "fishes for eels off the bar"),
    "Patient Griselda": ("Ruud Ansgar", "tows barges up the estuary"),
    "Lady Tansy": ("Mabel Quist", "carries herbs from the far bank"),
    "Plumb Line": ("Edda Marchbank", "sounds the channel every spring"),
    "Small Hours": ("Odile Marrow", "brings flour from the mills at Ostrey"),
    "Clapper": ("Wilmot Dray", "fetches scrap bronze from the wreckers"),
}
FESTIVALS = {  # name: (club, month)
    "the Blessing of the Nets": ("the Cormorant Club", "March"),
    "the Night of Coloured Light": ("the Lamplighters", "November"),
    "the Great Peal": ("the Ringers", "January"),
    "the Salt Debate": ("the Green Table", "September"),
}


def passages():
    """Return one record a passage, 60 in all."""
    texts = {}
    for name, (craft, teacher, more) in PEOPLE.items():
        texts[name] = f"{name} is a {craft} in Quernmouth who learned the trade from {teacher}. {more}"
    for name, (kind, owner, street) in SHOPS.items():
        texts[name] = f"{name} is a {kind} on {street} in Quernmouth. It belongs to {owner}."
    for name, (end, more) in STREETS.items():
        texts[name] = f"{name} is a street in Quernmouth that ends at {end}. {more}"
    for name, (builder, year, more) in LANDMARKS.items():
        texts[name] = f"{name} was built by {builder} and finished in {year}. {more}"
    for name, (founder, place, day) in CLUBS.items():
        texts[name] = f"{name} were founded by {founder}. They meet every {day} in {place}."
    for name, (skipper, work) in BOATS.items():
        texts[name] = f"The {name} is a boat that {work}. Her skipper is {skipper}."
    for name, (club, month) in FESTIVALS.items():
        texts[name] = f"{name} is held in {month}. It is organised by {club}."
    return [
        {"id": f"p{i:02}", "title": title[0].upper() + title[1:], "text": text[0].upper() + text[1:]}
        for i, (title, text) in enumerate(texts.items())
    ]


def questions():
    """Return (question, names of its passages in chain order, answer), one kind after the other."""
    founded = {founder: club for club, (founder, _, _) in CLUBS.items()}
    kinds = [
        [
            (f"Who taught the owner of {shop}?", [shop, owner], PEOPLE[owner][1])
            for shop, (_, owner, _) in SHOPS.items()
        ],
        [
            (f"What stands at the end of the street on which {shop} is?", [shop, street], STREETS[street][0])
            for shop, (_, _, street) in SHOPS.items()
        ],
        [
            (
                f"In which year was the place finished where the organisers of {festival} meet?",
                [festival, club, CLUBS[club][1]],
                str(LANDMARKS[CLUBS[club][1]][1]),
            )
            for festival, (club, _) in FESTIVALS.items()
        ],
        [
            (f"Where does the club meet that the skipper of the {boat} founded?", [boat, club], CLUBS[club][1])
            for boat, (skipper, _) in BOATS.items()
            for club in [founded[skipper]]
        ],
        [
            (
                f"What is the craft of whoever built the place where {club} meet?",
                [club, place, LANDMARKS[place][0]],
                PEOPLE[LANDMARKS[place][0]][0],
            )
            for club, (_, place, _) in CLUBS.items()
        ],
        [
            (f"Who built what stands at the end of {street}?", [street, end], LANDMARKS[end][0])
            for street, (end, _) in STREETS.items()
        ],
    ]
    longest = max(map(len, kinds))
    return [kind[i] for i in range(longest) for kind in kinds if i < len(kind)][:40]


def main(folder):
    """Write the three files."""
    corpus = passages()
    ids = {record["title"].casefold(): record["id"] for record in corpus}
    asked = [
        {"id": f"q{i:02}", "question": text, "gold_ids": [ids[name.casefold()] for name in chain], "answers": [answer]}
        for i, (text, chain, answer) in enumerate(questions())
    ]
    files = {
        "corpus.jsonl": corpus,
        "questions_train.jsonl": [record for i, record in enumerate(asked) if i % 4 != 3],
        "questions_dev.jsonl": [record for i, record in enumerate(asked) if i % 4 == 3],
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, records in files.items():
        lines = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
        (folder / name).write_text(lines, encoding="utf-8")
        print(f"{folder / name}: {len(records)} records")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python examples/own_corpus/make_corpus.py FOLDER")
    main(Path(sys.argv[1]))
