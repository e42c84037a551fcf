// what is drawn along an axis

/* An axis of errors, logarithmic: zeros in a band of their own below it, what is not finite in one above. Returns the
   height of an error, and the lines of the axis. */
function errorAxis(errors, { left, right, top, bottom }) {
  const BAND = 24, upper = top + BAND + 6, lower = bottom - BAND - 6;
  let least = Infinity, most = 0;
  for (const error of errors) {
    if (error > 0 && error < Infinity) { least = Math.min(least, error); most = Math.max(most, error); }
  }
  let low = -8, high = 0;
  if (most > 0) {
    low = Math.floor(Math.log10(least));
    high = Math.max(low + 1, Math.ceil(Math.log10(most)));
  }
  const heights = { 0: bottom - BAND / 2, Infinity: top + BAND / 2 };
  const y = (error) => heights[error] ?? lower - (Math.log10(error) - low) / (high - low) * (lower - upper);
  const text = (at, words) => draw("text", { x: left - 8, y: at + 4, "text-anchor": "end" }, words);
  const lines = [[heights.Infinity, "no number"], [heights[0], "0"]].flatMap(([at, words]) =>
    [draw("rect", { class: "band", x: left, y: at - BAND / 2, width: right - left, height: BAND, rx: 3 }), text(at, words)]);
  for (let power = low; power <= high; power += Math.ceil((high - low) / 6)) {
    const at = y(10 ** power);
    lines.push(draw("line", { class: "grid", x1: left, x2: right, y1: at, y2: at }),
      text(at, power === 0 ? "1" : `1e${power}`));
  }
  return { y, lines };
}

/* An axis from 0 to the largest of some values. */
function valueAxis(most, unit, { left, right, top, bottom }) {
  const power = 10 ** Math.floor(Math.log10(most / 4 || 1)), apart = power * [1, 2, 5, 10].find((k) => k * power * 4 >= most);
  const y = (value) => bottom - Math.max(0, value) / (most || 1) * (bottom - top);
  const lines = [];
  for (let k = 0; k * apart <= most; k++) {
    const at = y(k * apart);
    lines.push(draw("line", { class: "grid", x1: left, x2: right, y1: at, y2: at }),
      draw("text", { x: left - 8, y: at + 4, "text-anchor": "end" }, `${+(k * apart).toPrecision(3)} ${unit}`));
  }
  return { y, lines };
}

/* A chart of groups side by side, layers or steps: the pointer and the arrow keys go from one to the next, a click and
   Enter choose one.

   name(i)      below the axis
   say(i)       elements of what is said of it
   parts(area)  draws them: area has left, right, top, bottom, each (the width of a group) and x (its middle)
   chosen()     the chosen group, if there is one */
function chart(box, { name, say, parts, chosen = () => null, choose = () => {} }) {
  const svg = box.querySelector("svg"), tip = box.querySelector(".tip"), overlay = draw("g", {});
  let area = { width: 0 }, n = 0, pointed = null;

  function group(i, kind) {
    if (i === null) return [];
    const width = Math.max(area.each, 3);
    return [draw("rect", { class: kind, x: area.x(i) - width / 2, y: area.top, width, height: area.bottom - area.top })];
  }

  /* The names that there is space for: those at round places, and the last. */
  function names() {
    const wide = (i) => 7 * name(i).length + 8, needed = n ? wide(n - 1) / area.each : 1;
    const power = 10 ** Math.floor(Math.log10(Math.max(1, needed)));
    const apart = power * [1, 2, 5, 10].find((k) => k * power >= needed);
    const places = [...Array(n).keys()].filter((i) => i % apart === 0);
    if (n && (n - 1 - places.at(-1)) * area.each >= wide(n - 1)) places.push(n - 1);
    return places.map((i) => draw("text", { x: area.x(i), y: area.bottom + 16, "text-anchor": "middle" }, name(i)));
  }

  function point(i) {
    pointed = i;
    overlay.replaceChildren(...group(i, "pointed"));
    tip.hidden = i === null;
    if (i === null) return;
    tip.replaceChildren(...say(i));
    const right = area.x(i) + area.each / 2 + 8, left = area.x(i) - area.each / 2 - 8 - tip.offsetWidth;
    const at = right + tip.offsetWidth < area.width ? right : left;
    tip.style.left = `${Math.max(4, Math.min(area.width - tip.offsetWidth - 4, at))}px`;
    tip.style.top = "8px";
  }

  function at(event) {
    const i = Math.floor((event.clientX - svg.getBoundingClientRect().left - area.left) / area.each);
    return i >= 0 && i < n ? i : null;
  }

  svg.addEventListener("pointermove", (event) => point(at(event)));
  svg.addEventListener("pointerleave", () => point(null));
  svg.addEventListener("click", (event) => { if (at(event) !== null) choose(at(event)); });
  svg.addEventListener("focus", () => { if (svg.matches(":focus-visible")) point(chosen() ?? 0); });
  svg.addEventListener("blur", () => point(null));
  svg.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || !n) return;
    if (event.key === "Enter" && pointed !== null) return choose(pointed);
    const by = { ArrowRight: 1, ArrowLeft: -1, Home: -Infinity, End: Infinity }[event.key];
    if (by === undefined) return;
    event.preventDefault();
    point(Math.min(n - 1, Math.max(0, (pointed ?? chosen() ?? 0) + by)));
  });

  function show(groups = n) {
    const again = pointed;
    n = groups;
    const width = svg.clientWidth, height = svg.clientHeight;
    area = { width, left: 74, right: width - 14, top: 10, bottom: height - 24 };
    area.each = (area.right - area.left) / Math.max(1, n);
    area.x = (i) => area.left + (i + 0.5) * area.each;
    svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    svg.replaceChildren(...parts(area), ...names(), ...group(chosen(), "chosen-group"), overlay);
    point(again !== null && again < n ? again : null);
  }
  new ResizeObserver(() => { if (svg.clientWidth !== area.width) show(); }).observe(svg);
  return { show };
}
