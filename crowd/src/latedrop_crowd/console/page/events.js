// Alarms that wait for somebody, and the list of what happened.

import { $, ask, clock, make } from "./dom.js";

export function showAlarms(known, changed) {
  const waiting = known.alarms.filter((alarm) => alarm.acknowledged === null);
  const on = waiting.filter((alarm) => alarm.ended === null);
  const first = on[0] ?? waiting[0];
  if (!first) { $("alarms").replaceChildren(); return; }
  const others = waiting.length - 1;
  const acknowledge = async (alarms) => {
    for (const alarm of alarms) await ask(`/api/alarms/${alarm.id}/acknowledge`, "POST");
    changed();
  };
  $("alarms").replaceChildren(make("div", { class: on.length ? "" : "over" },
    make("b", {}, on.length ? "Alarm" : "Over"),
    make("span", {}, `${first.source}, ${first.text} (${clock(first.time)})`, others ? make("small", {}, ` and ${others} more`) : null),
    make("button", { type: "button", onclick: () => acknowledge([first]) }, "Acknowledge"),
    others ? make("button", { type: "button", class: "all", onclick: () => acknowledge(waiting) }, `All ${waiting.length}`) : null));
}

export function showEvents(known) {
  const rows = known.events.map((event) => make("li", {},
    make("time", {}, clock(event.time)),
    make("span", {}, make("span", { class: event.kind }, event.text), make("br"), make("small", {}, said(event))),
    event.picture ? make("a", { href: `/api/pictures/${event.picture}`, target: "_blank", rel: "noopener" }, "picture") : null));
  $("events").replaceChildren(...(rows.length ? rows : [make("li", {}, "", "Nothing yet.")]));
}

function said(event) {
  const words = [event.source];
  if (event.kind === "alarm") {
    words.push(event.ended === null ? "goes on" : `over at ${clock(event.ended)}`);
    words.push(event.acknowledged === null ? "not acknowledged" : `acknowledged at ${clock(event.acknowledged)}`);
  }
  return words.join(" · ");
}
