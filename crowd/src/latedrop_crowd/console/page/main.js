// The page: what is known, which source is looked at, and the stream of news.

import { $, ask, make, people, range, themed, toast } from "./dom.js";
import { Picture } from "./picture.js";
import { Timeline } from "./timeline.js";
import { ZoneList, drawing } from "./zones.js";
import { Labels } from "./labels.js";
import { showAlarms, showEvents } from "./events.js";
import { Wall } from "./wall.js";

export const known = { sources: [], current: 0, events: [], alarms: [], level: 0.9, sure: 0.9, ahead: Infinity };
export const source = () => known.sources[known.current];

const timeline = new Timeline(known);
const picture = new Picture(known, timeline);
const zones = new ZoneList(known, () => { picture.outline(); timeline.choices(); });
const labels = new Labels(known);
const wall = new Wall(known, (number) => { wall.close(); choose(number); });

function showSources() {
  const nav = $("sources");
  if (nav.children.length !== known.sources.length) {
    nav.replaceChildren(...known.sources.map((one) => make("button", { type: "button", onclick: () => choose(one.number) },
      make("i", { class: "light" }), one.name, make("b", {}, "–"))));
  }
  known.sources.forEach((one, number) => { // changed in place, so that the focus stays
    const button = nav.children[number];
    const whole = one.message?.zones?.[0];
    const colours = lost(one) ? [] : Object.values(one.colours ?? {});
    const worst = ["red", "amber", "green"].find((colour) => colours.includes(colour)) ?? "";
    button.setAttribute("aria-pressed", String(number === known.current));
    button.firstChild.className = `light ${worst}`;
    button.lastChild.textContent = lost(one) ? "no picture" : one.message?.uncountable ? "cannot count" : whole ? people(whole.count) : "–";
  });
}

// Numbers and colours of the last frame say nothing once no more come in.
const lost = (one) => one.camera?.state === "lost";

function choose(number) {
  known.current = number;
  showSources();
  picture.clear();
  showCount(source().message);
  showCamera();
  zones.show();
  timeline.choices();
  timeline.load();
  labels.load();
  $("width").textContent = source().width;
  history.replaceState(null, "", `#${number}`);
}

function showCount(message) {
  const whole = message?.zones?.[0];
  const counted = whole && whole.count !== null;
  $("count").textContent = counted ? people(whole.count) : "–";
  $("interval").textContent = whole ? range(whole.low, whole.high) : "–";
  $("ruler").hidden = !counted;
  if (!counted) {
    $("badge").textContent = whole ? "Cannot count" : "";
    $("badge").className = whole ? "badge strange" : "badge";
    $("reasons").hidden = !whole;
    $("reasons").textContent = message?.uncountable ?? "";
    return;
  }
  const top = Math.max(10, Math.ceil(Math.max(whole.high, source().zones[0]?.limit ?? 0, source().top ?? 0) / 10) * 10);
  source().top = top;
  const [band, at] = $("ruler").children;
  band.style.left = `${(100 * whole.low) / top}%`;
  band.style.width = `${(100 * (whole.high - whole.low)) / top}%`;
  at.style.left = `calc(${(100 * whole.count) / top}% - 1px)`;
  const strange = message.strangeness;
  const badge = $("badge");
  const words = strange >= 2 ? "Unlike the calibration: interval widened" : strange > 1 ? "A little unusual" : "As usual";
  if (badge.textContent !== words) badge.textContent = words;
  badge.className = `badge ${strange >= 2 ? "strange" : strange > 1 ? "near" : ""}`;
  $("reasons").hidden = !message.reasons.length;
  $("reasons").textContent = message.reasons.join("; ");
}

function showCamera() {
  const camera = source().camera ?? {};
  $("where").textContent = source().name;
  const skipped = camera.skipped ? `, ${camera.skipped} skipped` : "";
  $("rate").textContent = camera.counted === undefined ? "" : `${pace(camera.counted)} counted, ${pace(camera.arriving)} come in${skipped}`;
  const dark = camera.state !== "live" && camera.state !== undefined;
  $("curtain").hidden = !dark && !source().bad && Boolean(source().message?.frame);
  $("curtain").textContent = dark ? camera.words : source().bad ?? "waiting for the first frame";
  if (lost(source())) {
    showCount(null);
    zones.blank();
  }
}

const pace = (rate) => (rate >= 0.95 ? `${rate.toFixed(1)} frames per second` : rate > 0 ? `a frame every ${Math.round(1 / rate)} s` : "no frames");

async function news(message) {
  if (message.now) known.ahead = Math.min(known.ahead, Date.now() / 1000 - message.now); // this clock, beside the console's
  const one = known.sources[message.source];
  if (!one) return;
  if (message.camera) one.camera = { ...one.camera, ...message.camera };
  const here = message.source === known.current;
  if (message.kind === "count") {
    one.message = message;
    one.bad = null;
    for (const zone of message.zones) one.colours[zone.id] = zone.colour;
    showSources();
    wall.update(message);
    if (here) {
      showCount(message);
      zones.update(message);
      showCamera();
      picture.update(message);
      timeline.add(message);
    }
  } else if (message.kind === "state") {
    showSources();
    wall.show();
    if (here) showCamera();
  } else if (message.kind === "zones") {
    await refresh();
  } else if (message.kind === "labels") {
    if (here) labels.load();
    events();
  } else if (message.kind === "events") {
    events();
  } else if (message.kind === "bad") {
    one.bad = message.text;
    if (here) showCamera();
  }
}

async function events() {
  const found = await ask("/api/events");
  known.events = found.events;
  known.alarms = found.alarms;
  showEvents(known);
  showAlarms(known, events);
  wall.sound();
  timeline.draw();
}

async function refresh() {
  const state = await ask("/api/state");
  document.body.dataset.role = state.role;
  Object.assign(known, { level: state.level, sure: state.sure, events: state.events, alarms: state.alarms });
  known.sources = state.sources.map((one) => ({ ...one, top: known.sources[one.number]?.top }));
  known.current = Math.min(known.current, known.sources.length - 1);
  $("level").textContent = `${Math.round(100 * state.level)} % interval`;
  $("rule").textContent = `red from ${Math.round(100 * state.sure)} % sure`;
  showSources();
  showEvents(known);
  showAlarms(known, events);
  wall.show();
  zones.show();
  picture.outline();
  timeline.choices();
}

function listen() {
  const stream = new EventSource("/api/stream");
  const link = $("link");
  stream.onopen = async () => {
    link.textContent = "live";
    link.className = "link live";
    await refresh();
    choose(Math.min(Number(location.hash.slice(1)) || 0, known.sources.length - 1));
  };
  stream.onmessage = (event) => news(JSON.parse(event.data));
  stream.onerror = () => {
    link.textContent = "the console does not answer";
    link.className = "link lost";
  };
}

themed(() => timeline.draw());

$("snapshot").onclick = async () => {
  await ask(`/api/sources/${known.current}/snapshot`, "POST");
  toast("Snapshot kept; it is in the list of events.");
  events();
};
zones.redraw = drawing(known, async (zone, points, name, limit) => {
  const at = `/api/sources/${known.current}/zones`;
  await (zone ? ask(`${at}/${zone.id}`, "PUT", { name, points, limit }) : ask(at, "POST", { name, points, limit }));
  await refresh();
});
setInterval(() => picture.age(), 500);
listen();
