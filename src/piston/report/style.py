"""How the page looks, light or dark as the reader's system has it. Nothing but a style sheet."""

STYLE = """
:root {
  color-scheme: light dark;
  --page: #f6f6f4; --surface: #ffffff; --ink: #1f2328; --muted: #667079; --line: #e2e3e0;
  --accent: #2467d6; --second: #c2410c; --good: #1f8a5b; --weak: #b7791f; --bad: #c53d2d;
  --fade: #9aa7b5;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #15181c; --surface: #1d2126; --ink: #e8eaed; --muted: #98a1aa; --line: #31373e;
    --accent: #6aa5ff; --second: #fb923c; --good: #45b883; --weak: #d9a441; --bad: #ef6f5e;
    --fade: #66717d;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0; background: var(--page); color: var(--ink);
  font: 15px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif;
}
main { max-width: 1080px; margin: 0 auto; padding: 32px 20px 56px; }
h1 { font-size: 28px; line-height: 1.2; margin: 0 0 4px; letter-spacing: -0.01em; }
h2 { font-size: 19px; margin: 0 0 12px; }
h3 { font-size: 15px; margin: 20px 0 8px; }
h4 { font-size: 14px; margin: 14px 0 6px; }
header .note { margin: 0 0 12px; overflow-wrap: anywhere; }
nav { display: flex; flex-wrap: wrap; gap: 4px 18px; }
a { color: var(--accent); text-decoration: none; }
a:hover { text-decoration: underline; }
section, .card {
  background: var(--surface); border: 1px solid var(--line); border-radius: 12px;
}
section { padding: 22px 24px 24px; margin: 18px 0; scroll-margin-top: 12px; }
.note, figcaption, footer, .quiet-text { color: var(--muted); font-size: 13.5px; }
.note { margin: 0 0 12px; overflow-wrap: anywhere; }
.quiet-text { font-weight: normal; }
.missing { color: var(--muted); margin: 14px 4px; overflow-wrap: anywhere; }
.missing b { font-weight: 600; }
footer { margin: 28px 4px 0; }
.cards {
  display: grid; gap: 10px; margin: 22px 0 18px;
  grid-template-columns: repeat(auto-fit, minmax(132px, 1fr));
}
.card { padding: 13px 14px; }
.card h3 { margin: 0; color: var(--muted); font-size: 13px; font-weight: 500; }
.card h3 { overflow-wrap: anywhere; }
.card b { font-size: 24px; font-weight: 650; letter-spacing: -0.02em; }
.card p { margin: 2px 0 0; color: var(--muted); font-size: 12.5px; line-height: 1.4; }

svg { display: block; width: 100%; height: auto; overflow: visible; }
svg text { fill: var(--muted); font-size: 11px; }
svg .grid { stroke: var(--line); stroke-width: 1; fill: none; }
svg .axis { stroke: var(--muted); stroke-width: 1; fill: none; opacity: .6; }
.line { fill: none; stroke-width: 1.8; stroke-linejoin: round; stroke-linecap: round; }
.line.ink { stroke-width: 1.5; stroke-dasharray: 5 3.5; stroke-linecap: butt; }
.line.fade { stroke-width: 1.1; }
.line.accent { stroke: var(--accent); } .line.second { stroke: var(--second); }
.line.ink { stroke: var(--ink); } .line.fade { stroke: var(--fade); }
.line.quiet { stroke: var(--muted); }
.marker { fill: var(--accent); opacity: 0; }
.marker.second { fill: var(--second); } .marker.quiet { fill: var(--muted); }
.marker:hover { opacity: 1; }
.legend { display: flex; flex-wrap: wrap; gap: 4px 18px; margin: 0 0 10px; }
.legend { color: var(--muted); font-size: 13px; }
.legend span { display: inline-flex; align-items: center; gap: 7px; }
.legend i { width: 20px; height: 3px; border-radius: 2px; display: inline-block; }
.legend i.accent { background: var(--accent); } .legend i.second { background: var(--second); }
.legend i.fade { background: var(--fade); }
.legend i.ink {
  background: repeating-linear-gradient(90deg, var(--ink) 0 6px, transparent 6px 9px);
}
.legend i.cell { width: 15px; height: 15px; border-radius: 4px; }

.seeds {
  display: grid; gap: 6px; grid-template-columns: repeat(auto-fill, minmax(42px, 1fr));
  max-width: 720px; margin-bottom: 14px;
}
.cell { border-radius: 7px; border: 1.5px solid; font-variant-numeric: tabular-nums; }
.seeds .cell { text-align: center; padding: 7px 0; font-size: 13px; font-weight: 600; }
.cell.held { background: var(--good); border-color: var(--good); color: var(--surface); }
.cell.lost {
  border-color: var(--weak); color: var(--ink);
  background: linear-gradient(135deg, var(--weak) 30%, transparent 30%);
}
.cell.failed { border-color: var(--bad); color: var(--bad); background: transparent; }

figure { margin: 0; min-width: 0; }
.films, .multiples { display: grid; gap: 18px; }
.films { grid-template-columns: repeat(auto-fill, minmax(260px, 1fr)); }
.multiples { gap: 16px 14px; }
.multiples { grid-template-columns: repeat(auto-fill, minmax(min(225px, 45%), 1fr)); }
.multiples figcaption {
  display: flex; justify-content: space-between; gap: 8px; color: var(--ink); font-weight: 500;
}
.multiples figcaption span + span { color: var(--muted); font-weight: 400; }
video { width: 100%; border-radius: 8px; display: block; background: #000; }
.films figcaption { margin-top: 6px; }
.strip { display: flex; flex-wrap: wrap; gap: 10px; margin: 4px 0 18px; }
.strip figure { flex: 1 1 66px; max-width: 120px; }
.strip img { width: 100%; height: 84px; image-rendering: pixelated; border-radius: 4px; }
.strip figcaption { font-size: 12px; text-align: center; }

.scrolls { overflow-x: auto; }
.wide svg { min-width: 620px; }
table { border-collapse: collapse; font-size: 13px; width: 100%; }
th { color: var(--muted); font-weight: 500; text-align: left; }
th, td { padding: 3px 14px 3px 0; border-bottom: 1px solid var(--line); vertical-align: top; }
tbody tr:last-child td { border-bottom: 0; }
td { font-variant-numeric: tabular-nums; overflow-wrap: anywhere; }
.numbers td:nth-child(n + 2) { white-space: nowrap; }
.numbers { margin-bottom: 6px; }
.bar { display: block; height: 9px; min-width: 2px; margin-top: 6px; border-radius: 3px; }
.bar { background: var(--accent); }
td:has(.bar) { width: 34%; }
code { font: 12.5px/1.5 ui-monospace, "SF Mono", Menlo, "DejaVu Sans Mono", monospace; }
.chain { list-style: none; margin: 0; padding: 0 0 0 20px; border-left: 2px solid var(--line); }
.chain table { table-layout: fixed; min-width: 480px; }
.chain th:nth-child(2), .chain th:nth-child(3) { width: 16%; }
.chain > li { position: relative; padding-bottom: 14px; }
.chain > li::before {
  content: ""; position: absolute; left: -26px; top: 6px; width: 10px; height: 10px;
  border-radius: 50%; background: var(--accent);
}
.chain h4 { margin-top: 0; display: flex; flex-wrap: wrap; align-items: baseline; gap: 0 10px; }
.chain h4 code { color: var(--muted); font-weight: 400; }
.stage { color: var(--muted); font-weight: 400; font-size: 12.5px; margin-left: auto; }
.chain .note { margin: 6px 0 0; font-size: 13px; }
.thumbnails { display: flex; flex-wrap: wrap; gap: 12px; margin-top: 8px; }
.thumbnails img { border-radius: 4px; display: block; }
.thumbnails figcaption { font-size: 12px; }
details { margin-top: 6px; }
summary { cursor: pointer; color: var(--muted); font-size: 13px; }
details img { max-width: 100%; border-radius: 6px; }
@media (max-width: 600px) { section { padding: 16px; } main { padding: 20px 12px 40px; } }
"""
