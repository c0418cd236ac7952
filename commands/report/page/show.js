"use strict";
// Elements, and what the address says. Text goes in as text: nothing here parses HTML.

const keel = {
  runs: [],
  live: false,
  colours: ["#0b61c4", "#c4570b", "#2d8a4e", "#8a2d7c", "#a18b00", "#0b9cc4", "#c40b4a", "#555"],

  // An element with attributes (functions listen) and children (strings are text).
  make(tag, attributes = {}, ...children) {
    const element = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) {
      if (typeof value === "function") element.addEventListener(name, value);
      else if (value !== undefined && value !== false) element.setAttribute(name, value);
    }
    element.append(...children.flat().map((one) => (one instanceof Node ? one : String(one))));
    return element;
  },

  // What is shown stands in the address, so that it can be come back to.
  asked() {
    return Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
  },

  ask(changes) {
    const all = new URLSearchParams({ ...keel.asked(), ...changes });
    return `#${all}`;
  },

  // options: pairs of value and text. What is chosen is among them, or the page would show another.
  choice(label, name, options, chosen) {
    const change = (event) => (location.hash = keel.ask({ [name]: event.target.value }));
    const known = options.some(([value]) => value === chosen);
    const made = (known ? options : [...options, [chosen, chosen]]).map(([value, text]) => {
      const option = keel.make("option", { value }, text);
      option.selected = value === chosen;
      return option;
    });
    return keel.make("label", {}, `${label} `, keel.make("select", { name, change }, made));
  },

  colour(run) {
    return keel.colours[run % keel.colours.length];
  },

  short(value) {
    if (value === null || value === undefined) return "–";
    if (typeof value !== "number") return String(value);
    return String(Number(value.toPrecision(4)));
  },
};
