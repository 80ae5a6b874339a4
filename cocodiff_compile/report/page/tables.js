// SPDX-License-Identifier: Apache-2.0
"use strict";
/* Tables: filter by words, sort by a column. */

function startTable(root) {
  const body = $("tbody", root);
  const rows = [...body.rows];
  const texts = rows.map((row) => row.textContent.toLowerCase());
  const input = $(".filter", root);
  if (input) {
    input.addEventListener("input", () => {
      const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
      let count = 0;
      rows.forEach((row, at) => {
        row.hidden = !words.every((word) => texts[at].includes(word));
        count += !row.hidden;
      });
      $(".count", root).textContent = count === rows.length ? `${count} rows` : `${count} of ${rows.length} rows`;
    });
  }
  $$("th button", root).forEach((button, column) => {
    button.addEventListener("click", () => sortTable(root, body, rows, column, button));
  });
}

function sortTable(root, body, rows, column, button) {
  const head = button.closest("th");
  const down = head.getAttribute("aria-sort") === "ascending";
  for (const other of $$("th", root)) other.removeAttribute("aria-sort");
  head.setAttribute("aria-sort", down ? "descending" : "ascending");
  const key = (row) => {
    const cell = row.cells[column];
    return "sort" in cell.dataset ? Number(cell.dataset.sort) : cell.textContent;
  };
  const order = (a, b) =>
    typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b), "en", { numeric: true });
  const sorted = rows.map((row) => [key(row), row]).sort((a, b) => order(a[0], b[0]));
  if (down) sorted.reverse();
  body.append(...sorted.map((item) => item[1]));
}
