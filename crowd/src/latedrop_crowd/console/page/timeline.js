// The count over time with its band, the limit, alarms and labels.

import uPlot from "./uPlot.js";
import { $, ask, css } from "./dom.js";

export const hour = (seconds, span) => new Date(seconds * 1000).toLocaleTimeString([], {
  weekday: span > 86400 ? "short" : undefined, hour: "2-digit", minute: "2-digit", second: span > 60 ? undefined : "2-digit", hourCycle: "h23",
});

export class Timeline {
  constructor(known) {
    this.known = known;
    this.span = 60;
    this.rows = [[], [], [], []];
    this.zone = null;
    this.zoomed = false;
    for (const button of document.querySelectorAll("[data-span]")) {
      button.onclick = () => {
        this.span = Number(button.dataset.span);
        document.querySelectorAll("[data-span]").forEach((other) => other.setAttribute("aria-pressed", String(other === button)));
        this.zoomed = false;
        this.load();
      };
    }
    $("timeline-zone").onchange = () => { this.zone = Number($("timeline-zone").value); this.zoomed = false; this.load(); };
    new ResizeObserver(() => this.plot?.setSize(this.size())).observe($("chart"));
    setInterval(() => { if (this.span > 60 && this.known.sources.length && !this.zoomed && !document.hidden) this.load(); }, 5000);
  }

  // What is shown, in seconds.
  shown() {
    const scale = this.plot?.scales.x;
    if (this.zoomed && scale?.min) return [scale.min, scale.max];
    const now = Date.now() / 1000 - (Number.isFinite(this.known.ahead) ? this.known.ahead : 0);
    return [now - this.span, now];
  }

  size() {
    return { width: Math.max(240, $("chart").clientWidth), height: 190 };
  }

  choices() {
    const source = this.known.sources[this.known.current];
    if (!source.zones.some((zone) => zone.id === this.zone)) this.zone = source.zones[0]?.id;
    const select = $("timeline-zone");
    select.replaceChildren(...source.zones.map((zone) => new Option(zone.name, zone.id, false, zone.id === this.zone)));
    $("counts-csv").href = `/api/sources/${source.number}/counts.csv?seconds=${this.span}`;
    $("report").href = `/api/sources/${source.number}/report.html`;
    this.draw();
  }

  async load() {
    const zone = this.zone;
    if (zone === null || zone === undefined) return;
    const found = await ask(`/api/zones/${zone}/timeline?seconds=${this.span}`);
    if (zone !== this.zone) return;
    this.rows = [0, 1, 2, 3].map((column) => found.rows.map((row) => row[column]));
    $("counts-csv").href = `/api/sources/${this.known.current}/counts.csv?seconds=${this.span}`;
    this.draw();
  }

  add(message) {
    const now = message.zones.find((zone) => zone.id === this.zone);
    if (!now || this.span > 60) return;
    while (this.rows[0].length && this.rows[0].at(-1) >= message.time) this.rows.forEach((column) => column.pop()); // the clock was set back
    [message.time, now.count, now.low, now.high].forEach((value, column) => this.rows[column].push(value));
    while (this.rows[0].length && this.rows[0][0] < message.time - 60) this.rows.forEach((column) => column.shift());
    if (!this.zoomed) this.draw();
  }

  draw() {
    if (!this.known.sources.length) return;
    const theme = document.documentElement.dataset.theme;
    if (!this.plot || this.theme !== theme) {
      this.plot?.destroy();
      this.theme = theme;
      this.plot = new uPlot(this.options(), this.data(), $("chart"));
    } else {
      this.plot.setData(this.data(), !this.zoomed);
    }
  }

  data() {
    const [time, count, low, high] = this.rows;
    return [time, high, low, count];
  }

  limit() {
    return this.known.sources[this.known.current].zones.find((zone) => zone.id === this.zone)?.limit ?? null;
  }

  options() {
    const axis = { stroke: css("--soft"), grid: { stroke: css("--line"), width: 1 }, ticks: { stroke: css("--line"), width: 1 }, font: "12px system-ui" };
    const line = css("--accent");
    const shown = (plot, value) => (value === null || value === undefined ? "–" : value.toFixed(1));
    return {
      ...this.size(),
      padding: [10, 8, 0, 0],
      scales: {
        x: { range: (plot, low, high) => (this.zoomed || low === null ? [low ?? Date.now() / 1000 - 60, high ?? Date.now() / 1000] : [Math.max(low, high - this.span), high]) },
        y: { range: (plot, low, high) => [0, Math.max(10, (this.limit() ?? 0) * 1.12, (high ?? 0) * 1.08)] },
      },
      axes: [{ ...axis, space: 90, values: (plot, splits) => splits.map((at) => hour(at, this.span)) }, { ...axis, size: 42, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000] }],
      cursor: { y: false, drag: { x: true, y: false } },
      series: [
        { label: "Time", value: (plot, value) => (value === null ? "–" : hour(value, 60)) },
        { label: "High", stroke: "transparent", value: shown, points: { show: false } },
        { label: "Low", stroke: "transparent", value: shown, points: { show: false } },
        { label: "Count", stroke: line, width: 2, value: shown, points: { show: false } },
      ],
      bands: [{ series: [1, 2], fill: css("--band") }],
      hooks: {
        draw: [(plot) => this.marks(plot)],
        setSelect: [(plot) => { if (plot.select.width > 2) this.zoomed = true; }],
        ready: [(plot) => plot.over.addEventListener("dblclick", () => { this.zoomed = false; this.load(); })],
      },
    };
  }

  marks(plot) {
    const { ctx, bbox } = plot;
    const zone = this.zone;
    ctx.save();
    ctx.beginPath();
    ctx.rect(bbox.left, bbox.top - 12, bbox.width, bbox.height + 12);
    ctx.clip();
    const limit = this.limit();
    if (limit !== null) {
      const y = plot.valToPos(limit + 0.5, "y", true);
      ctx.strokeStyle = css("--red");
      ctx.lineWidth = 1.5 * devicePixelRatio;
      ctx.setLineDash([7, 5]);
      ctx.beginPath();
      ctx.moveTo(bbox.left, y);
      ctx.lineTo(bbox.left + bbox.width, y);
      ctx.stroke();
      ctx.setLineDash([]);
      ctx.fillStyle = css("--red");
      ctx.font = `${12 * devicePixelRatio}px system-ui`;
      ctx.textAlign = "left";
      ctx.textBaseline = "alphabetic";
      ctx.fillText(`limit ${limit}`, bbox.left + 8, y - 6);
    }
    ctx.textAlign = "center";
    ctx.textBaseline = "alphabetic";
    ctx.font = `${13 * devicePixelRatio}px system-ui`;
    for (const event of this.known.events) {
      if (event.kind !== "alarm" || event.zone !== zone) continue;
      ctx.fillStyle = css("--red");
      ctx.fillText("▲", plot.valToPos(event.time, "x", true), bbox.top + bbox.height - 4);
    }
    const source = this.known.sources[this.known.current];
    for (const label of zone === source.zones[0]?.id ? source.labelled ?? [] : []) {
      ctx.fillStyle = css("--accent");
      ctx.beginPath();
      ctx.arc(plot.valToPos(label.time, "x", true), plot.valToPos(label.people, "y", true), 4.5 * devicePixelRatio, 0, 7);
      ctx.fill();
    }
    ctx.restore();
  }
}
