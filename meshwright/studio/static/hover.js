// A read-out under the pointer for every chart that embeds its data; the charts are complete without it.
export function bindFigures(root) {
  for (const figure of root.querySelectorAll("figure.chart")) {
    const source = figure.querySelector("script");
    if (source) bind(figure, figure.querySelector("svg"), JSON.parse(source.textContent));
  }
}

function bind(figure, svg, data) {
  const out = figure.querySelector(".readout");
  const cursor = svg.querySelector(".cursor"), hair = cursor.querySelector("line");
  const [lowX, highX, startX, endX] = data.x, [lowY, highY, startY, endY, log] = data.y;
  const f = log ? Math.log10 : v => v;
  const atX = v => startX + (v - lowX) / (highX - lowX) * (endX - startX);
  const atY = v => startY + (f(v) - f(lowY)) / (f(highY) - f(lowY)) * (endY - startY);
  const dots = data.series.map(s => {
    const dot = document.createElementNS(svg.namespaceURI, "circle");
    dot.setAttribute("class", s.style); dot.setAttribute("r", 3.5); cursor.append(dot); return dot;
  });
  const longest = data.series.reduce((a, b) => b.x.length > a.x.length ? b : a);
  const axis = data.axis || "step";
  svg.addEventListener("pointermove", event => {
    const box = svg.getBoundingClientRect(), at = (event.clientX - box.left) / box.width * svg.viewBox.baseVal.width;
    const wanted = lowX + (at - startX) / (endX - startX) * (highX - lowX);
    const step = longest.x[nearest(longest.x, wanted)];
    hair.setAttribute("x1", atX(step)); hair.setAttribute("x2", atX(step));
    out.replaceChildren(...(data.labels ? [data.labels[longest.x.indexOf(step)]] : [`${axis} `, bold(show(step))]));
    data.series.forEach((s, i) => {
      const n = nearest(s.x, step);
      dots[i].setAttribute("cx", atX(s.x[n])); dots[i].setAttribute("cy", atY((s.top || s.y)[n]));
      out.append(` \u2002${s.label} `, bold(show(s.y[n])), s.x[n] === step ? "" : ` (${axis} ${show(s.x[n])})`);
    });
    cursor.setAttribute("visibility", "visible");
  });
  svg.addEventListener("pointerleave", () => {
    cursor.setAttribute("visibility", "hidden"); out.textContent = "\u00a0";
  });
}

export function nearest(xs, v) {
  let low = 0, high = xs.length - 1;
  while (high - low > 1) { const m = (low + high) >> 1; if (xs[m] < v) low = m; else high = m; }
  return Math.abs(xs[low] - v) <= Math.abs(xs[high] - v) ? low : high;
}

export function show(v) {
  return Math.abs(v) >= 1000 ? Math.round(v).toLocaleString("en") : String(+v.toPrecision(4));
}

function bold(text) { const b = document.createElement("b"); b.textContent = text; return b; }
