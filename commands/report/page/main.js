"use strict";
// What the address asks for, drawn; and, under `keel watch`, drawn again when the run has gone on.

keel.main = {
  views: { curves: keel.curves.show, runs: keel.table.show, read: keel.read.show },
  turn: 0,
  behind: false, // what is drawn is not the newest

  take(data) {
    keel.runs = data.runs;
    keel.live = data.live;
    const written = new Date(data.written * 1000).toLocaleString();
    document.getElementById("title").textContent = keel.runs.map((run) => run.name).join(", ");
    keel.main.status = keel.live ? `live · ${written}` : `as of ${written}`;
    document.getElementById("status").textContent = keel.main.status;
    const notes = keel.runs.flatMap((run) => run.notes.map((note) => `${run.name}: ${note}`));
    const box = document.getElementById("notes");
    box.hidden = !notes.length;
    box.querySelector("summary").textContent = `${notes.length} notes`;
    box.querySelector("ul").replaceChildren(...notes.map((note) => keel.make("li", {}, note)));
  },

  view(asked) {
    return Object.hasOwn(keel.main.views, asked.view) ? asked.view : "curves";
  },

  // Somebody reads what a new drawing would fold up.
  reading() {
    return document.querySelector("#view details[open]") !== null;
  },

  // News are drawn at once, or when the last fold is closed.
  async renew() {
    keel.main.behind = keel.main.reading();
    if (!keel.main.behind) return keel.main.draw();
    document.getElementById("status").textContent = `${keel.main.status} · shown when nothing is unfolded`;
  },

  // Scrolled places stay where they are when the same is drawn again.
  async draw() {
    const turn = ++keel.main.turn;
    keel.main.behind = false;
    document.getElementById("status").textContent = keel.main.status;
    const asked = keel.asked(), address = location.hash;
    const name = keel.main.view(asked);
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
    keel.main.catchUp(); // news may have come while this was made
  },

  catchUp() {
    if (keel.main.behind && !keel.main.reading()) keel.main.draw();
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
          if (mark) await keel.main.renew();
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
document.getElementById("view").addEventListener("toggle", keel.main.catchUp, true); // it does not bubble
keel.main.draw();
if (keel.live) keel.main.follow("");
