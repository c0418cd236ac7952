"use strict";
// The runs beside one another, and the knobs in which they differ.

keel.table = {
  row(name, values) {
    const same = values.every((value) => value === values[0]);
    return keel.make("tr", same ? {} : { class: "differs" },
      keel.make("th", {}, name), values.map((value) => keel.make("td", {}, value ?? "–")));
  },

  rows(field) {
    const names = [...new Set(keel.runs.flatMap((run) => Object.keys(run[field])))];
    return names.map((name) => [name, keel.runs.map((run) => run[field][name])]);
  },

  show() {
    const of = (rows) => keel.make("table", {},
      keel.make("thead", {}, keel.make("tr", {}, keel.make("th", {}),
        keel.runs.map((run) => keel.make("th", {}, run.name)))),
      keel.make("tbody", {}, rows.map(([name, values]) => keel.table.row(name, values))));
    const knobs = keel.table.rows("knobs");
    const differ = knobs.filter(([, values]) => values.some((value) => value !== values[0]));
    const page = [keel.make("h2", {}, "at a glance"), of(keel.table.rows("summary"))];
    if (keel.runs.length > 1)
      page.push(keel.make("h2", { id: "differ" }, `${differ.length} knobs differ`), of(differ));
    page.push(keel.make("details", {}, keel.make("summary", {}, `all ${knobs.length} knobs`), of(knobs)));
    return page;
  },
};
