"""The frame of the page to slide along the surface: its words, its style and its script."""

__all__ = ["PAGE"]

PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy"
  content="default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'">
<title>The valley of the NLL over rate and scale</title>
<style>
:root { color-scheme: light; }
body { font: 16px/1.5 system-ui, sans-serif; color: #1a1a1a; background: #fff; max-width: 66rem; margin: 0 auto;
  padding: 1rem; }
h1 { font-size: 1.5rem; line-height: 1.2; }
svg { width: 100%; height: auto; display: block; }
svg text { font-size: 14px; fill: #1a1a1a; text-anchor: middle; }
svg text.end { text-anchor: end; } svg text.title { font-size: 17px; font-weight: 600; }
.frame { fill: none; stroke: #333; } .valley { fill: none; stroke: #d55e00; stroke-width: 3; stroke-dasharray: 9 5; }
.one { stroke: #000; stroke-width: 1.2; stroke-dasharray: 2 4; }
.under { stroke: #fff; stroke-width: 2.4; opacity: .75; }
.cut { stroke: #fff; stroke-width: 2; } .slice { fill: none; stroke: #0072b2; stroke-width: 2.5; }
.at, .best { fill: #d55e00; stroke: #fff; stroke-width: 2; }
.controls { display: none; gap: .4rem 1.2rem; flex-wrap: wrap; align-items: center; margin: 1rem 0; }
.controls input { flex: 1 1 16rem; min-height: 2rem; } .controls select { font: inherit; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; display: none; }
th, td { padding: .2rem .8rem; border-bottom: 1px solid #ddd; text-align: right; }
th:first-child { text-align: left; }
.live .controls { display: flex; } .live table { display: table; } .live .still { display: none; }
</style>
</head>
<body>
<main>
<h1>The valley of the NLL over rate and scale</h1>
<p>Dropout at a rate gives every row a variance; a scale multiplies all of them. The picture shows the negative
log-likelihood of the validation rows of one split for every rate and scale. Dashed orange: the valley, the best scale
of each rate, which is the mean of e&sup2; / variance. Dotted: scale 1, the variance as it is. Below: the slice at one
rate. With one hidden layer the bottom of the injected valley is level: once scaled, the rate does not matter.</p>
<p class="still">This is {{first}}. Turn scripts on to move along the rate and to see the other sets.</p>
<div class="controls">
<label>Set <select id="set">{{options}}</select></label>
<label for="rate">Rate <output id="shown"></output></label>
<input id="rate" type="range" min="0" max="{{last}}" value="{{start}}" step="1">
</div>
<svg viewBox="0 0 1000 710" role="img" aria-label="Two maps of the NLL over rate and scale, injected and embedded, each
 with its valley, and below each the NLL over the scale at one rate.">
<defs><clipPath id="slices">{{clip}}</clipPath></defs>
{{drawings}}
{{legend}}
</svg>
<table aria-live="polite">
<thead><tr><th></th><th>best scale</th><th>NLL there</th><th>NLL at scale 1</th></tr></thead>
<tbody><tr data-kind="injected"><th>injected</th><td></td><td></td><td></td></tr>
<tr data-kind="embedded"><th>embedded</th><td></td><td></td><td></td></tr></tbody>
</table>
</main>
<script>
"use strict";
const data = {{data}};
const place = {{geometry}};
const byId = id => document.getElementById(id);
const rise = q => (q - 1 - Math.log(q)) / 2;
const part = (value, ends) => (Math.log10(value) - Math.log10(ends[0])) / Math.log10(ends[1] / ends[0]);
function draw() {
  const name = byId("set").value, found = data[name], index = Number(byId("rate").value);
  const rate = found.rates[index], ends = [found.rates[0], found.rates[found.rates.length - 1]];
  byId("shown").textContent = rate.toPrecision(2);
  byId("rate").setAttribute("aria-valuetext", "rate " + rate.toPrecision(2));
  document.querySelectorAll("g.set").forEach(group => {
    group.style.display = group.dataset.set === name ? "" : "none";
  });
  const group = [...document.querySelectorAll("g.set")].find(item => item.dataset.set === name);
  ["injected", "embedded"].forEach((kind, column) => {
    const left = place.left[column], best = found[kind].scale[index], least = found[kind].nll[index];
    const x = left + place.wide * part(rate, ends);
    const across = scale => left + place.wide * part(scale, found.scales);
    const height = (value, box) => box[1] - (box[1] - box[0]) * value;
    const down = nll => height((nll - found.nll[0]) / (found.nll[1] - found.nll[0]), place.slice);
    const set = (what, values) => {
      const mark = group.querySelector("." + what + "[data-kind=" + kind + "]");
      Object.entries(values).forEach(([key, value]) => mark.setAttribute(key, value));
    };
    set("cut", {x1: x, x2: x});
    set("at", {cx: x, cy: height(part(best, found.scales), place.panel)});
    set("best", {cx: across(best), cy: down(least)});
    const points = [];
    for (let step = 0; step <= 120; step++) {
      const scale = found.scales[0] * Math.pow(found.scales[1] / found.scales[0], step / 120);
      const nll = Math.min(least + rise(best / scale), 2 * found.nll[1] - found.nll[0]);
      points.push(across(scale).toFixed(1) + "," + down(nll).toFixed(1));
    }
    set("slice", {points: points.join(" ")});
    const cells = document.querySelectorAll("tr[data-kind=" + kind + "] td");
    [best, least, least + rise(best)].forEach((value, at) => { cells[at].textContent = Number(value.toPrecision(4)); });
  });
}
document.body.classList.add("live");
byId("set").addEventListener("change", draw);
byId("rate").addEventListener("input", draw);
draw();
</script>
</body>
</html>
"""
