"""How the page looks."""

CSS = """
:root { color-scheme: light dark;
  --back: #ffffff; --panel: #f4f6f8; --ink: #1a2028; --faint: #5b6673; --line: #d4dae1;
  --kept: #2a66b8; --band: #2a66b838; --redone: #c46a00; --save: #0b7d74; --check: #7a4fb5;
  --start: #76828f; --other: #c3ccd5; --good: #18743a; --bad: #b3261e; --mark: #b3261e; }
@media (prefers-color-scheme: dark) { :root {
  --back: #12161b; --panel: #1b2128; --ink: #e4e9ee; --faint: #9aa6b2; --line: #333d48;
  --kept: #6aa5f0; --band: #6aa5f038; --redone: #f0a04b; --save: #45c1b6; --check: #b793ec;
  --start: #8894a1; --other: #465260; --good: #5fc98a; --bad: #ff8a80; --mark: #ff8a80; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.5rem clamp(1rem, 4vw, 3rem) 4rem; max-width: 76rem;
  background: var(--back); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
h1 { font-size: 1.35rem; margin: 0 0 .75rem; } h2 { font-size: 1.1rem; margin: 2.4rem 0 .6rem; }
p { margin: .4rem 0; } small, .faint { color: var(--faint); }
code, pre { font: 13px/1.45 ui-monospace, "SF Mono", Menlo, Consolas, monospace; }
.verdict { border: 1px solid var(--line); border-left: .5rem solid var(--start);
  background: var(--panel); padding: .8rem 1.1rem; border-radius: .4rem; }
.verdict strong { font-size: 1.15rem; } .verdict.good { border-left-color: var(--good); }
.verdict.bad { border-left-color: var(--bad); }
.facts { display: grid; grid-template-columns: repeat(var(--columns), 1fr);
  gap: .6rem; margin: .9rem 0 0; }
.facts div { background: var(--panel); border-radius: .4rem; padding: .5rem .8rem; }
.facts dt { color: var(--faint); font-size: .85rem; } .facts dd { margin: 0; font-size: 1.2rem;
  font-variant-numeric: tabular-nums; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
caption { text-align: left; color: var(--faint); padding-bottom: .3rem; }
th, td { text-align: left; padding: .28rem .7rem .28rem 0; vertical-align: top;
  border-bottom: 1px solid var(--line); white-space: nowrap; }
th { color: var(--faint); font-weight: 600; font-size: .85rem; white-space: normal;
  vertical-align: bottom; }
td.n, th.n { text-align: right; }
td.t { min-width: 12rem; white-space: normal; overflow-wrap: anywhere; }
.strip { position: relative; height: 1.6rem; margin: 0 .6rem .6rem; font-weight: 700;
  border-bottom: 1px solid var(--line); } .strip span { position: absolute; bottom: 0;
  transform: translateX(-50%); } .strip .good { color: var(--good); }
.strip .bad { color: var(--bad); }
.stand { font-weight: 700; }
.bars { display: grid; grid-template-columns: auto 1fr auto; gap: .3rem .7rem;
  align-items: center; } .bars b { font-weight: 600; white-space: nowrap; }
.bar { position: relative; height: 1.35rem; background: var(--panel); border-radius: .2rem;
  overflow: hidden; }
.bar span { position: absolute; top: 0; bottom: 0; }
.kept { background: var(--kept); }
.redone { background: repeating-linear-gradient(45deg, var(--redone) 0 4px, var(--back) 4px 7px); }
.save { background: repeating-linear-gradient(90deg, var(--save) 0 3px, var(--back) 3px 5px); }
.check { background: repeating-linear-gradient(0deg, var(--check) 0 3px, var(--back) 3px 5px); }
.start { background: repeating-linear-gradient(135deg, var(--start) 0 2px, var(--back) 2px 6px); }
.other { background: var(--other); }
.gap { background: radial-gradient(var(--faint) 1px, transparent 1.4px) 0 0 / 6px 6px; }
.key { display: flex; flex-wrap: wrap; gap: .3rem 1.2rem; margin: .6rem 0; padding: 0;
  list-style: none; font-size: .9rem; }
.key li { display: flex; align-items: center; gap: .45rem; }
.key i { width: 1.75rem; height: .9rem; border-radius: .15rem; border: 1px solid var(--line);
  display: inline-block; }
figure { margin: 1.1rem 0 0; } figcaption { font-weight: 600; margin-bottom: 1.35rem; }
.area { position: relative; height: 13rem; margin: 0 .6rem 2.8rem 3.6rem;
  border-left: 1px solid var(--line); border-bottom: 1px solid var(--line); }
.area svg { position: absolute; inset: 0; width: 100%; height: 100%; overflow: visible; }
.area path { fill: none; vector-effect: non-scaling-stroke; }
.area .grid { stroke: var(--line); stroke-width: 1; } .area .band { fill: var(--band); }
.area .mean { stroke: var(--kept); stroke-width: 1.6; }
.area .again { stroke: var(--redone); stroke-width: 1.6; stroke-dasharray: 4 3; }
.area .fault { stroke: var(--mark); stroke-width: 1.2; stroke-dasharray: 1 3; }
.area span { position: absolute; font-size: .78rem; color: var(--faint); white-space: nowrap;
  font-variant-numeric: tabular-nums; }
.area .y { right: calc(100% + .45rem); transform: translateY(50%); }
.area .x { top: calc(100% + .2rem); transform: translateX(-50%); }
.area .axis { top: calc(100% + 1.3rem); left: 50%; transform: translateX(-50%); }
.area .m { bottom: calc(100% + .1rem); transform: translateX(-50%); color: var(--mark);
  font-weight: 700; }
.stroke { border: 0 !important; height: 0 !important; }
.stroke.line { border-top: 2px solid var(--kept) !important; }
.stroke.dash { height: 2px !important;
  background: repeating-linear-gradient(90deg, var(--redone) 0 5px, transparent 5px 9px); }
.stroke.dots { border-top: 2px dotted var(--mark) !important; }
.fill { background: var(--band); }
details { border: 1px solid var(--line); border-radius: .4rem; margin: .5rem 0;
  background: var(--panel); } summary { padding: .45rem .8rem; cursor: pointer;
  overflow-wrap: anywhere; }
details pre { margin: 0; padding: .6rem .8rem; overflow-x: auto; border-top: 1px solid var(--line);
  max-height: 34rem; } details .wide { padding: 0 .8rem .6rem; }
footer { margin-top: 3rem; border-top: 1px solid var(--line); padding-top: .8rem;
  color: var(--faint); font-size: .88rem; }
@media (max-width: 40rem) { body { font-size: 14px; } .area { height: 10rem; }
  .facts { grid-template-columns: repeat(2, 1fr); }
  .bars { grid-template-columns: auto 1fr; } .bars .how { display: none; } }
@media print { body { max-width: none; } details { break-inside: avoid; } }
"""
