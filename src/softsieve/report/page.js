"use strict";
// Draws the figures in the colours of the page, light or dark, and again when these change or the page is printed.
const softsieve = (() => {
  const data = (name) => JSON.parse(document.getElementById(`data-${name}`).textContent);
  const figures = data("figures");
  const schemes = data("schemes");
  const root = document.documentElement;
  const prefersDark = window.matchMedia("(prefers-color-scheme: dark)");
  const coarse = window.matchMedia("(pointer: coarse)").matches;
  const onPaper = window.matchMedia("print");
  const PAPER = 660; // pixels between the margins of a printed page
  const config = {
    displaylogo: false,
    responsive: true,
    doubleClick: "reset",
    displayModeBar: false, // a figure is an image with a name; its buttons would be stops of the Tab key
    showSendToCloud: false,
    showEditInChartStudio: false,
    plotlyServerURL: "",
    topojsonURL: "",
  };
  let chosen = null; // by the button; else what the system prefers
  let printing = false;
  const drawn = new Set();

  const name = () => (printing ? "light" : (chosen ?? (prefersDark.matches ? "dark" : "light")));

  function faint(colour) {
    const [r, g, b] = [1, 3, 5].map((i) => parseInt(colour.slice(i, i + 2), 16));
    return `rgba(${r},${g},${b},0.18)`;
  }

  function paint(trace, scheme, narrow) {
    const { role, slot } = trace.meta ?? {};
    if (narrow && trace.name) trace.name = wrap(trace.name, 30);
    const colour = scheme.lines[(slot ?? 0) % scheme.lines.length];
    if (role === "heat") {
      trace.colorscale = scheme.heat;
      const below = { orientation: "h", y: -0.18, yanchor: "top", len: 1, title: { text: "probability", side: "top" } };
      trace.colorbar = { ...trace.colorbar, ...(narrow ? below : {}), tickfont: { color: scheme.ink }, outlinewidth: 0 };
    } else if (role === "solved") {
      trace.colorscale = [[0, scheme.solved], [1, scheme.solved]];
    } else if (role === "band") {
      trace.line = { ...trace.line, color: colour };
      trace.fillcolor = faint(colour);
    } else {
      trace.line = { ...trace.line, color: colour };
      trace.marker = { ...trace.marker, color: colour, line: { width: 1, color: scheme.card } };
      for (const bars of ["error_x", "error_y"]) {
        if (trace[bars]) trace[bars] = { ...trace[bars], color: colour };
      }
    }
    return trace;
  }

  // A long name in lines of a few words, for small screens.
  function wrap(text, longest) {
    const lines = [""];
    for (const word of text.split(" ")) {
      const last = lines.length - 1;
      if (lines[last] && lines[last].length + word.length > longest) lines.push(word);
      else lines[last] += (lines[last] && " ") + word;
    }
    return lines.join("<br>");
  }

  function lay(layout, scheme, width) {
    const { legend, height } = layout.meta;
    const items = width < 520 ? 1 : width < 800 ? 2 : 4; // of the legend in a line
    const font = { color: scheme.ink, family: getComputedStyle(document.body).fontFamily, size: 13 };
    const more = {
      font,
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: layout.meta.masked ? scheme.masked : "rgba(0,0,0,0)",
      height: height + 21 * Math.max(0, Math.ceil(legend / items) - 1),
      autosize: true,
      dragmode: coarse ? false : "zoom",
      hoverlabel: { bgcolor: scheme.card, bordercolor: scheme.soft, font: { color: scheme.ink } },
    };
    if (printing) Object.assign(more, { width: PAPER, autosize: false });
    if (width < 520) more.margin = { ...layout.margin, r: 8 };
    for (const key of Object.keys(layout)) {
      if (/^[xy]axis\d*$/.test(key)) {
        const axis = { gridcolor: scheme.rule, linecolor: scheme.soft, zerolinecolor: scheme.rule, ticks: "outside" };
        more[key] = { ...layout[key], ...axis, tickcolor: scheme.soft, showline: true };
        if (width < 520 && key === "yaxis" && layout.yaxis.ticktext) {
          more.yaxis.ticktext = layout.yaxis.ticktext.map((text) => wrap(text, 16));
          more.height += 15 * more.yaxis.ticktext.reduce((lines, text) => lines + text.split("<br>").length - 1, 0);
        }
      }
    }
    if (layout.shapes) {
      more.shapes = layout.shapes.map((shape) => ({ ...shape, line: { ...shape.line, color: shape.name === "limit" ? scheme.soft : scheme.ink } }));
    }
    if (layout.annotations) more.annotations = layout.annotations.map((a) => ({ ...a, font: { ...font, size: 13 } }));
    return { ...layout, ...more };
  }

  function draw(key) {
    const place = document.getElementById(key);
    const figure = figures[key];
    if (!place || !figure) return;
    const scheme = schemes[name()];
    const width = printing ? PAPER : place.clientWidth;
    const traces = figure.data.map((trace) => paint({ ...trace }, scheme, width < 520));
    Plotly.react(place, traces, lay(figure.layout, scheme, width), config);
    const measured = document.querySelectorAll("#js-plotly-tester"); // text, off the page
    for (const svg of [...place.querySelectorAll("svg"), ...measured]) svg.setAttribute("aria-hidden", "true"); // the label says it
    place.style.minHeight = "";
    drawn.add(key);
  }

  function drawAll() {
    Object.keys(figures).forEach(draw);
  }

  // The button. What it says is kept while the page is open.
  const button = document.getElementById("scheme");
  function show() {
    if (chosen) root.dataset.scheme = chosen;
    button.setAttribute("aria-pressed", String(name() === "dark"));
    for (const key of drawn) draw(key);
  }
  button.hidden = false;
  button.addEventListener("click", () => {
    chosen = name() === "dark" ? "light" : "dark";
    show();
  });
  prefersDark.addEventListener("change", show);

  function print(on) {
    if (printing === on) return;
    printing = on;
    drawAll();
  }
  window.addEventListener("beforeprint", () => print(true));
  window.addEventListener("afterprint", () => print(false));
  onPaper.addEventListener("change", (event) => print(event.matches));

  // One figure at a time, so that the page can be read and scrolled meanwhile.
  function start() {
    printing = onPaper.matches;
    button.setAttribute("aria-pressed", String(name() === "dark"));
    const waiting = Object.keys(figures);
    (function next() {
      const key = waiting.shift();
      if (key === undefined) {
        root.dataset.drawn = "all";
        return;
      }
      if (!drawn.has(key)) draw(key);
      setTimeout(next, 0);
    })();
  }

  return { data, draw, figures, start };
})();
