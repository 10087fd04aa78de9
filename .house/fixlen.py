"""rewraps paragraphs of comments and docstrings that have a line over 120 characters"""
import subprocess,re,textwrap,json,collections
out=json.loads(subprocess.run(['/work/main/.venv/bin/ruff','check','.','--select','E501','--output-format','json'],capture_output=True,text=True).stdout)
by=collections.defaultdict(list)
for d in out: by[d['filename']].append(d['location']['row'])
for f,rows in by.items():
    lines=open(f).read().split('\n')
    for r in sorted(set(rows),reverse=True):
        i=r-1; l=lines[i]
        m=re.match(r'(\s*)(# )?',l); ind=m[0]
        if not (l.lstrip().startswith('# ') or not re.search(r'[=\[\]{}]|\)$|^\s*(def|return|if|for)\b',l)): print('HAND',f,r); continue
        stop=lambda x: not x.strip() or x.strip()=='#' or not x.startswith(ind) or re.match(re.escape(ind)+r'(\s|[*-] |\d\. )',x) 
        a=i
        while a>0 and not stop(lines[a-1]) and '"""' not in lines[a]: a-=1
        b=i
        while b+1<len(lines) and not stop(lines[b+1]) and not lines[b+1].strip().startswith('"""') and (m[2] or '"""' not in lines[b]): b+=1
        para=' '.join(x[len(ind):] for x in lines[a:b+1])
        new=textwrap.wrap(para,120-1,initial_indent=ind,subsequent_indent=ind,break_long_words=False,break_on_hyphens=False)
        lines[a:b+1]=new; print('wrapped',f,a+1,b+1)
    open(f,'w').write('\n'.join(lines))
