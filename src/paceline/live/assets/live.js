"use strict";
// Every text that comes from the run is set as text: nothing here makes HTML of it.
const SVG = "http://www.w3.org/2000/svg";
const at = (id) => document.getElementById(id);
const known = (value) => value !== null && value !== undefined;

function element(name, text, ...classes) {
  const made = document.createElement(name);
  if (known(text)) made.textContent = text;
  if (classes.length) made.className = classes.join(" ");
  return made;
}

function drawn(name, attributes, text) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (known(text)) made.textContent = text;
  return made;
}

// -- numbers in words

const count = (value) => value.toLocaleString("en-GB");
const digits = (value, places) => (Number.isFinite(value) ? value.toFixed(places) : "-");
const percent = (value) => `${digits(100 * value, 1)} %`;

// A number in the first unit in which what is written is less than its limit: 999.96 ms are a second.
function inUnits(value, units) {
  if (!Number.isFinite(value)) return "-";
  for (const [unit, size, limit, places] of units) {
    const text = digits(value / size, places === "few" ? (value < 10 * size ? 1 : 0) : places);
    if (Number(text) < limit) return `${text} ${unit}`;
  }
}

const TIMES = [["us", 1e-6, 1000, 0], ["ms", 1e-3, 1000, "few"], ["s", 1, 120, "few"], ["min", 60, 120, 1], ["h", 3600, Infinity, 1]];
const SIZES = [["B", 1, 1000, 0], ["kB", 1e3, 1000, 1], ["MB", 1e6, 1000, 1], ["GB", 1e9, Infinity, 1]];
const seconds = (value) => (value === 0 ? "0 s" : inUnits(value, TIMES));
const bytes = (value) => inUnits(value, SIZES);

const plain = (value) => (Math.abs(value) >= 100 ? count(Math.round(value)) : String(Number(value.toPrecision(3))));

// -- charts

const CHARTS = [
  { name: "loss", title: "Training loss", text: plain, log: true },
  { name: "accuracy", title: "Test accuracy", text: percent },
  { name: "test_loss", title: "Test loss", text: plain, log: true },
  { name: "pace", title: "Rounds a second", text: plain, zero: true },
  { name: "k", title: "Gradients a round waited for (K)", text: plain, zero: true, steps: true },
  { name: "step_seconds", second: "wait_seconds", title: "A step of the first {noun}, and its wait", text: seconds, zero: true },
];
const shown = {};

function ticks(low, high, wanted) {
  const span = high - low || Math.abs(high) || 1;
  const power = 10 ** Math.floor(Math.log10(span / wanted));
  const step = [1, 2, 2.5, 5, 10].map((each) => each * power).find((each) => span / each <= wanted);
  const found = [];
  for (let value = Math.ceil(low / step) * step; value <= high + step * 1e-6; value += step) found.push(Number(value.toPrecision(12)));
  return found;
}

// Decades, or 1, 2, 5 of each where they are few.
function logTicks(low, high) {
  const found = [];
  const few = Math.log10(high / low) < 3;
  for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power += 1) {
    for (const step of few ? [1, 2, 5] : [1]) found.push(Number((step * 10 ** power).toPrecision(6)));
  }
  const inside = found.filter((value) => value >= low * 0.999 && value <= high * 1.001);
  return inside.filter((_, place) => place % Math.ceil(inside.length / 6) === 0);
}

function card(chart, noun) {
  const made = element("section", null, "card");
  made.setAttribute("aria-labelledby", `title-${chart.name}`);
  const title = element("h2", chart.title.replace("{noun}", noun));
  title.id = `title-${chart.name}`;
  const caption = element("p", "", "caption");
  const svg = drawn("svg", { class: "plot", role: "img", "aria-labelledby": title.id, "data-chart": chart.name });
  const details = element("details");
  details.append(element("summary", "As a table"));
  const table = element("table");
  const head = element("thead");
  const row = element("tr");
  for (const heading of ["at", "value", ...(chart.second ? ["wait"] : [])]) {
    const cell = element("th", heading);
    cell.scope = "col";
    row.append(cell);
  }
  head.append(row);
  const body = element("tbody");
  table.append(head, body);
  details.append(table);
  made.append(title, caption, svg, details);
  details.addEventListener("toggle", () => draw(chart.name));
  return { chart, made, title, caption, svg, details, body, points: [], others: [] };
}

function draw(name) {
  const { chart, svg, points, others, details, body, caption } = shown[name];
  const width = Math.max(200, svg.clientWidth), height = 190, left = 46, bottom = 22, top = 8, right = 10;
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  const all = [...points, ...others];
  let low = Math.min(...all.map((point) => point[1])), high = Math.max(...all.map((point) => point[1]));
  if (chart.zero) low = Math.min(0, low);
  const log = chart.log && low > 0 && high > 10 * low;
  if (low === high) [low, high] = [low - (Math.abs(low) || 1) / 10, high + (Math.abs(high) || 1) / 10];
  const first = points[0][0], last = Math.max(points[points.length - 1][0], first + 1e-6);
  const x = (value) => left + ((value - first) / (last - first)) * (width - left - right);
  const share = (value) => (log ? Math.log(value / low) / Math.log(high / low) : (value - low) / (high - low));
  const y = (value) => top + (1 - share(value)) * (height - top - bottom);
  const parts = [];
  for (const value of log ? logTicks(low, high) : ticks(low, high, 4)) {
    parts.push(drawn("line", { class: "grid", x1: left, x2: width - right, y1: y(value), y2: y(value) }));
    parts.push(drawn("text", { x: left - 6, y: y(value) + 4, "text-anchor": "end" }, chart.text(value)));
  }
  for (const value of ticks(first, last, Math.max(2, Math.floor(width / 110)))) {
    parts.push(drawn("text", { x: x(value), y: height - 5, "text-anchor": "middle" }, seconds(value)));
  }
  const path = (line) => line.map((point, place) => {
    const corner = chart.steps && place ? `H${x(point[0]).toFixed(1)}V` : `${place ? "L" : "M"}${x(point[0]).toFixed(1)} `;
    return `${corner}${y(point[1]).toFixed(1)}`;
  }).join("");
  if (others.length) parts.push(drawn("path", { class: "curve second", d: path(others) }));
  parts.push(drawn("path", { class: "curve", d: path(points) }));
  const newest = points[points.length - 1];
  parts.push(drawn("circle", { class: "spot", r: 3.5, cx: x(newest[0]), cy: y(newest[1]) }));
  svg.replaceChildren(...parts);
  const waits = others.length ? `, of which ${chart.text(others[others.length - 1][1])} waiting (the lower line)` : "";
  caption.textContent = `${chart.text(newest[1])} after ${seconds(newest[0])}${waits}`;
  if (!details.open) return body.replaceChildren();
  const step = Math.max(1, Math.ceil(points.length / 20));
  const rows = points.map((point, place) => [point, others[place]]).filter((_, place) => (points.length - 1 - place) % step === 0);
  body.replaceChildren(...rows.map(([point, other]) => {
    const row = element("tr");
    row.append(element("td", seconds(point[0])), element("td", chart.text(point[1])));
    if (chart.second) row.append(element("td", other ? chart.text(other[1]) : ""));
    return row;
  }));
}

function charts(curves, noun) {
  const wanted = CHARTS.filter((chart) => curves[chart.name] && curves[chart.name].length > 1);
  for (const chart of wanted) {
    if (!shown[chart.name]) shown[chart.name] = card(chart, noun);
    shown[chart.name].title.textContent = chart.title.replace("{noun}", noun);
    shown[chart.name].points = curves[chart.name];
    shown[chart.name].others = chart.second ? curves[chart.second] : [];
  }
  for (const name of Object.keys(shown)) {
    if (!wanted.some((chart) => chart.name === name)) {
      shown[name].made.remove();
      delete shown[name];
    }
  }
  const places = wanted.map((chart) => shown[chart.name].made);
  if (places.some((place, number) => at("charts").children[number] !== place)) at("charts").replaceChildren(...places);
  for (const chart of wanted) draw(chart.name);
}

// -- tiles and tables

function tile(name, number, facts) {
  const made = element("div", null, "tile");
  made.append(element("div", name, "tile-name"), element("div", number, "tile-number"));
  if (facts) made.append(element("div", facts, "tile-facts"));
  return made;
}

function tiles(run) {
  const it = run.figures, made = [];
  if (known(it.round)) {
    const of = it.rounds ? `of ${count(it.rounds)}` : "";
    made.push(tile("round", count(it.round), [of, seconds(it.seconds)].filter(Boolean).join(", ")));
    made.push(tile("rounds a second", plain(it.rounds_per_second), known(it.k) ? `K = ${count(it.k)}` : ""));
  }
  if (known(it.steps)) {
    made.push(tile("steps", count(it.steps), seconds(it.seconds)));
    made.push(tile("steps a second", plain(it.steps_per_second), `of the slowest ${run.noun}`));
  }
  if (known(it.loss)) made.push(tile("training loss", digits(it.loss, 4), [
    known(it.accuracy) ? `test accuracy ${percent(it.accuracy)}` : "", known(it.test_loss) ? `test loss ${digits(it.test_loss, 4)}` : "",
  ].filter(Boolean).join(", ")));
  if (run.state === "running" || run.state === "waiting") {
    if (known(it.here)) made.push(tile(`${run.noun}s here`, count(it.here), known(it.workers) ? `of ${count(it.workers)}` : ""));
  }
  if (it.used || it.late || it.dropped) {
    made.push(tile("gradients on time", count(it.used), `${count(it.late)} late, ${count(it.dropped)} dropped`));
  }
  if (it.sent_bytes || it.received_bytes) {
    made.push(tile("bytes sent", bytes(it.sent_bytes), known(it.received_bytes) ? `${bytes(it.received_bytes)} received` : ""));
  }
  at("tiles").replaceChildren(...made);
}

const PHASES = ["input", "forward", "backward", "wait", "optimiser", "other"];

function bar(times) {
  const svg = drawn("svg", { class: "bar", viewBox: "0 0 120 12", role: "img" });
  const parts = { ...times, other: Math.max(0, times.step - PHASES.slice(0, 5).reduce((sum, name) => sum + times[name], 0)) };
  svg.setAttribute("aria-label", PHASES.map((name) => `${name} ${seconds(parts[name])}`).join(", "));
  let from = 0;
  for (const name of PHASES) {
    const width = times.step > 0 ? (120 * parts[name]) / times.step : 0;
    svg.append(drawn("rect", { class: `phase-${name}`, x: from.toFixed(2), y: 0, width: Math.max(0, width).toFixed(2), height: 12 }));
    from += width;
  }
  svg.append(drawn("title", {}, svg.getAttribute("aria-label")));
  return svg;
}

function people(run) {
  const rows = run.rows, counted = rows.some((row) => "used" in row), timed = rows.some((row) => row.times && known(row.times.step));
  at("people").hidden = !rows.length;
  at("people-title").textContent = run.noun === "rank" ? "Ranks" : "Workers";
  const gone = rows.filter((row) => row.state === "gone").length;
  const more = run.rows_left_out ? `, and ${count(run.rows_left_out)} more of whom there is nothing to say` : "";
  at("people-caption").textContent = `${count(rows.length)} ${run.noun}s${more}; ${count(gone)} gone`;
  const headings = [run.noun, "state", ...(counted ? ["on time", "late", "dropped"] : []),
    ...(timed ? ["steps/s", "a step", "wait", "spent on"] : []), "host", "remark"];
  const left = ["state", "spent on", "host", "remark"];
  at("people-head").replaceChildren(...headings.map((text) => {
    return Object.assign(element("th", text, ...(left.includes(text) ? ["left"] : [])), { scope: "col" });
  }));
  at("people-legend").hidden = !timed;
  if (timed && !at("people-legend").children.length) {
    at("people-legend").append(...PHASES.map((name) => {
      const key = element("span", null, "key");
      key.append(element("i", null, "swatch", `phase-${name}`), name);
      return key;
    }));
  }
  at("people-rows").replaceChildren(...rows.map((row) => {
    const made = element("tr");
    made.dataset.number = row.number;
    made.dataset.state = row.state;
    const state = element("td", null, "left");
    state.append(element("i", null, "mark", String(row.state).replace(/[^a-z]/g, "")), row.state);
    made.append(Object.assign(element("th", count(row.number)), { scope: "row" }), state);
    if (counted) for (const name of ["used", "late", "dropped"]) made.append(element("td", known(row[name]) ? count(row[name]) : ""));
    if (timed) {
      const times = row.times && known(row.times.step) ? row.times : null;
      made.append(element("td", times ? plain(row.steps_per_second) : ""), element("td", times ? seconds(times.step) : ""));
      made.append(element("td", times && times.step > 0 ? percent(times.wait / times.step) : ""));
      const spent = element("td", null, "left");
      if (times) spent.append(bar(times));
      made.append(spent);
    }
    made.append(element("td", row.host || "", "left"), element("td", row.remark || "", "reason"));
    return made;
  }));
}

function log(run) {
  at("log").hidden = !run.events.length;
  at("log-rows").replaceChildren(...run.events.slice().reverse().map(([when, text]) => {
    const row = element("tr");
    row.append(element("td", seconds(when)), element("td", text));
    return row;
  }));
}

// -- the run

let newest = null, spoken = "", over = false;

function show(run) {
  newest = run;
  document.title = `${run.name}: ${run.text}`.slice(0, 120);
  at("name").textContent = `paceline live: ${run.name}`;
  at("state").textContent = run.state;
  at("state").className = `state ${run.state}`;
  at("text").textContent = run.text.startsWith(`${run.state} `) || run.text.startsWith(`${run.state}:`)
    ? run.text.slice(run.state.length).replace(/^[ :]+/, "") : run.text;
  const say = run.state === "running" ? "running" : run.text;  // a reader is told of changes, not of every round
  if (say !== spoken) at("spoken").textContent = spoken = say;
  const conditions = [run.strategy, run.kind, run.read < 1 ? `reading the record: ${percent(run.read)}` : ""];
  at("conditions").replaceChildren(...conditions.filter(Boolean).map((text) => element("li", text)));
  at("warnings").replaceChildren(...[...run.problems, ...run.warnings].map((text) => element("p", text)));
  const { round, rounds } = run.figures;
  at("progress").hidden = !(known(round) && rounds);
  if (rounds) {
    at("progress").setAttribute("aria-valuemax", rounds);
    at("progress").setAttribute("aria-valuenow", round);
    at("progress").firstElementChild.style.width = `${Math.min(100, (100 * round) / rounds)}%`;
  }
  tiles(run);
  charts(run.curves, run.noun);
  people(run);
  log(run);
}

function tell(text) {
  at("link").textContent = text;
  at("link").hidden = !text;
}

const AGAIN = "No connection to the page's server: what is shown is old. Trying again.";

function follow() {
  const source = new EventSource(`events${location.search}`);
  source.onmessage = (event) => {
    const run = JSON.parse(event.data);
    over = run.last;
    tell(over ? "The page is served no more; this is its last state. `paceline live` with the run's folder shows it again." : "");
    if (over) source.close();
    show(run);
  };
  source.onerror = () => {
    if (over) return;
    if (source.readyState === EventSource.CLOSED) refused();  // by an answer that is no stream: a browser gives up then
    else tell(AGAIN);
  };
}

async function refused() {
  const status = await fetch(`state.json${location.search}`).then((answer) => answer.status, () => 0);
  if (status === 403) {
    tell("The page's server refuses this address; perhaps it was started again, with another token. Open the address that it has printed.");
    return;
  }
  tell(AGAIN);
  setTimeout(follow, 3000);
}

follow();
at("metrics").href = `metrics${location.search}`;
addEventListener("resize", () => newest && charts(newest.curves, newest.noun));
