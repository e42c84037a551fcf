(() => {
const data = JSON.parse(document.getElementById("data").textContent);
const tensors = data.tensors;
const DEFAULTS = { tensor: "", metric: "gain", sort: "per_mib" };
const METRICS = {
  gain: (t) => t.cost?.gain.value, per_mib: (t) => t.cost?.per_mib, nmse: (t) => t.error.nmse,
  worst: (t) => t.error.worst, outliers: (t) => t.error.outliers,
};
const COLUMNS = [
  ["name", "tensor"], ["type", "type"], ["gain", "KL falls by"], ["per_mib", "for each MiB"], ["nmse", "NMSE"],
  ["worst", "worst block"], ["outliers", "outliers"],
];

function number(x) {
  if (x === undefined) return "not measured";
  return x === 0 || Number.isInteger(x) ? x.toLocaleString("en")
    : Math.abs(x) >= 0.001 && Math.abs(x) < 1000 ? String(+x.toPrecision(4)) : x.toExponential(2);
}

// state: what the address's fragment says

const state = { ...DEFAULTS };
const layers = [...new Set(tensors.map((t) => t.layer))].sort((a, b) => (a ?? -1) - (b ?? -1));
const kinds = [...new Set(tensors.map((t) => t.kind))];
const at = new Map(tensors.map((t) => [`${t.layer} ${t.kind}`, t]));

function readAddress() {
  Object.assign(state, fromAddress(DEFAULTS, ["metric"]));
  if (!COLUMNS.some(([key]) => key === state.sort)) state.sort = DEFAULTS.sort;
  if (!tensors.some((t) => t.name === state.tensor)) state.tensor = sorted()[0].name;
}

function go(changes) {
  toAddress({ ...state, ...changes }, DEFAULTS);
  show();
}

// the heat map

function colour(name) {
  const hex = getComputedStyle(document.documentElement).getPropertyValue(`--heat-${name}`).trim();
  return [1, 3, 5].map((k) => parseInt(hex.slice(k, k + 2), 16));
}

function shades(values) {
  const positive = values.filter((x) => x > 0);
  const most = Math.max(...positive, 0), least = Math.max(Math.min(...positive, most), most / 1000);
  const ramp = [colour("low"), colour("mid"), colour("high")], zero = colour("zero");
  byId("least").textContent = positive.length ? `up to ${number(least)}` : "";
  byId("most").textContent = positive.length ? number(most) : "none above 0";
  return (x) => {
    if (!(x > 0)) return `rgb(${zero})`;
    const t = 2 * Math.max(0, least === most ? 1 : Math.log(x / least) / Math.log(most / least));
    const k = Math.min(1, Math.floor(t));
    return `rgb(${ramp[k].map((c, channel) => Math.round(c + (ramp[k + 1][channel] - c) * (t - k)))})`;
  };
}

function heatMap() {
  const metric = METRICS[state.metric], shade = shades(tensors.map(metric));
  const head = make("tr", {}, make("td", { className: "none" }),
    ...kinds.map((kind) => make("th", { scope: "col", textContent: kind.replace(/\.weight$/, "") })));
  const rows = layers.map((layer) => make("tr", {}, make("th", { scope: "row", textContent: layer ?? "–" }),
    ...kinds.map((kind) => {
      const tensor = at.get(`${layer} ${kind}`), value = tensor && metric(tensor);
      const cell = make("td", { className: !tensor ? "none" : value === undefined ? "unknown" : "" });
      if (!tensor) return cell;
      if (value !== undefined) cell.style.background = shade(value);
      cell.title = `${tensor.name}: ${number(value)}`;
      cell.dataset.tensor = tensor.name;
      cell.setAttribute("role", "gridcell");
      cell.setAttribute("aria-label", cell.title);
      cell.setAttribute("aria-selected", tensor.name === state.tensor);
      cell.tabIndex = tensor.name === state.tensor ? 0 : -1;
      return cell;
    })));
  const hadFocus = byId("heat").contains(document.activeElement);
  byId("heat").replaceChildren(make("thead", {}, head), make("tbody", {}, ...rows));
  if (hadFocus) byId("heat").querySelector('[aria-selected="true"]')?.focus();
}

byId("heat").addEventListener("click", (event) => {
  const name = event.target.dataset?.tensor;
  if (name) go({ tensor: name });
});

byId("heat").addEventListener("keydown", (event) => {
  const by = { ArrowDown: [1, 0], ArrowUp: [-1, 0], ArrowRight: [0, 1], ArrowLeft: [0, -1] }[event.key];
  if (!by || event.ctrlKey || event.metaKey || event.altKey) return;
  event.preventDefault();
  const chosen = tensors.find((t) => t.name === state.tensor);
  let row = layers.indexOf(chosen.layer) + by[0], column = kinds.indexOf(chosen.kind) + by[1];
  while (row >= 0 && row < layers.length && column >= 0 && column < kinds.length) {
    const next = at.get(`${layers[row]} ${kinds[column]}`);
    if (next) return go({ tensor: next.name });
    row += by[0], column += by[1];
  }
});

// the chosen tensor

function histogram(counts) {
  const width = 420, height = 130, base = height - 18, most = Math.max(...counts, 1), each = width / counts.length;
  const svg = draw("svg", { class: "histogram", viewBox: `0 0 ${width} ${height}`, role: "img" });
  const bin = (k) => `10^${data.bins[k]} to 10^${data.bins[k + 1]}`;
  svg.setAttribute("aria-label", counts.map((n, k) => (n ? `${bin(k)}: ${n}` : "")).filter(Boolean).join("; "));
  counts.forEach((n, k) => {
    const tall = n ? 2 + Math.log1p(n) / Math.log1p(most) * (base - 6) : 0;
    svg.append(draw("rect", { class: "isolated", x: k * each + 0.5, y: base - tall, width: each - 1, height: tall },
      draw("title", {}, `${bin(k)}: ${n.toLocaleString("en")} blocks`)));
    if (data.bins[k] % 2 === 0) svg.append(draw("text", { x: k * each + (k ? 0 : 12), y: height - 5 }, `1e${data.bins[k]}`));
  });
  svg.append(draw("line", { class: "base", x1: 0, x2: width, y1: base + 0.5, y2: base + 0.5 }));
  return make("figure", {}, svg, make("figcaption", {},
    "Blocks by their error, mean squared difference over the tensor's mean square; both axes logarithmic"));
}

function detail() {
  const t = tensors.find((each) => each.name === state.tensor), { error, cost } = t;
  const rows = [
    ["type", `${t.type_big} to ${t.type_small}`], ["weights", number(t.n_weights)],
    ["KL falls by", cost ? `${number(cost.gain.value)} ± ${number(cost.gain.error)} nats` : "not measured"],
    ["MiB more", cost ? number(cost.bytes / 2 ** 20) : "not measured"], ["for each MiB", number(cost?.per_mib)],
    ["NMSE", number(error.nmse)],
    ["worst block", `${number(error.worst)}, row ${error.worst_at[0]}, block ${error.worst_at[1]}`],
    ["outliers", number(error.outliers)],
  ];
  byId("tensor").replaceChildren(make("p", { className: "title", textContent: t.name }),
    make("table", {}, make("tbody", {}, ...rows.map(([name, value]) =>
      make("tr", {}, make("th", { scope: "row", textContent: name }), make("td", { textContent: value }))))),
    make("h3", { textContent: "Blocks" }), histogram(error.histogram));
}

// the table

function sorted() {
  const words = { name: (t) => t.name, type: (t) => t.type_small }[state.sort];
  if (words) return [...tensors].sort((a, b) => words(a).localeCompare(words(b), "en", { numeric: true }));
  const metric = METRICS[state.sort];
  return [...tensors].sort((a, b) => (metric(b) ?? -Infinity) - (metric(a) ?? -Infinity) || 0);
}

function list() {
  byId("columns").replaceChildren(...COLUMNS.map(([key, text]) => {
    const button = make("button", { type: "button", textContent: text });
    button.dataset.sort = key;
    button.addEventListener("click", () => { go({ sort: key }); byId("columns").querySelector(`[data-sort="${key}"]`).focus(); });
    const head = make("th", { scope: "col" }, button);
    if (key === state.sort) head.setAttribute("aria-sort", key === "name" || key === "type" ? "ascending" : "descending");
    return head;
  }));
  byId("rows").replaceChildren(...sorted().map((t) => {
    const link = make("a", { href: `#${new URLSearchParams({ ...state, tensor: t.name })}`, textContent: t.name });
    const row = make("tr", {}, make("th", { scope: "row" }, link), make("td", { textContent: t.type_small }),
      ...COLUMNS.slice(2).map(([key]) => make("td", { textContent: METRICS[key](t) === undefined ? "" : number(METRICS[key](t)) })));
    row.setAttribute("aria-selected", t.name === state.tensor);
    return row;
  }));
}

function show() {
  readAddress();
  byId("metric").value = state.metric;
  heatMap();
  detail();
  list();
}

byId("metric").addEventListener("change", () => go({ metric: byId("metric").value }));
addEventListener("hashchange", show);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", show);
show();
})();
