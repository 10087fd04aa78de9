import os, sys, subprocess
def load(root='.', rev=None):
    """[(section, new path, [old paths])] relative to src/slipstream"""
    out=[]; base=os.path.join(root,'src/slipstream'); sec=None; dirs=[]
    tree=set(subprocess.run(['git','ls-files','src/slipstream'],cwd=root,capture_output=True,text=True,check=True).stdout.split()) if rev is None else set(subprocess.run(['git','ls-tree','-r','--name-only',rev,'src/slipstream'],cwd=root,capture_output=True,text=True,check=True).stdout.split())
    tree={t[len('src/slipstream/'):] for t in tree}
    bad=[]
    for line in open('/work/tools/house/plan.txt'):
        line=line.strip()
        if not line: continue
        if line[0]=='[':
            sec,_,d=line[1:].partition(']'); dirs=d.split(); continue
        new,_,olds=line.partition(':'); new=new if '.' in new else new+'.py'
        paths=[]
        for o in olds.split():
            f=o if '.' in os.path.basename(o) else o+'.py'
            if f.startswith('./'): f=f[2:]; cand=[f] if f in tree else []
            elif '/' in f: cand=[f] if f in tree else []
            else: cand=[c for d in dirs for c in [os.path.normpath(os.path.join(d,f))] if c in tree]
            if len(cand)!=1: bad.append((sec,new,o,cand))
            else: paths+=cand
        out.append((sec,os.path.join(sec,new),paths))
    return out,tree,bad
if __name__=='__main__':
    out,tree,bad=load('/work/main')
    for b in bad: print('BAD',b)
    seen={}
    for s,n,ps in out:
        for p in ps:
            if p in seen: print('TWICE',p,seen[p],n)
            seen[p]=n
    print('uncovered',sorted(t for t in tree if t not in seen and '/ui/' not in t))
    print(len(out),len(tree))
