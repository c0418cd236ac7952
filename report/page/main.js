"use strict";
// What the address asks for, drawn; and, under `keel watch`, drawn again when the run has gone on.

keel.main = {
  views: { curves: keel.curves.show, runs: keel.table.show, read: keel.read.show },
  turn: 0,

  take(data) {
    keel.runs = data.runs;
    keel.live = data.live;
    const written = new Date(data.written * 1000).toLocaleString();
    document.getElementById("title").textContent = keel.runs.map((run) => run.name).join(", ");
    document.getElementById("status").textContent = keel.live ? `live · ${written}` : `as of ${written}`;
    const notes = keel.runs.flatMap((run) => run.notes.map((note) => `${run.name}: ${note}`));
    const box = document.getElementById("notes");
    box.hidden = !notes.length;
    box.querySelector("summary").textContent = `${notes.length} notes`;
    box.querySelector("ul").replaceChildren(...notes.map((note) => keel.make("li", {}, note)));
  },

  // Scrolled places stay where they are when the same is drawn again.
  async draw() {
    const turn = ++keel.main.turn;
    const asked = keel.asked(), address = location.hash;
    const name = Object.hasOwn(keel.main.views, asked.view) ? asked.view : "curves";
    for (const link of document.querySelectorAll("nav a"))
      link.toggleAttribute("aria-current", link.hash === `#view=${name}`);
    let made;
    try {
      made = await keel.main.views[name](asked);
    } catch (error) {
      made = [keel.make("p", { class: "note" }, `This cannot be shown: ${error.message}`)];
    }
    if (turn !== keel.main.turn) return; // asked for something else meanwhile
    const places = [".list", ".group"];
    const before = places.map((place) => document.querySelector(place)?.scrollTop ?? 0);
    const view = document.getElementById("view");
    for (const plot of view.querySelectorAll(".plot")) { keel.curves.seen.unobserve(plot); Plotly.purge(plot); }
    view.replaceChildren(...made);
    view.dataset.drawn = address;
    places.forEach((place, at) => {
      const element = document.querySelector(place);
      if (element && !(place === ".group" && keel.main.last !== asked.group)) element.scrollTop = before[at];
    });
    keel.main.last = asked.group;
  },

  // News from `keel watch`, every two seconds, while somebody looks.
  async follow(mark) {
    let next = mark;
    try {
      const token = new URLSearchParams(location.search).get("token");
      const headers = mark ? { "If-None-Match": mark } : {};
      if (!document.hidden) {
        const answer = await fetch(`data?${new URLSearchParams({ token })}`, { headers, cache: "no-store" });
        if (answer.status === 200) {
          keel.main.take(await answer.json());
          next = answer.headers.get("ETag");
          if (mark) keel.read.known.clear();
          if (mark && !document.querySelector("details[open]")) await keel.main.draw();
        } else if (answer.status !== 304) throw new Error(await answer.text());
      }
    } catch (error) {
      document.getElementById("status").textContent = `no news: ${error.message}`;
    }
    setTimeout(() => keel.main.follow(next), 2000);
  },
};

keel.main.take(JSON.parse(document.getElementById("data").textContent));
keel.tokens.listen();
addEventListener("hashchange", keel.main.draw);
keel.main.draw();
if (keel.live) keel.main.follow("");
