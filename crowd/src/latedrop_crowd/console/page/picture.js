// The live picture with its layers, and the outlines of zones over it.

import { $, people, shape } from "./dom.js";
import { hour } from "./timeline.js";

const STEP = 300; // seconds that a map of the console's memory covers

export class Picture {
  constructor(known, timeline) {
    this.known = known;
    this.timeline = timeline;
    this.layers = new Set(["density"]);
    this.busy = false;
    this.kept = new Map();
    for (const button of document.querySelectorAll("[data-layer]")) {
      button.onclick = () => {
        const on = button.getAttribute("aria-pressed") !== "true";
        button.setAttribute("aria-pressed", String(on));
        if (on) this.layers.add(button.dataset.layer);
        else this.layers.delete(button.dataset.layer);
        if (button.dataset.layer === "heat") this.heat();
        this.paint();
        this.explain();
      };
    }
    for (const where of ["pointerup", "click", "dblclick"]) document.querySelector(".timeline").addEventListener(where, () => setTimeout(() => this.heat(), 50));
    setInterval(() => this.heat(), 10000);
  }

  // What regions like these were on frames with known people: without it the layer says nothing.
  explain() {
    const policy = this.known.sources[this.known.current]?.faint;
    $("faint-said").hidden = !this.layers.has("faint");
    $("faint-said").textContent = !policy?.mass ? "This calibration calls no region faint."
      : `Faint: at most ${policy.mass.toFixed(2)} people. Of ${policy.seen} such regions on frames with known people ${policy.false} had nobody in them.`;
  }

  // Where people were, over what the timeline shows.
  async heat() {
    $("heat-said").hidden = !this.layers.has("heat");
    if (!this.layers.has("heat") || document.hidden) return;
    const number = this.known.current;
    const [first, until] = this.timeline.shown();
    const since = Math.floor(first / STEP) * STEP;
    const answer = await fetch(`/api/sources/${number}/heat?since=${since}&until=${until}`);
    const frames = Number(answer.headers.get("X-Frames") ?? 0);
    if (number !== this.known.current) return;
    if (frames) this.kept.set("heat", await createImageBitmap(await answer.blob()));
    else this.kept.delete("heat");
    $("heat-said").textContent = frames ? `Heat map: where people were from ${hour(since, until - since)} to ${hour(until, until - since)}, the mean of ${frames} frames.` : "Heat map: nothing was counted in the time that the timeline shows.";
    this.paint();
  }

  age() {
    const box = $("age");
    if (!this.time || !Number.isFinite(this.known.ahead)) { box.textContent = ""; return; }
    const old = Math.max(0, Date.now() / 1000 - this.known.ahead - this.time);
    const frozen = old > 3;
    const mapped = this.layers.has("doubt"); // takes seconds: then an old picture is no sign of a fault
    box.textContent = frozen ? `${mapped ? "picture and doubt are" : "picture is"} ${Math.round(old)} s old` : `${old.toFixed(1)} s old`;
    box.className = frozen ? "frozen" : "";
    $("picture").classList.toggle("frozen", frozen && !mapped);
  }

  clear() {
    this.kept.clear();
    this.time = null;
    this.outline();
    this.explain();
    this.heat();
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
      const mapped = this.layers.has("doubt");
      const which = `n=${message.frame}&mapped=${mapped}`;
      const wanted = [["picture", `${at}/picture?${which}`]];
      for (const kind of this.layers) if (kind !== "heat") wanted.push([kind, `${at}/layers/${kind}?${which}`]);
      const found = await Promise.all(wanted.map(async ([kind, path]) => [kind, await bitmap(path)]));
      if (number !== this.known.current) return;
      for (const [kind, part] of found) if (part) this.kept.set(kind, part.image);
      this.time = found[0][1]?.time ?? this.time;
      this.paint();
      this.age();
      const said = message.uncountable ? "cannot count" : `about ${people(message.zones[0].count)} people`;
      $("picture").setAttribute("aria-label", `Live picture of ${this.known.sources[number].name}: ${said}`);
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
    for (const kind of this.layers.has("heat") ? ["heat"] : ["density", "doubt", "faint"]) { // one at a time: they look alike
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

// A request that hangs must not freeze the picture beside numbers that go on.
async function bitmap(path) {
  const answer = await fetch(path, { signal: AbortSignal.timeout(5000) });
  if (answer.status !== 200) return null;
  return { image: await createImageBitmap(await answer.blob()), time: Number(answer.headers.get("X-Frame-Time")) || null };
}
