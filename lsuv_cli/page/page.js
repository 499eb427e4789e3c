"use strict";
(() => {
  const get = (id) => document.getElementById(id);
  const page = JSON.parse(get("data").textContent);
  const tip = get("tip"), table = get("layers"), rows = [...table.tBodies[0].rows], heads = [...table.tHead.rows[0].cells];
  const count = rows.length, names = rows.map(({ cells: [, { textContent: name }] }) => name.startsWith(page.prefix) ? name.slice(page.prefix.length) : name);
  const boxes = new Map([...document.querySelectorAll("#graph a")].map((a) => [Number(a.getAttribute("href").slice(2)), a]));
  const charts = [...document.querySelectorAll("svg.chart")].filter((svg) => svg.id in page.charts);
  const residual = get("residual");
  let chosen = -1, report = null, sums = [], sum = 0; // sums: the residual stream, once the report is unpacked
  document.querySelectorAll(".tools").forEach((p) => { p.hidden = false; });

  const number = (k, column) => { const text = rows[k].cells[column].textContent; return text === "" ? null : Number(text); };
  const shown = (v) => v === null || v === undefined ? "–" : Number.isNaN(v) ? "not finite" : v !== 0 && (Math.abs(v) < 1e-3 || Math.abs(v) >= 1e4) ? v.toExponential(2) : String(v);
  const told = (k, key) => `${k + 1} ${names[k]}\n` + Object.entries(page.charts[key] || {}).map(([label, column]) => `${label}: ${shown(number(k, column))}`).join("\n");

  function place(x, y, text) {
    tip.textContent = text; tip.hidden = false;
    tip.style.left = `${Math.max(4, Math.min(x + 14, innerWidth - tip.offsetWidth - 8))}px`;
    tip.style.top = `${y + 18 + tip.offsetHeight > innerHeight ? y - tip.offsetHeight - 10 : y + 18}px`;
  }
  const hide = () => { tip.hidden = true; };
  const left = (svg) => Number(svg.dataset.left), right = (svg) => Number(svg.dataset.right);
  const middle = (svg, k, of) => left(svg) + (right(svg) - left(svg)) * (k + .5) / of;
  const cursor = (svg, x) => { const line = svg.querySelector(".cursor"); line.setAttribute("x1", x); line.setAttribute("x2", x); };

  // Mark a layer everywhere: cursor in the charts, box in the graph, row of the table, histograms.
  function mark(k, scroll) {
    if (k < 0 || k >= count) return;
    if (chosen >= 0) { rows[chosen].classList.remove("marked"); rows[chosen].setAttribute("aria-selected", "false"); boxes.get(chosen)?.classList.remove("marked"); }
    chosen = k;
    rows[k].classList.add("marked"); rows[k].setAttribute("aria-selected", "true"); boxes.get(k)?.classList.add("marked");
    rove(rows, rows[k]); if (boxes.has(k)) rove([...boxes.values()], boxes.get(k));
    for (const svg of charts) cursor(svg, middle(svg, k, count));
    if (sums.length && sums[sum].row !== k) { const at = sums.findIndex((item) => item.row === k); if (at >= 0) sum = at; cursor(residual, at < 0 ? -9 : middle(residual, at, sums.length)); }
    if (scroll) { const box = table.parentElement; box.scrollTop = rows[k].offsetTop - box.clientHeight / 2; }
    detail(k);
  }

  function detail(k) {
    const panel = get("chosen");
    if (!panel) return;
    panel.hidden = false;
    get("which").textContent = `${k + 1} ${names[k]}`;
    get("numbers").textContent = heads.slice(2).map((th, i) => [th.textContent, rows[k].cells[i + 2].textContent]).filter(([, v]) => v).map(([t, v]) => `${t}: ${v}`).join(" · ");
    if (!report) return;
    const init = get("colour") && page.inits.includes(get("colour").value) ? get("colour").value : page.inits[0];
    const { weights, outputs } = (report.inits ? report.inits[init] : report).details.layers[k];
    histogram(get("weights"), weights); histogram(get("outputs"), outputs);
  }

  function element(parent, name, attributes, text) {
    const made = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    if (text !== undefined) made.textContent = text;
    parent.append(made);
  }
  function histogram(svg, item) {
    svg.replaceChildren();
    if (!item) { element(svg, "text", { x: 10, y: 80 }, "not measured"); svg.setAttribute("aria-label", "not measured"); return; }
    const { low, high, per_mille: heights } = item, wide = 440 / heights.length, most = Math.max(...heights);
    heights.forEach((height, i) => { const h = height / most * 140; element(svg, "rect", { x: 10 + i * wide, y: 146 - h, width: Math.max(wide - 1, 1), height: h }); });
    element(svg, "path", { class: "axis", d: "M10 146.5H450" });
    if (low < 0 && high > 0) { const zero = 10 + 440 * -low / (high - low); element(svg, "path", { class: "axis", d: `M${zero} 146v5` }); if (zero > 70 && zero < 390) element(svg, "text", { x: zero, y: 163, class: "number" }, "0"); }
    element(svg, "text", { x: 10, y: 163 }, shown(low)); element(svg, "text", { x: 450, y: 163, class: "tick" }, shown(high));
    svg.setAttribute("aria-label", `Histogram from ${shown(low)} to ${shown(high)}`);
  }

  // One of many elements can be reached by Tab; arrow keys go on from there.
  const rove = (all, one) => { for (const each of all) if (each.getAttribute("tabindex") !== "-1") each.setAttribute("tabindex", "-1"); one.setAttribute("tabindex", "0"); };
  const step = (event) => ({ ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1, PageDown: 10, PageUp: -10, Home: -1e9, End: 1e9 })[event.key];
  const within = (k, most) => Math.max(0, Math.min(most, k));

  // A chart shows what is under the pointer or the cursor: of `size()` items, `tell(k)` says it, `choose(k)` marks it.
  function live(svg, { size, chosen, tell, choose }) {
    const at = (event) => { const box = svg.getBoundingClientRect(), x = (event.clientX - box.left) * svg.viewBox.baseVal.width / box.width; return within(Math.floor((x - left(svg)) / (right(svg) - left(svg)) * size()), size() - 1); };
    svg.addEventListener("pointermove", (event) => { if (size()) place(event.clientX, event.clientY, tell(at(event))); });
    svg.addEventListener("pointerleave", hide);
    svg.addEventListener("click", (event) => { if (size()) choose(at(event)); });
    svg.addEventListener("blur", hide);
    svg.addEventListener("keydown", (event) => {
      const by = step(event); if (by === undefined || !size()) return;
      event.preventDefault(); const next = within(chosen() + by, size() - 1); choose(next);
      const box = svg.getBoundingClientRect(); place(box.left + middle(svg, next, size()) * box.width / svg.viewBox.baseVal.width, box.top + 20, tell(next));
    });
  }
  for (const svg of charts) live(svg, { size: () => count, chosen: () => chosen, tell: (k) => told(k, svg.id), choose: (k) => mark(k, true) });
  if (residual) live(residual, { size: () => sums.length, chosen: () => sum, tell: (k) => sums[k].told, choose: (k) => { sum = k; if (sums[k].row >= 0) mark(sums[k].row, true); cursor(residual, middle(residual, k, sums.length)); } });

  const lines = page.charts.variance || {};
  for (const [k, box] of boxes) {
    const status = typeof page.status === "number" ? rows[k].cells[page.status].textContent : page.status, first = Object.keys(lines).at(page.inits[0] === "" ? -1 : 0);
    box.setAttribute("aria-label", `${k + 1} ${names[k]}: ${status}${first && rows[k].cells[lines[first]].textContent ? `, variance ${rows[k].cells[lines[first]].textContent}` : ""}`);
    box.addEventListener("pointermove", (event) => place(event.clientX, event.clientY, told(k, "variance")));
    box.addEventListener("pointerleave", hide); box.addEventListener("blur", hide);
    box.addEventListener("click", (event) => { event.preventDefault(); mark(k, true); });
    box.addEventListener("keydown", (event) => {
      const by = step(event); if (by === undefined) return;
      event.preventDefault(); const keys = [...boxes.keys()], next = keys[within(keys.indexOf(k) + by, keys.length - 1)];
      mark(next, true); boxes.get(next).focus();
    });
  }

  // The table: sort by a click on a title, filter by any text in a row.
  table.setAttribute("role", "grid"); table.setAttribute("aria-label", "Layers");
  const value = (row, column) => { const text = row.cells[column].textContent, n = Number(text); return text === "" ? null : Number.isNaN(n) ? text.toLowerCase() : n; };
  heads.forEach((head, column) => {
    const button = document.createElement("button"); button.type = "button"; button.textContent = head.textContent; head.replaceChildren(button);
    button.addEventListener("click", () => {
      const down = head.getAttribute("aria-sort") === "ascending", sign = down ? -1 : 1;
      heads.forEach((each) => each.removeAttribute("aria-sort")); head.setAttribute("aria-sort", down ? "descending" : "ascending");
      const keyed = rows.map((row) => [value(row, column), row]);
      keyed.sort(([a], [b]) => a === null || b === null ? (a === null) - (b === null) : typeof a === typeof b ? sign * (a < b ? -1 : a > b ? 1 : 0) : sign * (typeof a === "number" ? -1 : 1));
      table.tBodies[0].append(...keyed.map(([, row]) => row));
    });
  });
  const once = (get("once")?.textContent ?? "").toLowerCase();
  get("filter").addEventListener("input", (event) => {
    const words = event.target.value.toLowerCase().split(/\s+/).filter(Boolean); let found = 0;
    for (const row of rows) { const text = row.textContent.toLowerCase() + once, fits = words.every((word) => text.includes(word)); row.hidden = !fits; found += fits; }
    get("found").textContent = words.length ? `${found} of ${count} layers` : "";
  });
  rows.forEach((row, k) => {
    row.addEventListener("click", () => mark(k, false));
    row.addEventListener("keydown", (event) => {
      if (event.key === "Enter" || event.key === " ") { event.preventDefault(); mark(k, false); return; }
      const by = step(event); if (by === undefined) return;
      event.preventDefault(); const seen = [...table.tBodies[0].rows].filter((each) => !each.hidden);
      const next = seen[within(seen.indexOf(row) + by, seen.length - 1)]; rove(rows, next); next.focus();
    });
  });

  const colour = get("colour");
  if (colour) {
    for (const label of Object.keys(lines)) colour.add(new Option(label, label));
    if (colour.length < 2) colour.closest("p").hidden = true;
    if (page.inits[0] === "") colour.selectedIndex = colour.length - 1;
    colour.addEventListener("change", () => {
      for (const [k, box] of boxes) {
        const v = number(k, lines[colour.value]), at = v <= 0 ? -Infinity : Math.log10(v / page.targets[k]);
        box.setAttribute("class", v === null ? "vx" : Number.isNaN(v) ? "vn" : `v${page.shades.filter((limit) => at > limit).length}`);
      }
      if (chosen >= 0) { boxes.get(chosen)?.classList.add("marked"); detail(chosen); }
    });
  }

  // The report itself, which is compressed and in columns if it is long: packing.py says how.
  function unpacked(bytes) {
    const end = bytes.indexOf(0), planes = bytes.subarray(end + 1), total = planes.length / 8, raw = new DataView(new ArrayBuffer(planes.length)), lists = [];
    for (let k = 0; k < 8; k++) for (let i = 0; i < total; i++) raw.setUint8(8 * i + k, planes[k * total + i]);
    let at = 0;
    const keep = (list) => { lists.push(list); return list; };
    const longer = (value) => {
      if (Array.isArray(value)) return value.length < 8 || value.some((item) => item !== null && typeof item === "object" && !Array.isArray(item)) ? value.map(longer) : keep(value);
      if (value === null || typeof value !== "object") return value;
      if (!("\0" in value)) return Object.fromEntries(Object.entries(value).map(([key, item]) => [key, longer(item)]));
      const held = value["\0"];
      if (typeof held === "number") return lists[held];
      if (held === "float64") return keep(Array.from({ length: value.count }, () => { const v = raw.getFloat64(8 * at++); return Number.isNaN(v) ? null : v; }));
      const keys = Object.keys(held[1]), values = keys.map((key) => longer(held[1][key])), made = values[0].map((_, k) => Object.fromEntries(keys.map((key, i) => [key, values[i][k]])));
      for (const k of held[0]) made.splice(k, 0, null);
      return made;
    };
    return longer(JSON.parse(new TextDecoder().decode(bytes.subarray(0, end))));
  }
  async function read() {
    const held = get("report");
    if (!held.type.includes("gzip")) return JSON.parse(held.textContent);
    const bytes = Uint8Array.from(atob(held.textContent), (c) => c.charCodeAt(0));
    return unpacked(new Uint8Array(await new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).arrayBuffer()));
  }
  read().then((found) => {
    report = found;
    const all = report.inits ? Object.entries(report.inits) : [["variance", report]], layers = new Map(all[0][1].layers.map((layer, k) => [layer.name, k]));
    if (residual) sums = all[0][1].sums.map((item, i) => ({
      row: layers.get(item.layer) ?? -1,
      told: `${i + 1} ${item.name}\n${all.map(([init, each]) => `${init}: ${each.sums[i].variance === null ? "not finite" : shown(Number(each.sums[i].variance.toPrecision(5)))}`).join("\n")}`,
    }));
    if (chosen >= 0) mark(chosen, false);
    document.body.dataset.ready = "yes";
  });
  get("save").addEventListener("click", async () => {
    const blob = new Blob([JSON.stringify(await read(), null, 2)], { type: "application/json" });
    const link = document.createElement("a"); link.href = URL.createObjectURL(blob); link.download = "report.json"; link.click(); URL.revokeObjectURL(link.href);
  });

  if (count) { mark(page.worst, true); rove(rows, rows[page.worst]); }
})();
