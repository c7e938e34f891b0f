// Frames worth a label, labelling one, and the calibrations that can be restored.

import { $, ask, clock, make, people, range, shape, toast } from "./dom.js";

export class Labels {
  constructor(known) {
    this.known = known;
    this.heads = [];
    $("label").onclick = async () => {
      const found = await ask(`/api/sources/${known.current}/freeze`, "POST");
      this.show(found);
      this.open(found.proposed.find((frame) => frame.id === found.id));
    };
    $("heads").addEventListener("click", (event) => this.click(event));
    $("label-people").addEventListener("input", () => { this.heads = []; this.dots(); });
  }

  async load() {
    const number = this.known.current;
    const found = await ask(`/api/sources/${number}/labels`);
    if (number === this.known.current) this.show(found);
  }

  show(found) {
    this.known.sources[this.known.current].labelled = found.labelled;
    const number = found.labelled.length;
    $("label-count").textContent = number ? `${number} frame${number > 1 ? "s" : ""} labelled` : "none yet";
    $("proposed").replaceChildren(...found.proposed.slice(0, 8).map((frame) => make("button", {
      type: "button", onclick: () => this.open(frame), "aria-label": `Label the frame of ${clock(frame.time)}: ${frame.why}`,
    }, make("img", { src: `/api/frames/${frame.id}`, alt: "" }), make("span", {}, `${clock(frame.time)}, ${frame.why}`))));
    $("labelled").hidden = !number;
    $("labelled").querySelector("ul").replaceChildren(...found.labelled.toReversed().map((frame) => make("li", {},
      make("span", {}, `${people(frame.people)} people, ${clock(frame.time)}`),
      make("button", { type: "button", "aria-label": `Delete the label of ${clock(frame.time)}`, onclick: () => this.unlabel(frame) }, "Delete"))));
    $("calibrations").querySelector("ul").replaceChildren(...found.calibrations.map((one) => make("li", {},
      make("span", {}, `${one.note}, ${clock(one.time)}`),
      one.used ? make("small", {}, "in use")
        : make("button", { type: "button", onclick: () => this.restore(one) }, "Restore"))));
  }

  async restore(one) {
    this.show(await ask(`/api/sources/${this.known.current}/calibrations/${one.id}/restore`, "POST"));
    toast(`Restored: ${one.note}.`);
  }

  async unlabel(frame) {
    const found = await ask(`/api/sources/${this.known.current}/frames/${frame.id}/label`, "DELETE");
    this.show(found);
    toast(found.said);
  }

  open(frame) {
    const number = this.known.current;
    const dialog = $("label-dialog");
    this.heads = [];
    $("label-people").value = "";
    $("label-said").textContent = `${clock(frame.time)} · the counter says ${people(frame.count)}, ${range(frame.low, frame.high)}`;
    $("label-picture").src = `/api/frames/${frame.id}`;
    $("label-picture").onload = () => this.dots();
    dialog.returnValue = "";
    dialog.showModal();
    dialog.onclose = async () => {
      const at = `/api/sources/${number}/frames/${frame.id}`;
      if (dialog.returnValue === "drop") this.show(await ask(at, "DELETE"));
      if (dialog.returnValue !== "save") return;
      const heads = this.heads.length ? this.heads : null;
      const found = await ask(`${at}/label`, "POST", { people: heads ? null : Number($("label-people").value), heads });
      this.show(found);
      toast(found.said);
    };
  }

  click(event) {
    const box = $("heads").getBoundingClientRect();
    const inside = (part) => Math.min(Math.max(part, 0), 1);
    const [x, y] = [inside((event.clientX - box.left) / box.width), inside((event.clientY - box.top) / box.height)];
    const reach = 12 / box.width;
    const near = this.heads.findIndex(([a, b]) => Math.hypot(a - x, ((b - y) * box.height) / box.width) < reach);
    if (near >= 0) this.heads.splice(near, 1);
    else this.heads.push([x, y]);
    $("label-people").value = String(this.heads.length);
    this.dots();
  }

  dots() {
    const image = $("label-picture");
    const height = (1000 * image.naturalHeight) / Math.max(1, image.naturalWidth);
    $("heads").setAttribute("viewBox", `0 0 1000 ${height}`);
    $("heads").setAttribute("preserveAspectRatio", "none");
    $("heads").replaceChildren(...this.heads.map(([x, y]) => shape("circle", { cx: 1000 * x, cy: height * y, r: 11 })));
  }
}
