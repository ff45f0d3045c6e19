"use strict";

const data = JSON.parse(document.getElementById("report-data").textContent);
const PAGE = 20;

/** Make an element. Texts of the data become text nodes, never markup. */
function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

function option(value, text) {
  return element("option", { value }, text);
}

/** Call f once the calls have paused, so that typing stays fluid. */
function paused(f, milliseconds) {
  let timer;
  return () => {
    clearTimeout(timer);
    timer = setTimeout(f, milliseconds);
  };
}

function tone(system) {
  const run = data.systems[system].run;
  return run === null ? "start" : "run" + (run % 5);
}

/* Learning curves: one figure at a time, and a slider that reads values off the lines. */

function startCurves() {
  const select = document.getElementById("curve-select");
  const figures = [...document.querySelectorAll("figure.curve")];
  select.closest(".controls").hidden = false;
  select.addEventListener("change", () => figures.forEach((figure, i) => (figure.hidden = i !== Number(select.value))));
  figures.forEach((figure, i) => startReader(figure, data.curves[i]));
}

function startReader(figure, lines) {
  const label = figure.querySelector(".reader"), slider = label.querySelector("input");
  const area = figure.querySelector(".area"), cursor = figure.querySelector(".cursor");
  const steps = [...new Set(lines.flatMap((line) => line.steps))].sort((a, b) => a - b);
  const end = Math.max(steps[steps.length - 1], 1);
  label.hidden = false;
  slider.max = steps.length - 1;
  slider.value = slider.max;
  const read = () => {
    const step = steps[slider.value];
    const values = lines.map((line) => `${data.runs[line.run]} ${valueAt(line, step)}`).join(", ");
    label.querySelector("output").textContent = `${step.toLocaleString("en")}: ${values}`;
    slider.setAttribute("aria-valuetext", `step ${step}: ${values}`);
    cursor.style.left = `${(100 * step) / end}%`;
  };
  const move = () => {
    read();
    cursor.hidden = false;
  };
  read();
  slider.addEventListener("input", move);
  area.addEventListener("pointermove", (event) => {
    const box = area.getBoundingClientRect();
    slider.value = nearest(steps, ((event.clientX - box.left) / box.width) * end);
    move();
  });
}

function nearest(steps, wanted) {
  let best = 0;
  steps.forEach((step, i) => {
    if (Math.abs(step - wanted) < Math.abs(steps[best] - wanted)) best = i;
  });
  return best;
}

function valueAt(line, step) {
  return step > line.steps[line.steps.length - 1] ? "ended" : String(line.values[nearest(line.steps, step)]);
}

/* Chains: filter, search, page. */

function startBrowser(section) {
  const { steps, passages, questions } = data.environments[section.dataset.environment];
  const form = section.querySelector("form"), fields = form.elements;
  const status = section.querySelector(".status"), list = section.querySelector(".questions");
  const pager = section.querySelector(".pager"), pages = pager.querySelector("select");
  const texts = questions.map((question) => searched(question, passages));
  const found = questions.map((question) => question.picks.map((picks) => goldFound(picks)));
  let shown = [], page = 0;

  const runs = data.systems.flatMap((system, i) => (system.run === null ? [] : [i]));
  const start = data.systems[runs[0]].start;
  fields.left.value = runs.length > 1 || start === null ? runs[0] : start;
  fields.right.value = runs.length > 1 ? runs[1] : start === null ? -1 : runs[0];

  const complete = (i, system) => found[i][system] === questions[i].golds;

  /** The outcomes that can be asked for, each a name and a test of a question. */
  function outcomes() {
    const left = Number(fields.left.value), right = Number(fields.right.value);
    if (right < 0 || left === right)
      return [
        ["any", () => true],
        ["complete", (i) => complete(i, left)],
        ["incomplete", (i) => !complete(i, left)],
      ];
    return [
      ["any", () => true],
      ["right complete", (i) => complete(i, right)],
      ["right incomplete", (i) => !complete(i, right)],
      ["left complete", (i) => complete(i, left)],
      ["left incomplete", (i) => !complete(i, left)],
      ["improved: right finds more gold", (i) => found[i][right] > found[i][left]],
      ["regressed: right finds less gold", (i) => found[i][right] < found[i][left]],
      ["equally much gold found", (i) => found[i][right] === found[i][left]],
    ];
  }

  function listOutcomes() {
    const before = fields.outcome.selectedOptions[0]?.value;
    const options = outcomes().map(([name, test]) =>
      option(name, `${name} (${questions.filter((_, i) => test(i)).length})`));
    fields.outcome.replaceChildren(...options);
    if (options.some((each) => each.value === before)) fields.outcome.value = before;
  }

  function filter() {
    const test = outcomes().find(([name]) => name === fields.outcome.value)[1];
    const words = fields.words.value.toLocaleLowerCase().split(/\s+/).filter(Boolean);
    const hops = fields.hops.value;
    shown = [...questions.keys()].filter((i) =>
      test(i) && (hops === "" || String(questions[i].hops) === hops) && words.every((word) => texts[i].includes(word)));
    page = 0;
    const count = Math.ceil(shown.length / PAGE);
    pages.replaceChildren(...Array.from({ length: count }, (_, i) => option(i, `${i + 1} of ${count}`)));
    draw();
  }

  function draw() {
    const first = page * PAGE, rows = shown.slice(first, first + PAGE);
    status.textContent = shown.length === 0
      ? "No question matches: widen the filters."
      : `${shown.length} of ${questions.length} questions; ${first + 1} to ${first + rows.length} are shown.`;
    const left = Number(fields.left.value), right = Number(fields.right.value);
    const systems = right < 0 || right === left ? [left] : [left, right];
    list.replaceChildren(...rows.map((i) => card(questions[i], passages, systems, steps, fields.open.checked)));
    pager.hidden = shown.length <= PAGE;
    pages.value = page;
    pager.querySelector('[data-turn="-1"]').disabled = page === 0;
    pager.querySelector('[data-turn="1"]').disabled = first + PAGE >= shown.length;
  }

  function turn(to) {
    page = to;
    draw();
    status.focus({ preventScroll: true });
    status.scrollIntoView({ block: "start" });
  }

  form.hidden = false;
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("change", (event) => {
    if (event.target === fields.words) return;
    if (event.target === fields.open) return draw();
    if (event.target === fields.left || event.target === fields.right) listOutcomes();
    filter();
  });
  fields.words.addEventListener("input", paused(filter, 120));
  pager.addEventListener("click", (event) => {
    const by = event.target.dataset.turn;
    if (by !== undefined) turn(page + Number(by));
  });
  pages.addEventListener("change", () => turn(Number(pages.value)));
  listOutcomes();
  filter();
}

/** Everything of a question that a search looks at, in lower case. */
function searched(question, passages) {
  const ids = new Set(question.gold);
  question.picks.forEach((picks) => picks.forEach(([passage]) => ids.add(passage)));
  const parts = [question.id, question.text, ...question.answers];
  ids.forEach((id) => parts.push(passages[id][0], passages[id][1]));
  return parts.join("\n").toLocaleLowerCase();
}

function goldFound(picks) {
  return new Set(picks.map(([, , place]) => place).filter((place) => place > 0)).size;
}

function card(question, passages, systems, steps, open) {
  const facts = [`${question.hops} ${question.hops === 1 ? "hop" : "hops"}`, `id ${question.id}`];
  const head = element("header", {},
    element("h3", { dir: "auto" }, question.text),
    element("p", { class: "quiet" }, facts.join(" · ")));
  if (question.answers.length)
    head.append(element("p", { class: "answer" }, "Answer: ", element("b", { dir: "auto" }, question.answers.join(" / "))));
  const columns = systems.map((system) => column(question, passages, system, steps, open));
  return element("article", { class: "question" }, head,
    element("div", { class: systems.length > 1 ? "columns two" : "columns" }, ...columns));
}

function column(question, passages, system, steps, open) {
  const picks = question.picks[system], found = goldFound(picks), complete = found === question.golds;
  const verdict = element("span", { class: complete ? "verdict complete" : "verdict" },
    `${complete ? "✓ complete" : "incomplete"}: ${found} of ${question.golds} gold`);
  const rows = picks.map(([passage, score, place]) => {
    const order = question.ordered && question.golds > 1 ? ` ${place}` : "";
    const badge = place > 0
      ? element("span", { class: "badge gold" }, `✓ gold${order}`)
      : element("span", { class: "badge wrong" }, "✗ wrong");
    return element("li", {}, passageDetails(passages[passage], open, badge, score.toFixed(3)));
  });
  const made = element("section", { class: "column" },
    element("h4", {},
      element("span", { class: "system" },
        element("span", { class: `mark ${tone(system)}`, "aria-hidden": "true" }), data.systems[system].name),
      verdict),
    element("ol", { class: "picks" }, ...rows));
  const places = new Set(picks.map(([, , place]) => place));
  const missed = question.gold.map((passage, i) => [passage, i + 1]).filter(([, place]) => !places.has(place));
  if (!complete) {
    const untold = question.golds - found - missed.length;
    made.append(
      element("h5", {}, steps > 1 ? "Missed" : "Not among them"),
      element("ul", { class: "picks missed" }, ...missed.map(([passage, place]) => {
        const order = question.ordered && question.golds > 1 ? ` ${place}` : "";
        return element("li", {}, passageDetails(passages[passage], open, element("span", { class: "badge miss" }, `○ gold${order}`), ""));
      })));
    if (untold > 0) made.append(element("p", { class: "quiet" }, `and ${untold} more gold passages`));
  }
  return made;
}

function passageDetails([title, text, cut], open, badge, score) {
  const summary = element("summary", {}, badge, element("span", { class: "score" }, score),
    element("b", { dir: "auto", class: "title" }, title || "without a title"),
    element("span", { dir: "auto", class: "glimpse" }, text.slice(0, 160)));
  const details = element("details", open ? { open: "" } : {}, summary,
    element("p", { dir: "auto", class: "text" }, text + (cut ? " …" : "")));
  if (cut) details.append(element("p", { class: "quiet" }, "cut here, the passage goes on"));
  return details;
}

startCurves();
document.querySelectorAll("section.chains").forEach(startBrowser);
