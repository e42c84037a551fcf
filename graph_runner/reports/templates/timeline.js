(() => {
const data = JSON.parse(document.getElementById("data").textContent);
const { timelines, ops, steps } = data;
const times = steps.flatMap((step) => step.of.filter(Boolean).map((part) => part.ns)).sort((a, b) => a - b);
const isUneven = times.at(-1) > 8 * times[times.length >> 1];  // a long prompt, beside which single tokens vanish
const DEFAULTS = { step: "", by: isUneven ? "token" : "time", sort: "" };
const OWN = 8;  // ops that have a colour of their own
const MOST = 5;  // ops in a tip

const ms = (ns) => {
  const digits = ns < 1e6 ? 3 : 2;
  return (ns / 1e6).toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
};
const percent = (part, all) => `${(100 * part / (all || 1)).toFixed(1)}%`;
const sum = (values) => values.reduce((all, each) => all + each, 0);

function colour(place) {
  if (ops[place].device === "") return ops[place].op === "outside of nodes" ? "op-outside" : "op-copies";
  return place < OWN ? `op-${place}` : "op-more";
}

const swatch = (place) => make("span", { className: `swatch ${colour(place)}`, ariaHidden: "true" });

// state: what the address's fragment says

const state = { ...DEFAULTS };

function go(change) {
  toAddress({ ...state, ...change }, DEFAULTS);
  show();
}

const chosen = () => steps.filter((each) => state.step === "" || String(each.step) === state.step);

// bars: of each group a bar for each timeline, in which ops lie one over the other

/* The times of a timeline in a group, by op. */
function added(times) {
  const found = new Map();
  for (const [place, ns] of times) found.set(place, (found.get(place) ?? 0) + ns);
  return [...found].sort(([a], [b]) => a - b);
}

function bars(groups, unit, area) {
  const most = Math.max(...groups.flat().map((stack) => sum(stack.map(([, value]) => value))), 0);
  const axis = valueAxis(most, unit, area), wide = Math.max(1, area.each * 0.82 / timelines.length);
  const rects = groups.flatMap((stacks, i) => stacks.flatMap((stack, k) => {
    const x = area.x(i) + (k - timelines.length / 2) * wide;
    let below = 0;
    return stack.map(([place, value]) => {
      const top = axis.y(below + value), height = axis.y(below) - top;
      below += value;
      return draw("rect", { class: `bar ${colour(place)}`, x, y: top, width: Math.max(0.6, wide - (wide > 4 ? 1 : 0)), height });
    });
  }));
  return [...axis.lines, ...rects];
}

/* What is said of a group: its name, and of each timeline the time and the ops that take most of it. */
function said(title, stacks) {
  const lines = [make("p", {}, title)];
  stacks.forEach((stack, k) => {
    const all = sum(stack.map(([, ns]) => ns)), largest = [...stack].sort(([, a], [, b]) => b - a);
    lines.push(make("p", {}, `${timelines.length > 1 ? `${timelines[k].short}: ` : ""}${stack.length ? `${ms(all)} ms` : "not there"}`));
    for (const [place, ns] of largest.slice(0, timelines.length > 1 ? 3 : MOST)) {
      lines.push(make("p", {}, swatch(place), `${ops[place].op} ${ms(ns)} ms, ${percent(ns, all)}`));
    }
  });
  return lines;
}

// steps

const stacksOf = (step) => step.of.map((part) => (part ? added(part.times.map(([, place, ns]) => [place, ns])) : []));
const ofSteps = steps.map(stacksOf);

function stepBars(area) {
  const scaled = ofSteps.map((stacks, i) => stacks.map((stack, k) => {
    const part = steps[i].of[k];
    const by = { time: 1e6, token: 1e6 * part?.tokens, share: part?.ns / 100 }[state.by];
    return stack.map(([place, ns]) => [place, by ? ns / by : 0]);
  }));
  return bars(scaled, state.by === "share" ? "%" : "ms", area);
}

const stepChart = chart(byId("steps"), {
  name: (i) => String(steps[i].step),
  say: (i) => {
    const tokens = [...new Set(steps[i].of.map((part) => part?.tokens ?? 0))].join(" and ");
    return said(`step ${steps[i].step}: ${tokens} token${tokens === "1" ? "" : "s"}`, ofSteps[i]);
  },
  parts: stepBars,
  chosen: () => { const i = steps.findIndex((each) => String(each.step) === state.step); return i < 0 ? null : i; },
  choose: (i) => go({ step: String(steps[i].step) === state.step ? "" : String(steps[i].step) }),
});

// layers

/* The times of a step that are a node's or a copy's. */
const inLayers = (part) => (part?.times ?? []).filter(([, place]) => colour(place) !== "op-outside");
const layers = [...new Set(steps.flatMap((step) => step.of.flatMap((part) => inLayers(part).map(([layer]) => layer))))]
  .sort((a, b) => (a ?? Infinity) - (b ?? Infinity));
let ofLayers = [];

function addLayers() {
  const at = new Map(layers.map((layer, i) => [layer, i]));
  const times = layers.map(() => timelines.map(() => []));
  for (const step of chosen()) {
    step.of.forEach((part, k) => {
      for (const [layer, place, ns] of inLayers(part)) times[at.get(layer)][k].push([place, ns]);
    });
  }
  ofLayers = times.map((each) => each.map(added));
}

const layerChart = chart(byId("layers"), {
  name: (i) => (layers[i] === null ? "none" : String(layers[i])),
  say: (i) => said(layers[i] === null ? "in no layer" : `layer ${layers[i]}`, ofLayers[i]),
  parts: (area) => bars(ofLayers.map((stacks) => stacks.map((stack) => stack.map(([place, ns]) => [place, ns / 1e6]))), "ms", area),
});

// nodes

function cells(node) {
  const [a, b] = node.of;
  if (timelines.length > 1) {
    return [(a ?? b).count, a ? ms(a.ns) : "", b ? ms(b.ns) : "", a?.ns > 0 && b ? (b.ns / a.ns).toFixed(2) : ""];
  }
  const rate = (value) => (a.ns > 0 && value ? (value / a.ns).toFixed(1) : "");
  return [a.count, ms(a.ns), rate(a.nbytes), rate(a.operations), a.ns > 0 && a.nbytes ? `${(100 * a.least / a.ns).toFixed(0)}%` : ""];
}

function showLongest() {
  const nodes = state.step === "" ? data.longest : chosen()[0].longest;
  byId("longest-of").textContent = state.step === "" ? "in all steps together" : `of step ${state.step}`;
  byId("longest").tBodies[0].replaceChildren(...nodes.map((node) => make("tr", {},
    make("th", { scope: "row" }, swatch(node.op), make("code", {}, node.id)), ...cells(node).map((text) => make("td", {}, text)))));
}

function show() {
  Object.assign(state, fromAddress(DEFAULTS, ["step", "by"]));
  for (const key of ["step", "by"]) byId(key).value = state[key];
  byId("layers-title").textContent = state.step === "" ? "Time by layer" : `Time by layer, step ${state.step}`;
  addLayers();
  stepChart.show(steps.length);
  layerChart.show(layers.length);
  sortRows(byId("ops"), state.sort);
  showLongest();
}

for (const row of byId("ops").tBodies[0].rows) row.cells[0].prepend(swatch(Number(row.dataset.op)));
for (const key of ["step", "by"]) byId(key).addEventListener("change", () => go({ [key]: byId(key).value }));
connectHeads(byId("ops"), (sort) => go({ sort }));
addEventListener("hashchange", show);
show();
})();
