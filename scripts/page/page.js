"use strict";

// What a model wrote reaches the page as text nodes alone (`make`), never as HTML.
const data = JSON.parse(document.getElementById("data").textContent);
const runs = data.runs;
const COLOURS = ["#4477aa", "#ee6677", "#228833", "#aa7700", "#33a0c0", "#aa3377"];
const DASHES = ["", "6 3", "2 3", "8 3 2 3"];
const PAGE = 130; // completions that are drawn before the button `more`
const UNLIKELY = -2.3; // nats: below a tenth
const VERY_UNLIKELY = -4.6; // below a hundredth
const MARKS = "underlined: p < 0.1, twice: p < 0.01 under the server; ⟨v3⟩: from here policy version 3; struck: does not train";

const PANELS = [
  { title: "reward", names: ["reward", /^eval\/.*reward$/], unit: "" },
  { title: "held-out accuracy", names: [/^eval\/.*accuracy$/], unit: "share" },
  { title: "reward by data set", names: [/^sets\/.*\/reward$/], unit: "" },
  { title: "length of completions", names: ["completions/mean_length"], unit: "tokens" },
  { title: "different completions", names: ["completions/different"], unit: "share" },
  { title: "entropy", names: ["entropy"], unit: "nats" },
  {
    title: "trainer's minus server's log-probs",
    names: ["sampling/current_logp_difference", "sampling/stale_logp_difference"],
    unit: "nats",
  },
  { title: "idle", names: ["idle/trainer", "idle/servers"], unit: "share of the time" },
  { title: "speed", names: ["tokens_per_s/trained", "tokens_per_s/sampled"], unit: "tokens/s" },
];

const NO_REWARD = "no reward"; // in place of a function's name
const NO_FILTER = { text: "", finish: "", set: "", by: "", least: "", most: "" };
const START = {
  view: "step", run: 0, step: null, sort: "group", order: 1, ...NO_FILTER,
  row: null, before: null, after: null, open: null, other: "grad_norm", shown: PAGE,
};
const state = { ...START };

// -- Small things ---------------------------------------------------------------------------------

function make(tag, attributes = {}, ...children) {
  const element = tag.startsWith("svg:")
    ? document.createElementNS("http://www.w3.org/2000/svg", tag.slice(4))
    : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== null && value !== false) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== null));
  return element;
}

const byId = (id) => document.getElementById(id);
const isNumber = (value) => typeof value === "number" && Number.isFinite(value);

function short(value) {
  if (!isNumber(value)) return "none";
  if (Number.isInteger(value)) return value.toLocaleString("en");
  return Math.abs(value) >= 0.001 && Math.abs(value) < 1e5 ? String(Number(value.toPrecision(4))) : value.toExponential(2);
}

// Characters that nobody sees, or that turn a line around, are named instead of obeyed.
// Joiners and variants within emoji and scripts stay.
const HIDDEN = /((?![\t\n\u200c\u200d])[\p{Cc}\p{Cf}\p{Cs}\p{Zl}\p{Zp}\ufe00-\ufe0e])/u;

function plain(text) {
  const parts = String(text).split(HIDDEN); // every other one is such a character
  const named = (character) => `⟨U+${character.codePointAt(0).toString(16).padStart(4, "0").toUpperCase()}⟩`;
  return parts.map((part, place) => (place % 2 ? make("span", { class: "hidden-mark" }, named(part)) : part)).filter(Boolean);
}

const isGrouped = () => state.view === "step" && state.sort === "group";
const textOf = (text, kind = "text") => make("div", { class: kind, dir: "auto" }, ...plain(text));

// -- Samples --------------------------------------------------------------------------------------

const length = (sample) => (sample.tokens ?? sample.completion).length;

function content(message) {
  const value = message?.content;
  if (Array.isArray(value)) return value.map((part) => part?.text ?? `<${part?.type}>`).join("");
  const calls = message?.tool_calls ? JSON.stringify(message.tool_calls) : "";
  return [value ?? "", calls].filter(Boolean).join("\n");
}

function promptText(sample) {
  if (typeof sample.prompt === "string") return sample.prompt;
  return sample.prompt.map(content).join("\n");
}

const rewardOf = (sample, name) => (name === "reward" ? sample.reward : sample.rewards[name]);

const stepsOf = (samples) => [...new Set(samples.map((sample) => sample.step))].sort((a, b) => a - b);

function prepare(run) {
  run.steps = stepsOf(run.samples);
  run.byStep = Map.groupBy(run.samples, (sample) => sample.step);
  run.byKey = new Map();
  for (const sample of run.samples) nameIt(run, `${sample.step}-${sample.group}`, sample);
  run.evaluations = stepsOf(run.heldOut);
  for (const sample of run.heldOut) nameIt(run, `held-out-${sample.step}-${sample.set ?? ""}-${sample.row}`, sample);
  const names = new Set([...run.samples, ...run.heldOut].flatMap((sample) => Object.keys(sample.rewards)));
  names.delete("reward"); // the weighted sum has this name
  run.functions = [...names];
}

// A completion's name is the same in every page of its run.
function nameIt(run, prefix, sample) {
  let number = 0;
  while (run.byKey.has(`${prefix}-${number}`)) number += 1;
  sample.key = `${prefix}-${number}`;
  run.byKey.set(sample.key, sample);
}

const SORTS = {
  group: (sample) => sample.group,
  advantage: (sample) => sample.advantage,
  length: length,
};

function sorted(samples) {
  const of = SORTS[state.sort] ?? ((sample) => rewardOf(sample, state.sort));
  const known = samples.filter((sample) => isNumber(of(sample)));
  known.sort((a, b) => (of(a) - of(b)) * state.order || a.group - b.group);
  return known.concat(samples.filter((sample) => !isNumber(of(sample))));
}

// A function gives none for a completion that is not its task; such ones do not pass.
function fitsReward(sample) {
  if (!state.by) return true;
  if (state.by === NO_REWARD) return !isNumber(sample.reward);
  const value = rewardOf(sample, state.by);
  if (!isNumber(value)) return false;
  return (state.least === "" || value >= Number(state.least)) && (state.most === "" || value <= Number(state.most));
}

function fits(sample) {
  if (!fitsReward(sample)) return false;
  if (state.finish && sample.finish_reason !== state.finish) return false;
  if (state.set && (sample.set ?? "") !== state.set) return false;
  if (!state.text) return true;
  const words = state.text.toLowerCase();
  const texts = [sample.completion, promptText(sample), JSON.stringify(sample.columns ?? {})];
  return texts.some((text) => text.toLowerCase().includes(words));
}

function chosenSamples() {
  const run = runs[state.run];
  if (state.view === "row") return run.samples.filter((sample) => sample.row === state.row && fits(sample));
  return sorted((run.byStep.get(state.step) ?? []).filter(fits));
}

// -- Curves ---------------------------------------------------------------------------------------

const metricNames = [...new Set(runs.flatMap((run) => Object.keys(run.metrics)))].filter((name) => name !== "step").sort();
const matching = (names) => names.flatMap((name) => metricNames.filter((other) => name === other || name.test?.(other)));

function points(run, name) {
  const values = run.metrics[name] ?? [];
  return values.map((value, place) => [run.metrics.step[place], value]).filter(([, value]) => isNumber(value));
}

// An accuracy is there only where all rewards are 0 or 1: a curve through a few of them would mislead.
function isWhole({ run, name, points: found }) {
  return !name.endsWith("accuracy") || found.length === points(run, name.replace(/accuracy$/, "reward")).length;
}

function ticks(low, high) {
  const raw = (high - low) / 4 || 1;
  const power = 10 ** Math.floor(Math.log10(raw));
  const size = [1, 2, 5, 10].map((factor) => factor * power).find((candidate) => candidate >= raw);
  const first = Math.ceil(low / size);
  const numTicks = Math.min(Math.floor(high / size + 1e-9) - first + 1, 9);
  return Array.from({ length: numTicks }, (_, place) => (first + place) * size);
}

function chart(panel) {
  const names = matching(panel.names);
  const of = (run, number) => names.map((name, place) => ({ run, number, name, dash: DASHES[place % DASHES.length], points: points(run, name) }));
  const series = runs.flatMap(of);
  const drawn = series.filter((one) => one.points.length && !one.run.hidden && isWhole(one));
  if (!drawn.length) return null;

  const all = drawn.flatMap((one) => one.points);
  const [left, right] = [Math.min(...all.map((p) => p[0])), Math.max(...all.map((p) => p[0]))];
  let [low, high] = [Math.min(...all.map((p) => p[1])), Math.max(...all.map((p) => p[1]))];
  if (low === high) [low, high] = [low - 0.5, high + 0.5];
  const [width, height, before, below] = [360, 190, 46, 22];
  const x = (step) => before + ((step - left) / (right - left || 1)) * (width - before - 8);
  const y = (value) => 6 + ((high - value) / (high - low)) * (height - below - 6);

  const svg = make("svg:svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": panel.title });
  for (const value of ticks(low, high)) {
    svg.append(make("svg:line", { class: "grid", x1: before, x2: width - 8, y1: y(value), y2: y(value) }));
    svg.append(make("svg:text", { x: before - 4, y: y(value) + 4, "text-anchor": "end" }, short(Number(value.toPrecision(10)))));
  }
  for (const step of ticks(left, right).filter(Number.isInteger)) {
    svg.append(make("svg:text", { x: x(step), y: height - 6, "text-anchor": "middle" }, String(step)));
  }
  for (const one of drawn) {
    const path = one.points.map((p, place) => `${place ? "L" : "M"}${x(p[0]).toFixed(1)} ${y(p[1]).toFixed(1)}`).join("");
    const colour = COLOURS[one.number % COLOURS.length];
    svg.append(make("svg:path", { class: "curve", d: path, stroke: colour, "stroke-dasharray": one.dash }));
    if (one.points.length < 12)
      for (const p of one.points) svg.append(make("svg:circle", { cx: x(p[0]), cy: y(p[1]), r: 2.5, fill: colour }));
  }
  if (isNumber(state.step)) svg.append(make("svg:line", { class: "here", x1: x(state.step), x2: x(state.step), y1: 6, y2: height - below }));

  const caption = make("figcaption", {}, ...legend(names));
  const stepAt = (event) => {
    const box = svg.getBoundingClientRect();
    const place = ((event.clientX - box.left) / box.width) * width;
    return left + ((place - before) / (width - before - 8)) * (right - left);
  };
  svg.addEventListener("mousemove", (event) => {
    const step = stepAt(event);
    const told = drawn.map((one) => {
      const [at, value] = nearest(one.points, step, (p) => p[0]);
      return `${runs.length > 1 ? `${one.run.name} ` : ""}${one.name} ${short(value)} at step ${Math.round(at)}`;
    });
    caption.replaceChildren(told.join(" · "));
  });
  svg.addEventListener("mouseleave", () => caption.replaceChildren(...legend(names)));
  svg.addEventListener("click", (event) => choose({ view: "step", step: nearest(runs[state.run].steps, stepAt(event), (step) => step), open: null }));
  const unit = panel.unit ? make("span", { class: "faint" }, ` (${panel.unit})`) : null;
  return make("figure", {}, make("h2", {}, panel.title, unit), svg, caption);
}

function sign(colour, dash) {
  const line = make("svg:line", { x1: 0, x2: 28, y1: 4, y2: 4, stroke: colour, "stroke-width": 2, "stroke-dasharray": dash });
  return make("svg:svg", { viewBox: "0 0 28 8" }, line);
}

function legend(names) {
  if (names.length < 2) return [make("span", { class: "faint" }, names[0], ", by step")];
  return names.map((name, place) => make("span", { class: "key faint" }, sign("currentColor", DASHES[place % DASHES.length]), `${name} `));
}

const nearest = (all, step, stepOf) =>
  all.reduce((best, one) => (Math.abs(stepOf(one) - step) < Math.abs(stepOf(best) - step) ? one : best), all[0] ?? null);

function drawCurves() {
  const figures = PANELS.map(chart);
  if (!metricNames.includes(state.other)) state.other = metricNames[0];
  const other = chart({ title: state.other, names: [state.other], unit: "" });
  if (other) {
    const menu = select(metricNames, state.other, (value) => choose({ other: value }), "another metric");
    other.firstChild.replaceChildren(menu);
    figures.push(other);
  }
  byId("curves").replaceChildren(...figures.filter(Boolean));
}

// -- What is above the list -----------------------------------------------------------------------

function select(options, value, act, label) {
  const items = options.map((option) => {
    const [word, name] = Array.isArray(option) ? option : [option, option];
    return make("option", { value: word, selected: String(word) === String(value) }, name);
  });
  return make("select", { "aria-label": label, title: label, onchange: (event) => act(event.target.value) }, ...items);
}

function button(name, act, pressed = null, title = null) {
  return make("button", { onclick: act, "aria-pressed": pressed === null ? null : String(pressed), title }, name);
}

function drawHead() {
  const keys = runs.map((run, number) => {
    const box = make("input", { type: "checkbox", checked: !run.hidden, onchange: () => { run.hidden = !run.hidden; drawCurves(); } });
    return make("label", { class: "key" }, box, sign(COLOURS[number % COLOURS.length], ""), ...plain(run.name));
  });
  const named = new Map(); // what is left out, and of which runs
  for (const run of runs) for (const told of run.leftOut) named.set(told, [...(named.get(told) ?? []), run.name]);
  const notes = [...named].map(([told, names]) => make("p", { class: "note faint" }, ...plain(`${names.join(", ")}${names.length > 1 ? ", each" : ""}: ${told}.`)));
  byId("head").replaceChildren(make("div", { class: "row" }, ...keys, button("? keys", () => byId("help").showModal())), settings(), ...notes);
}

// The settings, a column for each run: first what differs between them, then what is no default.
function settings() {
  const names = [...new Set(runs.flatMap((run) => Object.keys(run.config)))].sort();
  const value = (run, name) => (typeof run.config[name] === "string" ? run.config[name] : JSON.stringify(run.config[name] ?? null));
  const differ = names.filter((name) => new Set(runs.map((run) => value(run, name))).size > 1);
  const changed = names.filter((name) => runs.some((run) => run.changed.includes(name)));
  const told = (runs.length > 1 ? differ : changed).map((name) => `${name} ${[...new Set(runs.map((run) => value(run, name)))].join(", ")}`);
  const rows = [...new Set([...differ, ...changed, ...names])].map((name) =>
    make("tr", { class: differ.includes(name) || changed.includes(name) ? "differs" : "" }, ...[name, ...runs.map((run) => value(run, name))].map((text) => make("td", {}, ...plain(text)))),
  );
  const heads = ["", ...runs.map((run) => run.name)].map((text) => make("th", {}, ...plain(text)));
  if (runs.length > 1) rows.unshift(make("tr", {}, ...heads));
  return make("details", { id: "settings" }, make("summary", { class: "faint" }, ...plain(told.join(" · ") || "settings")), make("table", {}, ...rows));
}

const filter = (changes) => choose(changes, drawList); // the field that is typed in stays

function bound(name) {
  return make("input", { type: "number", step: "any", class: "bound", value: state[name], "aria-label": `${name} reward`, oninput: (event) => filter({ [name]: event.target.value }) });
}

function drawControls() {
  const run = runs[state.run];
  const views = [
    button("samples of a step", () => toView("step"), state.view === "step"),
    button("a prompt over the steps", () => toRow(state.row ?? chosenSamples()[0]?.row ?? run.samples[0]?.row), state.view === "row"),
    button("held-out, before and after", () => toView("heldOut"), state.view === "heldOut"),
  ];
  byId("views").replaceChildren(...views);

  const parts = [];
  if (runs.length > 1) parts.push(select(runs.map((one, number) => [number, one.name]), state.run, (value) => toRun(Number(value)), "run"));
  if (state.view === "step") {
    parts.push(button("‹", () => move(-1), null, "the step before: ["), button("›", () => move(1), null, "the next step: ]"));
    parts.push(select(run.steps.map((step) => [step, `step ${step}`]), state.step, (value) => choose({ step: Number(value), open: null }), "step"));
    const sorts = ["group", "reward", "advantage", "length", ...(run.functions.length > 1 ? run.functions : [])];
    parts.push(select(sorts.map((name) => [name, `by ${name}`]), state.sort, (value) => choose({ sort: value, order: value === "group" ? 1 : -1 }), "sort by"));
    parts.push(button(state.order > 0 ? "lowest first" : "highest first", () => choose({ order: -state.order })));
  }
  if (state.view === "row") {
    const rows = new Map(run.samples.map((sample) => [sample.row, promptText(sample).trim().slice(0, 60)]));
    const options = [...rows].sort(([a], [b]) => a - b).map(([row, text]) => [row, `row ${row}: ${text}`]);
    parts.push(select(options, state.row, (value) => toRow(Number(value)), "dataset row"));
  }
  if (state.view === "heldOut" && run.evaluations.length) {
    const options = run.evaluations.map((step) => [step, `step ${step}`]);
    for (const [name, step] of Object.entries(compared()))
      parts.push(name, select(options, step, (value) => choose({ [name]: Number(value) }), name));
  }
  const samples = state.view === "heldOut" ? run.heldOut : run.samples;
  const reasons = [...new Set(samples.map((sample) => sample.finish_reason))].sort();
  if (reasons.length > 1 || state.finish) parts.push(select([["", "any end"], ...reasons], state.finish, (value) => choose({ finish: value }), "finish reason"));
  const sets = [...new Set(samples.map((sample) => sample.set ?? ""))].sort();
  if (sets.length > 1 || state.set) parts.push(select([["", "all data sets"], ...sets.filter(Boolean)], state.set, (value) => choose({ set: value }), "data set"));
  const names = run.functions.length > 1 ? ["reward", ...run.functions] : ["reward"];
  const functions = [["", "any reward"], ...names.map((name) => [name, `where ${name} is`])];
  if (state.by === NO_REWARD || samples.some((sample) => !isNumber(sample.reward))) functions.push([NO_REWARD, "without a reward"]);
  parts.push(select(functions, state.by, (value) => choose({ by: value, least: "", most: "" }), "filter by reward"));
  if (state.by && state.by !== NO_REWARD) parts.push("from", bound("least"), "to", bound("most"));
  parts.push(make("input", { type: "search", placeholder: "with this text", value: state.text, "aria-label": "filter by text", oninput: (event) => filter({ text: event.target.value }) }));
  byId("controls").replaceChildren(make("div", { class: "row" }, ...parts));
}

// -- Completions ----------------------------------------------------------------------------------

function figures(sample) {
  const parts = [`reward ${short(sample.reward)}`];
  if (Object.keys(sample.rewards).length > 1)
    parts.push(...Object.entries(sample.rewards).map(([name, value]) => `${name} ${short(value)}`));
  if (isNumber(sample.advantage)) parts.push(`advantage ${sample.advantage > 0 ? "+" : ""}${short(sample.advantage)}`);
  parts.push(sample.tokens ? `${length(sample)} tokens` : `${length(sample)} characters`);
  if (sample.finish_reason !== "stop") parts.push(`cut: ${sample.finish_reason}`);
  if (!isGrouped()) parts.push(`step ${sample.step}`, `group ${sample.group}`, `row ${sample.row}`);
  return parts.map((part) => make("span", {}, part));
}

function card(sample) {
  try {
    return readable(sample);
  } catch (error) {
    return make("article", { id: `sample-${sample.key}` }, make("p", { class: "cut" }, `it cannot be drawn: ${error.message}`), textOf(JSON.stringify(sample)));
  }
}

function readable(sample) {
  const isOpen = state.open === sample.key;
  const head = make("div", { class: "figures", onclick: () => open(isOpen ? null : sample.key) }, ...figures(sample));
  const body = isOpen ? whole(sample) : [isGrouped() ? "" : promptLine(sample), textOf(`▸ ${sample.completion.slice(0, 600) || "(empty)"}`, "text short")];
  return make("article", { class: isOpen ? "chosen" : "", id: `sample-${sample.key}` }, head, ...body);
}

const picture = (name, kind = null) => make("img", { class: kind, src: data.images[name], alt: "of the prompt" });

// A prompt on one line or two, with its images, small.
function promptLine(sample) {
  const known = (sample.images ?? []).filter((name) => data.images[name]);
  const columns = Object.entries(sample.columns ?? {}).map(([name, value]) => `${name}: ${typeof value === "string" ? value : JSON.stringify(value)}`);
  return make("div", { class: "prompt" }, ...known.map((name) => picture(name, "small")),
    textOf(promptText(sample).slice(-400), "text short faint"), textOf(columns.join(" · ").slice(0, 120), "text short"));
}

function conversation(messages) {
  const who = (message) => make("div", { class: "who" }, ...plain(message?.role ?? ""));
  return messages.map((message) => make("div", { class: "turn" }, who(message), textOf(content(message))));
}

function whole(sample) {
  const { messages, ...info } = sample.info ?? {};
  if (messages !== undefined && !Array.isArray(messages)) info.messages = messages;
  const isText = typeof sample.prompt === "string";
  const parts = conversation(isText ? [{ role: "prompt", content: sample.prompt }] : sample.prompt);
  for (const name of sample.images ?? [])
    parts.push(data.images[name] ? picture(name) : make("p", { class: "faint" }, "an image that this page does not have"));

  if (Array.isArray(messages))
    parts.push(make("details", { open: true }, make("summary", {}, "as a conversation"), ...conversation(messages)));
  (sample.earlier ?? []).forEach((segment, number) => {
    parts.push(make("div", { class: "who" }, `segment ${number + 1} of ${sample.earlier.length + 1}`));
    if (segment.prompt) parts.push(textOf(segment.prompt, "text faint"));
    parts.push(tokens(segment));
  });
  if (sample.earlier) parts.push(make("div", { class: "who" }, `segment ${sample.earlier.length + 1}, the last`));
  if (sample.tokens) parts.push(make("div", { class: "faint" }, MARKS), tokens(sample));
  else parts.push(...conversation([{ role: "completion", content: sample.completion }]));
  if (sample.finish_reason !== "stop") parts.push(make("p", { class: "cut" }, `✂ it was cut: ${sample.finish_reason}`));

  const known = Object.entries({ ...sample.columns, ...info });
  if (known.length) {
    const rows = known.map(([name, value]) => make("tr", {}, make("th", {}, ...plain(name)), make("td", { dir: "auto" }, ...plain(typeof value === "string" ? value : JSON.stringify(value)))));
    parts.push(make("table", {}, ...rows));
  }
  const links = make("div", { class: "row" });
  if (!sample.key.startsWith("held-out")) {
    links.append(button("its group side by side", () => toGroup(sample)), button("this prompt over the steps", () => toRow(sample.row)));
    links.append(make("a", { href: hash({ open: sample.key }) }, "link to it"));
  }
  parts.push(links);
  return parts;
}

function tokens(part) {
  const versions = new Array(part.tokens.length).fill(null);
  for (const [version, begin, end] of part.weight_versions) versions.fill(version, begin, end);
  let last = versions.find((version) => version !== null);
  const spans = part.tokens.map((text, place) => {
    const version = versions[place];
    const logprob = part.logprobs[place] ?? -Infinity; // which JSON has no number for
    const kinds = ["token"];
    let ground = "";
    let told = "from the environment: it does not train";
    if (version === null) kinds.push("from-environment");
    else {
      told = `log-prob ${short(logprob)} (p ${Math.exp(logprob).toPrecision(3)}), policy version ${version}`;
      if (logprob < VERY_UNLIKELY) kinds.push("very-unlikely");
      else if (logprob < UNLIKELY) kinds.push("unlikely");
      ground = `background: rgb(230 120 0 / ${Math.min(0.6, -logprob / 8).toFixed(2)})`;
      if (version !== last) kinds.push("new-version");
      last = version;
    }
    return make("span", { class: kinds.join(" "), title: `${place}: ${told}`, style: ground || null, "data-version": version }, ...plain(text));
  });
  return make("div", { class: "text tokens", dir: "auto" }, ...spans);
}

function difference(first, last) {
  const change = last.reward - first.reward;
  if (!isNumber(change) || change === 0) return make("span", { class: "faint" }, "unchanged");
  return make("span", { class: change > 0 ? "up" : "down" }, `${change > 0 ? "▲ +" : "▼ "}${short(change)}`);
}

// The two evaluations that are compared: the first and the last, or those that were chosen.
function compared() {
  const { evaluations } = runs[state.run];
  return { before: state.before ?? evaluations[0], after: state.after ?? evaluations.at(-1) };
}

function drawHeldOut() {
  const run = runs[state.run];
  const { before, after } = compared();
  const seen = run.heldOut.filter((sample) => [before, after].includes(sample.step));
  const problems = Map.groupBy(seen, (sample) => `${sample.set ?? ""} ${sample.row}`);
  const mean = (samples) => ({ reward: meanReward(samples), samples });
  const pairs = [...problems.values()].filter((ofProblem) => ofProblem.some(fits)).map((ofProblem) => {
    const ofStep = Map.groupBy(ofProblem, (sample) => sample.step);
    const steps = [before, after].filter((step) => ofStep.has(step));
    return { first: mean(ofStep.get(steps[0])), last: mean(ofStep.get(steps.at(-1))), steps };
  });
  const size = (pair) => Math.abs(pair.last.reward - pair.first.reward) || 0;
  pairs.sort((a, b) => size(b) - size(a));

  const worse = pairs.filter((pair) => pair.last.reward < pair.first.reward).length;
  const better = pairs.filter((pair) => pair.last.reward > pair.first.reward).length;
  const parts = [make("p", {}, `${pairs.length} problems: ${better} better, ${worse} worse, the largest changes first`)];
  for (const step of new Set([before, after]))
    parts.push(summary(seen.filter((sample) => sample.step === step && fits(sample)), `at step ${step}: `));
  for (const { first, last, steps } of pairs.slice(0, state.shown)) {
    const cards = [first.samples[0], ...(new Set(steps).size > 1 ? [last.samples[0]] : [])].map(card);
    const change = steps.length > 1 ? [difference(first, last), `${short(first.reward)} → ${short(last.reward)}`] : [`only at step ${steps[0]}`];
    const head = make("div", { class: "row" }, ...change, `row ${first.samples[0].row}`);
    parts.push(make("section", { class: "problem" }, head, make("div", { class: "side" }, ...cards)));
  }
  byId("list").replaceChildren(...parts, more(pairs.length));
}

// Of those that have one; NaN where none does.
function meanReward(samples) {
  const rewards = samples.map((sample) => sample.reward).filter(isNumber);
  return rewards.reduce((sum, reward) => sum + reward, 0) / rewards.length;
}

// How often each value comes, the most frequent first.
function counted(values) {
  const counts = [...Map.groupBy(values, (value) => value)].map(([value, all]) => [value, all.length]);
  return counts.sort(([one, times], [other, more]) => more - times || (one < other ? -1 : 1));
}

// The most frequent completion, where a policy that answers everything alike shows, and the rewards.
function summary(samples, where = "") {
  if (!samples.length) return make("p", { class: "faint" }, `${where}no completion fits`);
  const number = samples.length === 1 ? "1 completion" : `${samples.length.toLocaleString("en")} completions`;
  const told = [`${where}${number}, mean reward ${short(meanReward(samples))}`];
  const without = samples.filter((sample) => !isNumber(sample.reward)).length;
  if (without) told.push(`, ${without.toLocaleString("en")} without one`);
  const rewards = counted(samples.map((sample) => sample.reward).filter(isNumber));
  if (rewards.length && rewards.length <= 4) told.push(` (${rewards.map(([value, count]) => `${short(value)} × ${count.toLocaleString("en")}`).join(", ")})`);

  const texts = counted(samples.map((sample) => sample.completion.trim()));
  const [[text, count]] = texts;
  if (count === 1) return make("p", { class: "summary" }, ...told, samples.length > 1 ? ", all different" : "");
  const letters = [...text]; // whole characters
  const cut = letters.length > 60 ? `${letters.slice(0, 60).join("")}…` : text;
  told.push(`, ${texts.length.toLocaleString("en")} different; ${count.toLocaleString("en")} times `);
  told.push(text ? make("bdi", {}, "“", ...plain(cut), "”") : "an empty one");
  return make("p", { class: "summary" }, ...told);
}

// Of a step, how many of its completions are in the log, and how many groups taught nothing.
function aboutStep(step) {
  const { config, metrics, byStep } = runs[state.run];
  const parts = [];
  const total = (config.batch_size ?? 0) * (config.num_generations ?? 0);
  const logged = (byStep.get(step) ?? []).length;
  if (logged < total) parts.push(`${logged} of the step's ${total} completions were logged`);
  const share = metrics.frac_reward_zero_std?.[metrics.step.indexOf(step)]; // none where steps are means of neighbours
  if (isNumber(share)) parts.push(`${Math.round(100 * share)} % of the groups with rewards have advantages that are all zero`);
  return parts.length ? make("p", { class: "faint" }, parts.join("; ")) : "";
}

function more(total) {
  if (total <= state.shown) return "";
  return button(`more: ${(total - state.shown).toLocaleString("en")} are below`, () => choose({ shown: state.shown + PAGE }));
}

function drawList() {
  if (state.view === "heldOut") return drawHeldOut();
  const samples = chosenSamples();
  const parts = [summary(samples)];
  if (state.view === "step") parts.push(aboutStep(state.step));
  if (isGrouped()) {
    let drawn = 0;
    for (const [group, ofGroup] of Map.groupBy(samples, (sample) => sample.group)) {
      if (drawn >= state.shown) break;
      drawn += ofGroup.length;
      const [first] = ofGroup;
      parts.push(make("h2", { id: `group-${group}` }, `group ${group}, dataset row ${first.row}`));
      parts.push(promptLine(first), make("div", { class: "side" }, ...ofGroup.map(card)));
    }
  } else {
    let last = null;
    for (const sample of samples.slice(0, state.shown)) {
      if (state.view === "row" && sample.step !== last) parts.push(make("h2", {}, `step ${sample.step}`));
      last = sample.step;
      parts.push(card(sample));
    }
  }
  parts.push(more(samples.length));
  byId("list").replaceChildren(...parts);
}

// -- Where one is ---------------------------------------------------------------------------------

function hash(changes = {}) {
  const { shown, ...known } = { ...state, ...changes };
  const kept = Object.entries(known).filter(([, value]) => value !== null && value !== "");
  return `#${new URLSearchParams(kept)}`;
}

const saveAddress = () => history.replaceState(null, "", hash());

function choose(changes, redraw = draw) {
  Object.assign(state, { shown: PAGE }, changes);
  saveAddress();
  redraw();
}

function draw() {
  drawCurves();
  drawControls();
  drawList();
}

function open(key) {
  state.open = key;
  saveAddress();
  drawList();
  byId(`sample-${key}`)?.scrollIntoView({ block: "nearest" });
}

const toRun = (run) => choose({ ...NO_FILTER, run, step: runs[run].steps.at(-1) ?? null, sort: "group", order: 1, before: null, after: null, open: null, row: null });
const toView = (view) => choose({ view, set: "", open: null }); // the views have different data sets
const toRow = (row) => row !== undefined && choose({ view: "row", row, set: "", open: null });

function toGroup(sample) {
  choose({ view: "step", step: sample.step, sort: "group", order: 1, open: null, ...NO_FILTER, shown: 1e9 });
  byId(`group-${sample.group}`)?.scrollIntoView();
}

function move(by) {
  const { steps } = runs[state.run];
  const step = steps[steps.indexOf(state.step) + by];
  if (step !== undefined) choose({ step, open: null });
}

function toNext(by) {
  const keys = [...document.querySelectorAll("article")].map((article) => article.id.slice("sample-".length));
  const next = keys[Math.max(keys.indexOf(String(state.open)) + by, 0)];
  if (next !== undefined) open(next);
}

const opened = () => runs[state.run].samples.find((sample) => sample.key === state.open);

const KEYS = {
  "]": ["the next step", () => move(1)],
  "[": ["the step before", () => move(-1)],
  j: ["the next completion", () => toNext(1)],
  k: ["the one before", () => toNext(-1)],
  g: ["its group side by side", () => opened() && toGroup(opened())],
  p: ["its prompt over the steps", () => opened() && toRow(opened().row)],
  s: ["samples of a step", () => toView("step")],
  h: ["held-out problems", () => toView("heldOut")],
  "/": ["filter by text", () => document.querySelector("input[type=search]").focus()],
  "?": ["these keys", () => byId("help").showModal()],
};

document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") document.activeElement.blur();
  if (event.target.matches("input, select") || event.ctrlKey || event.metaKey || event.altKey) return;
  const [, act] = KEYS[event.key] ?? [];
  if (!act) return;
  event.preventDefault();
  act();
});

const NUMBERS = ["run", "step", "order", "row", "before", "after"];

function fromAddress() {
  Object.assign(state, START);
  for (const [name, value] of new URLSearchParams(location.hash.slice(1))) {
    if (name in START && name !== "shown") state[name] = NUMBERS.includes(name) ? Number(value) : value;
  }
  if (!runs[state.run]) state.run = 0;
  const run = runs[state.run];
  if (!run.byKey.has(state.open)) state.open = null;
  if (!run.byStep.has(state.step)) state.step = run.steps.at(-1) ?? null;
}

// -- A run that goes on ---------------------------------------------------------------------------

// The page loads itself anew when a run has written, while nobody reads a completion or fills in a field; a large one,
// which takes long to load, less often.
const WAIT = Math.max(3000, 20 * performance.now());

async function follow() {
  const answer = await fetch("state").catch(() => null); // the server may be gone
  const isRead = state.open !== null || byId("controls").contains(document.activeElement) || document.hidden;
  if (answer?.ok && !isRead && (await answer.text()) !== data.state) {
    const isLast = state.step === (runs[state.run].steps.at(-1) ?? null);
    if (isLast) history.replaceState(null, "", hash({ step: null }));
    return location.reload();
  }
  setTimeout(follow, WAIT);
}

runs.forEach(prepare);
fromAddress();
drawHead();
draw();
byId("help").append(
  make("h2", {}, "keys"),
  make("table", {}, ...Object.entries(KEYS).map(([key, [what]]) => make("tr", {}, make("td", {}, key), make("td", {}, what)))),
  button("close", () => byId("help").close()),
);
if (state.open !== null) byId(`sample-${state.open}`)?.scrollIntoView();
window.addEventListener("hashchange", () => { fromAddress(); draw(); });
if (data.state) setTimeout(follow, WAIT);
