// Tables of four rows and more sort by a click on a header; those wider than their place keep their first column.

const NUMBER = /^[+-]?[\d ,]*\.?\d+/;

function key(row, column) {
  const text = row.cells[column].textContent.trim().replace("\u2212", "-");
  const found = text.match(NUMBER);
  return found ? Number(found[0].replace(/[ ,]/g, "")) : text.toLowerCase();
}

function compare(a, b) {
  if (typeof a === typeof b) return a < b ? -1 : a > b ? 1 : 0;
  return typeof a === "number" ? -1 : 1; // numbers before words
}

function sort(table, header) {
  // The first click on a column of numbers puts the largest first.
  const before = header.ariaSort;
  const isDescending = before === "none" ? header.style.textAlign === "right" : before === "ascending";
  const sign = isDescending ? -1 : 1;
  const body = table.tBodies[0];
  const rows = [...body.rows].sort((a, b) => sign * compare(key(a, header.cellIndex), key(b, header.cellIndex)));
  for (const other of table.tHead.rows[0].cells) other.ariaSort = "none";
  header.ariaSort = isDescending ? "descending" : "ascending";
  body.append(...rows);
}

function prepare(table) {
  if (table.tBodies[0] && table.tBodies[0].rows.length >= 4 && !table.closest(".doc")) {
    for (const header of table.tHead.rows[0].cells) {
      header.ariaSort = "none";
      header.tabIndex = 0;
      header.addEventListener("click", () => sort(table, header));
      header.addEventListener("keydown", (event) => event.key === "Enter" && sort(table, header));
    }
  }
}

function mark(table) {
  const frame = table.closest(".md-typeset__scrollwrap");
  frame?.classList.toggle("wide-table", table.offsetWidth > frame.clientWidth);
}

const tables = () => document.querySelectorAll(".md-typeset__table > table");
addEventListener("load", () => {
  tables().forEach(prepare);
  tables().forEach(mark);
});
addEventListener("resize", () => tables().forEach(mark));
