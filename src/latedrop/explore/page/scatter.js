// Rows as points: along the prediction or an input, upwards the error or the value, each with its interval.

import uPlot from "./uPlot.js";
import { $, css } from "./dom.js";

export class Scatter {
  constructor(choose) {
    this.choose = choose;
    this.rows = null;
    this.chosen = null;
    new ResizeObserver(() => this.plot?.setSize(this.size())).observe($("chart"));
    $("chart").addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (!step || !this.rows?.at.length) return;
      event.preventDefault();
      const now = this.rows.row.indexOf(this.chosen);
      this.choose(this.rows.row[now < 0 ? 0 : (now + step + this.rows.row.length) % this.rows.row.length]);
    });
  }

  size() {
    return { width: Math.max(240, $("chart").clientWidth), height: Math.max(320, Math.min(520, window.innerHeight - 360)) };
  }

  // `found` has row, at, low, high, up and inside of every point; points without a place are left out.
  show(found, names) {
    const order = [...found.at.keys()].filter((i) => found.at[i] !== null && found.up[i] !== null).sort((a, b) => found.at[a] - found.at[b]);
    this.rows = Object.fromEntries(Object.entries(found).map(([name, values]) => [name, order.map((i) => values[i])]));
    const data = [this.rows.at, this.rows.up, this.rows.low, this.rows.high];
    const key = `${document.documentElement.dataset.theme} ${names.at} ${names.up}`;
    if (this.plot && this.key === key) { // another level: what is zoomed into stays
      this.plot.setData(data, false);
      this.plot.redraw();
      return;
    }
    this.plot?.destroy();
    this.key = key;
    this.plot = new uPlot(this.options(names), data, $("chart"));
  }

  mark(row) {
    this.chosen = row;
    this.plot?.redraw();
  }

  options(names) {
    const axis = { stroke: css("--soft"), grid: { stroke: css("--line"), width: 1 }, ticks: { stroke: css("--line") }, font: "12px system-ui", labelFont: "12px system-ui", labelSize: 20 };
    const hidden = { stroke: "transparent", paths: () => null, points: { show: false } };
    const wide = (plot, low, high) => { const more = (high - low || Math.abs(high) || 1) * 0.04; return [low - more, high + more]; };
    return {
      ...this.size(),
      legend: { show: false },
      scales: { x: { time: false, range: wide }, y: { range: wide } },
      axes: [{ ...axis, label: names.at }, { ...axis, label: names.up, size: 62 }],
      cursor: { drag: { x: true, y: true, uni: 20 }, points: { show: false } },
      series: [{}, hidden, hidden, hidden],
      hooks: {
        draw: [(plot) => this.draw(plot)],
        ready: [(plot) => plot.over.addEventListener("click", (event) => this.nearest(plot, event))],
      },
    };
  }

  draw(plot) {
    const { ctx, bbox } = plot;
    const { row, at, up, low, high, inside } = this.rows;
    const size = devicePixelRatio * (row.length > 1500 ? 1.8 : 2.8);
    const place = (value, scale) => plot.valToPos(value, scale, true);
    ctx.save();
    ctx.beginPath();
    ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
    ctx.clip();
    ctx.strokeStyle = css("--accent");
    ctx.globalAlpha = 0.3;
    ctx.lineWidth = Math.max(1, Math.min(6, bbox.width / row.length / 1.6));
    ctx.beginPath();
    row.forEach((_, i) => {
      const x = place(at[i], "x");
      ctx.moveTo(x, place(low[i], "y"));
      ctx.lineTo(x, place(high[i], "y"));
    });
    ctx.stroke();
    ctx.globalAlpha = 1;
    for (const good of [true, false]) {
      ctx.fillStyle = css(good ? "--accent" : "--red");
      ctx.beginPath();
      row.forEach((_, i) => {
        if (inside[i] !== good) return;
        const [x, y] = [place(at[i], "x"), place(up[i], "y")];
        ctx.moveTo(x + size, y);
        ctx.arc(x, y, size, 0, 7);
      });
      ctx.fill();
    }
    const now = row.indexOf(this.chosen);
    if (now >= 0) {
      const [x, y] = [place(at[now], "x"), place(up[now], "y")];
      ctx.strokeStyle = css("--ink");
      ctx.lineWidth = 2 * devicePixelRatio;
      ctx.beginPath();
      ctx.moveTo(x, place(low[now], "y"));
      ctx.lineTo(x, place(high[now], "y"));
      ctx.moveTo(x + 3 * size, y);
      ctx.arc(x, y, 3 * size, 0, 7);
      ctx.stroke();
    }
    ctx.restore();
  }

  nearest(plot, event) {
    if (plot.select.width > 2 || plot.select.height > 2) return;
    const { row, at, up } = this.rows;
    const box = plot.over.getBoundingClientRect();
    const [x, y] = [event.clientX - box.left, event.clientY - box.top];
    let best = null;
    let least = 30 ** 2;
    row.forEach((one, i) => {
      const far = (plot.valToPos(at[i], "x") - x) ** 2 + (plot.valToPos(up[i], "y") - y) ** 2;
      if (far < least) [best, least] = [one, far];
    });
    if (best !== null) this.choose(best);
  }
}
