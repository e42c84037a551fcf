// tables whose heads are buttons: rows in the order of a column, the largest value first, words from a to z

function sortRows(table, key) {
  const heads = [...table.tHead.rows[0].cells];
  const column = heads.findIndex((head) => head.querySelector("button")?.dataset.sort === key);
  for (const head of heads) head.removeAttribute("aria-sort");
  if (column < 0) return;
  const isWords = heads[column].classList.contains("words") || column === 0;
  heads[column].setAttribute("aria-sort", isWords ? "ascending" : "descending");
  const value = (row) => Number(row.cells[column].dataset.value ?? -Infinity);
  const words = (row) => row.cells[column].textContent.trim();
  const body = table.tBodies[0];
  body.append(...[...body.rows].sort((a, b) => isWords
    ? words(a).localeCompare(words(b), "en", { numeric: true }) : value(b) - value(a) || 0));
}

function connectHeads(table, sort) {
  for (const button of table.tHead.querySelectorAll("[data-sort]")) {
    button.addEventListener("click", () => sort(button.dataset.sort));
  }
}
