"use strict";
// Metrics by group; a curve is drawn when it comes into view.

keel.curves = {
  first: ["held out", "reward", "by domain", "training", "length"],
  rows: 200, // events of a run in the table below
  // What happens besides steps: in words, and the colour of its dotted line.
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
      return { group: "held out", plot: parts.at(-1), series: parts.slice(1, -1).join("/") };
    if (parts[0] === "domain" && parts.length > 2)
      return { group: "by domain", plot: parts.at(-1), series: parts.slice(1, -1).join("/") };
    return { group: parts.length > 1 ? parts[0] : "training", plot: metric, series: "" };
  },

  plots() {
    const groups = new Map();
    keel.runs.forEach((run, number) => {
      for (const metric of Object.keys(run.metrics)) {
        const { group, plot, series } = keel.curves.place(metric);
        if (!groups.has(group)) groups.set(group, new Map());
        const plots = groups.get(group);
        if (!plots.has(plot)) plots.set(plot, []);
        plots.get(plot).push({ number, metric, series });
      }
    });
    const order = (name) => (keel.curves.first.indexOf(name) + 1 || 99) + name;
    return [...groups].sort(([a], [b]) => (order(a) < order(b) ? -1 : 1));
  },

  x(run, axis) {
    return axis === "hours" ? run.times.map((at) => (at - run.times[0]) / 3600) : run.steps;
  },

  traces(members, axis) {
    const dashes = ["solid", "dash", "dot", "dashdot", "longdash"];
    const series = [...new Set(members.map((one) => one.series))];
    return members.map(({ number, metric, series: name }) => {
      const run = keel.runs[number], x = [], y = [];
      const across = keel.curves.x(run, axis);
      run.metrics[metric].forEach((value, at) => {
        if (value !== null) { x.push(across[at]); y.push(value); }
      });
      const few = metric.startsWith("eval/") || x.length < 3;
      const at = series.indexOf(name);
      const alone = keel.runs.length === 1 && name;
      return {
        x, y,
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
      run.events.filter(({ kind }) => !["ledger", "tracker"].includes(kind)).map((event) => {
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
      title: { text: keel.curves.text(title), font: { size: 13 }, x: 0.02, xanchor: "left" },
      margin: { l: 48, r: 10, t: 30, b: 28 },
      showlegend: traces.length > 1,
      legend: { font: { size: 10 }, orientation: "h", y: 1.02, yanchor: "bottom", x: 1, xanchor: "right" },
      hovermode: "x unified",
      xaxis: { zeroline: false, gridcolor: "#eef1f4" },
      yaxis: { zeroline: false, gridcolor: "#eef1f4", exponentformat: "power" },
      shapes: keel.curves.shapes(axis),
    };
  },

  // One box; `traces` are made when it is seen.
  box(title, axis, traces, more = {}) {
    const element = keel.make("div", { class: "plot", "data-plot": title });
    element.draw = () => {
      const made = traces();
      const layout = { ...keel.curves.layout(title, axis, made), ...more };
      Plotly.react(element, made, layout, { responsive: true, displayModeBar: false });
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

  // Where the seconds of a step went, one above the other.
  split(run, axis) {
    const names = ["rollout", "reward", "train", "sync"].filter((n) => run.metrics[`time/${n}`]);
    const at = (n) => run.metrics[`time/${n}`];
    const steps = run.steps.map((_, i) => i).filter((i) => names.some((n) => at(n)[i] !== null));
    const across = keel.curves.x(run, axis);
    return names.map((name, order) => ({
      x: steps.map((i) => across[i]),
      y: steps.map((i) => at(name)[i] || 0),
      name, stackgroup: "all", line: { width: 0.5, color: keel.colour(order) },
      hovertemplate: "%{y:.2f} s<extra>%{fullData.name}</extra>",
    }));
  },

  show(asked) {
    const axis = asked.axis || "step";
    const page = [keel.make("div", { class: "bar" },
      keel.choice("across", "axis", [["step", "steps"], ["hours", "hours since the start"]], axis),
      keel.curves.legend(axis))];
    for (const [group, plots] of keel.curves.plots()) {
      page.push(keel.make("h2", {}, group));
      const grid = keel.make("div", { class: "grid" });
      if (group === "time")
        for (const run of keel.runs)
          if (run.kind === "run")
            grid.append(keel.curves.box(`a step's seconds${keel.runs.length > 1 ? ` · ${run.name}` : ""}`,
              axis, () => keel.curves.split(run, axis)));
      for (const [plot, members] of plots)
        grid.append(keel.curves.box(plot, axis, () => keel.curves.traces(members, axis)));
      page.push(grid);
    }
    const events = keel.curves.table();
    if (events.length)
      page.push(keel.make("h2", {}, "events"), keel.make("table", {},
        events.map(([name, event]) => keel.make("tr", {},
          ...[name, `step ${event.step}`, event.kind, event.text].map((text) => keel.make("td", {}, text))))));
    if (page.length === 1)
      page.push(keel.make("p", { class: "dim" }, keel.runs.some((run) => run.kind === "run")
        ? "No step has been written so far." : "Evaluations have no curves: their results are under Runs."));
    return page;
  },
};
