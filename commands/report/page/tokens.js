"use strict";
// Sampled tokens in the colour of a number, with all their numbers under the pointer.

keel.tokens = {
  // What a token can be coloured by: its value, and the value as −1 … 1 (or 0 … 1) of a scale.
  choices: {
    logp: { label: "log-probability", ends: ["p = 0", "p = 1"], value: (run, at) => run.logp?.[at],
      scale: (value) => 1 - Math.exp(Math.min(0, value)), hues: [0, 0] },
    advantage: { label: "advantage", ends: ["negative", "positive"], value: (run, at, one) => one.advantage,
      scale: (value) => Math.max(-1, Math.min(1, value)), hues: [0, 130] },
    ratio: { label: "ratio π_θ/π_old", ends: ["0.8", "1.2"], value: (run, at) => run.ratio?.[at],
      scale: (value) => Math.max(-1, Math.min(1, (value - 1) / 0.2)), hues: [0, 210] },
    kept: { label: "sampling mask, ids", ends: ["1", "64"], value: (run, at) => run.kept?.[at],
      scale: (value) => Math.min(1, Math.log2(Math.max(1, value)) / 6), hues: [210, 210] },
    overlap: { label: "routing overlap", ends: ["0", "1"], value: (run, at) => run.overlap?.[at],
      scale: (value) => 1 - value, hues: [30, 30] },
    version: { label: "version of the weights", ends: ["oldest", "newest"], value: (run, at) => run.version?.[at],
      scale: (value, range) => (range[1] > range[0] ? (range[1] - value) / (range[1] - range[0]) : 0), hues: [280, 280] },
  },
  most: 3000, // tokens of a run that are drawn at once

  colour(choice, value, range) {
    if (typeof value !== "number") return "";
    const at = choice.scale(value, range);
    if (Math.abs(at) < 0.02) return "";
    const hue = choice.hues[at < 0 ? 0 : 1];
    return `hsl(${hue} 85% ${(100 - 42 * Math.abs(at)).toFixed(1)}%)`;
  },

  legend(name) {
    const choice = keel.tokens.choices[name];
    const ends = [-1, -0.5, 0, 0.5, 1].filter((at) => at >= 0 || choice.hues[0] !== choice.hues[1]);
    if (["logp", "overlap", "version"].includes(name)) ends.reverse();
    const boxes = ends.map((at) => {
      const box = keel.make("i");
      box.style.backgroundColor =
        keel.tokens.colour({ scale: () => at, hues: choice.hues }, at) || "#fff";
      return box;
    });
    return keel.make("span", { class: "legend" }, choice.ends[0], boxes, choice.ends[1]);
  },

  tip(run, at, one) {
    const lines = [JSON.stringify(run.text[at])];
    for (const [name, choice] of Object.entries(keel.tokens.choices)) {
      const value = choice.value(run, at, one);
      if (value !== undefined && value !== null) lines.push(`${choice.label}  ${keel.short(value)}`);
    }
    if (typeof run.logp?.[at] === "number") lines.push(`probability  ${keel.short(Math.exp(run.logp[at]))}`);
    return lines.join("\n");
  },

  // Tokens from … to (left out) of a run, `most` of them and a button for the rest.
  draw(into, run, from, to, one, name, range) {
    const choice = keel.tokens.choices[name];
    const end = Math.min(to, from + keel.tokens.most);
    for (let at = from; at < end; at++) {
      const span = keel.make("span", {}, run.text[at]);
      span.style.backgroundColor = keel.tokens.colour(choice, choice.value(run, at, one), range);
      span.about = () => keel.tokens.tip(run, at, one);
      into.append(span);
    }
    if (end < to) {
      const more = keel.make("button", { click: () => {
        more.remove();
        keel.tokens.draw(into, run, end, to, one, name, range);
      } }, `${to - end} more tokens`);
      into.append(more);
    }
  },

  listen() {
    const tip = document.getElementById("tip");
    document.addEventListener("mouseover", (event) => {
      const about = event.target.about;
      tip.hidden = !about;
      if (!about) return;
      tip.textContent = about();
      const box = event.target.getBoundingClientRect();
      tip.style.left = `${Math.max(0, Math.min(box.left, innerWidth - tip.offsetWidth - 10))}px`;
      const above = box.top - tip.offsetHeight - 4;
      tip.style.top = `${above > 0 ? above : box.bottom + 4}px`;
    });
  },
};
