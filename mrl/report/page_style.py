"""Style sheet of `report.html`: one colour per policy and per kind of activity, light and dark."""

from mrl.report.palette import KIND_COLOURS, colour_of

RULES = """
:root{color-scheme:light dark;--ground:#fff;--card:#f6f7f9;--ink:#1c2128;--soft:#5b6470;--rule:#e3e6ea;
--axis:#9aa3ad}
@media (prefers-color-scheme:dark){:root{--ground:#14171b;--card:#1d2127;--ink:#e6e9ed;--soft:#9aa4b0;--rule:#2c323a;
--axis:#6b7480}}
*{box-sizing:border-box}
body{margin:0;background:var(--ground);color:var(--ink);
font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif}
main{max-width:1180px;margin:0 auto;padding:32px 24px 64px}
h1{font-size:30px;line-height:1.2;margin:0}
h2{font-size:20px;margin:48px 0 14px;padding-bottom:6px;border-bottom:1px solid var(--rule)}
h3{font-size:15px;margin:26px 0 8px}
header p{color:var(--soft);margin:6px 0 20px}
.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(160px,1fr));gap:12px}
.card{background:var(--card);border-radius:10px;padding:14px 16px}
.card b{display:block;font-size:26px;line-height:1.15;font-variant-numeric:tabular-nums}
.card span{color:var(--soft);font-size:13px;line-height:1.35;display:block;margin-top:4px}
.problems ul{color:#c0392b}
.grid{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(460px,100%),1fr));gap:18px;margin-top:18px}
.grid.small{grid-template-columns:repeat(auto-fill,minmax(min(350px,100%),1fr));margin-top:0}
figure{margin:0;overflow-x:auto;background:var(--card);border-radius:10px;padding:14px 16px}
figcaption{font-weight:600;margin-bottom:6px}
figure p{color:var(--soft);font-size:13px;margin:6px 0 0}
figure.wide svg{max-width:860px;margin:0 auto}
.empty{color:var(--soft);font-style:italic}
svg{display:block;width:100%;height:auto;overflow:visible}
figure svg{min-width:340px}figure.wide svg{min-width:560px}.grid.small svg{min-width:240px}
svg text{font-size:12px;fill:var(--ink)}
svg .tick,svg .label{fill:var(--soft)}
svg .name{font-weight:600;fill:var(--policy)}
svg .strong{font-weight:600;font-size:14px}
svg .halo{paint-order:stroke;stroke:var(--card);stroke-width:8px;stroke-linejoin:round}
.rule{stroke:var(--rule);stroke-width:1}
.axis{stroke:var(--axis);stroke-width:1}
.line{fill:none;stroke:var(--policy);stroke-width:2.4;stroke-linejoin:round;stroke-linecap:round}
.line.dashed{stroke-width:1.4;stroke-dasharray:5 4;opacity:.8}
.dots{fill:none;stroke:var(--policy);stroke-width:3.4;stroke-linecap:round;opacity:.26}
.lead{fill:none;stroke:var(--policy);stroke-width:1;opacity:.45}
.mark,.head{fill:var(--policy)}
.open{fill:var(--ground);stroke:var(--policy);stroke-width:2}
.bar{stroke:var(--policy);stroke-width:3;opacity:.45}
.area{fill:var(--policy);opacity:.55;stroke:var(--card);stroke-width:1}
.flow{fill:none;stroke:var(--policy);opacity:.75}
.head{opacity:.9}
.box{fill:var(--ground);stroke:var(--policy);stroke-width:2.5}
rect.wait,rect.peers,rect.form,rect.train,rect.publish,rect.save,rect.other{fill:var(--policy,var(--soft));stroke:var(--card);stroke-width:1}
rect.wait{opacity:.3}rect.peers{opacity:.2}rect.form{opacity:.78}rect.train{opacity:1}rect.publish{opacity:.62}
rect.save{opacity:.46}rect.other{opacity:.1}
svg text.in-form,svg text.in-train,svg text.in-publish{fill:var(--ground);font-weight:600}
.did{fill:var(--activity)}.waited{fill:var(--axis);opacity:.3}
.step{stroke:var(--ink);stroke-width:1.4}
.frame{fill:none;stroke:var(--ink);stroke-width:1.4}
figure.timeline{padding-top:22px}figure.timeline svg{min-width:760px}
table{border-collapse:collapse;font-size:14px;font-variant-numeric:tabular-nums}
th,td{padding:5px 12px;text-align:left;border-bottom:1px solid var(--rule);vertical-align:top}
thead th{color:var(--soft);font-weight:500;font-size:13px;white-space:nowrap}
.n{text-align:right;white-space:nowrap}
.accuracy{width:100%;max-width:760px}.accuracy td:last-child{width:220px;padding-top:7px}
.accuracy tbody th{font-size:15px}.overall td{font-weight:600}
.dumbbell{width:200px}
.flows{margin-top:14px}
.costs td:first-child{white-space:nowrap}.note{color:var(--soft);font-size:13px;max-width:80em}
details{margin-top:14px}summary{cursor:pointer;color:var(--soft)}
.policy{color:var(--policy);font-weight:600;white-space:nowrap}
.scroll{overflow-x:auto}
.samples{width:100%}
.text{font:13px/1.45 ui-monospace,"DejaVu Sans Mono",monospace;white-space:pre-wrap;
overflow-wrap:anywhere;min-width:180px}
@media print{figure,.card{border:1px solid var(--rule)}section{break-inside:avoid-page}}
"""


def style_sheet(num_policies: int) -> str:
    """Return the style sheet, with a class `cN` for the policy at place N and `tN` for the Nth kind of activity."""
    light = "".join(f".c{index}{{--policy:{colour_of(index).light}}}" for index in range(num_policies))
    dark = "".join(f".c{index}{{--policy:{colour_of(index).dark}}}" for index in range(num_policies))
    light += "".join(f".t{index}{{--activity:{colour.light}}}" for index, colour in enumerate(KIND_COLOURS))
    dark += "".join(f".t{index}{{--activity:{colour.dark}}}" for index, colour in enumerate(KIND_COLOURS))
    return f"{RULES}{light}@media (prefers-color-scheme:dark){{{dark}}}"
