"use strict";
// The page is whole without this: it adds names to the points, sorting and a filter.
(() => {
  const namespace = "http://www.w3.org/2000/svg";
  const jobs = JSON.parse(document.getElementById("points").textContent);
  const shapes = [...document.querySelectorAll("#job-points path, #job-points use")];
  // Shapes within <defs> are patterns that others use.
  shapes.filter((shape) => !shape.closest("defs")).forEach((point, index) => {
    const job = jobs[index];
    const title = document.createElementNS(namespace, "title");
    title.textContent = job.text;
    point.append(title);
    point.addEventListener("click", () => { location.hash = job.row; });
  });

  const value = (row, column) => {
    const cell = row.cells[column];
    return cell.dataset.value === undefined ? cell.textContent : Number(cell.dataset.value);
  };
  const compare = (a, b) => {
    if (typeof a === "string" || typeof b === "string") return String(a).localeCompare(String(b));
    return (Number.isNaN(a) ? -Infinity : a) - (Number.isNaN(b) ? -Infinity : b);
  };
  document.querySelectorAll("table.sortable").forEach((table) => {
    const body = table.tBodies[0];
    table.querySelectorAll("thead button").forEach((button) => {
      button.addEventListener("click", () => {
        const header = button.parentElement;
        const down = header.getAttribute("aria-sort") !== "descending";
        for (const other of header.parentElement.cells) other.removeAttribute("aria-sort");
        header.setAttribute("aria-sort", down ? "descending" : "ascending");
        const rows = [...body.rows].sort((a, b) =>
          (down ? -1 : 1) * compare(value(a, header.cellIndex), value(b, header.cellIndex)));
        body.append(...rows);
      });
    });
  });

  const filter = document.getElementById("filter");
  filter.addEventListener("input", () => {
    const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
    for (const row of document.querySelectorAll("#jobs tbody tr")) {
      const text = row.textContent.toLowerCase();
      row.hidden = !words.every((word) => text.includes(word));
    }
  });
})();
