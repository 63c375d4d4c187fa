"use strict";
// The margin under the reader's hand. Which class is masked at which margin was asked of the library when the page was
// made: `first` is the step, in hundredths, from which on a class is kept; `until` that below which a row is solved.
(() => {
  const runs = softsieve.data("explorers");
  const slider = document.getElementById("explorer-delta");
  if (slider && runs.length) {
    const chooser = document.getElementById("explorer-run");
    const says = document.getElementById("explorer-says");
    const value = document.getElementById("explorer-value");
    const { data: cells, layout: mapLayout } = softsieve.figures["explorer-map"];
    const { data: lines, layout: lineLayout } = softsieve.figures["explorer-curves"];
    const grouped = new Intl.NumberFormat("en");
    const plain = (text) => text.replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");
    let run = runs[0];
    let waiting = false;
    mapLayout.meta.masked = true;

    const step = () => Math.round(100 * Number(slider.value));

    function choose() {
      run = runs[chooser ? Number(chooser.value) : 0];
      const count = run.p[0].length;
      const columns = Array.from({ length: count }, (_, j) => j);
      const names = run.ranked ? columns.map((j) => (j ? `${j}` : "label")) : run.labels.map(plain);
      const heat = cells[0];
      heat.x = columns;
      heat.y = run.p.map((_, i) => i + 1);
      heat.customdata = run.p.map((row, i) => row.map((p, j) => [
        plain(run.labels[run.ranked ? run.classes[i][j] : j]),
        plain(run.labels[run.target[i]]),
        p,
        run.first[i][j] ? `masked below delta ${(run.first[i][j] / 100).toFixed(2)}` : "never masked",
      ]));
      heat.hovertemplate =
        "row %{y}, label %{customdata[1]}<br>class %{customdata[0]}: p = %{customdata[2]:.3f}<br>%{customdata[3]}<extra></extra>";
      cells[1].x = [0];
      cells[1].y = heat.y;
      cells[1].hovertemplate = "row %{y}: solved<extra></extra>";
      mapLayout.xaxis = {
        ...mapLayout.xaxis,
        tickvals: columns,
        ticktext: names.map((name) => (name.length > 14 ? `${name.slice(0, 13)}…` : name)),
        title: { text: run.ranked ? "the label, then its rivals from the strongest on" : "class" },
      };
      document.getElementById("explorer-name").textContent = run.name;
      const share = (counts, whole) => counts.map((n) => (100 * n) / Math.max(1, whole));
      lines[0].y = share(run.masked, run.rivals);
      lines[1].y = share(run.solved, run.rows);
    }

    function move() {
      waiting = false;
      const at = step();
      const solved = run.solved[at];
      const delta = (at / 100).toFixed(2);
      cells[0].z = run.p.map((row, i) => row.map((p, j) => (at < run.first[i][j] ? null : p)));
      cells[1].z = run.until.map((until) => [at < until ? 1 : null]);
      const edge = { type: "line", xref: "paper", x0: 0, x1: 1, y0: solved + 0.5, y1: solved + 0.5, line: { width: 2 } };
      mapLayout.shapes = [edge];
      const here = { type: "line", yref: "paper", y0: 0, y1: 1, x0: at / 100, x1: at / 100, line: { width: 1.5, dash: "dot" } };
      lineLayout.shapes = [here];
      [0, 1].forEach((i) => {
        lines[2 + i].x = [at / 100];
        lines[2 + i].y = [lines[i].y[at]];
      });
      value.textContent = delta;
      slider.setAttribute("aria-valuetext", `delta ${delta}`);
      says.textContent =
        `delta ${delta}: ${grouped.format(solved)} of ${grouped.format(run.rows)} rows solved, ` +
        `${grouped.format(run.masked[at])} of ${grouped.format(run.rivals)} rival classes masked; ` +
        `gradient left in ${grouped.format(run.rows - solved)} rows`;
      softsieve.draw("explorer-map");
      softsieve.draw("explorer-curves");
    }

    slider.addEventListener("input", () => {
      if (!waiting) requestAnimationFrame(move);
      waiting = true;
    });
    chooser?.addEventListener("change", () => {
      choose();
      slider.value = String(run.delta / 100);
      move();
    });
    choose();
    slider.value = String(run.delta / 100);
    move();
  }
  softsieve.start();
})();
