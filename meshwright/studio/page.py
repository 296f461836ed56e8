"""The shell of a report: style and script, both inside the file so that it opens from a disk without a network."""

from html import escape

_STYLE = """
:root{--ink:#1b1f24;--soft:#5b6470;--faint:#8a939e;--line:#e4e7eb;--paper:#fff;--card:#f7f8fa;--blue:#2f6fde;
--pale:#a9c4f2;--orange:#d9730d;--red:#cf3a36;--green:#1f8a4c;--grey:#7d8590;color-scheme:light}
@media (prefers-color-scheme:dark){:root{--ink:#e4e7eb;--soft:#a3acb8;--faint:#788390;--line:#2b323b;--paper:#12161b;
--card:#191f26;--blue:#6ea3ff;--pale:#34507f;--orange:#f0964a;--red:#f0716c;--green:#58c48a;--grey:#8d96a1;
color-scheme:dark}}
*{box-sizing:border-box}
body{margin:0;background:var(--paper);color:var(--ink);font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,
"Helvetica Neue",Arial,sans-serif;-webkit-text-size-adjust:100%}
main{max-width:1128px;margin:0 auto;padding:44px 24px 64px}
h1{font-size:27px;line-height:1.2;font-weight:650;letter-spacing:-.015em;margin:0;overflow-wrap:anywhere}
h2{font-size:17px;font-weight:650;letter-spacing:-.005em;margin:48px 0 14px}
h3{font-size:13.5px;font-weight:600;margin:0}
p{margin:0}
header .name{display:flex;align-items:center;gap:12px;flex-wrap:wrap}
header .facts{color:var(--soft);margin-top:7px}
header .facts span+span::before{content:"·";margin:0 8px;color:var(--faint)}
.state{font-size:12px;font-weight:600;line-height:1;padding:5px 9px;border-radius:99px;border:1px solid currentColor}
.state.done{color:var(--green)}.state.running{color:var(--blue)}.state.stopped{color:var(--orange)}
.state.failed{color:var(--red)}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(168px,1fr));gap:12px;margin:28px 0 0}
.tile{background:var(--card);border-radius:10px;padding:14px 16px 13px}
.tile .what{font-size:12.5px;color:var(--soft)}
.tile .value{font-size:25px;font-weight:600;letter-spacing:-.02em;line-height:1.25;margin-top:3px;
font-variant-numeric:tabular-nums}
.tile .value.words{font-size:13.5px;line-height:2.3;letter-spacing:-.01em;white-space:nowrap}
.tile .more{font-size:12px;line-height:1.4;color:var(--soft);margin-top:3px;overflow-wrap:anywhere}
.note{color:var(--soft);font-size:13.5px}.note.alarm{color:var(--red);margin:-4px 0 16px}
.note.foot{font-size:12px;margin-top:10px}
.note.above{margin:-4px 0 18px}
.charts{display:grid;grid-template-columns:repeat(2,minmax(0,1fr));gap:12px 20px}
.chart{margin:0;min-width:0}.chart.wide{grid-column:1/-1}
figcaption{display:flex;justify-content:space-between;align-items:baseline;gap:16px;margin-bottom:6px}
.legend{display:flex;gap:16px;font-size:12.5px;color:var(--soft);flex-wrap:wrap}
.key{display:inline-block;width:16px;height:0;border-top:2.5px solid;border-radius:2px;vertical-align:middle;
margin-right:6px}
.key.train{color:var(--pale)}.key.smooth,.key.plain{color:var(--blue)}.key.validation{color:var(--orange)}
svg{display:block;width:100%;height:auto;overflow:visible;touch-action:pan-y}
svg text{font-size:11.5px;fill:var(--soft);font-variant-numeric:tabular-nums}
svg .unit{fill:var(--faint)}
.grid{stroke:var(--line);stroke-width:1}.axis{stroke:var(--faint);stroke-width:1}
.mark{stroke:var(--grey);stroke-width:1;stroke-dasharray:3 4}.hair{stroke:var(--faint);stroke-width:1}
.line{fill:none;stroke-width:1.8;stroke-linejoin:round;stroke-linecap:round}
.line.train{stroke:var(--pale);stroke-width:1.1}.line.smooth,.line.plain{stroke:var(--blue)}
.line.validation{stroke:var(--orange)}
circle.train{fill:var(--pale)}circle.smooth,circle.plain{fill:var(--blue)}circle.validation{fill:var(--orange)}
.area{fill:currentColor;opacity:.8}.cursor circle[class^=kind]{fill:currentColor}
.kind-other{color:var(--grey)}.kind-parameters{color:var(--blue)}.kind-optimizer{color:var(--pale)}
.kind-gradients{color:var(--orange)}.kind-activations{color:var(--green)}
.bad{stroke:var(--red);stroke-width:1.5;fill:none}
.readout{font-size:12.5px;color:var(--soft);font-variant-numeric:tabular-nums;min-height:19px;text-align:right}
.readout b{font-weight:600;color:var(--ink)}
.empty{color:var(--faint);background:var(--card);border-radius:10px;padding:34px;text-align:center;font-size:13.5px}
table{border-collapse:collapse;width:100%;font-size:13.5px}
td,th{text-align:left;vertical-align:top;padding:5px 12px 5px 0;border-bottom:1px solid var(--line);font-weight:400}
thead th{color:var(--soft);font-size:12.5px}
th[scope=row]{color:var(--soft);white-space:nowrap;width:1%;padding-right:20px}
td.number{text-align:right;white-space:nowrap;font-variant-numeric:tabular-nums;width:1%;padding-right:20px}
td{overflow-wrap:anywhere}td.none{color:var(--faint)}td.given{font-weight:600}
.pairs span{display:inline-block;margin-right:16px}.pairs i{font-style:normal;color:var(--faint);margin-right:5px}
.sections{columns:3;column-gap:28px}
.sections section{break-inside:avoid;padding-bottom:22px}
.sections h3{padding-bottom:4px;border-bottom:1px solid var(--faint)}
.sections td{text-align:right;padding-right:0;font-variant-numeric:tabular-nums}
pre{font:12.5px/1.55 ui-monospace,SFMono-Regular,Menlo,Consolas,"Liberation Mono",monospace;background:var(--card);
border-radius:10px;padding:14px 16px;margin:8px 0 0;white-space:pre-wrap;overflow-wrap:anywhere;tab-size:4}
details{margin-top:10px}summary{cursor:pointer;color:var(--soft);font-size:13.5px}
.sample h3{color:var(--soft);font-weight:500}details .sample{margin-top:18px}
footer{margin-top:52px;padding-top:14px;border-top:1px solid var(--line);color:var(--faint);font-size:12.5px}
@media (max-width:860px){.charts{grid-template-columns:1fr}.sections{columns:2}}
@media (max-width:560px){.sections{columns:1}main{padding-top:28px}
.wide svg text{font-size:22px}.wide svg .unit{display:none}}
@media print{:root{--ink:#000;--soft:#444;--faint:#777;--line:#ddd;--paper:#fff;--card:#f5f5f5;--blue:#1f5fd0;
--pale:#a9c4f2;--orange:#b85c00;--red:#b3201c;--green:#146b38;color-scheme:light}
main{padding:0;max-width:none}.readout{display:none}.chart,.tile,.sample,tr{break-inside:avoid}h2{break-after:avoid}
.tile,pre{border:1px solid var(--line)}}
"""

_SCRIPT = """
for (const figure of document.querySelectorAll("figure.chart")) {
  const source = figure.querySelector("script"), svg = figure.querySelector("svg");
  if (!source) continue;
  const data = JSON.parse(source.textContent), out = figure.querySelector(".readout");
  const cursor = svg.querySelector(".cursor"), hair = cursor.querySelector("line");
  const [lowX, highX, startX, endX] = data.x, [lowY, highY, startY, endY, log] = data.y;
  const f = log ? Math.log10 : v => v;
  const atX = v => startX + (v - lowX) / (highX - lowX) * (endX - startX);
  const atY = v => startY + (f(v) - f(lowY)) / (f(highY) - f(lowY)) * (endY - startY);
  const show = v => Math.abs(v) >= 1000 ? Math.round(v).toLocaleString("en") : String(+v.toPrecision(4));
  const dots = data.series.map(s => {
    const dot = document.createElementNS(svg.namespaceURI, "circle");
    dot.setAttribute("class", s.style); dot.setAttribute("r", 3.5); cursor.append(dot); return dot;
  });
  const nearest = (xs, v) => {
    let low = 0, high = xs.length - 1;
    while (high - low > 1) { const m = (low + high) >> 1; if (xs[m] < v) low = m; else high = m; }
    return Math.abs(xs[low] - v) <= Math.abs(xs[high] - v) ? low : high;
  };
  const longest = data.series.reduce((a, b) => b.x.length > a.x.length ? b : a);
  svg.addEventListener("pointermove", event => {
    const box = svg.getBoundingClientRect(), at = (event.clientX - box.left) / box.width * svg.viewBox.baseVal.width;
    const wanted = lowX + (at - startX) / (endX - startX) * (highX - lowX);
    const step = longest.x[nearest(longest.x, wanted)];
    hair.setAttribute("x1", atX(step)); hair.setAttribute("x2", atX(step));
    out.replaceChildren(...(data.labels ? [data.labels[longest.x.indexOf(step)]] : ["step ", bold(show(step))]));
    data.series.forEach((s, i) => {
      const n = nearest(s.x, step);
      dots[i].setAttribute("cx", atX(s.x[n])); dots[i].setAttribute("cy", atY((s.top || s.y)[n]));
      out.append(` \\u2002${s.label} `, bold(show(s.y[n])), s.x[n] === step ? "" : ` (step ${show(s.x[n])})`);
    });
    cursor.setAttribute("visibility", "visible");
  });
  svg.addEventListener("pointerleave", () => {
    cursor.setAttribute("visibility", "hidden"); out.textContent = "\\u00a0";
  });
}
function bold(text) { const b = document.createElement("b"); b.textContent = text; return b; }
addEventListener("beforeprint", () => document.querySelectorAll("details").forEach(d => d.open = true));
"""


def page(title: str, body: str) -> str:
    """A whole HTML document around a body; `title` is plain text, `body` is HTML."""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n<main>\n{body}\n</main>\n"
        f"<script>{_SCRIPT}</script>\n</body>\n</html>\n"
    )
