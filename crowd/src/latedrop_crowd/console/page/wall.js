// All cameras on one screen, readable from two metres; the worst comes first. A tone for new alarms, if switched on.

import { $, make, people, range } from "./dom.js";
import { state } from "./zones.js";

const RANK = { red: 0, amber: 1, green: 2 };

export class Wall {
  constructor(known, choose) {
    this.known = known;
    this.tiles = new Map();
    this.choose = choose;
    this.heard = null;
    $("wall-button").onclick = () => (this.open() ? this.close() : this.begin());
    $("sound").onclick = () => {
      this.audio = this.audio ? null : new AudioContext();
      $("sound").setAttribute("aria-pressed", String(Boolean(this.audio)));
      $("sound").textContent = this.audio ? "Sound on" : "Sound off";
    };
    setInterval(() => this.age(), 500);
    if (new URLSearchParams(location.search).has("wall")) this.begin();
  }

  open() {
    return !$("wall").hidden;
  }

  begin() {
    $("wall").hidden = false;
    document.body.classList.add("walled");
    $("wall-button").textContent = "Back";
    this.show();
  }

  close() {
    $("wall").hidden = true;
    document.body.classList.remove("walled");
    $("wall-button").textContent = "Wall";
  }

  tile(one) {
    const parts = {
      image: make("canvas", { "aria-hidden": "true" }), age: make("span", { class: "age" }), count: make("output"), interval: make("span", { class: "range" }), word: make("div", { class: "word" }), time: null, busy: false,
    };
    parts.node = make("button", { type: "button", class: "tile", onclick: () => this.choose(one.number) },
      make("span", { class: "view" }, parts.image, parts.age), make("span", { class: "name" }, one.name),
      make("span", { class: "numbers" }, parts.count, parts.interval), parts.word);
    this.tiles.set(one.number, parts);
    return parts;
  }

  show() {
    if (!this.open()) return;
    const ranked = [...this.known.sources].sort((a, b) => worst(a).rank - worst(b).rank || a.number - b.number);
    const columns = ranked.length === 1 ? 1 : ranked.length <= 4 ? 2 : 3;
    const span = 1 + ((columns - (ranked.length % columns)) % columns); // the worst one takes the cells that are left over
    $("wall").style.setProperty("--columns", columns);
    $("wall").classList.toggle("dense", ranked.length > 6);
    ranked.forEach((one, place) => {
      const parts = this.tiles.get(one.number) ?? this.tile(one);
      const now = worst(one);
      const whole = one.message?.zones?.[0];
      const lost = one.camera?.state === "lost";
      parts.node.style.order = place;
      parts.node.style.gridColumn = place ? "" : `span ${span}`;
      parts.node.classList.toggle("large", ranked.length === 1 || (!place && span > 1));
      parts.node.classList.toggle("wide", [1, 3, 4].includes(ranked.length) || (!place && span > 1));
      parts.node.classList.toggle("red", now.colour === "red");
      parts.count.textContent = lost || !whole ? "–" : people(whole.count);
      parts.interval.textContent = lost ? "no picture" : whole ? range(whole.low, whole.high) : "waiting";
      parts.interval.classList.toggle("words", lost || !whole || whole.low === null);
      parts.word.textContent = lost ? one.camera.words : one.message?.uncountable || now.text;
      parts.word.className = `word ${now.colour ?? ""}`;
      if (!parts.node.isConnected) $("wall").append(parts.node);
      if (!parts.time) this.fetch(one.number);
    });
  }

  update(message) {
    this.show();
    if (this.open()) this.fetch(message.source);
  }

  async fetch(number) {
    const parts = this.tiles.get(number);
    if (!parts || parts.busy || document.hidden) return;
    parts.busy = true;
    try {
      const answer = await fetch(`/api/sources/${number}/picture`, { signal: AbortSignal.timeout(5000) });
      if (answer.status !== 200) return;
      const image = await createImageBitmap(await answer.blob());
      [parts.image.width, parts.image.height] = [image.width, image.height];
      parts.image.getContext("2d").drawImage(image, 0, 0);
      parts.time = Number(answer.headers.get("X-Frame-Time"));
    } catch { /* the next frame comes; the age tells */ } finally {
      parts.busy = false;
    }
  }

  age() {
    if (!this.open()) return;
    for (const parts of this.tiles.values()) {
      const old = parts.time && Number.isFinite(this.known.ahead) ? Math.max(0, Date.now() / 1000 - this.known.ahead - parts.time) : null;
      parts.age.textContent = old === null ? "no picture yet" : `${old < 10 ? old.toFixed(1) : Math.round(old)} s old`;
      parts.node.classList.toggle("frozen", old !== null && old > 3);
    }
  }

  sound() {
    const on = this.known.alarms.filter((alarm) => alarm.ended === null && alarm.acknowledged === null).map((alarm) => alarm.id);
    const fresh = this.heard !== null && on.some((id) => !this.heard.has(id));
    this.heard = new Set(on);
    if (!fresh || !this.audio) return;
    const tone = this.audio.createOscillator();
    tone.frequency.value = 880;
    tone.connect(this.audio.destination);
    tone.start();
    tone.stop(this.audio.currentTime + 0.4);
  }
}

// The zone that needs somebody most, and what is said of it.
function worst(one) {
  if (one.camera?.state === "lost" || one.message?.uncountable) return { rank: 1, colour: "amber", text: "" };
  const named = new Map(one.zones.map((zone) => [zone.id, zone.name]));
  const zones = (one.message?.zones ?? []).filter((zone) => zone.colour).sort((a, b) => RANK[a.colour] - RANK[b.colour]);
  if (!zones.length) return { rank: 3, colour: null, text: "no limit set" };
  const alone = one.zones.length < 2 || zones[0].id === one.zones[0].id;
  return { rank: RANK[zones[0].colour], colour: zones[0].colour, text: `${alone ? "" : `${named.get(zones[0].id) ?? ""}: `}${state(zones[0])}` };
}
