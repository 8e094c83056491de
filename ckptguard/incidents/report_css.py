"""How an incident's page looks: light and dark, narrow and wide, on screen and on paper."""

STYLE = """
:root{color-scheme:light dark;--ground:#f6f7f9;--card:#fff;--ink:#1b2028;--soft:#5b6472;--line:#e2e5ea;--bad:#c4314b;
--warn:#a85f00;--good:#1a7f4b;--link:#2b5fc7;--bad-ground:#fdecef;--warn-ground:#fff3de;--good-ground:#e5f5ec;
--code:#eff1f5}
@media (prefers-color-scheme:dark){:root{--ground:#12151b;--card:#1a1f28;--ink:#e6e9ef;--soft:#9aa4b2;--line:#2c333f;
--bad:#ff7b90;--warn:#f2b35e;--good:#5fd39a;--link:#8ab0ff;--bad-ground:#3a1b22;--warn-ground:#38290f;
--good-ground:#14301f;--code:#232a35}}
*{box-sizing:border-box}
body{margin:0;background:var(--ground);color:var(--ink);font:16px/1.55 system-ui,-apple-system,"Segoe UI",Roboto,
"Noto Sans","DejaVu Sans",sans-serif;-webkit-text-size-adjust:100%}
main{max-width:880px;margin:0 auto;padding:28px 20px 48px}
header{border-left:5px solid var(--bad);padding:2px 0 2px 20px;margin-bottom:22px}
header.mended{border-color:var(--good)}header.handling{border-color:var(--warn)}
h1{font-size:1.9rem;line-height:1.2;margin:.35em 0 .3em;letter-spacing:-.01em;text-wrap:balance}
h2{font-size:1.05rem;margin:0 0 .8em}h3{font-size:1.05rem;margin:0}
p{margin:.4em 0}.over,.run,.note{color:var(--soft);font-size:.9rem}.lead{font-size:1.08rem}
.outcome{font-weight:600}
.outcome::before{content:"\\2192\\a0";color:var(--soft)}
code{font:.88em/1.4 ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace;overflow-wrap:anywhere}
.pill{display:inline-block;padding:.1em .65em;border-radius:1em;font-size:.8rem;font-weight:600;
vertical-align:.08em;background:var(--code);color:var(--soft)}
.pill.open,.pill.likely{background:var(--bad-ground);color:var(--bad)}
.pill.handling,.pill.possible{background:var(--warn-ground);color:var(--warn)}
.pill.closed{background:var(--good-ground);color:var(--good)}
dl{margin:0}dd{margin:0}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(180px,1fr));gap:12px;margin-bottom:12px}
.tiles div,section{background:var(--card);border:1px solid var(--line);border-radius:10px}
.tiles div{padding:12px 16px}.tiles dt,.facts dt{color:var(--soft);font-size:.85rem}
.tiles dd{font-size:1.2rem;font-weight:650;line-height:1.3;overflow-wrap:anywhere}
.tiles small{display:block;font-size:.82rem;font-weight:400;color:var(--soft)}
section{padding:18px 20px;margin:12px 0}
.cause{border-top:1px solid var(--line);padding:12px 0}
.cause.first{border-top:0;padding-top:0}.cause:last-child{padding-bottom:0}
.cause.first h3{font-size:1.25rem}
.cause summary{cursor:pointer;list-style-position:outside;margin-left:1.1em}
.cause summary h3{display:inline}
.cause ul,.cause ol{margin:.5em 0;padding-left:1.4em}.because{color:var(--soft)}
.advice li{margin:.25em 0}.do{font-weight:600;margin:.7em 0 0}
figure{margin:0 0 14px}figcaption{font-weight:600;font-size:.95rem}figcaption span{color:var(--soft);font-weight:400}
.curve{display:block;width:100%;height:auto}
.curve .grid{stroke:var(--line)}.curve .tick{fill:var(--soft);font-size:11px}
.curve .line{fill:none;stroke:var(--link);stroke-width:1.8;stroke-linejoin:round}.curve .dot{fill:var(--link)}
.curve .sick{fill:var(--bad)}.curve .mark{stroke-width:1.6}
.curve .span{fill:var(--bad);opacity:.1}
.curve .onset{stroke:var(--bad);stroke-dasharray:5 4}.curve .good{stroke:var(--good)}
.legend{font-size:.88rem;color:var(--soft);margin-bottom:10px}.k{margin-right:1.4em;white-space:nowrap}
.k::before{content:"";display:inline-block;margin-right:.5em;vertical-align:.25em;width:18px;border-top:2px solid}
.k.onset::before{border-top:2px dashed var(--bad)}.k.good::before{border-color:var(--good)}
.k.sick::before{width:8px;height:8px;border:0;border-radius:50%;background:var(--bad);vertical-align:0}
.wide{overflow-x:auto}table{border-collapse:collapse;width:100%;font-size:.93rem}
th{text-align:left;color:var(--soft);font-weight:400;font-size:.85rem}
th,td{padding:6px 12px 6px 0;border-bottom:1px solid var(--line);vertical-align:top}tr:last-child td{border-bottom:0}
.kind{background:var(--code);border-radius:5px;padding:.05em .5em;font-size:.85rem;color:var(--soft)}
.changes td:first-child{min-width:13em}.changes td:nth-child(2){min-width:15em}
.became{color:var(--bad);font-weight:600}th.num{text-align:right}
.num{text-align:right;font-variant-numeric:tabular-nums}.bars td{white-space:nowrap;color:var(--soft)}
.bars td:first-child,.bars .num{color:var(--ink)}
.bars td:first-child{white-space:normal;min-width:15em}
.bars .bar{width:30%;min-width:110px}
.bar i{display:block;height:10px;margin-top:7px;border-radius:3px;background:var(--good)}
.bar i.near{background:var(--warn)}.bar i.over{background:var(--bad)}
.facts{display:grid;grid-template-columns:repeat(auto-fit,minmax(230px,1fr));gap:10px 24px}
.facts dd{overflow-wrap:anywhere}.done{margin:0;padding-left:1.4em}
.command{margin:.55em 0;color:var(--soft)}
.command code{display:block;background:var(--code);color:var(--ink);border-radius:6px;
padding:.5em .8em;margin-bottom:.2em}
footer{color:var(--soft);font-size:.85rem;margin-top:20px}
@media (max-width:620px){main{padding:18px 12px 32px}.curve .tick{font-size:17px}h1{font-size:1.5rem}}
@media print{body{background:#fff}section,.tiles div{break-inside:avoid}details:not([open])>*{display:block}}
"""
