// The page: photos, the classes that one or two models predict, and the selected pixel.

import { drawAgain, showAttention } from "./attention.js";
import { css, drawLabels } from "./drawing.js";
import { element, percent, swatch } from "./elements.js";
import { ask, askBytes, predictionAddress, upload } from "./requests.js";

const DIMMED = 0.2; // opacity of the other classes while one is highlighted
const SAVED = { "labels.png": "labels as PNG", "overlay.jpg": "overlay as JPEG", "masks.zip": "one mask per class as ZIP" };
const THUMBNAIL = 96; // height in pixels
const $ = (id) => document.getElementById(id);
const stages = [$("classes"), $("attention")];

const state = {
  page: null, // answer of /api/page: models and limits
  photos: [],
  current: null, // the photo that is shown
  size: "auto",
  opacity: 65,
  hidden: [], // per model, the set of classes that are switched off; background from the start
  highlighted: null, // [model, class]
  explained: 0, // model whose attention is shown
  view: "reach",
};

let ticket = 0; // number of the last request to show a photo: answers to earlier requests are ignored
let explaining = new AbortController();

// Photos

async function addPhotos(files) {
  clearProblems();
  const added = [];
  for (const [k, file] of [...files].entries()) {
    setBusy(`Adding ${file.name}${files.length > 1 ? ` (${k + 1} of ${files.length})` : ""}`);
    try {
      if (file.size > state.page.max_megabytes * 2 ** 20) {
        throw new Error(`${file.name}: ${Math.round(file.size / 2 ** 20)} MB; expected at most ${state.page.max_megabytes}; save it smaller`);
      }
      added.push(remember(await upload(file)));
      if (added.length === 1) await show(added[0]);
    } catch (error) {
      showProblem(error);
    }
  }
  setBusy(null);
  for (const photo of added) await predictThumbnail(photo);
}

function remember(photo) {
  photo.predictions = new Map();
  photo.pixel = [Math.floor(photo.height / 2), Math.floor(photo.width / 2)];
  photo.thumbnail = element("canvas", {});
  photo.button = element("button", { type: "button", title: photo.name, onclick: () => show(photo) }, photo.thumbnail,
    element("span", { className: "hidden-text" }, photo.name));
  const remove = element("button", { type: "button", className: "remove", ariaLabel: `Remove ${photo.name}`, title: "Remove", onclick: () => removePhoto(photo) }, "×");
  photo.entry = element("li", {}, photo.button, remove);
  photo.image = new Image();
  photo.image.src = `/api/photos/${photo.id}/view.jpg`;
  state.photos.push(photo);
  $("gallery").append(photo.entry);
  photo.image.decode().then(() => drawThumbnail(photo), () => {});
  return photo;
}

async function removePhoto(photo) {
  state.photos = state.photos.filter((other) => other !== photo);
  photo.entry.remove();
  if (state.current === photo && state.photos.length) await show(state.photos.at(-1));
  await ask(`/api/photos/${photo.id}`, { method: "DELETE" }).catch(() => {});
}

function drawThumbnail(photo) {
  const canvas = photo.thumbnail;
  canvas.height = THUMBNAIL;
  canvas.width = Math.round(Math.min(2.5, photo.width / photo.height) * THUMBNAIL);
  const context = canvas.getContext("2d");
  context.drawImage(photo.image, 0, 0, canvas.width, canvas.height);
  const found = predictionOf(photo, 0);
  if (found === undefined) return;
  const colors = document.createElement("canvas");
  const model = state.page.models[0];
  drawLabels(colors, found.labels, photo.view_width, photo.view_height, model.palette, alphas(model, new Set(), null));
  context.globalAlpha = 0.65;
  context.drawImage(colors, 0, 0, canvas.width, canvas.height);
}

async function predictThumbnail(photo) {
  try {
    await predict(photo, state.size);
    drawThumbnail(photo);
  } catch (error) {
    if (state.photos.includes(photo)) showProblem(error);
  }
}

// Predictions

const predictionOf = (photo, model) => photo.predictions.get(`${model} ${state.size}`);

async function predict(photo, size) {
  for (const model of state.page.models.keys()) {
    if (photo.predictions.has(`${model} ${size}`)) continue;
    const found = await ask(predictionAddress(photo, model, "", { size }));
    found.labels = await askBytes(predictionAddress(photo, model, "/view", { size }));
    photo.predictions.set(`${model} ${size}`, found);
  }
}

// Predict a photo, then show it instead of the previous one. Return whether it is shown.
async function show(photo, size = state.size) {
  const mine = ++ticket;
  setBusy(`Segmenting ${photo.name}`);
  try {
    await Promise.all([predict(photo, size), photo.image.decode()]);
  } catch (error) {
    if (mine === ticket) {
      setBusy(null);
      showProblem(error);
      if (error.status === 404) await removePhoto(photo);
    }
    return false;
  }
  if (mine !== ticket) return false;
  state.current = photo;
  state.size = size;
  setBusy(null);
  document.documentElement.style.setProperty("--ratio", photo.width / photo.height);
  for (const stage of stages) {
    stage.classList.toggle("pixelated", photo.view_width < 320);
    stage.querySelector(".photo").src = photo.image.src;
  }
  for (const other of state.photos) other.button.setAttribute("aria-current", String(other === photo));
  showLists();
  drawClasses();
  drawThumbnail(photo);
  select(photo.pixel);
  return true;
}

function showFacts() {
  const { current: photo, page } = state;
  const [height, width] = predictionOf(photo, 0).predicted_size;
  const resized = height !== photo.height || width !== photo.width;
  $("facts").textContent = `${photo.name}, ${photo.width} x ${photo.height} pixels, segmented at ${resized ? `${width} x ${height}` : "its own size"}.`
    + (photo.id === page.photo.id ? ` ${page.attribution}.` : "");
  stages[0].setAttribute("aria-label", `${photo.name} with the colors of its classes`);
  stages[1].setAttribute("aria-label", `${photo.name} with the attention of the selected pixel`);
}

function alphas(model, hidden, highlighted) {
  return model.classes.map((_, k) => {
    if (hidden.has(k)) return 0;
    return highlighted === null || highlighted === k ? 255 : Math.round(255 * DIMMED);
  });
}

function drawClasses() {
  const { current: photo, page, highlighted } = state;
  page.models.forEach((model, k) => {
    const canvas = $(`overlay-${k}`);
    const one = highlighted === null || highlighted[0] !== k ? null : highlighted[1];
    drawLabels(canvas, predictionOf(photo, k).labels, photo.view_width, photo.view_height, model.palette, alphas(model, state.hidden[k], one));
    canvas.style.opacity = one === null ? state.opacity / 100 : Math.max(state.opacity, 65) / 100;
  });
  updateLinks();
}

// Class lists, one per model

function showLists() {
  $("lists").replaceChildren(...state.page.models.map((model, k) => {
    const { shares } = predictionOf(state.current, k);
    const order = [...shares.keys()].filter((c) => shares[c] > 0).sort((a, b) => shares[b] - shares[a]);
    const entries = order.map((c) => classEntry(model, k, c, shares[c]));
    const boxes = () => entries.map((entry) => entry.querySelector("input"));
    const all = (on) => () => {
      for (const box of boxes()) box.checked = on;
      for (const c of order) state.hidden[k][on ? "delete" : "add"](c);
      drawClasses();
    };
    const heading = element("div", { className: "list-heading" },
      element("h3", {}, state.page.models.length > 1 ? model.short_name : "Classes in this photo"),
      element("button", { type: "button", className: "link", onclick: all(true) }, "all"),
      element("button", { type: "button", className: "link", onclick: all(false) }, "none"));
    const links = element("p", { className: "downloads" }, "Save ",
      ...Object.keys(SAVED).map((file) => element("a", { className: "button", id: `save-${file.split(".")[0]}-${k}`, download: "" }, SAVED[file])));
    return element("section", { className: "list", id: `list-${k}` }, heading, element("ul", { className: "classes" }, ...entries), links);
  }));
  updateLinks();
}

function classEntry(model, k, c, share) {
  const box = element("input", { type: "checkbox", checked: !state.hidden[k].has(c) });
  box.onchange = () => {
    state.hidden[k][box.checked ? "delete" : "add"](c);
    drawClasses();
  };
  const entry = element("li", {}, element("label", {}, box, swatch(css(model.palette[c])),
    element("span", { className: "name" }, model.classes[c]), element("span", { className: "number" }, percent(share))));
  const highlight = (value) => () => {
    state.highlighted = value;
    drawClasses();
  };
  entry.onpointerenter = (event) => { if (event.pointerType === "mouse") highlight([k, c])(); };
  entry.onpointerleave = highlight(null);
  return entry;
}

function updateLinks() {
  const { current: photo, size } = state;
  for (const k of state.page.models.keys()) {
    const values = { size, opacity: state.opacity, hidden: [...state.hidden[k]].join(" ") };
    for (const file of Object.keys(SAVED)) {
      const link = $(`save-${file.split(".")[0]}-${k}`);
      if (link !== null) link.href = predictionAddress(photo, k, `/${file}`, file === "overlay.jpg" ? values : { size });
    }
  }
}

// The selected pixel

function labelAt(photo, model, [row, column]) {
  const y = Math.min(Math.floor(((row + 0.5) / photo.height) * photo.view_height), photo.view_height - 1);
  const x = Math.min(Math.floor(((column + 0.5) / photo.width) * photo.view_width), photo.view_width - 1);
  return predictionOf(photo, model).labels[y * photo.view_width + x];
}

function select(pixel) {
  const { current: photo, page } = state;
  photo.pixel = pixel;
  const [row, column] = pixel;
  for (const stage of stages) {
    const ring = stage.querySelector(".ring");
    ring.hidden = false;
    ring.style.left = `${(100 * (column + 0.5)) / photo.width}%`;
    ring.style.top = `${(100 * (row + 0.5)) / photo.height}%`;
  }
  const names = page.models.flatMap((model, k) => {
    const label = labelAt(photo, k, pixel);
    return [k ? ", " : "", element("span", { className: "answer" }, ...(page.models.length > 1 ? [`${model.short_name}: `] : []), swatch(css(model.palette[label])), element("b", {}, model.classes[label]))];
  });
  $("selected").replaceChildren(`Row ${row}, column ${column}: `, ...names, " ", element("a", { href: "#explanation", className: "jump" }, "see its attention"));
  explain();
}

async function explain() {
  const { current: photo, size, explained } = state;
  const [row, column] = photo.pixel;
  explaining.abort();
  const mine = explaining = new AbortController();
  $("attention").querySelector(".busy").hidden = false;
  try {
    const answer = await ask(predictionAddress(photo, explained, "/pixel", { size, row, column }), { signal: mine.signal });
    if (mine !== explaining) return;
    $("save-attention").href = predictionAddress(photo, explained, "/attention.png", { size, row, column });
    showAttention(photo, state.page.models[explained], answer, state.view);
  } catch (error) {
    if (error.name !== "AbortError") showProblem(error);
  } finally {
    if (mine === explaining) $("attention").querySelector(".busy").hidden = true;
  }
}

function pixelOf(event, stage) {
  const box = stage.getBoundingClientRect();
  const { width, height } = state.current;
  const limit = (value, length) => Math.min(Math.max(Math.floor(value * length), 0), length - 1);
  return [limit((event.clientY - box.top) / box.height, height), limit((event.clientX - box.left) / box.width, width)];
}

const STEPS = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };

function moveByKey(event) {
  const step = STEPS[event.key];
  if (step === undefined || state.current === null || event.ctrlKey || event.metaKey || event.altKey) return;
  event.preventDefault();
  const { width, height, pixel } = state.current;
  const length = event.shiftKey ? 1 : Math.max(1, Math.round(Math.max(width, height) / 100));
  const limit = (value, size) => Math.min(Math.max(value, 0), size - 1);
  select([limit(pixel[0] + length * step[0], height), limit(pixel[1] + length * step[1], width)]);
}

function showTip(event) {
  if (state.current === null || event.pointerType !== "mouse") return;
  const [stage, tip] = [stages[0], $("tip")];
  const box = stage.getBoundingClientRect();
  const x = event.clientX - box.left;
  const side = state.page.models.length > 1 && x / box.width > Number($("split").value) / 100 ? 1 : 0;
  const model = state.page.models[side];
  const label = labelAt(state.current, side, pixelOf(event, stage));
  tip.replaceChildren(swatch(css(model.palette[label])), model.classes[label]);
  tip.hidden = false;
  tip.classList.toggle("flipped", x > box.width * 0.7);
  tip.style.left = `${x}px`;
  tip.style.top = `${event.clientY - box.top}px`;
}

// Two models, left and right of a divider

function split(value) {
  $("split").value = value;
  const percentage = `${value}%`;
  $("overlay-0").style.clipPath = `inset(0 calc(100% - ${percentage}) 0 0)`;
  $("overlay-1").style.clipPath = `inset(0 0 0 ${percentage})`;
  $("divider").style.left = percentage;
}

function setUpTwoModels(models) {
  for (const id of ["compare", "divider", "model-choice", "corner-0", "corner-1"]) $(id).hidden = false;
  models.forEach((model, k) => {
    $(`corner-${k}`).textContent = model.short_name;
    const radio = element("input", { type: "radio", name: "explained", checked: k === 0, onchange: () => { state.explained = k; explain(); } });
    $("model-choice").append(element("label", {}, radio, element("span", {}, model.short_name)));
  });
  $("split").oninput = () => split(Number($("split").value));
  const divider = $("divider");
  divider.onpointerdown = (event) => { divider.setPointerCapture(event.pointerId); };
  divider.onpointermove = (event) => {
    if (!divider.hasPointerCapture(event.pointerId)) return;
    const box = stages[0].getBoundingClientRect();
    split(Math.min(100, Math.max(0, Math.round((100 * (event.clientX - box.left)) / box.width))));
  };
  divider.onclick = (event) => event.stopPropagation();
  split(50);
}

// Messages

function setBusy(text) {
  $("segmentation").setAttribute("aria-busy", String(text !== null));
  stages[0].querySelector(".busy").hidden = text === null;
  if (text !== null) $("facts").textContent = `${text} …`;
  else if (state.current !== null) showFacts();
}

function clearProblems() {
  $("problems").replaceChildren();
}

function showProblem(error) {
  $("problems").append(element("p", {}, error.message));
}

// Controls

async function changeSize(size) {
  if (size === state.size || state.current === null) return;
  clearProblems();
  const mine = ticket + 1;
  if (!(await show(state.current, size)) && mine === ticket) { // the size was refused: reset the controls to the size that is shown
    const isSide = /^\d+$/.test(state.size);
    $("size").value = isSide ? "side" : state.size;
    if (isSide) $("side").value = state.size;
    $("side-label").hidden = !isSide;
  }
}

function setUpControls() {
  $("files").onchange = async () => {
    const files = [...$("files").files];
    $("files").value = "";
    await addPhotos(files);
  };
  $("opacity").oninput = () => {
    state.opacity = Number($("opacity").value);
    $("opacity-value").textContent = `${state.opacity} %`;
    for (const k of state.page.models.keys()) $(`overlay-${k}`).style.opacity = state.opacity / 100;
    updateLinks();
  };
  $("size").onchange = () => {
    const choice = $("size").value;
    $("side-label").hidden = choice !== "side";
    changeSize(choice === "side" ? $("side").value : choice);
  };
  $("side").onchange = () => changeSize($("side").value);
  $("view").onchange = () => {
    state.view = document.querySelector("input[name=view]:checked").value;
    explain();
  };
  for (const stage of stages) {
    stage.onclick = (event) => { if (state.current !== null) select(pixelOf(event, stage)); };
    stage.onkeydown = moveByKey;
  }
  stages[0].onpointermove = showTip;
  stages[0].onpointerleave = () => { $("tip").hidden = true; };
  document.ondragover = (event) => { event.preventDefault(); document.body.classList.add("dropping"); };
  document.ondragleave = (event) => { if (event.relatedTarget === null) document.body.classList.remove("dropping"); };
  document.ondrop = (event) => {
    event.preventDefault();
    document.body.classList.remove("dropping");
    if (event.dataTransfer.files.length) addPhotos(event.dataTransfer.files);
  };
  document.onpaste = (event) => { if (event.clipboardData.files.length) addPhotos(event.clipboardData.files); };
  new ResizeObserver(drawAgain).observe($("attention"));
}

function describeModels(models) {
  $("models").replaceChildren(...models.map((model) => element("span", { className: "model" }, element("b", {}, model.name),
    ` ${model.head} on ${model.backbone}, ${model.classes.length} classes`)));
  $("footer").replaceChildren(...models.map((model) => element("p", {},
    `Model ${model.name}: ${model.license === null ? "license not stated" : `license ${model.license}`}.`)));
}

async function start() {
  try {
    const page = state.page = await ask("/api/page");
    state.hidden = page.models.map((model) => new Set([...model.classes.keys()].filter((k) => model.classes[k].toLowerCase() === "background")));
    const shortNames = page.models.map((model) => model.name.split(/[\\/]/).filter(Boolean).at(-1));
    const distinct = new Set(shortNames).size === shortNames.length;
    page.models.forEach((model, k) => { model.short_name = distinct ? shortNames[k] : model.name; });
    describeModels(page.models);
    $("files").accept = ["image/*", ...page.suffixes].join(",");
    $("add-help").textContent = `You can also drop or paste photos, one or several, up to ${page.max_megabytes} MB each. Photos stay on this machine.`;
    const sides = page.models[0].short_sides;
    if (sides !== null) $("side").value = sides[1];
    setUpControls();
    if (page.models.length > 1) setUpTwoModels(page.models);
    const photo = remember(page.photo);
    photo.pixel = [Math.floor(page.pixel[0] * photo.height), Math.floor(page.pixel[1] * photo.width)];
    await show(photo);
  } catch (error) {
    setBusy(null);
    showProblem(error);
  }
}

start();
