// The page: level, rows, the chosen row, slices.

import { $, ask, make, themed } from "./dom.js";
import { Scatter } from "./scatter.js";

const known = { about: null, now: null, output: 0, up: "error", asked: 0 };
const scatter = new Scatter(choose);
const short = (value) => (value === null || value === undefined ? "–" : Number(value.toPrecision(4)).toString());
const percent = (value, digits = 1) => `${(100 * value).toFixed(digits)} %`;
const part = (value) => `${100 * value}%`; // for a style, which takes no space
const unit = () => known.about.outputs[known.output].unit;
const withUnit = (value) => `${short(value)}${unit() ? ` ${unit()}` : ""}`;
const OWN = { prediction: "prediction", std: "predicted std", strangeness: "strangeness" };

function pairs(where, facts) {
  $(where).replaceChildren(...Object.entries(facts).flatMap(([name, value]) => [make("dt", {}, name), make("dd", {}, value)]));
}

async function begin() {
  const about = known.about = await ask("/api/about");
  document.title = `${about.title}: latedrop explore`;
  $("title").textContent = about.title;
  $("level").value = about.level;
  $("output-pick").hidden = about.outputs.length < 2;
  $("output").replaceChildren(...about.outputs.map((one, number) => new Option(one.name, number)));
  const own = Object.entries(OWN).filter(([name]) => name !== "strangeness" || about.strangeness);
  $("across").replaceChildren(...own.map(([name, label]) => new Option(label, `own ${name}`)), ...Object.keys(about.columns).map((name) => new Option(name, `of ${name}`)));
  const rows = about.shown.length;
  $("shown").textContent = rows < about.rows ? `${rows} of ${about.rows} rows, evenly chosen` : `${rows} rows`;
  await load();
}

async function load() {
  const mine = ++known.asked; // the newest answer counts
  const level = Number($("level").value);
  $("level-said").textContent = percent(level, 0);
  const found = await ask(`/api/outputs/${known.output}?level=${level}`).catch(() => null); // it was said
  if (mine !== known.asked) return;
  if (!found) { // such as a level that few conformal rows cannot give: what is shown stays
    if (!known.now) return;
    $("level").value = known.now.level;
    $("level-said").textContent = percent(known.now.level, 0);
    return;
  }
  known.now = found;
  $("coverage").textContent = percent(found.coverage);
  $("coverage").title = `± ${percent(found.coverage_error)} by chance${found.constant === null ? "" : `; with one constant variance ${percent(found.constant)}`}`;
  $("width").textContent = short(found.width);
  $("width-said").textContent = `mean width${unit() ? `, ${unit()}` : ""}`;
  $("verdict").textContent = found.verdict;
  $("verdict").className = `verdict ${found.grade}`;
  draw();
  showSlices();
  showWorst();
  if (scatter.chosen !== null) showNumbers(scatter.chosen);
}

function across() {
  const choice = $("across").value;
  const name = choice.slice(choice.indexOf(" ") + 1);
  if (choice.startsWith("of ")) return [name, known.about.columns[name]];
  if (name === "strangeness") return [OWN[name], known.about.strangeness];
  return [`${OWN[name]}${unit() ? ` [${unit()}]` : ""}`, name === "std" ? known.now.std : known.now.mean];
}

function draw() {
  if (!known.now) return;
  const { mean, target, low, high } = known.now;
  const [label, at] = across();
  const less = known.up === "error" ? mean : mean.map(() => 0);
  const from = (values) => values.map((value, i) => (value === null ? null : value - less[i]));
  const inside = target.map((value, i) => low[i] <= value && value <= high[i]);
  const name = known.up === "error" ? "target less prediction" : "target";
  scatter.show({ row: known.about.shown, at, up: from(target), low: from(low), high: from(high), inside }, { at: label, up: `${name}${unit() ? ` [${unit()}]` : ""}` });
}

function showNumbers(row) {
  const i = known.about.shown.indexOf(row);
  const one = i < 0 ? known.now.worst.find((other) => other.row === row) : { target: known.now.target[i], mean: known.now.mean[i], low: known.now.low[i], high: known.now.high[i] };
  if (!one) return;
  const inside = one.low <= one.target && one.target <= one.high;
  $("row-badge").textContent = inside ? "inside" : "outside";
  $("row-badge").className = inside ? "badge" : "badge strange";
  const facts = { target: withUnit(one.target), prediction: withUnit(one.mean), error: withUnit(one.target - one.mean) };
  facts[`${percent(known.now.level, 0)} interval`] = `${short(one.low)} to ${withUnit(one.high)}`;
  if (known.row?.strangeness !== null && known.row?.strangeness !== undefined) facts.strangeness = short(known.row.strangeness);
  pairs("row-numbers", facts);
}

async function choose(row) {
  scatter.mark(row);
  const found = await ask(`/api/outputs/${known.output}/rows/${row}`);
  if (scatter.chosen !== row) return;
  known.row = found;
  $("row-name").textContent = `${known.about.place[0].toUpperCase()}${known.about.place.slice(1)} ${found.place}`;
  const shares = Object.entries(found.shares).sort((a, b) => b[1] - a[1]);
  $("shares").replaceChildren(...shares.map(([name, share]) => {
    const bar = make("u");
    bar.style.width = part(share);
    return make("div", {}, make("span", { title: name }, name), make("i", {}, bar), make("b", {}, percent(share)));
  }));
  const units = found.units.map((one) => `${one.site}[${one.place.join(", ")}] ${percent(one.share)}`);
  $("why").textContent = found.why || (units.length ? `Largest single units: ${units.join("; ")}.` : "");
  pairs("row-inputs", Object.fromEntries(Object.entries(found.inputs).map(([name, value]) => [name, short(value)])));
  showNumbers(row);
}

function showSlices() {
  const select = $("slice");
  const before = select.value;
  select.replaceChildren(...known.now.slices.map((one) => new Option(OWN[one.name] ?? one.name, one.name, false, one.name === before)));
  showGroups();
}

function showGroups() {
  const found = known.now.slices.find((one) => one.name === $("slice").value);
  $("groups").replaceChildren(...(found?.groups ?? []).map((group) => {
    const [bar, level, plain] = [make("u"), make("s"), group.constant === null ? null : make("em", {}, "◇")];
    bar.style.width = part(group.coverage);
    level.style.left = part(known.now.level);
    if (plain) plain.style.left = part(group.constant);
    const said = group.off === "less" ? "too few" : group.off;
    return make("div", {},
      make("span", {}, group.low === group.high ? short(group.low) : `${short(group.low)} to ${short(group.high)}`, make("small", {}, `${group.rows} rows`)),
      make("span", { class: `track ${group.off}`, role: "img", "aria-label": `${percent(group.coverage)} inside` }, bar, level, plain),
      make("span", {}, percent(group.coverage), make("small", { class: group.off }, said || `± ${percent(group.coverage_error)}`)));
  }));
  if (!found) $("groups").textContent = "There are too few rows to cut them into slices.";
}

function showWorst() {
  $("worst").replaceChildren(...known.now.worst.map((one) => make("li", {}, make("button", { type: "button", onclick: () => choose(one.row) },
    make("span", {}, `${known.about.place} ${one.place}`), make("b", {}, `${one.deviations.toFixed(1)} deviations`),
    make("small", {}, `target ${withUnit(one.target)}, predicted ${short(one.low)} to ${short(one.high)}`)))));
}

$("level").oninput = load;
$("across").onchange = draw;
$("slice").onchange = showGroups;
$("output").onchange = async () => {
  known.output = Number($("output").value);
  await load();
  if (scatter.chosen !== null) choose(scatter.chosen);
};
for (const button of document.querySelectorAll("[data-up]")) {
  button.onclick = () => {
    known.up = button.dataset.up;
    document.querySelectorAll("[data-up]").forEach((other) => other.setAttribute("aria-pressed", String(other === button)));
    draw();
  };
}
themed(draw);
begin();
