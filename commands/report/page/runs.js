"use strict";
// Tables with a column for each run: the summary, and the settings.

keel.table = {
  row(name, values) {
    const same = values.every((value) => value === values[0]);
    return keel.make("tr", same ? {} : { class: "differs" },
      keel.make("th", {}, name), values.map((value) => keel.make("td", {}, value ?? "–")));
  },

  // Pairs of a name and the values of all runs.
  rows(field) {
    const names = [...new Set(keel.runs.flatMap((run) => Object.keys(run[field])))];
    return names.map((name) => [name, keel.runs.map((run) => run[field][name])]);
  },

  of(rows) {
    return keel.make("table", {},
      keel.runs.length > 1 ? keel.make("thead", {}, keel.make("tr", {}, keel.make("th", {}),
        keel.runs.map((run) => keel.make("th", {}, run.name)))) : [],
      keel.make("tbody", {}, rows.map(([name, values]) => keel.table.row(name, values))));
  },

  // A run's summary on few lines; those of several runs side by side.
  summary() {
    const rows = keel.table.rows("summary");
    if (keel.runs.length > 1) return keel.table.of(rows);
    return keel.make("div", { class: "summary" }, rows.map(([name, [value]]) =>
      keel.make("div", {}, keel.make("div", { class: "dim" }, name), keel.make("strong", {}, value))));
  },

  show() {
    const knobs = keel.table.rows("knobs");
    const changed = knobs.filter(([name]) => keel.runs.some((run) => run.changed.includes(name)));
    const differ = changed.filter(([, values]) => values.some((value) => value !== values[0]));
    const alike = changed.filter((row) => !differ.includes(row));
    const page = [];
    if (keel.runs.length > 1)
      page.push(keel.make("h2", { id: "differ" }, `${differ.length} settings differ`), keel.table.of(differ));
    page.push(keel.make("h2", {}, keel.runs.length > 1 ? `${alike.length} settings are the same in all, and not the defaults`
      : `${alike.length} settings that are not the defaults`), keel.table.of(alike));
    page.push(keel.make("details", {}, keel.make("summary", {}, `all ${knobs.length} settings`), keel.table.of(knobs)));
    return page;
  },
};
