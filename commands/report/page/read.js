"use strict";
// Groups to choose from, and the members of one side by side. Only what is shown is drawn.

keel.read = {
  page: 100, // groups of the list that are drawn at once
  known: new Map(), // the last chunks that were looked at

  // The lines of a chunk: out of the page, or from `keel watch`.
  async lines(run, chunk) {
    const key = `${run} ${chunk}`;
    if (keel.read.known.has(key)) return keel.read.known.get(key);
    let body;
    if (keel.live) {
      const token = new URLSearchParams(location.search).get("token");
      const answer = await fetch(`chunk?${new URLSearchParams({ token, run, chunk })}`);
      if (!answer.ok) throw new Error(await answer.text());
      body = answer.body;
    } else {
      const element = document.querySelector(
        `script[data-run="${Number(run)}"][data-chunk="${CSS.escape(chunk)}"]`);
      const bytes = Uint8Array.from(atob(element.textContent), (one) => one.charCodeAt(0));
      body = new Blob([bytes]).stream();
    }
    const text = await new Response(body.pipeThrough(new DecompressionStream("gzip"))).text();
    const lines = text.split("\n");
    keel.read.known.set(key, lines);
    if (keel.read.known.size > 8) keel.read.known.delete(keel.read.known.keys().next().value);
    return lines;
  },

  spread(group) {
    const mean = keel.read.mean(group.rewards);
    return keel.read.mean(group.rewards.map((reward) => (reward - mean) ** 2));
  },

  mean(values) {
    return values.reduce((sum, value) => sum + value, 0) / Math.max(1, values.length);
  },

  orders: {
    step: ["the latest first", (a, b) => b.step - a.step],
    spread: ["where rewards differ most", (a, b) => keel.read.spread(b) - keel.read.spread(a)],
    low: ["the lowest rewards", (a, b) => keel.read.mean(a.rewards) - keel.read.mean(b.rewards)],
    high: ["the highest rewards", (a, b) => keel.read.mean(b.rewards) - keel.read.mean(a.rewards)],
    long: ["the longest", (a, b) => Math.max(...b.tokens) - Math.max(...a.tokens)],
  },

  chosen(run, asked) {
    const words = (asked.find || "").toLowerCase();
    const found = run.groups.filter((group) =>
      (!asked.step || String(group.step) === asked.step) &&
      (!asked.domain || group.domain === asked.domain) &&
      (!words || `${group.question} ${group.prompt}`.toLowerCase().includes(words)));
    return found.sort((keel.read.orders[asked.order] || keel.read.orders.step)[1]);
  },

  list(run, groups, shown) {
    const list = keel.make("div", { class: "list" });
    list.append(keel.make("div", { class: "dim" }, `${groups.length} groups, ` +
      `${groups.reduce((sum, group) => sum + group.rewards.length, 0)} trajectories`));
    const draw = (from) => {
      for (const group of groups.slice(from, from + keel.read.page)) {
        const at = group.at;
        list.append(keel.make("a",
          { href: keel.ask({ group: at }), "aria-current": group === shown && "true" },
          group.question || group.prompt,
          keel.make("div", { class: "dim" }, (run.kind === "run" ? `step ${group.step} · ` : "") +
            `${group.domain} · ${group.rewards.length} samples, mean reward ${keel.short(keel.read.mean(group.rewards))}`)));
      }
      const left = groups.length - from - keel.read.page;
      if (left > 0)
        list.append(keel.make("button", { click: (event) => {
          event.target.remove();
          draw(from + keel.read.page);
        } }, `${left} more`));
    };
    draw(0);
    return list;
  },

  // Content that is made when it is opened for the first time.
  fold(label, fill, open) {
    const body = keel.make("div", { class: "said" });
    const details = keel.make("details", {}, keel.make("summary", {}, label), body);
    const once = () => { if (details.open && !body.hasChildNodes()) fill(body); };
    details.addEventListener("toggle", once);
    details.open = open;
    once();
    return details;
  },

  folded(label, text, open) {
    return keel.read.fold(label, (body) => body.append(text), open);
  },

  // Where the thinking of a sampled run ends and its calls begin, in tokens.
  parts(run, message) {
    const text = run.text.join("");
    const token = (character) => {
      let at = 0;
      for (let seen = 0; at < run.text.length && seen + run.text[at].length <= character; at++)
        seen += run.text[at].length;
      return at;
    };
    const thought = (message?.reasoning_content || "").trim();
    const content = (message?.content || "").trim();
    let end = 0;
    const mark = text.indexOf("</think>");
    if (mark >= 0) end = mark + "</think>".length;
    else if (thought && text.includes(thought)) end = text.indexOf(thought) + thought.length;
    let calls = text.length;
    if (message?.tool_calls?.length) {
      const said = content ? text.indexOf(content, end) : -1;
      calls = said >= 0 ? said + content.length : end;
    }
    return { thinking: token(end), calls: calls === text.length ? run.text.length : token(calls) };
  },

  sampled(run, message, one, asked, range) {
    const colour = asked.colour in keel.tokens.choices ? asked.colour : "logp";
    const { thinking, calls } = keel.read.parts(run, message);
    const all = run.text.length, open = asked.open === "1";
    const draw = (from, to) => (body) => keel.tokens.draw(body, run, from, to, one, colour, range);
    const made = [];
    if (thinking) made.push(keel.read.fold(`thinking, ${thinking} tokens`, draw(0, thinking), open));
    const answer = keel.make("div", { class: "said" });
    draw(thinking, calls)(answer);
    made.push(answer);
    if (calls < all) {
      const names = message.tool_calls.map((call) => call.function?.name ?? "?").join(", ");
      made.push(keel.read.fold(`calls: ${names}`, draw(calls, all), open));
    }
    return made;
  },

  contexts(one, asked, range) {
    const said = one.messages.slice(one.opening)
      .filter((message) => message.role === "assistant" && message.name !== "program");
    let turn = 0;
    return one.contexts.flatMap((runs, number) => {
      const made = [];
      if (one.contexts.length > 1)
        made.push(keel.make("div", { class: "tags" }, `context ${number + 1} of ${one.contexts.length}`));
      runs.forEach((run, at) => {
        if (typeof run === "string") {
          const label = at ? "results and context" : "prompt";
          made.push(keel.read.folded(`${label}, ${run.length} characters`, run, at > 0 && asked.open === "1"));
        } else made.push(...keel.read.sampled(run, said[turn++], one, asked, range));
      });
      return made;
    });
  },

  // Without tokens: what was said, as text.
  messages(messages, open) {
    return messages.flatMap((message) => {
      const made = [];
      const text = typeof message.content === "string" ? message.content : JSON.stringify(message.content ?? "");
      if (message.reasoning_content)
        made.push(keel.read.folded("thinking", String(message.reasoning_content), open));
      if (message.role === "assistant") made.push(keel.make("div", { class: "said" }, message.raw || text));
      else made.push(keel.read.folded(`${message.role} ${message.name ?? ""}`.trim(), text, open));
      for (const call of message.tool_calls || [])
        made.push(keel.read.folded(`call: ${call.function?.name ?? "?"}`,
          JSON.stringify(call.function?.arguments, null, 1) ?? "", open));
      return made;
    });
  },

  member(one, asked, range) {
    const numbers = (entries) => entries.map(([name, value]) => `${name} ${keel.short(value)}`).join(" · ");
    const made = [
      keel.make("h3", {}, `reward ${keel.short(one.reward)}` +
        (one.advantage === undefined ? "" : ` · advantage ${one.advantage >= 0 ? "+" : ""}${keel.short(one.advantage)}`)),
      keel.make("div", { class: "tags" }, `sample ${one.sibling + 1} · ${one.tokens} tokens · ${one.finish}`),
      one.answer ? keel.make("div", { class: "answer" }, keel.make("span", { class: "dim" }, "answer "), one.answer) : [],
      keel.make("div", { class: "tags parts" }, numbers(Object.entries(one.parts))),
    ];
    if (one.usage) made.push(keel.make("div", { class: "tags" },
      numbers(Object.entries(one.usage).filter(([, value]) => value))));
    for (const [name, text] of Object.entries(one.notes || {}))
      made.push(keel.make("div", { class: "note" }, `${name}: ${text}`));
    if (one.facts) made.push(keel.read.folded("facts", JSON.stringify(one.facts, null, 1), asked.open === "1"));
    if (one.contexts?.length) made.push(...keel.read.contexts(one, asked, range));
    else if (one.messages) made.push(...keel.read.messages(one.messages.slice(one.opening), asked.open === "1"));
    else made.push(keel.make("div", { class: "dim" }, "Its text was not written: run.save_tokens has no room for it."));
    return keel.make("div", { class: "member" }, made);
  },

  async group(run, number, asked, about) {
    const into = keel.make("div", { class: "group" });
    if (!about) {
      into.append(keel.make("p", { class: "dim" }, run.groups.length
        ? "No group fits this choice." : `There are no trajectories to read${run.notes.length ? "; the notes above may say why" : ""}.`));
      return into;
    }
    const line = (await keel.read.lines(number, about.chunk))[about.line];
    const group = JSON.parse(line);
    into.append(keel.make("h2", {}, about.question || group.prompt), keel.make("div", { class: "tags" },
      (run.kind === "run" ? `step ${about.step} · ` : "") + `${group.domain} · ${group.prompt}`));
    if (group.messages.length)
      into.append(keel.read.fold("whole prompt", (body) =>
        body.append(group.messages.map((m) => `[${m.role}] ${m.content ?? ""}`).join("\n")), asked.open === "1"));
    if (group.reference) into.append(keel.make("div", { class: "answer" },
      keel.make("span", { class: "dim" }, "expected answer "), group.reference));
    for (const reason of group.dropped) into.append(keel.make("div", { class: "note" }, `missing: ${reason}`));
    const versions = group.trajectories.flatMap((one) => (one.contexts || []).flat())
      .flatMap((part) => part.version || []);
    const range = [versions.reduce((a, b) => Math.min(a, b), Infinity), versions.reduce((a, b) => Math.max(a, b), -1)];
    const sorted = [...group.trajectories].sort((a, b) => b.reward - a.reward);
    into.append(keel.make("div", { class: "members" }, sorted.map((one) => keel.read.member(one, asked, range))));
    return into;
  },

  bar(run, number, asked) {
    const values = (all) => [["", "all"], ...[...new Set(all)].map((one) => [one, one])];
    const colours = Object.entries(keel.tokens.choices).map(([name, { label }]) => [name, label]);
    const orders = Object.entries(keel.read.orders).map(([name, [label]]) => [name, label]);
    const find = keel.make("input", { type: "search", placeholder: "words of the question", value: asked.find || "",
      change: (event) => (location.hash = keel.ask({ find: event.target.value })) });
    const open = keel.make("input", { type: "checkbox",
      change: (event) => (location.hash = keel.ask({ open: event.target.checked ? 1 : 0 })) });
    open.checked = asked.open === "1";
    const runs = keel.runs.map((one, at) => [String(at), one.name]);
    const colour = asked.colour in keel.tokens.choices ? asked.colour : "logp";
    return keel.make("div", { class: "bar" },
      keel.runs.length > 1 ? keel.choice("run", "run", runs, String(number)) : [],
      run.kind === "run" ? keel.choice("step", "step", values(run.groups.map((g) => String(g.step))), asked.step || "") : [],
      keel.choice("domain", "domain", values(run.groups.map((g) => g.domain)), asked.domain || ""),
      keel.choice("order", "order", orders, asked.order || "step"), find,
      keel.choice("colour by", "colour", colours, colour), keel.tokens.legend(colour),
      keel.make("label", {}, open, " unfold all"));
  },

  async show(asked) {
    const number = Math.min(Number(asked.run) || 0, keel.runs.length - 1);
    const run = keel.runs[number];
    run.groups.forEach((group, at) => (group.at = at));
    const groups = keel.read.chosen(run, asked);
    const shown = asked.group === undefined ? groups[0] : run.groups[Number(asked.group)];
    return [keel.read.bar(run, number, asked), keel.make("div", { class: "reader" },
      keel.read.list(run, groups, shown), await keel.read.group(run, number, asked, shown))];
  },
};
