"use strict";
(() => {
  const STATES = { READY: "ready", LOADING: "loading", UNAVAILABLE: "unavailable" };

  function el(name, attributes = {}, ...children) {
    const made = document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    made.append(...children.filter((child) => child !== null && child !== undefined));
    return made;
  }
  const number = (value) => value.toLocaleString("en", { maximumFractionDigits: value < 10 ? 2 : value < 100 ? 1 : 0 });
  const ms = (value) => (value === null ? "–" : number(value));
  const words = (text) => String(text).replaceAll("_", " ");
  function duration(seconds) {
    if (seconds < 90) return `${Math.round(seconds)} s`;
    if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
    if (seconds < 129600) return `${Math.round(seconds / 3600)} h`;
    return `${Math.round(seconds / 86400)} days`;
  }

  function table(caption, heads, rows) {
    const cell = (value, n) => {
      const head = heads[n], kind = n === 0 ? "th" : "td";
      const attributes = { class: head.number ? "number" : head.why ? "why" : "" };
      if (n === 0) attributes.scope = "row";
      return el(kind, attributes, value);
    };
    return el("div", { class: "wide", tabindex: "0", role: "region", "aria-label": caption },
      el("table", {},
        el("caption", {}, caption),
        el("thead", {}, el("tr", {}, ...heads.map((head) => el("th", { scope: "col", class: head.number ? "number" : "" }, head.name)))),
        el("tbody", {}, ...rows.map((row) => el("tr", {}, ...row.map(cell))))));
  }

  function trackCard(track) {
    const share = track.share === null ? "" : ` · ${Math.round(track.share * 100)} % of answers`;
    return el("div", { class: `card ${track.slot}` },
      el("div", { class: "row" }, el("h3", {}, track.slot), el("span", { class: "soft" }, track.version === null ? "no version" : `version ${track.version}`)),
      el("p", { class: "big" }, number(track.rate_per_s), el("small", {}, ` requests/s${share}`)));
  }

  function versions(model, seen) {
    const heads = [{ name: "Version" }, { name: "State" }, { name: "Tracks" }, { name: "Served as" },
      { name: "Requests/s", number: true }, { name: "p50 ms", number: true }, { name: "p95 ms", number: true },
      { name: "p99 ms", number: true }, { name: "All requests", number: true }, { name: "Why", why: true }];
    const kinds = { READY: "good", UNAVAILABLE: "bad" };
    const troubled = model.versions.some((v) => v.reason);
    const rows = model.versions.map((v) => [
      v.version,
      el("span", { class: `badge ${v.reason === "unloaded" ? "" : kinds[v.state] || ""}` }, v.reason === "unloaded" ? "unloaded" : STATES[v.state] || v.state),
      v.slots.join(", ") || "–",
      [v.variant, v.hardware, v.platform].filter(Boolean).join(" · ") || "–",
      number(v.rate_per_s), ms(v.p50_ms), ms(v.p95_ms), ms(v.p99_ms), number(v.requests), v.reason,
    ].slice(0, troubled ? 10 : 9));
    return table(`Versions, last ${duration(seen.recent_s)}`, heads.slice(0, troubled ? 10 : 9), rows);
  }

  function modelSection(model, seen) {
    const id = `model-${model.name}`;
    const ready = model.versions.some((v) => v.slots.includes("stable") && v.state === "READY");
    const cards = model.slots.map(trackCard);
    return el("section", { "aria-labelledby": id },
      el("div", { class: "head" }, el("h2", { id }, model.name), el("span", { class: `badge ${ready ? "good" : "bad"}` }, ready ? "answers" : "does not answer")),
      el("div", { class: "cards" }, ...cards),
      versions(model, seen));
  }

  function refusals(seen) {
    const heads = [{ name: "Model" }, { name: "Track" }, { name: "Reason" },
      { name: `Last ${duration(seen.recent_s)}`, number: true }, { name: "Since start", number: true }];
    const rows = seen.refusals.map((r) => [r.model, r.slot,
      el("span", { class: r.is_ours && r.recent ? "bad-text" : "" }, words(r.reason)), number(r.recent), number(r.total)]);
    return el("section", {}, rows.length ? table("Refused requests", heads, rows) : el("div", {}, el("h3", {}, "Refused requests"), el("p", { class: "fine" }, "None since the start.")));
  }

  function freshness(seen) {
    const states = ["fresh", "stale", "missing", "ahead"];
    const heads = [{ name: "Feature view" }, ...states.map((name) => ({ name, number: true }))];
    const rows = seen.freshness.map((one) => [one.view, ...states.map((state) => {
      const rows = one.rows[state] || 0;
      return el("span", { class: rows && (state === "stale" || state === "ahead") ? "bad-text" : "" }, number(rows));
    })]);
    return el("section", {}, table(`Rows read for entities, last ${duration(seen.recent_s)}`, heads, rows));
  }

  function draw(seen) {
    const main = document.getElementById("main"), made = [];
    if (seen.notices.length) {
      made.push(el("section", { class: "notices", role: "status" }, el("h3", {}, "Needs attention"),
        el("ul", {}, ...seen.notices.map((text) => el("li", {}, text)))));
    }
    if (!seen.models.length) made.push(el("section", {}, el("h2", {}, "No model is loaded"), el("p", { class: "fine" }, "This process serves nothing yet. Load a model, or look at the log for why none was.")));
    made.push(...seen.models.map((model) => modelSection(model, seen)), refusals(seen));
    if (seen.freshness.length) made.push(freshness(seen));
    const at = [window.scrollX, window.scrollY];
    const focused = document.activeElement && document.activeElement.getAttribute("aria-label");
    main.replaceChildren(...made);
    if (focused) [...main.querySelectorAll(".wide")].find((one) => one.getAttribute("aria-label") === focused)?.focus();
    window.scrollTo(...at);
    document.getElementById("process").textContent = `process ${seen.process.pid}, up ${duration(seen.process.up_s)}`;
  }

  const asked = document.getElementById("asked");
  function report(text, away) {
    if (asked.textContent !== text) asked.textContent = text;
    asked.classList.toggle("away", away);
  }

  let seen = JSON.parse(document.getElementById("seen").textContent);
  draw(seen);
  report(`as of ${seen.at.slice(11, 19)} UTC`, false);
  async function ask() {
    try {
      const answer = await fetch("status.json", { cache: "no-store", credentials: "same-origin" });
      if (!answer.ok) throw new Error(`status ${answer.status}`);
      seen = await answer.json();
      draw(seen);
      report(`as of ${seen.at.slice(11, 19)} UTC`, false);
    } catch (error) {
      report(`not answered since ${seen.at.slice(11, 19)} UTC`, true);
    }
    window.setTimeout(ask, seen.refresh_s * 1000);
  }
  window.setTimeout(ask, seen.refresh_s * 1000);
})();
