"use strict";

// A link to code that is folded away unfolds it.
function unfold() {
  const target = location.hash.length > 1 ? document.getElementById(location.hash.slice(1)) : null;
  if (!target) return;
  if (target instanceof HTMLDetailsElement) target.open = true;
  for (const details of target.querySelectorAll("details")) details.open = true;
  target.scrollIntoView();
}
window.addEventListener("hashchange", unfold);
window.addEventListener("load", unfold);
window.addEventListener("beforeprint", () => {
  for (const details of document.querySelectorAll("details")) details.open = true;
});

// Headings of sortable tables sort the rows of each group by what they say, or by their data-value.
function value(row, column) {
  const cell = row.cells[column];
  const number = Number(cell.dataset.value);
  return cell.dataset.value === undefined || Number.isNaN(number) ? cell.textContent.trim() : number;
}
function compare(a, b) {
  return typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b));
}
for (const table of document.querySelectorAll("table.sortable")) {
  const headings = Array.from(table.tHead.rows[0].cells);
  headings.forEach((heading, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...heading.childNodes);
    heading.append(button);
    button.addEventListener("click", () => {
      const sign = heading.getAttribute("aria-sort") === "descending" ? 1 : -1;
      for (const other of headings) other.removeAttribute("aria-sort");
      heading.setAttribute("aria-sort", sign > 0 ? "ascending" : "descending");
      for (const body of table.tBodies) {
        const rows = Array.from(body.rows).filter((row) => !row.classList.contains("group"));
        rows.sort((a, b) => sign * compare(value(a, column), value(b, column)));
        body.append(...rows);
      }
    });
  });
}
