// The list of zones with their limits, and drawing a new one with the mouse or the keyboard.

import { $, ask, make, people, range, shape } from "./dom.js";

export const WORDS = { green: "below the limit", amber: "cannot tell", red: "above the limit" };
// A change shows only once it has lasted; until then both are said.
export const state = (zone) => (zone.colour ? WORDS[zone.colour] + (zone.coming ? `; now: ${WORDS[zone.coming]}` : "") : "");

export class ZoneList {
  constructor(known, changed) {
    this.known = known;
    this.changed = changed;
    this.rows = new Map();
  }

  show() {
    const source = this.known.sources[this.known.current];
    this.rows.clear();
    $("zones").replaceChildren(...source.zones.map((zone) => this.row(source, zone)));
    if (source.camera?.state === "lost") this.blank();
    else if (source.message?.zones) this.update(source.message);
  }

  blank() {
    for (const parts of this.rows.values()) {
      parts.number.textContent = "–";
      parts.light.className = "light";
      parts.word.className = "word";
      if (parts.word.textContent !== "no picture") parts.word.textContent = "no picture";
      parts.chance.textContent = "";
    }
  }

  row(source, zone) {
    const parts = {
      light: make("i", { class: "light" }), number: make("span", { class: "number" }, "–"), word: make("span", { class: "word", role: "status" }), chance: make("small"),
    };
    const limit = make("input", {
      type: "number", min: 0, step: 1, placeholder: "none", value: zone.limit, "aria-label": `Limit of ${zone.name}`,
      onchange: () => this.save(source, zone, { limit: limit.value === "" ? null : Number(limit.value) }),
    });
    const edit = make("button", {
      type: "button", title: `Edit ${zone.name}`, "aria-label": `Edit ${zone.name}`, onclick: () => this.redraw(zone),
    }, "Edit");
    const remove = zone.points.length ? make("button", {
      type: "button", title: `Remove ${zone.name}`, "aria-label": `Remove ${zone.name}`, onclick: () => this.remove(source, zone),
    }, "✕") : null;
    parts.limit = limit;
    this.rows.set(zone.id, parts);
    return make("li", { "data-zone": zone.id }, parts.light, make("span", { class: "name" }, zone.name), parts.number,
      make("div", { class: "row" }, make("span", { class: "said" }, parts.word, parts.chance), make("span", {}, make("label", {}, "limit ", limit), edit, remove)));
  }

  async save(source, zone, changes) {
    const said = { name: zone.name, limit: zone.limit, ...changes }; // corners stay where none are sent
    const found = await ask(`/api/sources/${source.number}/zones/${zone.id}`, "PUT", said);
    source.zones = found.zones;
    this.changed();
  }

  async remove(source, zone) {
    if (!confirm(`Remove ${zone.name}? What it has counted stays.`)) return;
    source.zones = (await ask(`/api/sources/${source.number}/zones/${zone.id}`, "DELETE")).zones;
    this.show();
    this.changed();
  }

  update(message) {
    for (const zone of message.zones) {
      const parts = this.rows.get(zone.id);
      if (!parts) continue;
      parts.number.replaceChildren(people(zone.count), make("small", {}, range(zone.low, zone.high)));
      parts.light.className = `light ${zone.colour ?? ""}`;
      const said = state(zone);
      if (parts.word.textContent !== said) parts.word.textContent = said; // said aloud only when it changes
      parts.word.className = `word ${zone.colour ?? ""}`;
      parts.chance.textContent = zone.colour && zone.probability !== null ? chance(zone.probability, parts.limit.value) : "";
    }
  }
}

function chance(probability, limit) {
  const percent = Math.round(100 * probability);
  return `more than ${limit}: ${percent > 99 ? "over 99" : percent < 1 ? "under 1" : percent} % likely`;
}

export function drawing(known, save) {
  const frame = $("frame");
  const overlay = $("overlay");
  let points = null;
  let editing = null;
  let cursor = [0.5, 0.5];
  const height = () => overlay.viewBox.baseVal.height || 750;

  const sketch = () => {
    overlay.querySelectorAll(".drawn").forEach((node) => node.remove());
    if (!points) return;
    const all = points.map(([x, y]) => [1000 * x, height() * y]);
    const [x, y] = [1000 * cursor[0], height() * cursor[1]];
    const nodes = [shape("polygon", { points: [...all, [x, y]].map((p) => p.join(",")).join(" "), class: "draft" })];
    nodes.push(...all.map(([a, b]) => shape("circle", { cx: a, cy: b, r: 7 })));
    nodes.push(shape("path", { d: `M${x - 12},${y}h24M${x},${y - 12}v24`, class: "cross" }));
    for (const node of nodes) node.classList.add("drawn");
    overlay.append(...nodes);
  };
  const stop = () => {
    points = editing = null;
    frame.classList.remove("drawing");
    $("draw").textContent = "Draw a zone";
    $("hint").hidden = true;
    sketch();
  };
  const finish = () => {
    if (points.length < 3) return;
    name(editing, points);
  };
  // Name and limit of a new zone, or of one that is there; its corners stay unless others are given.
  const name = (zone, corners) => {
    const dialog = $("zone-dialog");
    $("zone-name").value = zone?.name ?? `Zone ${known.sources[known.current].zones.length}`;
    $("zone-limit").value = zone?.limit ?? "";
    $("zone-shape").hidden = !zone?.points.length;
    dialog.returnValue = "";
    dialog.showModal();
    $("zone-name").select();
    dialog.onclose = () => {
      const limit = $("zone-limit").value;
      if (dialog.returnValue === "save") save(zone, corners, $("zone-name").value, limit === "" ? null : Number(limit));
      stop();
      if (dialog.returnValue === "shape") start(zone);
    };
  };
  const add = (point) => {
    const [first] = points;
    const near = first && Math.hypot(point[0] - first[0], point[1] - first[1]) < 0.025;
    if (near && points.length > 2) finish();
    else points.push(point);
    sketch();
  };
  const place = (event) => {
    const box = frame.getBoundingClientRect();
    const share = (value) => Math.min(1, Math.max(0, value));
    return [share((event.clientX - box.left) / box.width), share((event.clientY - box.top) / box.height)];
  };
  $("draw").onclick = () => { if (points) stop(); else start(null); };
  const start = (zone) => {
    points = [];
    editing = zone;
    frame.classList.add("drawing");
    $("draw").textContent = "Cancel";
    $("hint").textContent = "Click the corners; click the first one again, or press Enter, to finish. With the keyboard: arrows move, space sets a corner.";
    $("hint").hidden = false;
    sketch();
  };
  frame.addEventListener("pointermove", (event) => { if (points) { cursor = place(event); sketch(); } });
  frame.addEventListener("click", (event) => { if (points) add(place(event)); });
  document.addEventListener("keydown", (event) => {
    if (!points || document.querySelector("dialog[open]")) return;
    const step = event.shiftKey ? 0.05 : 0.01;
    const moves = { ArrowLeft: [-step, 0], ArrowRight: [step, 0], ArrowUp: [0, -step], ArrowDown: [0, step] };
    if (event.key === "Escape") stop();
    else if (event.key === "Enter") finish();
    else if (event.key === " ") add([...cursor]);
    else if (moves[event.key]) cursor = cursor.map((value, i) => Math.min(1, Math.max(0, value + moves[event.key][i])));
    else return;
    event.preventDefault();
    sketch();
  });
  return (zone) => name(zone, []);
}
