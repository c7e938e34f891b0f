// Alarms that wait for somebody, and the list of what happened.

import { $, ask, clock, make } from "./dom.js";

export function showAlarms(known, changed) {
  const open = known.alarms.filter((alarm) => alarm.acknowledged === null);
  $("alarms").replaceChildren(...open.map((alarm) => make("div", { class: alarm.ended === null ? "" : "over" },
    make("b", {}, alarm.ended === null ? "Alarm" : "Over"),
    make("span", {}, `${alarm.source}, ${alarm.text} (${clock(alarm.time)})`),
    make("button", {
      type: "button", onclick: async () => { await ask(`/api/alarms/${alarm.id}/acknowledge`, "POST"); changed(); },
    }, "Acknowledge"))));
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
