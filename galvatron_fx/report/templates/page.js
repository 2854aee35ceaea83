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

// Pictures over time tell what is under the pointer, and show a part of the step that is dragged over.
const HINT = "Point at the picture to read it; drag over a part to see it larger.";
function amount(number, units, base) {
  const [unit, size] = units.find(([, least]) => Math.abs(number) >= least * base) || units[units.length - 1];
  return `${Number((number / size).toPrecision(3))} ${unit}`;
}
const inSeconds = (s) => amount(s, [["s", 1], ["ms", 1e-3], ["us", 1e-6]], 1);
const inBytes = (b) => amount(b, [["GB", 1e9], ["MB", 1e6], ["kB", 1e3], ["B", 1]], 1);

// Of a path of boxes: where each begins and how wide it is.
function boxesOf(path) {
  const found = path.getAttribute("d").matchAll(/M([\d.]+) ([\d.]+)h([\d.]+)v([\d.]+)/g);
  return Array.from(found, ([, x, y, width, height]) => [Number(x), Number(y), Number(width), Number(height)]);
}
// Of a path around an area: its upper and its lower edge, as corners from left to right.
function edgesOf(path) {
  let x = 0, y = 0;
  const corners = Array.from(path.getAttribute("d").matchAll(/([MHV])([\d.-]+)(?: ([\d.-]+))?/g), ([, to, a, b]) => {
    if (to !== "V") x = Number(a);
    if (to !== "H") y = Number(to === "M" ? b : a);
    return [x, y];
  });
  const turn = corners.findIndex(([at], i) => i + 1 < corners.length && corners[i + 1][0] < at);
  const last = turn < 0 ? corners.length - 1 : turn;
  const first = last > 0 && corners[last - 1][0] === corners[last][0] ? last - 1 : last;
  return [corners.slice(0, first + 1), corners.slice(last).reverse()];
}
const edgeAt = (edge, x) => edge.reduce((y, corner) => (corner[0] <= x ? corner[1] : y), edge[0][1]);

function readable(view) {
  const boxes = [], areas = [], titled = [];
  for (const path of view.querySelectorAll("path[data-lane]")) boxes.push([path.dataset, boxesOf(path)]);
  for (const path of view.querySelectorAll("path[data-pixel]")) areas.push([path, edgesOf(path)]);
  for (const rect of view.querySelectorAll("rect")) {
    const [x, y, width, height] = ["x", "y", "width", "height"].map((name) => Number(rect.getAttribute(name)));
    if (rect.textContent) titled.push([rect.textContent, x, y, width, height]);
  }
  return (x, y, toSeconds) => {
    for (const [text, left, top, width, height] of titled) {
      if (left <= x && x <= left + width && top <= y && y <= top + height) return text;
    }
    for (const [{ lane, name }, spans] of boxes) {
      for (const [left, top, width, height] of spans) {
        if (top > y || y > top + height) break;
        if (left > x || x > left + width) continue;
        const [start, end] = [toSeconds(left), toSeconds(left + width)];
        return `${lane === name ? name : `${lane}, ${name}`}: ${inSeconds(end - start)}, from ${inSeconds(start)} on`;
      }
    }
    for (const [path, edges] of areas) {
      const [upper, lower] = edges.map((edge) => edgeAt(edge, x));
      if (upper <= y && y <= lower) {
        return `${path.dataset.name}: ${inBytes((lower - upper) * Number(path.dataset.pixel))}`;
      }
    }
    return "";
  };
}

for (const view of document.querySelectorAll("svg.time")) {
  const picture = view.ownerSVGElement, total = Number(view.dataset.seconds), read = readable(view);
  const [left, top, width, height] = view.getAttribute("viewBox").split(" ").map(Number);
  const names = Array.from(picture.children, (text) => [text, Number(text.getAttribute("x"))]).filter(
    ([text, x]) => text.getAttribute("text-anchor") === "middle" && Number(text.getAttribute("y")) < top + height + 20 &&
      left - 1 <= x && x <= left + width + 1);
  const bar = document.createElement("p"), says = document.createElement("span");
  const selected = document.createElementNS(picture.namespaceURI, "rect");
  let from = left, shown = width, dragged = null;
  const toSeconds = (x) => ((x - left) / width) * total;
  const inStep = (x) => from + ((x - left) * shown) / width;
  function rest() {
    says.textContent = shown < width ? `${inSeconds(toSeconds(from))} to ${inSeconds(toSeconds(from + shown))}` : HINT;
  }
  function show(start, span) {
    shown = Math.min(width, Math.max(span, width / 1000));
    from = Math.min(left + width - shown, Math.max(left, start));
    view.setAttribute("viewBox", `${from} ${top} ${shown} ${height}`);
    for (const [text, x] of names) {
      const at = left + ((x - from) * width) / shown;
      text.setAttribute("x", at);
      text.setAttribute("visibility", at < left - 1 || at > left + width + 1 ? "hidden" : "visible");
    }
    rest();
  }
  function placeOf(event) {
    const frame = picture.getBoundingClientRect(), box = picture.viewBox.baseVal;
    const x = ((event.clientX - frame.left) * box.width) / frame.width + box.x;
    return [Math.min(left + width, Math.max(left, x)), ((event.clientY - frame.top) * box.height) / frame.height + box.y];
  }
  picture.addEventListener("pointermove", (event) => {
    const [x, y] = placeOf(event), what = read(inStep(x), y, toSeconds);
    says.textContent = `${inSeconds(toSeconds(inStep(x)))}${what ? " · " : ""}${what}`;
    if (dragged === null) return;
    selected.setAttribute("x", Math.min(x, dragged));
    selected.setAttribute("width", Math.abs(x - dragged));
  });
  picture.addEventListener("pointerleave", rest);
  picture.addEventListener("pointerdown", (event) => {
    const [x, y] = placeOf(event);
    if (event.button !== 0 || y > top + height) return;
    dragged = x;
    picture.setPointerCapture(event.pointerId);
    for (const [name, is] of [["class", "selected"], ["x", x], ["y", top], ["width", 0], ["height", height]]) {
      selected.setAttribute(name, is);
    }
    picture.append(selected);
  });
  for (const kind of ["pointerup", "pointercancel"]) {
    picture.addEventListener(kind, (event) => {
      const start = dragged, [x] = placeOf(event);
      dragged = null;
      selected.remove();
      if (start === null || kind === "pointercancel" || Math.abs(x - start) < 6) return;
      show(inStep(Math.min(x, start)), (Math.abs(x - start) * shown) / width);
    });
  }
  picture.addEventListener("dblclick", () => show(left, width));
  const moves = [["+", "nearer", () => show(from + shown / 4, shown / 2)],
    ["−", "further away", () => show(from - shown / 2, shown * 2)],
    ["←", "earlier", () => show(from - shown / 2, shown)], ["→", "later", () => show(from + shown / 2, shown)],
    ["whole step", "whole step", () => show(left, width)]];
  for (const [sign, label, move] of moves) {
    const button = document.createElement("button");
    [button.type, button.textContent] = ["button", sign];
    button.setAttribute("aria-label", label);
    button.addEventListener("click", move);
    bar.append(button);
  }
  bar.className = "zoom";
  bar.append(says);
  picture.after(bar);
  rest();
}
