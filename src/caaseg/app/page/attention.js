// The attention of the selected pixel: drawn over the photo, and in numbers.

import { COLUMN_COLOR, ROW_COLOR, cellCenters, css, drawLines, drawProfile, drawReach } from "./drawing.js";
import { element, percent, swatch } from "./elements.js";

const MAX_SIDE = 800; // of the drawn heat map, which is scaled by the browser
const MIN_GATE_RANGE = 0.01; // below, gates are reported as equal instead of drawn as bars
const $ = (id) => document.getElementById(id);

let shown = null; // arguments of the last call of showAttention, to draw again when the window changes

export function showAttention(photo, model, answer, view) {
  shown = [photo, model, answer, view];
  const attention = answer.attention;
  $("explained-class").textContent = `: ${model.classes[answer.label]}`;
  $("instead").hidden = attention !== null;
  $("attention-parts").hidden = attention === null;
  $("view").hidden = attention === null || attention.column === null;
  if (attention === null) {
    $("instead").textContent = answer.reason;
    return;
  }
  drawHeat(photo, attention, attention.column === null ? "reach" : view);
  showPlaces(model, attention);
  $("class-weights").replaceChildren(
    ...attention.by_class.map(({ label, weight }) => bar(model.palette[label], model.classes[label], weight)));
  showGates(attention.gates);
}

export function drawAgain() {
  if (shown !== null && shown[2].attention !== null) showAttention(...shown);
}

function drawHeat(photo, attention, view) {
  const heat = $("heat");
  const scale = Math.min(1, MAX_SIDE / Math.max(photo.view_width, photo.view_height));
  heat.width = Math.max(1, Math.round(photo.view_width * scale));
  heat.height = Math.max(1, Math.round(photo.view_height * scale));
  if (view === "lines") drawLines(heat, attention);
  else drawReach(heat, attention);
  const hasLines = attention.column !== null;
  $("attention").parentElement.classList.toggle("without-profiles", !hasLines);
  $("key").replaceChildren();
  if (hasLines) {
    const centers = attention.cells.map((cells, axis) => cellCenters(cells, attention.predicted_size[axis]));
    drawProfile($("column-profile"), attention.column, COLUMN_COLOR, centers[0], true);
    drawProfile($("row-profile"), attention.row, ROW_COLOR, centers[1], false);
    $("key").append("Bars: weights ", underlined("along the column", "column"), ", and then ", underlined("along the row", "row"), "; their product covers the whole image. ");
  } else {
    $("key").append("Attention covers the whole image at once. ");
  }
  $("key").append("On the photo, brighter means a larger weight, logarithmically.");
}

function underlined(text, kind) {
  return element("span", { className: `axis ${kind}` }, text);
}

function showPlaces(model, attention) {
  $("places").replaceChildren(...attention.places.map((place, k) => {
    const mark = element("span", { className: `place${place.x > 0.6 ? " flipped" : ""}` },
      element("b", {}, String(k + 1)), element("span", {}, model.classes[place.label]));
    mark.style.left = `${100 * place.x}%`;
    mark.style.top = `${100 * place.y}%`;
    return mark;
  }));
  $("place-list").replaceChildren(
    ...attention.places.map((place, k) => bar(model.palette[place.label], `${k + 1}  ${model.classes[place.label]}`, place.weight)),
    bar(null, "around the pixel", attention.own_weight));
}

function bar(color, name, weight) {
  const filled = element("i", {});
  filled.style.width = `${100 * weight}%`;
  return element("li", {}, color === null ? element("span", { className: "swatch own" }) : swatch(css(color)),
    element("span", { className: "name" }, name), element("span", { className: "bar" }, filled),
    element("span", { className: "number" }, percent(weight)));
}

function showGates(gates) {
  const parts = [];
  if (gates !== null) {
    const [largest, smallest] = [gates.largest[0][1], gates.smallest[0][1]];
    parts.push(element("h3", {}, "Channel gates"), element("p", { className: "soft" },
      `Column gate times row gate, of ${gates.number} channels: 1 keeps a channel, 0 removes it.`));
    if (largest - smallest < MIN_GATE_RANGE) {
      parts.push(element("p", {}, `All gates are between ${smallest.toFixed(4)} and ${largest.toFixed(4)}: they weight all channels almost equally.`));
    } else {
      parts.push(element("div", { className: "tables" }, gateTable("Largest, by channel", gates.largest), gateTable("Smallest, by channel", gates.smallest)));
    }
  }
  $("gates").replaceChildren(...parts);
}

function gateTable(title, gates) {
  return element("div", {}, element("h4", {}, title), element("ul", { className: "bars gates" }, ...gates.map(([channel, gate]) => {
    const filled = element("i", {});
    filled.style.width = `${100 * gate}%`;
    return element("li", {}, element("span", { className: "name" }, String(channel)),
      element("span", { className: "bar" }, filled), element("span", { className: "number" }, gate.toFixed(2)));
  })));
}
