"use strict";
// The overview: a summary, the main curves, the others on demand, and what never changed. A curve is
// drawn when it comes into view.

keel.curves = {
  // Plots that are shown first; the others are a click away.
  main: [/^held-out /, /^reward\/mean$/, /^reward_mean by domain$/, /^length\/mean$/, /^loss$/, /^kl\/ref$/,
    /^entropy\/kept$/, /^grad_norm$/, /^mismatch\/logp_abs$/, /^rollout\/truncated_fraction$/, /^seconds of a step/],
  rows: 200, // events of a run in the table below
  // Events by kind: in words, and the colour of their dotted lines.
  kinds: new Map(Object.entries({
    resume: ["resumed", "#5b6673"],
    engine: ["an engine started again", "#8a2d7c"],
    alarm: ["an alarm", "#c40b4a"],
    frozen: ["a process stood still", "#0b9cc4"],
    restart: ["started again from a checkpoint", "#c4570b"],
    fewer: ["went on with fewer ranks", "#2d8a4e"],
    "out of memory": ["out of memory", "#a18b00"],
    end: ["engines or rewards ended it", "#1c2430"],
  })),
  other: ["something else", "#b8c0ca"],

  // Several series share a plot: those of one metric, over domains or held-out sets.
  place(metric) {
    const parts = metric.split("/");
    if (parts[0] === "eval" && parts.length > 2)
      return { plot: `held-out ${parts.at(-1)}`, series: parts.slice(1, -1).join("/") };
    if (parts[0] === "domain" && parts.length > 2)
      return { plot: `${parts.at(-1)} by domain`, series: parts.slice(1, -1).join("/") };
    return { plot: metric, series: "" };
  },

  rank(plot) {
    return (keel.curves.main.findIndex((one) => one.test(plot)) + 1 || 99);
  },

  // Pairs of a plot's title and its members, in the order in which they are shown.
  plots() {
    const plots = new Map();
    keel.runs.forEach((run, number) => {
      for (const metric of Object.keys(run.metrics)) {
        const { plot, series } = keel.curves.place(metric);
        if (!plots.has(plot)) plots.set(plot, []);
        plots.get(plot).push({ number, metric, series });
      }
    });
    return [...plots].sort(([a], [b]) => keel.curves.rank(a) - keel.curves.rank(b) || (a < b ? -1 : 1));
  },

  values({ number, metric }) {
    return keel.runs[number].metrics[metric].values;
  },

  constant(members) {
    return members.every((one) => keel.curves.values(one).every((value, _, all) => value === all[0]));
  },

  x(run, axis) {
    return axis === "hours" ? run.times.map((at) => (at - run.times[0]) / 3600) : run.steps;
  },

  traces(members, axis) {
    const dashes = ["solid", "dash", "dot", "dashdot", "longdash"];
    const series = [...new Set(members.map((one) => one.series))];
    return members.map(({ number, metric, series: name }) => {
      const run = keel.runs[number], across = keel.curves.x(run, axis);
      const { at: places, values } = run.metrics[metric];
      const few = metric.startsWith("eval/") || values.length < 3;
      const at = series.indexOf(name);
      const alone = keel.runs.length === 1 && name;
      return {
        x: places.map((place) => across[place]), y: values,
        name: keel.curves.text([keel.runs.length > 1 && run.name, name].filter(Boolean).join(" · ")),
        mode: few ? "lines+markers" : "lines",
        line: { width: 1.5, color: keel.colour(alone ? at : number),
          dash: alone ? "solid" : dashes[at % dashes.length] },
        hovertemplate: "%{y:.5g}<extra>%{fullData.name}</extra>",
      };
    });
  },

  // plotly.js reads some tags in labels: names of runs and domains must not make any.
  text(name) {
    return String(name).replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll("%{", "% {");
  },

  // A line for each; those of several runs say whose they are.
  events(axis) {
    return keel.runs.flatMap((run) =>
      run.events.filter(({ kind }) => kind !== "tracker").map((event) => {
        const [words, colour] = keel.curves.kinds.get(event.kind) || keel.curves.other;
        return {
          words, colour,
          x: axis === "hours" ? (event.time - run.times[0]) / 3600 : event.step,
          whose: keel.runs.length > 1 ? run.name : "",
        };
      }),
    );
  },

  legend(axis) {
    const found = new Map(keel.curves.events(axis).map(({ words, colour }) => [words, colour]));
    const known = [...keel.curves.kinds.values(), keel.curves.other].filter(([words]) => found.has(words));
    const labels = known.map(([words, colour]) => {
      const label = keel.make("span", { class: "event" }, words);
      label.style.color = colour;
      return label;
    });
    return labels.length ? [keel.make("span", { class: "dim" }, "dotted lines: "), ...labels] : [];
  },

  // The last events of each run, by their time.
  table() {
    return keel.runs
      .flatMap((run) => run.events.slice(-keel.curves.rows).map((event) => [run.name, event]))
      .sort(([, a], [, b]) => a.time - b.time);
  },

  // The lines of a kind of event in a run as one shape: an alarm that stays on has thousands of them,
  // and each shape of each plot takes the browser's time. Only single lines may have a label: the last.
  shapes(axis) {
    const kinds = new Map();
    for (const { words, colour, whose, x } of keel.curves.events(axis)) {
      if (!Number.isFinite(x)) continue;
      const key = `${words} ${whose}`;
      if (!kinds.has(key)) kinds.set(key, { colour, whose, places: new Set() });
      kinds.get(key).places.add(x);
    }
    return [...kinds.values()].flatMap(({ colour, whose, places }) => {
      const line = { color: colour, width: 1, dash: "dot" }, last = [...places].at(-1);
      const others = [...places].slice(0, -1).map((x) => `M${x},0V1`).join("");
      return [
        ...(others ? [{ type: "path", path: others, yref: "paper", line }] : []),
        { type: "line", x0: last, x1: last, yref: "paper", y0: 0, y1: 1, line,
          label: { text: keel.curves.text(whose.slice(-30)), textangle: -90, textposition: "end",
            xanchor: "right", font: { size: 9, color: colour } } },
      ];
    });
  },

  layout(title, axis, traces) {
    return {
      title: { text: keel.curves.text(title), font: { size: 12 }, x: 0.02, y: 0.98, xanchor: "left", yanchor: "top" },
      margin: { l: 12, r: 10, t: traces.length > 1 ? 40 : 26, b: 24 },
      showlegend: traces.length > 1,
      legend: { font: { size: 10 }, orientation: "h", y: 1, yanchor: "bottom", x: 0, xanchor: "left" },
      hovermode: "x unified",
      font: { size: 10 },
      xaxis: { zeroline: false, gridcolor: "#eef1f4", nticks: 6 },
      yaxis: { zeroline: false, gridcolor: "#eef1f4", nticks: 5, exponentformat: "e", automargin: true },
      shapes: keel.curves.shapes(axis),
    };
  },

  // One box; `traces` are made when it is seen.
  box(title, axis, traces) {
    const element = keel.make("div", { class: "plot", "data-plot": title });
    element.draw = () => {
      const made = traces();
      Plotly.react(element, made, keel.curves.layout(title, axis, made), { responsive: true, displayModeBar: false });
    };
    keel.curves.seen.observe(element);
    return element;
  },

  seen: new IntersectionObserver((entries) => {
    for (const { isIntersecting, target } of entries) {
      if (!isIntersecting) continue;
      keel.curves.seen.unobserve(target);
      target.draw();
    }
  }, { rootMargin: "200px" }),

  // Seconds of a step by part, one above the other.
  split(run, axis) {
    const across = keel.curves.x(run, axis);
    return ["rollout", "reward", "train", "sync"].filter((name) => run.metrics[`time/${name}`])
      .map((name, order) => {
        const { at, values } = run.metrics[`time/${name}`];
        return {
          x: at.map((place) => across[place]), y: values,
          name, stackgroup: "all", line: { width: 0.5, color: keel.colour(order) },
          hovertemplate: "%{y:.2f} s<extra>%{fullData.name}</extra>",
        };
      });
  },

  // Metrics that never changed, with their values; of several runs where those differ.
  flat(plots) {
    const members = plots.flatMap(([, members]) => members);
    const names = [...new Set(members.map((one) => one.metric))];
    const values = (metric) => keel.runs.map((run) => keel.short(run.metrics[metric]?.values[0]));
    return keel.make("div", { class: "flat" }, names.map((metric) => keel.make("span", {},
      keel.make("span", { class: "dim" }, `${metric} `),
      new Set(values(metric)).size > 1 ? values(metric).join(" · ") : values(metric)[0])));
  },

  show(asked) {
    const axis = asked.axis || "step", all = asked.all === "1";
    const page = [keel.table.summary()];
    const drawn = keel.curves.plots();
    const flat = drawn.filter(([, members]) => keel.curves.constant(members));
    const boxes = drawn.filter((one) => !flat.includes(one))
      .map(([plot, members]) => [plot, () => keel.curves.traces(members, axis)]);
    for (const run of keel.runs)
      if (run.metrics["time/rollout"])
        boxes.push([`seconds of a step${keel.runs.length > 1 ? ` · ${run.name}` : ""}`,
          () => keel.curves.split(run, axis)]);
    const main = boxes.filter(([plot]) => keel.curves.rank(plot) < 99);
    const others = boxes.filter((one) => !main.includes(one));
    const grid = (some) => keel.make("div", { class: "grid" },
      some.map(([plot, traces]) => keel.curves.box(plot, axis, traces)));
    if (boxes.length)
      page.push(keel.make("div", { class: "bar" },
        keel.choice("across", "axis", [["step", "steps"], ["hours", "hours since the start"]], axis),
        keel.curves.legend(axis)), grid(main));
    if (others.length)
      page.push(keel.make("p", {}, keel.make("a", { href: keel.ask({ all: all ? 0 : 1 }) },
        all ? "Hide the other curves" : `Show ${others.length} more curves`)), all ? grid(others) : []);
    if (flat.length)
      page.push(keel.make("h2", {}, "did not change"), keel.curves.flat(flat));
    const events = keel.curves.table();
    if (events.length)
      page.push(keel.make("h2", {}, "events"), keel.make("table", { id: "events" },
        events.map(([name, event]) => keel.make("tr", {},
          ...[name, `step ${event.step}`, event.kind, event.text].map((text) => keel.make("td", {}, text))))));
    return page.flat();
  },
};
