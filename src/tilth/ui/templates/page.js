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
