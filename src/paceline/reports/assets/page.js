"use strict";
// Unpacks the library and the figures, draws them in the colours of the reader's scheme, and again when that changes.
(async () => {
  async function unpacked(id) {
    const bytes = Uint8Array.from(atob(document.getElementById(id).textContent), (letter) => letter.charCodeAt(0));
    return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
  }

  const library = document.createElement("script");
  library.textContent = await unpacked("plotly");
  document.head.append(library);
  const report = JSON.parse(await unpacked("report-data"));
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const mouse = matchMedia("(hover: hover) and (pointer: fine)");
  const hidden = new Set();

  // "used/0.3" -> the colour of the token "used" at 0.3 of its strength.
  function colour(token, colours) {
    const [name, strength] = token.split("/");
    if (!Object.hasOwn(colours, name)) return token;
    if (strength === undefined) return colours[name];
    const [r, g, b] = [1, 3, 5].map((at) => parseInt(colours[name].slice(at, at + 2), 16));
    return `rgba(${r},${g},${b},${strength})`;
  }

  // Only values under a key that ends in "color" are tokens: a name that reads like one stays a name.
  function painted(value, colours, key = "") {
    if (Array.isArray(value)) return value.map((item) => painted(item, colours, key));
    if (value !== null && typeof value === "object") {
      return Object.fromEntries(Object.entries(value).map(([k, v]) => [k, painted(v, colours, k)]));
    }
    return typeof value === "string" && key.endsWith("color") ? colour(value, colours) : value;
  }

  function draw() {
    const colours = report.colours[dark.matches ? "dark" : "light"];
    for (const [name, figure] of Object.entries(report.charts)) {
      const { data, layout } = painted(figure, colours);
      for (const line of data) if (hidden.has(line.legendgroup)) line.visible = false;
      layout.dragmode = mouse.matches ? "zoom" : false; // on a phone a finger scrolls the page
      Plotly.react(`chart-${name}`, data, layout, {
        responsive: true,
        displaylogo: false,
        displayModeBar: mouse.matches ? "hover" : false,
        modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d"],
      });
    }
  }

  document.querySelectorAll("button.key").forEach((button) =>
    button.addEventListener("click", () => {
      const series = button.dataset.series;
      hidden.has(series) ? hidden.delete(series) : hidden.add(series);
      document
        .querySelectorAll(`button.key[data-series="${series}"]`)
        .forEach((key) => key.setAttribute("aria-pressed", String(!hidden.has(series))));
      draw();
    })
  );
  dark.addEventListener("change", draw);
  draw();
})().catch((error) => {
  // A browser of before 2023 has no DecompressionStream.
  for (const chart of document.querySelectorAll(".chart")) chart.textContent = `This chart cannot be drawn: ${error}`;
});
