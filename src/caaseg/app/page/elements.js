// Elements of the page, built from text that is never interpreted as HTML.

export function element(tag, properties, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}

export function swatch(color) {
  const made = element("span", { className: "swatch" });
  made.style.background = color;
  return made;
}

export const percent = (share) => `${share > 0 && share < 0.0005 ? "< 0.1" : (100 * share).toFixed(1)} %`;
