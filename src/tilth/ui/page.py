"""The frame of the report: one file without a single outside reference, light or dark as the reader likes it."""

import base64
import hashlib
from typing import Any

from tilth.ui.html import Html, embed, join, tag

STYLE = """
:root{color-scheme:light dark;--paper:#faf8f3;--card:#fffefb;--ink:#2b261f;--soft:#766d60;--line:#e7e0d3;
--shade:#f1ece1;
--leaf:#3c7d40;--sky:#2f70a3;--clay:#b9532d;--sun:#b98113;--plum:#835092;--teal:#22807b;--soil:#8a7057;
--rose:#c9577f;--indigo:#4b4fa6;--olive:#8d8b1e;--aqua:#5fb3c4;--lilac:#b59ad6;--moss:#9dbb62;
--good:60,130,64;--mid:214,160,40;--bad:196,66,40}
@media(prefers-color-scheme:dark){:root{--paper:#161410;--card:#1e1b16;--ink:#ece5d8;--soft:#a0968a;--line:#353028;
--shade:#262219;--leaf:#84c681;--sky:#79b6e4;--clay:#ea8d66;--sun:#e6b954;--plum:#c79ad9;--teal:#67c7bf;--soil:#c0a78c;
--rose:#f08fb0;--indigo:#9aa0f2;--olive:#cfcc5e;--aqua:#3f8fa1;--lilac:#7f66a3;--moss:#6d8a3a;
--good:96,180,98;--mid:222,172,62;--bad:232,98,68}}
*{box-sizing:border-box}
body{margin:0;background:var(--paper);color:var(--ink);font:15px/1.55 system-ui,-apple-system,"Segoe UI",Roboto,
"Liberation Sans",sans-serif;font-variant-numeric:tabular-nums;-webkit-text-size-adjust:100%}
main{max-width:1120px;margin:0 auto;padding:30px 24px 60px}
header .brand{display:flex;gap:10px;align-items:center;color:var(--soft);font-size:14px;flex-wrap:wrap}
header .brand b{color:var(--leaf);font-size:17px;letter-spacing:.02em}
header svg.mark{width:22px;height:22px;fill:none;stroke:var(--leaf);stroke-width:2;stroke-linecap:round;
stroke-linejoin:round}
h1{font:500 clamp(25px,4.2vw,40px)/1.18
Charter,"Bitstream Charter","Sitka Text",Cambria,"Liberation Serif",Georgia,serif;
margin:20px 0 10px;max-width:30em;letter-spacing:-.008em;text-wrap:balance}
h1 b{font-weight:600;white-space:nowrap;color:var(--leaf)}h1 b.from{color:var(--soil)}h1 b.bad{color:var(--clay)}
.lede{color:var(--soft);margin:0 0 24px;max-width:52em}
h2{font-size:13px;letter-spacing:.09em;text-transform:uppercase;color:var(--soft);margin:46px 0 14px;font-weight:600}
h3{font-size:15px;margin:0 0 10px;font-weight:600}h3 small{font-weight:400;color:var(--soft);margin-left:8px}
.state{padding:1px 9px;border-radius:99px;border:1px solid currentColor;font-size:12px}
.state.finished{color:var(--leaf)}.state.running{color:var(--sky)}.state.interrupted{color:var(--sun)}
.state.failed{color:var(--clay)}
.tiles{display:flex;flex-wrap:wrap;gap:1px;background:var(--line);border:1px solid var(--line);border-radius:12px;
overflow:hidden}
.tile{background:var(--card);padding:13px 15px;flex:1 1 118px}
.tile span{white-space:nowrap;display:block;color:var(--soft);font-size:12.5px}
.tile b{font-size:20px;font-weight:600;letter-spacing:-.01em;white-space:nowrap}
.tile small{display:block;color:var(--soft);font-size:12.5px}
.tile.warn b{color:var(--clay)}
.charts{display:flex;flex-wrap:wrap;gap:16px}
figure.chart{margin:0;flex:1 1 300px;display:flex;flex-direction:column;background:var(--card);min-width:0;
border:1px solid var(--line);border-radius:12px;padding:14px 16px 10px}
figure.hero{flex-basis:100%;padding:18px 20px 12px}
figcaption{display:flex;justify-content:space-between;gap:12px;align-items:flex-start;flex:1 0 auto}
figcaption strong{font-weight:600;display:block;line-height:1.3}figcaption small{color:var(--soft);font-size:12px;
line-height:1.35;display:block}
.hero figcaption strong{font-size:17px}.hero figcaption small{font-size:13px}
.legend{display:flex;flex-direction:column;align-items:flex-end;font-size:12.5px;color:var(--soft);white-space:nowrap}
.legend b{color:var(--ink);font-weight:600}.hero .legend b{font-size:26px;color:var(--leaf);line-height:1.1}
.hero .key{display:none}
.key{display:inline-block;width:9px;height:9px;border-radius:3px;background:currentColor;margin-right:6px}
.plot{position:relative;height:150px;margin:15px 0 0 46px}.hero .plot{height:270px;margin-left:52px}
.plot svg{position:absolute;inset:0;width:100%;height:100%;overflow:visible;touch-action:pan-y}
.plot .y{position:absolute;right:100%;transform:translateY(-50%);padding-right:9px;color:var(--soft);font-size:11.5px;
white-space:nowrap}
.x{display:flex;justify-content:space-between;color:var(--soft);font-size:11.5px;margin:6px 0 0 46px}
.hero .x{margin-left:52px}
.lanes{margin:22px 0 0}.lanes figcaption{flex:none;justify-content:flex-start;align-items:baseline;margin:0 0 8px}
.lane{display:flex;align-items:center;gap:8px;margin:2px 0}.lane span{flex:none;width:68px;text-align:right;
font-size:11.5px;color:var(--soft);white-space:nowrap}.lane svg{flex:1;min-width:0;height:20px;background:var(--shade);
border-radius:3px}.lanes .x{margin-left:76px}.lanes .plot~.x{margin-left:46px}
.band{fill:currentColor;stroke:none}.ink{color:var(--ink)}.pale{opacity:.42}.idle{color:var(--shade)}.idle.far{color:var(--line)}
.bar.thin{height:12px;border-radius:3px;gap:0}.bar.thin i{min-width:0}
path{fill:none;stroke-linejoin:round;stroke-linecap:round;vector-effect:non-scaling-stroke}
.grid{stroke:var(--line);stroke-width:1}.border{stroke:var(--soft);stroke-width:1;stroke-dasharray:2 3}
.shade{fill:var(--shade)}
.line{stroke:currentColor;stroke-width:2}.raw{stroke:currentColor;stroke-width:1;opacity:.28}
.hero .line{stroke-width:2.5}.dots{stroke:currentColor;stroke-width:6}.hero .dots{stroke-width:7}
.area{fill:currentColor;opacity:.1}
.leaf{color:var(--leaf)}.sky{color:var(--sky)}.clay{color:var(--clay)}.sun{color:var(--sun)}.plum{color:var(--plum)}
.rose{color:var(--rose)}.indigo{color:var(--indigo)}.olive{color:var(--olive)}.aqua{color:var(--aqua)}
.lilac{color:var(--lilac)}.moss{color:var(--moss)}
.teal{color:var(--teal)}.soil{color:var(--soil)}.grey{color:var(--soft)}
.cursor{position:absolute;top:0;bottom:0;width:1px;background:var(--soft);opacity:0;pointer-events:none}
.cursor i{position:absolute;width:9px;height:9px;margin:-4.5px;border-radius:9px;background:currentColor;
border:2px solid var(--card)}
.zone{position:absolute;box-sizing:border-box;top:7px;padding-left:9px;font-size:12px;color:var(--soft);white-space:nowrap;overflow:hidden}
.groups{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(330px,100%),1fr));gap:12px}
.card figure.chart{border:0;padding:18px 0 0;border-radius:0}
.card{background:var(--card);border:1px solid var(--line);border-radius:12px;padding:18px 20px}
.two{display:grid;grid-template-columns:repeat(auto-fit,minmax(300px,1fr));gap:16px;align-items:start}
.card dl+.bar{margin-top:18px}
.bar{display:flex;height:26px;border-radius:7px;overflow:hidden;background:var(--shade);gap:1px}
.bar i{display:block;background:currentColor;min-width:2px}
.keys{display:flex;flex-wrap:wrap;gap:4px 20px;margin:12px 0 0;font-size:13px}.keys b{font-weight:600}
.keys span.k{color:var(--soft)}
table{border-collapse:collapse;width:100%;font-size:13.5px}
td,th{padding:5px 10px 5px 0;text-align:right;font-weight:400;
border-bottom:1px solid var(--line);white-space:nowrap}
th{color:var(--soft);font-size:12px}td:first-child,th:first-child{text-align:left}
tr:last-child td{border:0}td .meter{display:block;height:8px;border-radius:4px;background:var(--sky);min-width:2px}
td.wide{width:34%}.scroll{overflow-x:auto}
dl{display:grid;grid-template-columns:auto 1fr;gap:4px 18px;margin:0;font-size:14px}dt{color:var(--soft)}
dd{margin:0;overflow-wrap:anywhere;text-align:right}
.moment{margin:0 0 22px}.group{background:var(--card);border:1px solid var(--line);border-radius:12px;padding:13px 16px;
min-width:0}
.prompt{display:flex;justify-content:space-between;gap:4px 16px;flex-wrap:wrap;margin:0 0 8px;color:var(--soft);
font-size:13px}
code,.text,pre,.scale span{font-family:ui-monospace,"SF Mono",Menlo,Consolas,"Liberation Mono",monospace}
.prompt code{color:var(--ink);font-size:14px;white-space:pre-wrap;overflow-wrap:anywhere}
.sample{display:flex;gap:12px;align-items:baseline;padding:3px 0}
.badge{flex:none;min-width:50px;text-align:center;font-size:12px;border-radius:6px;padding:1px 7px;font-weight:600}
.badge.right{background:rgba(var(--good),.17);color:var(--leaf)}.badge.wrong{background:rgba(var(--bad),.15);
color:var(--clay)}
.badge.partly{background:rgba(var(--mid),.2);color:var(--sun)}
.badge.missing{border:1px dashed var(--clay);color:var(--clay)}
.text{white-space:pre-wrap;overflow-wrap:anywhere;font-size:14.5px;line-height:1.75;min-width:0}
.text span,.scale span{border-radius:3px;padding:2px 1px;margin-right:1px}
.p0{background:rgba(var(--good),.1)}.p1{background:rgba(var(--good),.24)}.p2{background:rgba(var(--good),.38)}
.p3{background:rgba(var(--mid),.34)}.p4{background:rgba(var(--mid),.55)}.p5{background:rgba(var(--bad),.38)}
.p6{background:rgba(var(--bad),.58)}.p7{background:rgba(var(--bad),.8)}
.text .special{font-size:11px;opacity:.75}.text .cut,.text .more{color:var(--sun);font-size:12px;background:none;
margin-left:8px}
.scale{font-size:12px;color:var(--soft);margin:0 0 18px}.scale span{padding:2px 7px;color:var(--ink);font-size:11.5px}
.lead{color:var(--soft);max-width:52em;margin:-4px 0 14px}
#tip{position:fixed;z-index:9;pointer-events:none;background:var(--ink);color:var(--paper);border-radius:7px;
padding:5px 10px;font-size:12.5px;opacity:0;transition:opacity .1s;white-space:nowrap}
details{margin-top:14px}summary{cursor:pointer;color:var(--soft)}pre{overflow:auto;font-size:12.5px;line-height:1.5}
footer{margin-top:48px;color:var(--soft);font-size:13px}
@media(max-width:560px){main{padding:20px 14px 40px}.sample{gap:8px}.hero .plot{height:200px}.text{font-size:13.5px}
.hero .legend b{font-size:21px}}
@media print{body{background:#fff}.card,.chart,.group{break-inside:avoid}}
"""

SCRIPT = """
const data=JSON.parse(document.getElementById('data').textContent);
const tip=document.getElementById('tip');
const short=v=>Math.abs(v)>=1e6?+(v/1e6).toPrecision(3)+'M':Math.abs(v)>=1e3?+(v/1e3).toPrecision(3)+'k':
Math.abs(v)<1e-12?'0':Math.abs(v)<1e-3?(+v.toPrecision(2)).toExponential():String(+v.toPrecision(3));
const size=v=>v>=1e9?+(v/1e9).toPrecision(3)+' GB':v>=1e6?+(v/1e6).toPrecision(3)+' MB':short(v);
const forms={share:v=>+(100*v).toPrecision(3)+' %',number:short,count:short,size:size};
const charts=[...document.querySelectorAll('figure.chart')].map((figure,i)=>{
 const d=data[i],plot=figure.querySelector('.plot'),cursor=plot.querySelector('.cursor');
 const labels=[...figure.querySelectorAll('.now b')],dots=d.lines.map(l=>{
  const dot=document.createElement('i');dot.className=l.c;cursor.append(dot);return dot});
 const ends=figure.querySelector('.x span:first-child'),start=ends.textContent;
 const level=v=>{const f=d.log?Math.log10:x=>x;return (1-(f(v)-f(d.y[0]))/(f(d.y[1])-f(d.y[0])||1))*100};
 const show=step=>{
  const inside=step!==null&&step>=d.x[0]-.5&&step<=d.x[1]+.5;
  cursor.style.opacity=inside?1:0;
  ends.textContent=inside?'step '+Math.round(step).toLocaleString('en'):start;
  if(inside)cursor.style.left=(d.x[1]>d.x[0]?(step-d.x[0])/(d.x[1]-d.x[0]):.5)*100+'%';
  d.lines.forEach((l,k)=>{
   let v=l.last;
   if(inside){let a=0,b=l.x.length-1;while(a<b){const m=(a+b)>>1;if(l.x[m]<step)a=m+1;else b=m}
    if(a>0&&step-l.x[a-1]<l.x[a]-step)a--;v=l.y[a];dots[k].style.top=Math.min(Math.max(level(v),0),100)+'%'}
   labels[k].textContent=forms[d.form](v)})};
 const move=e=>{const r=plot.getBoundingClientRect();
  const t=Math.min(Math.max((e.clientX-r.left)/r.width,0),1);
  charts.forEach(c=>c.show(Math.round(d.x[0]+t*(d.x[1]-d.x[0]))))};
 plot.addEventListener('pointermove',move);plot.addEventListener('pointerdown',move);
 plot.addEventListener('pointerleave',()=>charts.forEach(c=>c.show(null)));
 return {show}});
const hide=()=>{tip.style.opacity=0};
document.addEventListener('pointerover',e=>{
 const t=e.target.closest?e.target.closest('[data-l]'):null;
 if(!t)return hide();
 const l=+t.dataset.l,p=Math.exp(l);
 tip.textContent='p '+(p>.9995?'≈ 100':(100*p).toPrecision(3))+' %   log-prob '+l+'   token '+t.dataset.i;
 const r=t.getBoundingClientRect();tip.style.opacity=1;
 tip.style.left=Math.max(6,Math.min(r.left,innerWidth-tip.offsetWidth-6))+'px';
 tip.style.top=(r.top>44?r.top-34:r.bottom+8)+'px'});
document.addEventListener('scroll',hide,{passive:true});
"""

MARK = Html(
    '<svg class="mark" viewBox="0 0 24 24" aria-hidden="true"><path d="M12 21v-9M12 14c0-4 3-7 8-7 0 5-3 8-8 7zM12 12'
    'c0-3.500-2.500-6-7-6 0 4 2.500 7 7 6zM4 21h16"/></svg>'
)


def page(title: str, body: Html, data: list[dict[str, Any]]) -> str:
    """The whole file. Nothing but the script above can run in it: its digest is the only one the page permits."""
    digest = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; img-src data:"
    head = join(
        [
            Html('<meta charset="utf-8">'),
            Html(f'<meta http-equiv="Content-Security-Policy" content="{policy}">'),
            Html('<meta name="viewport" content="width=device-width,initial-scale=1">'),
            tag("title", title),
            tag("style", Html(STYLE)),
        ]
    )
    numbers = tag("script", embed(data), type="application/json", id="data")
    rest = join([tag("main", body), tag("div", id="tip"), numbers, tag("script", Html(SCRIPT))])
    return f'<!doctype html>\n<html lang="en"><head>{head}</head><body>{rest}</body></html>\n'
