"use strict";
(() => {
const cells = [...document.querySelectorAll(".cell")], chips = [...document.querySelectorAll(".chip")];
const PASSED = ["right", "right within rounding"];

// verdicts: the fragment has those that are chosen, and others are dimmed

function chosen() {
  return new Set((new URLSearchParams(location.hash.slice(1)).get("verdict") ?? "").split(",").filter(Boolean));
}

function show() {
  const verdicts = chosen();
  for (const chip of chips) chip.setAttribute("aria-pressed", verdicts.has(chip.dataset.verdict));
  for (const cell of cells) cell.classList.toggle("dim", verdicts.size > 0 && !verdicts.has(cell.dataset.verdict));
}

for (const chip of chips) {
  chip.addEventListener("click", () => {
    const verdicts = chosen(), name = chip.dataset.verdict;
    if (!verdicts.delete(name)) verdicts.add(name);
    location.hash = verdicts.size ? new URLSearchParams({ verdict: [...verdicts].join(",") }) : "";
    show();
  });
}

// keys

function beside(cell, down, right) {
  const place = cell.closest("td"), row = place.parentElement;
  const rows = [...document.querySelectorAll("tbody tr")];
  return rows[rows.indexOf(row) + down]?.cells[place.cellIndex + right]?.querySelector(".cell");
}

addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const at = cells.indexOf(document.activeElement);
  const by = { ArrowDown: [1, 0], ArrowUp: [-1, 0], ArrowRight: [0, 1], ArrowLeft: [0, -1] }[event.key];
  let next;
  if (by !== undefined && at >= 0) next = beside(cells[at], ...by);
  else if (event.key === "n") next = cells.find((cell, i) => i > at && !PASSED.includes(cell.dataset.verdict));
  else if (event.key === "p") next = cells.findLast((cell, i) => i < at && !PASSED.includes(cell.dataset.verdict));
  if (!next) return;
  event.preventDefault();
  next.focus();
});

show();
addEventListener("hashchange", show);
})();
