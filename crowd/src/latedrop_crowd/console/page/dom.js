// Small things that every part of the page needs.

export const $ = (id) => document.getElementById(id);

export function make(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "class") node.className = value;
    else if (value !== null && value !== undefined && value !== false) node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

export function shape(tag, attributes = {}, text = "") {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  if (text) node.textContent = text;
  return node;
}

export async function ask(path, method = "GET", body = undefined) {
  const answer = await fetch(path, {
    method,
    headers: body === undefined ? {} : { "Content-Type": "application/json" },
    body: body === undefined ? undefined : JSON.stringify(body),
  });
  const content = await answer.json().catch(() => ({}));
  if (!answer.ok) {
    const said = content.error || (content.detail && "Please check what you have typed.") || `The server says ${answer.status}.`;
    toast(said);
    throw new Error(said);
  }
  return content;
}

let hiding = 0;
export function toast(text) {
  const box = $("toast");
  box.textContent = text;
  box.hidden = false;
  clearTimeout(hiding);
  hiding = setTimeout(() => { box.hidden = true; }, 6000);
}

export const people = (value) => (value === null ? "–" : Math.round(value).toString());
export const range = (low, high) => low === null ? "cannot count" : `${Math.max(0, Math.floor(low + 0.5))} – ${Math.floor(high + 0.5)}`;
export const clock = (seconds) => new Date(seconds * 1000).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", second: "2-digit", hourCycle: "h23" });
export const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

// Light or dark, as the system or the button says; `changed` draws again what does not follow by itself.
export function themed(changed) {
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const show = (name) => { document.documentElement.dataset.theme = name; changed(); };
  $("theme").onclick = () => {
    const next = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
    localStorage.setItem("theme", next);
    show(next);
  };
  dark.onchange = () => { if (!localStorage.getItem("theme")) show(dark.matches ? "dark" : "light"); };
  show(localStorage.getItem("theme") ?? (dark.matches ? "dark" : "light"));
}
