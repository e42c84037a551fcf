(() => {
const data = JSON.parse(document.getElementById("data").textContent);
const nodes = data.nodes;
const VERDICTS = ["exact", "rounding", "inherited", "amplified", "introduced", "failed"];
const SERIES = ["cumulative", "isolated"];  // the latter is drawn over the former
const DEFAULTS = { q: "", verdict: "", op: "", step: "", metric: "nmse", sort: "order", node: "" };
const ROW = 28;

const count = (n) => n.toLocaleString("en");
const label = (node) => `step ${node.step}, node ${node.index}: ${node.op} ${node.name}`;

function number(x) {
  if (x === undefined) return "–";
  if (x === null || x === Infinity) return "not finite";
  return x === 0 ? "0" : Math.abs(x) >= 0.01 && Math.abs(x) < 1000 ? String(+x.toPrecision(4)) : x.toExponential(2);
}

/* A comparison's error: undefined where there is none, Infinity where it is no finite number. */
function errorOf(found, metric) {
  if (!found) return undefined;
  if (found.n_different === 0) return 0;
  if (metric === "bytes") return found.n_different / found.n_bytes;
  return found[metric] === null ? Infinity : found[metric];
}

// state: what the address's fragment says

const state = { ...DEFAULTS };
let errors = {};  // by series, of each node
let shown = [];  // places of the nodes that pass the filters, sorted
let isShown = [];
const words = nodes.map((n) =>
  [`${n.step}/${n.index}`, n.op, n.name, n.types, n.device, n.fused, n.not_judged, n.diagnosis, n.failure].join(" ").toLowerCase());

function readAddress() {
  Object.assign(state, fromAddress(DEFAULTS, ["metric", "op", "step"]));
  if (!["order", ...SERIES].includes(state.sort)) state.sort = DEFAULTS.sort;
  if (!/^\d+$/.test(state.node) || Number(state.node) >= nodes.length) state.node = "";
}

/* The error of a node in words; one that failed has none, though it sorts and is plotted as the largest. */
const said = (series, i) => (nodes[i].verdict === "failed" ? "–" : number(errors[series][i]));

function chosen() {
  return state.node === "" ? data.first_introduced ?? null : Number(state.node);
}

function update(change) {
  Object.assign(state, change);
  toAddress(state, DEFAULTS);
  show();
}

function show() {
  const verdicts = state.verdict.split(",").filter(Boolean);
  const wanted = state.q.toLowerCase().split(/\s+/).filter(Boolean);
  const others = (n, i) => (state.op === "" || n.op === state.op) && (state.step === "" || String(n.step) === state.step)
    && wanted.every((word) => words[i].includes(word));
  const counts = Object.fromEntries(VERDICTS.map((verdict) => [verdict, 0]));
  isShown = nodes.map((n, i) => {
    if (!others(n, i)) return false;
    counts[n.verdict] += 1;
    return !verdicts.length || verdicts.includes(n.verdict);
  });
  errors = Object.fromEntries(SERIES.map((series) => [series, nodes.map((n) =>
    n.verdict === "failed" && series === "isolated" ? Infinity : errorOf(n[series], state.metric))]));
  shown = [...nodes.keys()].filter((i) => isShown[i]);
  if (state.sort !== "order") {
    const by = errors[state.sort].map((error) => error ?? -1);
    shown.sort((a, b) => (by[a] === by[b] ? a - b : by[b] - by[a]));
  }
  showFilters(verdicts, counts);
  table.show();
  plot.show();
  showDetail();
}

function choose(i) {
  update({ node: String(i) });
  table.reveal(i);
}

// filters

function showFilters(verdicts, counts) {
  for (const key of ["metric", "op", "step"]) byId(key).value = state[key];
  if (byId("q").value !== state.q) byId("q").value = state.q;
  for (const chip of document.querySelectorAll(".chip")) {
    const verdict = chip.dataset.verdict;
    chip.setAttribute("aria-pressed", verdicts.includes(verdict));
    chip.classList.toggle("empty", counts[verdict] === 0);
    chip.querySelector("span").textContent = count(counts[verdict]);
  }
  for (const button of document.querySelectorAll("[data-sort]")) {
    const ordered = button.dataset.sort === "order" ? "ascending" : "descending";
    if (button.dataset.sort === state.sort) button.parentElement.setAttribute("aria-sort", ordered);
    else button.parentElement.removeAttribute("aria-sort");
  }
  const filtered = ["q", "verdict", "op", "step"].some((key) => state[key] !== "");
  byId("clear").hidden = !filtered;
  byId("count").textContent = filtered ? `${count(shown.length)} of ${count(nodes.length)} nodes` : `${count(nodes.length)} nodes`;
}

function connectFilters() {
  for (const op of [...new Set(nodes.map((n) => n.op))].sort()) byId("op").append(make("option", { value: op }, op));
  for (const step of new Set(nodes.map((n) => n.step))) {
    byId("step").append(make("option", { value: String(step) }, stepName(step)));
  }
  byId("q").addEventListener("input", (event) => update({ q: event.target.value }));
  for (const key of ["metric", "op", "step"]) byId(key).addEventListener("change", (event) => update({ [key]: event.target.value }));
  byId("clear").addEventListener("click", () => {
    update({ q: "", verdict: "", op: "", step: "" });
    byId("q").focus();
  });
  for (const chip of document.querySelectorAll(".chip")) {
    chip.addEventListener("click", () => {
      const verdicts = new Set(state.verdict.split(",").filter(Boolean));
      if (!verdicts.delete(chip.dataset.verdict)) verdicts.add(chip.dataset.verdict);
      update({ verdict: [...verdicts].join(",") });
    });
  }
  for (const button of document.querySelectorAll("[data-sort]")) {
    button.addEventListener("click", () => {
      update({ sort: button.dataset.sort });
      byId("scroll").scrollTop = 0;
    });
  }
}

const stepName = (step) => (step === 0 ? "prompt" : `step ${step}`);

// the table: of thousands of rows, those that are in sight

const table = (() => {
  const box = byId("scroll"), grid = byId("nodes"), body = byId("rows");
  const space = () => make("tr", { ariaHidden: "true" });
  const above = space(), below = space();

  function row(i, place) {
    const n = nodes[i];
    const error = (series) => make("td", { className: errors[series][i] === 0 ? "zero" : "" }, said(series, i));
    const made = make("tr", { className: "row", id: `row-${i}`, title: n.diagnosis ?? n.failure ?? "" },
      make("td", {}, `${n.step} / ${n.index}`), make("td", {}, n.op), make("td", { title: n.name }, n.name),
      make("td", { title: n.types }, n.types), make("td", { className: n.verdict }, n.verdict),
      error("isolated"), error("cumulative"));
    made.setAttribute("aria-rowindex", place + 2);
    made.setAttribute("aria-selected", i === chosen());
    made.dataset.node = i;
    return made;
  }

  function showRows() {
    const first = Math.max(0, Math.floor(box.scrollTop / ROW) - 8);
    const last = Math.min(shown.length, Math.ceil((box.scrollTop + box.clientHeight) / ROW) + 8);
    above.style.height = `${first * ROW}px`;
    below.style.height = `${(shown.length - last) * ROW}px`;
    body.replaceChildren(above, ...shown.slice(first, last).map((i, k) => row(i, first + k)), below);
    const current = chosen();
    if (current !== null && byId(`row-${current}`)) grid.setAttribute("aria-activedescendant", `row-${current}`);
    else grid.removeAttribute("aria-activedescendant");
  }

  function reveal(i) {
    const place = shown.indexOf(i), head = grid.tHead.offsetHeight;
    if (place < 0) return;
    const top = place * ROW, room = box.clientHeight - head - ROW;
    if (top < box.scrollTop) box.scrollTop = top;
    else if (top > box.scrollTop + room) box.scrollTop = top - room / 2;
    showRows();
  }

  box.addEventListener("scroll", showRows, { passive: true });
  body.addEventListener("click", (event) => {
    const clicked = event.target.closest(".row");
    if (clicked) choose(Number(clicked.dataset.node));
  });
  grid.addEventListener("keydown", (event) => {
    const page = Math.floor(box.clientHeight / ROW) - 2;
    const by = { ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page, Home: -Infinity, End: Infinity }[event.key];
    if (by === undefined || event.target !== grid || !shown.length) return;
    event.preventDefault();
    const place = shown.indexOf(chosen());
    choose(shown[Math.min(shown.length - 1, Math.max(0, place < 0 ? 0 : place + by))]);
  });
  return {
    reveal,
    show() {
      grid.setAttribute("aria-rowcount", shown.length + 1);
      byId("none").hidden = shown.length > 0;
      showRows();
    },
  };
})();

// the plot

const plot = (() => {
  const svg = byId("plot"), tip = byId("tip");
  const LEFT = 74, RIGHT = 14, TOP = 8, BOTTOM = 24;
  let scale, pointed = null;

  function makeScale() {
    const width = svg.clientWidth, height = svg.clientHeight;
    const places = state.step === "" ? [0, nodes.length - 1] : [
      nodes.findIndex((n) => String(n.step) === state.step), nodes.findLastIndex((n) => String(n.step) === state.step)];
    const [from, to] = places, across = (width - LEFT - RIGHT) / (to - from + 1);
    const area = { left: LEFT, right: width - RIGHT, top: TOP, bottom: height - BOTTOM };
    const x = (i) => LEFT + (i - from + 0.5) * across;
    return { width, height, from, to, across, x, ...errorAxis(SERIES.flatMap((series) => errors[series]), area) };
  }

  function axes() {
    const s = scale, parts = [...s.lines];
    let free = 0;
    for (let i = s.from; i <= s.to; i++) {
      if (i > s.from && nodes[i].step === nodes[i - 1].step) continue;
      const x = s.x(i) - s.across / 2, name = stepName(nodes[i].step);
      if (i > s.from) parts.push(draw("line", { class: "step", x1: x, x2: x, y1: TOP, y2: s.height - BOTTOM }));
      if (x < free) continue;
      parts.push(draw("text", { class: "step-name", x: x + 2, y: s.height - 7 }, name));
      free = x + 7 * name.length + 10;
    }
    return parts;
  }

  /* One path for all points of a verdict: discs are lines of no length with round ends, rings two arcs each. */
  const SHAPES = { isolated: "h0", cumulative: "m-3 0a3 3 0 1 0 6 0a3 3 0 1 0 -6 0" };

  function dots(series, verdict) {
    const points = [];
    for (let i = scale.from; i <= scale.to; i++) {
      const error = errors[series][i];
      if (isShown[i] && error !== undefined && nodes[i].verdict === verdict) {
        points.push(`M${scale.x(i).toFixed(1)} ${scale.y(error).toFixed(1)}${SHAPES[series]}`);
      }
    }
    return points.length ? [draw("path", { class: `dots ${series} ${verdict}`, d: points.join("") })] : [];
  }

  function mark(i, name) {
    if (i === null || i < scale.from || i > scale.to) return [];
    const x = scale.x(i), parts = [draw("line", { class: name, x1: x, x2: x, y1: TOP, y2: scale.height - BOTTOM })];
    for (const series of SERIES) {
      if (errors[series][i] !== undefined) parts.push(draw("circle", { class: "spot", cx: x, cy: scale.y(errors[series][i]), r: 5.5 }));
    }
    return parts;
  }

  const overlay = draw("g", {});
  function point(i) {
    pointed = i;
    overlay.replaceChildren(...mark(i, "cross"));
    tip.hidden = i === null;
    if (i === null) return;
    const n = nodes[i];
    tip.replaceChildren(make("p", {}, label(n)), make("p", {}, make("b", { className: n.verdict }, n.verdict),
      ` · isolated ${said("isolated", i)} · cumulative ${said("cumulative", i)}`));
    const x = scale.x(i), y = scale.y(errors.isolated[i] ?? errors.cumulative[i] ?? 0);
    const left = x + tip.offsetWidth + 20 < scale.width ? x + 12 : x - tip.offsetWidth - 12;
    tip.style.left = `${Math.max(4, left)}px`;
    tip.style.top = `${Math.min(scale.height - tip.offsetHeight - 6, Math.max(6, y - tip.offsetHeight - 12))}px`;
  }

  function nearest(event) {
    const box = svg.getBoundingClientRect(), x = event.clientX - box.left, y = event.clientY - box.top;
    const middle = scale.from + Math.floor((x - LEFT) / scale.across), reach = Math.ceil(14 / scale.across);
    let best = null, least = Infinity;
    for (let i = Math.max(scale.from, middle - reach); i <= Math.min(scale.to, middle + reach); i++) {
      if (!isShown[i]) continue;
      for (const series of SERIES) {
        if (errors[series][i] === undefined) continue;
        const distance = Math.hypot(scale.x(i) - x, scale.y(errors[series][i]) - y);
        if (distance < least) [best, least] = [i, distance];
      }
    }
    return best;
  }

  svg.addEventListener("pointermove", (event) => point(nearest(event)));
  svg.addEventListener("pointerleave", () => point(null));
  svg.addEventListener("click", (event) => {
    const i = nearest(event);
    if (i === null) return;
    choose(i);
    point(i);
  });
  svg.addEventListener("focus", () => { if (svg.matches(":focus-visible")) point(chosen()); });
  svg.addEventListener("blur", () => point(null));
  svg.addEventListener("keydown", (event) => {
    const order = [...nodes.keys()].slice(scale.from, scale.to + 1).filter((i) => isShown[i]);
    if (event.key === "Enter" && pointed !== null) choose(pointed);
    const by = { ArrowRight: 1, ArrowLeft: -1, Home: -Infinity, End: Infinity }[event.key];
    if (by === undefined || !order.length) return;
    event.preventDefault();
    const place = order.indexOf(pointed ?? chosen());
    point(order[Math.min(order.length - 1, Math.max(0, place < 0 ? 0 : place + by))]);
  });

  function show() {
    scale = makeScale();
    const points = SERIES.flatMap((series) => VERDICTS.flatMap((verdict) => dots(series, verdict)));
    svg.setAttribute("viewBox", `0 0 ${scale.width} ${scale.height}`);
    svg.replaceChildren(...(nodes.length ? axes() : []), ...mark(chosen(), "chosen"), ...points, overlay);
    point(null);
  }
  new ResizeObserver(() => { if (svg.clientWidth !== scale.width) show(); }).observe(svg);
  return { show };
})();

// the chosen node

function showDetail() {
  const i = chosen(), box = byId("detail");
  if (i === null) {
    box.replaceChildren(make("p", { className: "hint" }, "Choose a node in the plot or in the table."));
    return;
  }
  const n = nodes[i];
  const about = make("p", { className: "place" }, make("b", { className: n.verdict }, n.verdict),
    ` · ${stepName(n.step)}, node ${n.index}${n.device ? ` · computed by ${n.device}` : ""}${n.fused ? `, by ${n.fused}` : ""}${n.not_judged ? ` · not judged: ${n.not_judged}` : ""}${n.wrong_in ? ` · wrong: ${n.wrong_in}` : ""}`);
  const parts = [make("p", { className: "title" }, `${n.op} `, make("code", {}, n.name)), about];
  if (n.diagnosis || n.failure) {
    parts.push(make("p", { className: `diagnosis ${n.verdict}` }, make("span", {}, n.diagnosis ?? n.failure)));
  }
  for (const [what, text] of [["compute it again without the model", n.replay], ["nearest test cases of ggml", n.test]]) {
    if (text) parts.push(make("p", { className: "place" }, `${what}: `, make("code", { className: "command" }, text)));
  }
  parts.push(...metrics(n), ...histogram(n), ...heatMap(n.heat), ...blocks(n));
  box.replaceChildren(...parts);
}

function rowsOf(head, rows) {
  const made = make("table", {});
  made.append(make("thead", {}, make("tr", {}, ...head.map((text) => make("th", { scope: "col" }, text)))));
  made.append(make("tbody", {}, ...rows.map(([name, ...values]) =>
    make("tr", {}, make("th", { scope: "row" }, name), ...values.map((value) => make("td", {}, value))))));
  return made;
}

function metrics(n) {
  const series = ["isolated", "mirrored", "cumulative"].filter((name, k) => k === 0 || n[name]);
  const both = series.map((name) => n[name]);
  const each = (say) => both.map((found) => (found ? say(found) : "–"));
  const differs = (say) => each((found) => (found.n_different ? say(found) : "–"));
  const pair = (values) => (values ? `${count(values[0])} / ${count(values[1])}` : "–");
  const rows = [
    ["bytes that differ", ...each((c) => (c.n_different
      ? `${count(c.n_different)} (${(100 * c.n_different / c.n_bytes).toPrecision(3)} %)` : "none"))],
    ["written outside", ...each((c) => (c.outside ? "yes" : "no"))],
  ];
  if (both.some((c) => c?.n_different)) {
    rows.push(
      ["NMSE", ...differs((c) => number(c.nmse))],
      ["largest absolute", ...differs((c) => number(c.max_abs))],
      ["largest relative", ...differs((c) => number(c.max_rel))],
      ["cosine", ...differs((c) => (c.cosine === undefined || c.cosine === null ? number(c.cosine) : c.cosine.toFixed(9)))],
      ["NaN, reference / device", ...differs((c) => pair(c.nan))],
      ["infinite, reference / device", ...differs((c) => pair(c.inf))],
      ["first at [i3, i2, i1, i0]", ...differs((c) => (c.where ? `[${c.where.join(", ")}]` : "–"))]);
  }
  const shape = [["types", n.types], ["shape ne", n.ne.join(" × ")]];
  const compared = both.find(Boolean);
  if (compared) shape.push(["bytes", count(compared.n_bytes)]);
  if (n.nb) shape.push(["strides nb", n.nb.join(", ")]);
  if (typeof n.noise === "number") shape.push(["times the noise floor", number(n.noise)]);
  if (n.judged) {
    const { row, n_rows, error, limit, against } = n.judged;
    shape.push(["judged", `row ${count(row)} of ${count(n_rows)}: ${number(error)} from ${against}, limit ${number(limit)}`]);
  }
  return [make("h3", {}, "Tensor"), rowsOf([], shape), rowsOf(["", ...series], rows)];
}

function histogram(n) {
  const both = ["isolated", "cumulative"].filter((series) => n[series]?.ulp?.some(Boolean));
  if (!both.length) return [];
  const bins = Math.max(...both.map((series) => n[series].ulp.findLastIndex((k) => k > 0) + 1), 6);
  const name = (bin) => (bin < 3 ? String(bin) : `${2 ** (bin - 2) + 1}–${2 ** (bin - 1)}`);
  const most = Math.max(...both.flatMap((series) => n[series].ulp));
  const width = 420, height = 110, base = height - 18, each = width / bins, thick = Math.min(each * 0.8, 34) / both.length;
  const svg = draw("svg", { class: "histogram", viewBox: `0 0 ${width} ${height}`, role: "img" });
  const caption = make("figcaption", {}, "Elements by units in the last place, logarithmic", ...both.flatMap((series) =>
    [make("span", { className: `swatch ${series}` }), series]));
  svg.setAttribute("aria-label", both.map((series) => `${series}: ${n[series].ulp.slice(0, bins).map((k, bin) =>
    `${name(bin)}: ${count(k)}`).join(", ")}`).join("; "));
  const every = Math.ceil(44 / each);
  for (let bin = 0; bin < bins; bin++) {
    const middle = (bin + 0.5) * each;
    both.forEach((series, k) => {
      const found = n[series].ulp[bin] ?? 0;
      const tall = found ? 3 + Math.log1p(found) / Math.log1p(most) * (base - 6) : 0;
      svg.append(draw("rect", { class: series, x: middle + (k - both.length / 2) * thick, y: base - tall, width: thick, height: tall, rx: 1 },
        draw("title", {}, `${name(bin)} ulp: ${count(found)} elements, ${series}`)));
    });
    if (bin < 3 ? each > 12 || bin === 0 : (bin - 3) % every === 0) {
      svg.append(draw("text", { x: middle, y: height - 5 }, bin < 3 ? name(bin) : `≤${shortNumber(2 ** (bin - 1))}`));
    }
  }
  svg.append(draw("line", { class: "base", x1: 0, x2: width, y1: base + 0.5, y2: base + 0.5 }));
  return [make("h3", {}, "Distance in ULP"), make("figure", {}, svg, caption)];
}

function shortNumber(x) {
  for (const [size, unit] of [[2 ** 30, "G"], [2 ** 20, "M"], [2 ** 10, "k"]]) if (x >= size) return `${x / size}${unit}`;
  return String(x);
}

function colour(name) {
  const hex = getComputedStyle(document.documentElement).getPropertyValue(`--heat-${name}`).trim();
  return [1, 3, 5].map((k) => parseInt(hex.slice(k, k + 2), 16));
}

function heatMap(heat) {
  if (!heat) return [];
  const { rows, cols, values } = heat;
  const canvas = make("canvas", { className: "heat", width: cols, height: rows });
  canvas.style.height = `${Math.min(300, Math.max(28, 400 * rows / cols))}px`;
  const positive = values.filter((x) => x > 0);
  const most = positive.reduce((a, b) => Math.max(a, b), 0), least = positive.reduce((a, b) => Math.min(a, b), most);
  const ramp = [colour("low"), colour("mid"), colour("high")], zero = colour("zero"), bad = colour("bad");
  const shade = (x) => {
    if (x === null) return bad;
    if (x === 0) return zero;
    const t = 2 * (least === most ? 1 : Math.log(x / least) / Math.log(most / least)), k = Math.min(1, Math.floor(t));
    return ramp[k].map((c, channel) => c + (ramp[k + 1][channel] - c) * (t - k));
  };
  const pixels = new ImageData(cols, rows);
  values.forEach((x, k) => pixels.data.set([...shade(x), 255], 4 * k));
  canvas.getContext("2d").putImageData(pixels, 0, 0);

  const finite = most ? `from ${number(least)} to ${number(most)}` : "zero";
  const summary = `${count(heat.n_rows)} rows of ${count(heat.ne0)} elements; largest error of a patch ${finite}, `
    + `${count(values.filter((x) => x === 0).length)} of ${count(values.length)} patches without error`
    + (values.includes(null) ? `, ${count(values.filter((x) => x === null).length)} not finite` : "");
  canvas.setAttribute("role", "img");
  canvas.setAttribute("aria-label", summary);
  const caption = make("figcaption", {}, summary);
  const span = (k, parts, size) => {
    const first = Math.floor(k * size / parts), last = Math.max(first, Math.ceil((k + 1) * size / parts) - 1);
    return first === last ? String(first) : `${first}–${last}`;
  };
  canvas.addEventListener("pointermove", (event) => {
    const box = canvas.getBoundingClientRect();
    const row = Math.min(rows - 1, Math.floor((event.clientY - box.top) / box.height * rows));
    const col = Math.min(cols - 1, Math.floor((event.clientX - box.left) / box.width * cols));
    caption.textContent = `rows ${span(row, rows, heat.n_rows)}, elements ${span(col, cols, heat.ne0)}: ${number(values[row * cols + col])}`;
  });
  canvas.addEventListener("pointerleave", () => { caption.textContent = summary; });
  return [make("h3", {}, "Where the error is"), make("figure", {}, canvas, caption)];
}

function blocks(n) {
  const both = ["isolated", "cumulative"].filter((series) => n[series]?.blocks);
  if (!both.length) return [];
  const names = {
    n_blocks: "blocks", n_different: "that differ", n_scale: "in the scale", n_quants: "in the quants", off_by_one: "quants off by one",
    off_by_more: "quants off by more", swapped_nibbles: "nibbles swapped", rounding: "rounding used",
  };
  const say = (value) => (typeof value === "number" ? count(value) : String(value ?? "–"));
  const rows = Object.entries(names).map(([key, name]) => [name, ...both.map((series) => say(n[series].blocks[key]))]);
  return [make("h3", {}, "Quantised blocks"), rowsOf(["", ...both], rows)];
}

// keys: / searches, n and p go to the next and the previous wrong node of those that are shown

addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.target.matches("input, select")) {
    if (event.key === "Escape") event.target.blur();
    return;
  }
  if (event.key === "/") {
    event.preventDefault();
    byId("q").focus();
  } else if (event.key === "n" || event.key === "p") {
    const wrong = [...nodes.keys()].filter((i) => isShown[i] && ["introduced", "failed"].includes(nodes[i].verdict));
    const at = chosen() ?? -1;
    const next = event.key === "n" ? wrong.find((i) => i > at) : wrong.findLast((i) => i < at);
    if (next !== undefined) choose(next);
  }
});

// begin

connectFilters();
readAddress();
show();
if (chosen() !== null) table.reveal(chosen());
addEventListener("hashchange", () => {
  readAddress();
  show();
  if (chosen() === null) return;
  table.reveal(chosen());
  if (state.node !== "") byId("detail").scrollIntoView({ block: "nearest" });
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", showDetail);
})();

