"use strict";
(() => {
  const get = (id) => document.getElementById(id);
  const page = JSON.parse(get("data").textContent);
  const tip = get("tip"), table = get("layers"), rows = [...table.tBodies[0].rows], heads = [...table.tHead.rows[0].cells];
  const count = rows.length, names = rows.map((row) => row.cells[1].textContent.slice(page.prefix));
  const boxes = new Map([...document.querySelectorAll("#graph a")].map((a) => [Number(a.getAttribute("href").slice(2)), a]));
  const charts = [...document.querySelectorAll("svg.chart")].filter((svg) => svg.id in page.charts);
  let chosen = -1, report = null;
  document.querySelectorAll(".tools").forEach((p) => { p.hidden = false; });

  const number = (k, column) => { const text = rows[k].cells[column].textContent; return text === "" ? null : Number(text); };
  const shown = (v) => v === null || v === undefined ? "–" : v !== 0 && (Math.abs(v) < 1e-3 || Math.abs(v) >= 1e4) ? v.toExponential(2) : String(v);
  const told = (k, key) => `${k + 1} ${names[k]}\n` + Object.entries(page.charts[key] || {}).map(([label, column]) => `${label}: ${shown(number(k, column))}`).join("\n");

  function place(x, y, text) {
    tip.textContent = text; tip.hidden = false;
    tip.style.left = `${Math.max(4, Math.min(x + 14, innerWidth - tip.offsetWidth - 8))}px`;
    tip.style.top = `${y + 18 + tip.offsetHeight > innerHeight ? y - tip.offsetHeight - 10 : y + 18}px`;
  }
  const hide = () => { tip.hidden = true; };
  const left = (svg) => Number(svg.dataset.left), right = (svg) => Number(svg.dataset.right);
  const middle = (svg, k) => left(svg) + (right(svg) - left(svg)) * (k + .5) / count;

  // Mark a layer everywhere: cursor in the charts, box in the graph, row of the table, histograms.
  function mark(k, scroll) {
    if (k < 0 || k >= count) return;
    if (chosen >= 0) { rows[chosen].classList.remove("marked"); rows[chosen].setAttribute("aria-selected", "false"); boxes.get(chosen)?.classList.remove("marked"); }
    chosen = k;
    rows[k].classList.add("marked"); rows[k].setAttribute("aria-selected", "true"); boxes.get(k)?.classList.add("marked");
    rove(rows, rows[k]); if (boxes.has(k)) rove([...boxes.values()], boxes.get(k));
    for (const svg of charts) { const line = svg.querySelector(".cursor"), x = middle(svg, k); line.setAttribute("x1", x); line.setAttribute("x2", x); }
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

  for (const svg of charts) {
    const at = (event) => { const box = svg.getBoundingClientRect(), x = (event.clientX - box.left) * svg.viewBox.baseVal.width / box.width; return within(Math.floor((x - left(svg)) / (right(svg) - left(svg)) * count), count - 1); };
    svg.addEventListener("pointermove", (event) => place(event.clientX, event.clientY, told(at(event), svg.id)));
    svg.addEventListener("pointerleave", hide);
    svg.addEventListener("click", (event) => mark(at(event), true));
    svg.addEventListener("blur", hide);
    svg.addEventListener("keydown", (event) => {
      const by = step(event); if (by === undefined) return;
      event.preventDefault(); mark(within(chosen + by, count - 1), true);
      const box = svg.getBoundingClientRect(); place(box.left + middle(svg, chosen) * box.width / svg.viewBox.baseVal.width, box.top + 20, told(chosen, svg.id));
    });
  }

  for (const [k, box] of boxes) {
    const title = box.querySelector("title"); box.setAttribute("aria-label", title.textContent); title.remove();
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
  get("filter").addEventListener("input", (event) => {
    const words = event.target.value.toLowerCase().split(/\s+/).filter(Boolean); let found = 0;
    for (const row of rows) { const text = row.textContent.toLowerCase(), fits = words.every((word) => text.includes(word)); row.hidden = !fits; found += fits; }
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

  const colour = get("colour"), lines = page.charts.variance || {};
  if (colour) {
    for (const label of Object.keys(lines)) colour.add(new Option(label, label));
    if (colour.length < 2) colour.closest("p").hidden = true;
    if (page.inits[0] === "") colour.selectedIndex = colour.length - 1;
    colour.addEventListener("change", () => {
      for (const [k, box] of boxes) {
        const v = number(k, lines[colour.value]), at = v === null ? NaN : v <= 0 ? -Infinity : Math.log10(v / page.targets[k]);
        box.setAttribute("class", Number.isNaN(at) ? "vx" : `v${page.shades.filter((limit) => at > limit).length}`);
      }
      if (chosen >= 0) { boxes.get(chosen)?.classList.add("marked"); detail(chosen); }
    });
  }

  // The report itself, which is compressed if it is long.
  async function unpacked() {
    const held = get("report");
    if (!held.type.includes("gzip")) return held.textContent;
    const bytes = Uint8Array.from(atob(held.textContent), (c) => c.charCodeAt(0));
    return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
  }
  unpacked().then((text) => { report = JSON.parse(text); if (chosen >= 0) detail(chosen); document.body.dataset.ready = "yes"; });
  get("save").addEventListener("click", async () => {
    const blob = new Blob([await unpacked()], { type: "application/json" });
    const link = document.createElement("a"); link.href = URL.createObjectURL(blob); link.download = "report.json"; link.click(); URL.revokeObjectURL(link.href);
  });

  if (count) { mark(page.worst, true); rove(rows, rows[page.worst]); }
})();
