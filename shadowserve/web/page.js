"use strict";
// Shows /summary.json of this server, again every two seconds. Text from programs is set as text, never as HTML.
const POLL_MS = 2000, TIMEOUT_MS = 5000, POINTS = 150;
const THEMES = ["system", "dark", "light"];
const shown = new Map(); // what a program's section has, by the program's number and address
const byId = (id) => document.getElementById(id);
let paused = false, updated = null, theme = 0;

function add(parent, tag, text, className) {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  if (className) made.className = className;
  parent.append(made);
  return made;
}

function brief(value, unit) {
  if (unit === "ratio") return `${(100 * value).toFixed(1)} %`;
  const base = unit === "bytes" ? 1024 : 1000;
  const names = unit === "bytes" ? ["B", "KiB", "MiB", "GiB", "TiB"] : ["", "k", "M", "G", "T"];
  let power = 0;
  while (Math.abs(value) >= base && power < names.length - 1) { value /= base; power += 1; }
  return `${+value.toPrecision(3)} ${names[power]}`.trim();
}

function chart(figure, unit, data) {
  const style = getComputedStyle(document.documentElement), colour = (name) => style.getPropertyValue(name).trim();
  const axis = { stroke: colour("--soft"), grid: { stroke: colour("--line"), width: 1 }, ticks: { show: false } };
  const clock = (_, ticks) => ticks.map((each) => new Date(1000 * each).toLocaleTimeString("en-GB"));
  const incrs = unit === "bytes" ? Array.from({ length: 60 }, (_, power) => 2 ** power) : undefined;
  const options = {
    width: Math.max(120, figure.clientWidth - 18), height: 130, legend: { show: false }, cursor: { show: false },
    axes: [
      { ...axis, space: 80, size: 30, values: clock },
      { ...axis, space: 25, size: 64, incrs, values: (_, ticks) => ticks.map((each) => brief(each, unit)) },
    ],
    scales: { y: { range: (_, least, most) => [Math.min(0, least), most > 0 ? 1.1 * most : 1] } },
    series: [{}, { stroke: colour("--draw"), width: 2, points: { show: false } }],
  };
  const drawn = new uPlot(options, data, figure);
  drawn.root.setAttribute("aria-hidden", "true"); // the caption and the table have the values
  return drawn;
}

function section(key, where, number) {
  const part = byId("program").content.firstElementChild.cloneNode(true);
  part.id = `program-${number}`;
  byId("programs").append(part);
  const link = add(byId("list"), "a", where);
  link.href = `#${part.id}`;
  byId("list").hidden = byId("list").children.length < 2;
  const made = { part, link, charts: new Map(), times: [], at: null };
  shown.set(key, made);
  return made;
}

function values(made, list) {
  const rows = made.part.querySelector("details tbody");
  made.part.querySelector("details").hidden = false;
  rows.replaceChildren();
  made.times.push(Date.now() / 1000);
  made.times.splice(0, made.times.length - POINTS);
  for (const { name, title, unit, value, text } of list) {
    const row = add(rows, "tr");
    add(row, "td", title);
    add(row, "td", text, "number");
    let drawn = made.charts.get(name);
    if (!drawn) {
      const figure = add(made.part.querySelector(".charts"), "figure"), caption = add(figure, "figcaption");
      add(caption, "span", title);
      drawn = { figure, unit, label: add(caption, "b"), values: made.times.map(() => null) };
      drawn.plot = chart(figure, unit, [made.times, drawn.values]);
      made.charts.set(name, drawn);
    }
    drawn.label.textContent = text;
    drawn.values.push(value);
    drawn.values.splice(0, drawn.values.length - made.times.length);
    drawn.plot.setData([made.times, drawn.values]);
  }
}

function parts(made, { title, counts }) {
  const table = made.part.querySelector(".parts"), body = table.querySelector("tbody");
  const whole = Object.values(counts).reduce((sum, each) => sum + each, 0);
  table.hidden = !whole;
  table.querySelector("caption").textContent = title;
  body.replaceChildren();
  for (const [name, count] of Object.entries(counts)) {
    const row = add(body, "tr");
    add(row, "td", name);
    add(row, "td", Math.round(count).toLocaleString("en"), "number");
    add(row, "td", `${(100 * count / whole).toFixed(1)} %`, "number");
    const bar = add(add(row, "td"), "meter");
    bar.value = count / whole;
    bar.setAttribute("aria-label", `share of ${name}`);
  }
}

function program({ where, summary, error }, number) {
  const key = `${number} ${where}`, made = shown.get(key) || section(key, where || location.host, number);
  const { part } = made, failed = part.querySelector(".error"), name = where || location.host;
  part.classList.toggle("failed", Boolean(error));
  failed.hidden = !error;
  const message = error ? `No values: ${error}${made.at ? ` The values below are from ${made.at}.` : ""}` : "";
  if (failed.textContent !== message) failed.textContent = message; // else a screen reader repeats it
  if (error && !made.at) part.querySelector("h2").textContent = name;
  if (!summary) return;
  made.at = new Date().toLocaleTimeString("en-GB");
  part.querySelector("h2").textContent = `${name}: ${summary.kind}`;
  part.querySelector(".text").textContent = summary.paragraph;
  const limit = part.querySelector(".limit");
  limit.textContent = summary.limit_line;
  limit.className = `limit ${summary.level}`;
  values(made, summary.values);
  parts(made, summary.parts);
}

function failed(text) {
  const alert = byId("alert");
  const message = text && `${text}${updated ? ` The values are from ${updated}.` : ""}`;
  if (alert.textContent !== message) alert.textContent = message;
  alert.hidden = !text;
  document.body.classList.toggle("failed", Boolean(text));
}

async function poll() {
  if (!paused) {
    try {
      const answer = await fetch("/summary.json", { signal: AbortSignal.timeout(TIMEOUT_MS), cache: "no-store" });
      if (!answer.ok) throw new Error(`HTTP status ${answer.status}`);
      (await answer.json()).programs.forEach(program);
      updated = new Date().toLocaleTimeString("en-GB");
      failed("");
      byId("state").textContent = `live, ${updated}`;
    } catch (error) {
      failed(`${location.host} does not answer (${error.message}).`);
      byId("state").textContent = "not live";
    }
  }
  setTimeout(poll, POLL_MS);
}

function redraw() {
  for (const made of shown.values()) {
    for (const drawn of made.charts.values()) {
      drawn.plot.destroy();
      drawn.plot = chart(drawn.figure, drawn.unit, [made.times, drawn.values]);
    }
  }
}

function start() {
  byId("pause").addEventListener("click", () => {
    paused = !paused;
    byId("pause").setAttribute("aria-pressed", String(paused));
    byId("pause").textContent = paused ? "Continue" : "Pause";
    if (paused) byId("state").textContent = `paused, ${updated || "no values yet"}`;
  });
  byId("theme").addEventListener("click", () => {
    theme = (theme + 1) % THEMES.length;
    document.documentElement.dataset.theme = THEMES[theme];
    byId("theme").textContent = `Theme: ${THEMES[theme]}`;
    redraw();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  let resizing = 0;
  addEventListener("resize", () => { clearTimeout(resizing); resizing = setTimeout(redraw, 200); });
  poll();
}

start();
