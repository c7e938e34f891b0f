"use strict";
// The slider: numbers of the chosen level, and a line at it in the figures of its section. All texts come with the page.
for (const box of document.querySelectorAll(".levels")) {
  const data = JSON.parse(box.querySelector("script").textContent);
  const slider = box.querySelector("input"), now = box.querySelector("output");
  const marks = [];
  for (const line of box.querySelectorAll("line.now")) {
    const [x, , width] = line.closest("[data-box]").dataset.box.split(" ").map(Number);
    marks.push((share) => {
      line.setAttribute("x1", x + share * width);
      line.setAttribute("x2", x + share * width);
    });
  }
  const show = () => {
    const index = Number(slider.value);
    now.textContent = data.levels[index];
    for (const cell of box.querySelectorAll("[data-of]")) {
      cell.textContent = data.rows[cell.dataset.of][cell.dataset.what][index] ?? "-";
    }
    for (const move of marks) move(data.shares[index]);
  };
  slider.addEventListener("input", show);
  box.querySelector(".slider").hidden = false;
  show();
}
// Pointing at a mark: its title as a note of our own, at once, and on touch screens too.
const tip = document.createElement("div");
tip.className = "tip";
tip.hidden = true;
document.body.append(tip);
for (const title of document.querySelectorAll("svg title")) {
  title.parentNode.dataset.tip = title.textContent;
  title.remove();
}
document.addEventListener("pointerover", (event) => {
  const mark = event.target.closest?.("[data-tip]");
  tip.hidden = !mark;
  if (!mark) return;
  tip.textContent = mark.dataset.tip;
  const room = document.documentElement.clientWidth - tip.offsetWidth - 8;
  tip.style.left = `${Math.max(8, Math.min(event.pageX + 12, room))}px`;
  tip.style.top = `${event.pageY + 14}px`;
});
