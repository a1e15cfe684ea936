// Class colors and attention weights as pixels.

const DECADES = 3; // brightness is logarithmic over this many powers of ten, because most weights are small
const COLUMN = [86, 190, 240];
const ROW = [255, 158, 74];
const HEAT = [[101, 21, 110], [159, 42, 99], [212, 72, 66], [245, 125, 21], [250, 193, 39], [252, 230, 120]];

// Draw labels (one class id per pixel) in their colors; classes have an alpha of 0 to 255 each.
export function drawLabels(canvas, labels, width, height, palette, alphas) {
  canvas.width = width;
  canvas.height = height;
  const context = canvas.getContext("2d");
  const image = context.createImageData(width, height);
  const colors = new Uint32Array(256);
  palette.forEach(([red, green, blue], k) => { colors[k] = ((alphas[k] << 24) | (blue << 16) | (green << 8) | red) >>> 0; });
  const pixels = new Uint32Array(image.data.buffer);
  for (let k = 0; k < labels.length; k++) pixels[k] = colors[labels[k]];
  context.putImageData(image, 0, 0);
}

// Draw the weights of all cells as a heat map.
export function drawReach(canvas, attention) {
  const [rows, columns] = attention.cells;
  const light = brightness(attention.reach);
  drawCells(canvas, attention, rows, columns, (k) => [heatColor(light[k]), light[k]], true);
}

// Draw the weights along the column and the row of a cell.
export function drawLines(canvas, attention) {
  const [rows, columns] = attention.cells;
  const [i, j] = attention.cell;
  const column = brightness(attention.column);
  const row = brightness(attention.row);
  drawCells(canvas, attention, rows, columns, (k) => {
    const y = Math.floor(k / columns);
    const x = k % columns;
    if (x === j && (y !== i || column[y] >= row[x])) return [COLUMN, column[y]];
    return y === i ? [ROW, row[x]] : [ROW, 0];
  }, false);
}

// Draw weights as bars that start at an edge of the photo.
export function drawProfile(canvas, weights, color, centers, vertical) {
  const length = vertical ? canvas.clientHeight : canvas.clientWidth;
  const depth = vertical ? canvas.clientWidth : canvas.clientHeight;
  const ratio = window.devicePixelRatio || 1;
  canvas.width = Math.round((vertical ? depth : length) * ratio);
  canvas.height = Math.round((vertical ? length : depth) * ratio);
  const context = canvas.getContext("2d");
  context.scale(ratio, ratio);
  context.fillStyle = color;
  const largest = Math.max(...weights);
  const thickness = Math.max(1, length / weights.length - 1);
  weights.forEach((weight, k) => {
    const size = Math.max(1, (weight / largest) * depth);
    const start = centers[k] * length - thickness / 2;
    if (vertical) context.fillRect(0, start, size, thickness);
    else context.fillRect(start, 0, thickness, size);
  });
}

// Return the centers of cells along an axis, as fractions of the photo: corners are aligned at the predicted size.
export function cellCenters(cells, predicted) {
  return Array.from({ length: cells }, (_, k) => ((cells > 1 ? (k * (predicted - 1)) / (cells - 1) : (predicted - 1) / 2) + 0.5) / predicted);
}

function drawCells(canvas, attention, rows, columns, colorOf, smooth) {
  const small = new OffscreenCanvas(columns, rows);
  const smallContext = small.getContext("2d");
  const image = smallContext.createImageData(columns, rows);
  for (let k = 0; k < rows * columns; k++) {
    const [[red, green, blue], alpha] = colorOf(k);
    image.data.set([red, green, blue, Math.round(235 * alpha)], 4 * k);
  }
  smallContext.putImageData(image, 0, 0);
  const context = canvas.getContext("2d");
  context.clearRect(0, 0, canvas.width, canvas.height);
  context.imageSmoothingEnabled = smooth;
  context.imageSmoothingQuality = "high";
  const [x, width] = extent(columns, attention.predicted_size[1]);
  const [y, height] = extent(rows, attention.predicted_size[0]);
  context.drawImage(small, x * canvas.width, y * canvas.height, width * canvas.width, height * canvas.height);
}

// Return start and length of all cells along an axis, as fractions of the photo; the outermost cells reach beyond it.
function extent(cells, predicted) {
  if (cells === 1) return [0, 1];
  const pitch = (predicted - 1) / (cells - 1) / predicted;
  return [0.5 / predicted - pitch / 2, cells * pitch];
}

// Scale weights to 0 to 1: 1 for the largest, 1 / DECADES less for every power of ten below.
function brightness(weights) {
  const largest = Math.max(...weights);
  return weights.map((weight) => Math.max(0, 1 + Math.log10(weight / largest) / DECADES));
}

function heatColor(light) {
  const position = light * (HEAT.length - 1);
  const k = Math.min(Math.floor(position), HEAT.length - 2);
  return HEAT[k].map((value, c) => value + (HEAT[k + 1][c] - value) * (position - k));
}

export const css = ([red, green, blue]) => `rgb(${red}, ${green}, ${blue})`;
export const COLUMN_COLOR = css(COLUMN);
export const ROW_COLOR = css(ROW);
