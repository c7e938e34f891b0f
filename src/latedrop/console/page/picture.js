// The live picture with its layers, and the outlines of zones over it.

import { $, people, shape } from "./dom.js";

export class Picture {
  constructor(known) {
    this.known = known;
    this.layers = new Set(["density"]);
    this.busy = false;
    this.kept = new Map();
    for (const button of document.querySelectorAll("[data-layer]")) {
      button.onclick = () => {
        const on = button.getAttribute("aria-pressed") !== "true";
        button.setAttribute("aria-pressed", String(on));
        if (on) this.layers.add(button.dataset.layer);
        else this.layers.delete(button.dataset.layer);
        this.paint();
      };
    }
  }

  clear() {
    this.kept.clear();
    this.outline();
    const message = this.known.sources[this.known.current].message;
    if (message?.frame) this.update(message);
  }

  async update(message) {
    this.outline(message);
    if (this.busy || document.hidden) return;
    this.busy = true;
    try {
      const number = message.source;
      const at = `/api/sources/${number}`;
      // Doubt costs more than a count: where it is shown, all is of the frame that it was worked out for.
      const mapped = this.layers.has("doubt") || this.layers.has("regions");
      const which = `n=${message.frame}&mapped=${mapped}`;
      const wanted = [["picture", `${at}/picture?${which}`]];
      for (const kind of this.layers) wanted.push([kind, `${at}/layers/${kind}?${which}`]);
      const found = await Promise.all(wanted.map(async ([kind, path]) => [kind, await bitmap(path)]));
      if (number !== this.known.current) return;
      for (const [kind, image] of found) if (image) this.kept.set(kind, image);
      this.paint();
      const late = mapped && message.mapped ? Math.round(message.time - message.mapped) : 0;
      $("late").textContent = late > 0 ? `picture and doubt of ${late} s ago` : "";
      const whole = message.zones[0];
      $("picture").setAttribute("aria-label", `Live picture of ${this.known.sources[number].name}: about ${people(whole.count)} people`);
    } catch { /* the next frame comes */ } finally {
      this.busy = false;
    }
  }

  paint() {
    const image = this.kept.get("picture");
    if (!image) return;
    const canvas = $("picture");
    if (canvas.width !== image.width || canvas.height !== image.height) {
      canvas.width = image.width;
      canvas.height = image.height;
      $("frame").style.setProperty("--ratio", image.width / image.height);
      this.outline();
    }
    const paper = canvas.getContext("2d");
    paper.imageSmoothingQuality = "high";
    paper.drawImage(image, 0, 0);
    if (this.layers.size) { // a little darker, so that layers stand out
      paper.fillStyle = "rgba(8, 14, 20, .28)";
      paper.fillRect(0, 0, canvas.width, canvas.height);
    }
    for (const kind of ["density", "doubt", "regions"]) {
      if (this.layers.has(kind) && this.kept.has(kind)) paper.drawImage(this.kept.get(kind), 0, 0, canvas.width, canvas.height);
    }
  }

  outline(message = this.known.sources[this.known.current]?.message) {
    const source = this.known.sources[this.known.current];
    const overlay = $("overlay");
    if (!source) return;
    const height = (1000 * $("picture").height) / $("picture").width;
    overlay.setAttribute("viewBox", `0 0 1000 ${height}`);
    const numbers = new Map((message?.zones ?? []).map((zone) => [zone.id, zone]));
    const shapes = source.zones.filter((zone) => zone.points.length).flatMap((zone) => {
      const points = zone.points.map(([x, y]) => [1000 * x, height * y]);
      const now = numbers.get(zone.id);
      const left = Math.min(...points.map((point) => point[0]));
      const top = Math.min(...points.filter((point) => point[0] < left + 120).map((point) => point[1]));
      return [
        shape("polygon", { points: points.map((point) => point.join(",")).join(" "), class: now?.colour ?? "" }),
        shape("text", { x: left + 10, y: Math.max(top + 30, 34) }, `${zone.name}${now ? `  ${people(now.count)}` : ""}`),
      ];
    });
    overlay.replaceChildren(...shapes, ...overlay.querySelectorAll(".drawn"));
  }
}

async function bitmap(path) {
  const answer = await fetch(path);
  if (answer.status !== 200) return null;
  return createImageBitmap(await answer.blob());
}
