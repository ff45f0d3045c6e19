"""The report page in a real browser: filters, search, pages, sides, curves, and no request."""

import html
import json
import re
import shutil
import subprocess

import pytest

torch = pytest.importorskip("torch")
from test_report import ARABIC, ATTACK, DEV, data, model, page, runs  # noqa: E402, F401 - fixtures

BROWSER = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)

# What a reader does, step by step; each step notes what the page then shows.
DRIVER = r"""
const noted = {};
const wait = (ms) => new Promise((done) => setTimeout(done, ms));
const section = document.querySelector("section.chains"), fields = section.querySelector("form").elements;
const status = () => section.querySelector(".status").textContent;
const articles = () => [...section.querySelectorAll("article.question")];
const pager = section.querySelector(".pager");
const set = (field, value) => {
  field.value = value;
  field.dispatchEvent(new Event("change", { bubbles: true }));
};
const type = async (text) => {
  fields.words.value = text;
  fields.words.dispatchEvent(new Event("input", { bubbles: true }));
  await wait(300);
};
const see = () => ({
  status: status(),
  titles: articles().map((article) => article.querySelector("h3").textContent),
  verdicts: articles().map((article) => [...article.querySelectorAll(".verdict")].map((each) => each.textContent)),
  facts: articles().map((article) => article.querySelector("header .quiet").textContent),
  marks: articles().map((article) => [...article.querySelectorAll(".column")].map((column) =>
    [...column.querySelectorAll("ol .badge")].map((badge) => badge.textContent))),
  missed: articles().map((article) => [...article.querySelectorAll(".column")].map((column) =>
    column.querySelectorAll(".missed li").length)),
  pager: !pager.hidden,
});
async function drive() {
  noted.title = document.title;
  noted.images = document.images.length;
  noted.requests = performance.getEntriesByType("resource").map((entry) => entry.name);
  noted.first = see();
  noted.sides = [fields.left.selectedOptions[0].text, fields.right.selectedOptions[0].text];
  noted.outcomes = [...fields.outcome.options].map((each) => each.text);
  noted.directions = [...new Set([...section.querySelectorAll("[dir]")].map((each) => each.dir))];

  pager.querySelector('[data-turn="1"]').click();
  noted.second = see();
  noted.focused = document.activeElement === section.querySelector(".status");
  set(pager.querySelector("select"), "2");
  noted.third = see();
  noted.atEnd = pager.querySelector('[data-turn="1"]').disabled && !pager.querySelector('[data-turn="-1"]').disabled;
  noted.pages = [...pager.querySelectorAll("option")].map((each) => each.text);

  noted.byOutcome = {};
  for (const name of [...fields.outcome.options].map((each) => each.value)) {
    set(fields.outcome, name);
    noted.byOutcome[name] = see();
  }
  set(fields.outcome, "any");
  set(fields.hops, "2");
  noted.hops = see();
  set(fields.hops, "");
  await type("RIVER 17");
  noted.words = see();
  await type("الدانوب");
  noted.arabic = see();
  await type("no such word");
  noted.nothing = see();
  await type("");
  set(fields.right, "-1");
  noted.alone = see();
  noted.aloneOutcomes = [...fields.outcome.options].map((each) => each.value);
  fields.open.checked = true;
  set(fields.open, "on");
  noted.open = [...section.querySelectorAll("article details")].every((each) => each.open);
  noted.text = [...section.querySelectorAll(".text")].map((each) => each.textContent);

  const curves = document.getElementById("curve-select");
  const seen = () => [...document.querySelectorAll("figure.curve:not([hidden])")].map((each) => each.id);
  noted.curve = seen();
  set(curves, "3");
  noted.otherCurve = seen();
  const slider = document.querySelector("#curve-3 input");
  slider.value = 0;
  slider.dispatchEvent(new Event("input"));
  noted.read = document.querySelector("#curve-3 output").textContent;
  noted.overflow = document.documentElement.scrollWidth - document.documentElement.clientWidth;
  const controls = [...section.querySelectorAll("button, select, input, summary")];
  noted.unreachable = controls.filter((each) => each.tabIndex < 0).length;
  noted.unlabelled = [...section.querySelectorAll("select, input")].filter((each) => !each.labels.length).length;
}
drive().catch((error) => (noted.error = String(error))).then(() => {
  const shown = document.createElement("pre");
  shown.id = "noted";
  shown.textContent = JSON.stringify(noted);
  document.body.replaceChildren(shown);
});
"""


def dump(text, folder, size="1100,900"):
    """Open a page in the browser and return what stands on it in the end."""
    if BROWSER is None:
        pytest.skip("there is no chromium on this machine")
    path = folder / "page.html"
    path.write_text(text, encoding="utf-8")
    words = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder / 'profile'}"]
    words += [f"--window-size={size}", "--virtual-time-budget=20000", "--dump-dom", path.as_uri()]
    return subprocess.run(words, capture_output=True, text=True, timeout=180, check=True).stdout


def driven(text, folder, size="1100,900"):
    """Run the driver on a page, whose policy must be lifted for a script that is not its own."""
    policy = re.compile(r'<meta http-equiv="Content-Security-Policy"[^>]*>')
    assert policy.search(text)
    text = policy.sub("", text).replace("</body>", f"<script>{DRIVER}</script></body>")
    noted = re.search(r'<pre id="noted">(.*?)</pre>', dump(text, folder, size), re.S)
    assert noted is not None
    return json.loads(html.unescape(noted.group(1)))


@pytest.fixture(scope="module")
def noted(page, tmp_path_factory):  # noqa: F811
    return driven(page, tmp_path_factory.mktemp("wide"))


@pytest.fixture(scope="module")
def browsed(model):  # noqa: F811
    return model["environments"][0]["chains"]["questions"]


def found(question, system):
    return len({place for _, _, place in question["picks"][system]} - {0})


def test_nothing_of_the_data_runs_and_nothing_is_requested(noted):
    assert "error" not in noted
    assert noted["title"] == "pqn, seed 1 and infonce, seed 1: retrieval report"
    assert noted["images"] == 0 and noted["requests"] == []
    assert ATTACK in noted["first"]["titles"] and noted["directions"] == ["auto"]


def test_under_its_own_policy_the_page_runs_its_own_script_alone(page, tmp_path):  # noqa: F811
    # The stranger's script is put where the browser would run it, were it not for the policy.
    text = dump(page.replace("</body>", "<script>document.body.id = 'owned'</script></body>"), tmp_path)
    assert f"{DEV} of {DEV} questions; 1 to 20 are shown." in text and 'id="owned"' not in text


def test_pages_of_twenty(noted, browsed):
    titles = [question["text"] for question in browsed]
    assert noted["first"]["titles"] == titles[:20] and noted["first"]["pager"]
    assert noted["first"]["status"] == f"{DEV} of {DEV} questions; 1 to 20 are shown."
    assert noted["second"]["titles"] == titles[20:40] and noted["focused"]
    assert noted["third"]["titles"] == titles[40:] and noted["atEnd"]
    assert noted["pages"] == ["1 of 3", "2 of 3", "3 of 3"]


def test_both_sides_show_their_own_picks(noted, browsed):
    assert noted["sides"] == ["pqn, seed 1", "infonce, seed 1"]
    for question, marks, missed in zip(browsed, noted["first"]["marks"], noted["first"]["missed"], strict=False):
        for system, shown, absent in zip((2, 3), marks, missed, strict=True):
            many = question["golds"] > 1
            wanted = [
                "✗ wrong" if place == 0 else f"✓ gold {place}" if many else "✓ gold"
                for _, _, place in question["picks"][system]
            ]
            assert shown == wanted and absent == question["golds"] - found(question, system)


def test_outcomes(noted, browsed):
    rules = {
        "any": lambda q: True,
        "right complete": lambda q: found(q, 3) == q["golds"],
        "right incomplete": lambda q: found(q, 3) < q["golds"],
        "left complete": lambda q: found(q, 2) == q["golds"],
        "left incomplete": lambda q: found(q, 2) < q["golds"],
        "improved: right finds more gold": lambda q: found(q, 3) > found(q, 2),
        "regressed: right finds less gold": lambda q: found(q, 3) < found(q, 2),
        "equally much gold found": lambda q: found(q, 3) == found(q, 2),
    }
    assert list(noted["byOutcome"]) == list(rules)
    counts = {name: sum(map(rule, browsed)) for name, rule in rules.items()}
    assert noted["outcomes"] == [f"{name} ({count})" for name, count in counts.items()]
    for name, rule in rules.items():
        shown = noted["byOutcome"][name]
        assert shown["titles"] == [question["text"] for question in browsed if rule(question)][:20]
        assert shown["pager"] == (counts[name] > 20)
    assert 0 < counts["left complete"] < DEV  # the filters have something to tell apart


def test_hops_and_words(noted, browsed):
    assert noted["hops"]["status"].startswith(f"{sum(q['hops'] == 2 for q in browsed)} of {DEV} questions")
    assert {facts.partition(" · ")[0] for facts in noted["hops"]["facts"]} == {"2 hops"}
    assert noted["words"]["titles"] == ["Where does river 17 end?"] and not noted["words"]["pager"]
    assert 0 < int(noted["arabic"]["status"].split()[0]) < DEV
    assert noted["nothing"] == {**noted["nothing"], "status": "No question matches: widen the filters.", "titles": []}


def test_one_side_alone_with_whole_passages(noted):
    assert all(len(verdicts) == 1 for verdicts in noted["alone"]["verdicts"])
    assert noted["aloneOutcomes"] == ["any", "complete", "incomplete"]
    assert noted["open"] and ARABIC in noted["text"] and ATTACK in noted["text"]


def test_curves_are_chosen_and_read(noted, model):  # noqa: F811
    assert noted["curve"] == ["curve-0"] and noted["otherCurve"] == ["curve-3"]
    lines = model["curves"][3]["lines"]
    first = min(step for line in lines for step in line["steps"])
    assert noted["read"].startswith(f"{first}: ")
    for line in lines:
        assert f"{model['runs'][line['run']]['label']} " in noted["read"]


def test_keyboard_and_narrow_screens(noted, page, tmp_path):  # noqa: F811
    assert noted["unreachable"] == 0 and noted["unlabelled"] == 0 and noted["overflow"] <= 0
    assert driven(page, tmp_path, "500,900")["overflow"] <= 0
