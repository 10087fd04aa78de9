"""Moves and folds modules of src/slipstream: refactor.py [--dry] SECTION... (cwd: a worktree)"""
import ast, os, re, subprocess, sys, collections, builtins, textwrap
sys.path.insert(0,'/work/tools/house')
import plan as planmod
SRC='src/slipstream'
DRY='--dry' in sys.argv
sections=[a for a in sys.argv[1:] if not a.startswith('--')]
reports=[]
def say(*a): reports.append(' '.join(str(x) for x in a))

def modname(rel):
    m='slipstream.'+rel[:-3].replace('/','.')
    return m[:-9] if m.endswith('.__init__') else m
allplan,tree,bad=planmod.load('.')
chosen=[(s,n,ps) for s,n,ps in allplan if s in sections]
badsel=[b for b in bad if b[0] in sections]
if badsel: print('BAD',badsel); 
# a plan line whose old files are already moved
RENAMES={}   # (oldmodule, name) -> new
if os.path.exists('/work/tools/house/renames.txt'):
    for l in open('/work/tools/house/renames.txt'):
        l=l.split('#')[0].split()
        if l: RENAMES[(l[0],l[1])]=l[2]
pyfiles={t for t in tree if t.endswith('.py')}
modules={modname(t):t for t in pyfiles}
packages={m for m,t in modules.items() if t.endswith('__init__.py')}|{'slipstream.'+os.path.dirname(t).replace('/','.') for t in tree if '/' in t}
M={}          # old module -> new module
P={}          # old path -> new path
for s,n,ps in chosen:
    for p in ps:
        P[p]=n
        if p.endswith('.py'): M[modname(p)]=modname(n)
dead_inits=[t for t in pyfiles if t.endswith('__init__.py') and t not in P and os.path.dirname(t) and
            all(o in P or o==t for o in tree if os.path.dirname(o)==os.path.dirname(t) ) and not any(os.path.dirname(o).startswith(os.path.dirname(t)+'/') and o not in P for o in tree)
            and not any(os.path.dirname(n)==os.path.dirname(t) for n in P.values()) and os.path.getsize(f'{SRC}/{t}')<200]
def newmod(m): return M.get(m,m)
src={}
def read(path):
    with open(path) as f: return f.read()
# ---------- names at the top level of a module
def bound(node):
    """names that a top-level statement binds, not imports"""
    if isinstance(node,(ast.FunctionDef,ast.AsyncFunctionDef,ast.ClassDef)): return [node.name]
    out=[]
    if isinstance(node,ast.Assign):
        for t in node.targets: out+= [x.id for x in ast.walk(t) if isinstance(x,ast.Name) and isinstance(x.ctx,ast.Store)]
    elif isinstance(node,(ast.AnnAssign,ast.AugAssign)):
        if isinstance(node.target,ast.Name): out.append(node.target.id)
    elif isinstance(node,(ast.For,ast.While,ast.With,ast.If,ast.Try)):
        for x in ast.walk(node):
            if isinstance(x,ast.Name) and isinstance(x.ctx,ast.Store): out.append(x.id)
            elif isinstance(x,(ast.FunctionDef,ast.ClassDef)): out.append(x.name)
    return out
def is_tc(node):
    return isinstance(node,ast.If) and ((isinstance(node.test,ast.Name) and node.test.id=='TYPE_CHECKING') or (isinstance(node.test,ast.Attribute) and node.test.attr=='TYPE_CHECKING')) and not node.orelse and all(isinstance(x,(ast.Import,ast.ImportFrom)) for x in node.body)
DOT=re.compile(r'(?<![\w./-])slipstream(?:\.[A-Za-z_]\w*)+')
def map_dotted(text):
    """slipstream.a.b.c -> new dotted, or None"""
    parts=text.split('.')
    for k in range(len(parts),1,-1):
        m='.'.join(parts[:k])
        if m in modules:
            rest=parts[k:]
            n=newmod(m)
            if rest and (m,rest[0]) in RENAMES: rest=[RENAMES[(m,rest[0])]]+rest[1:]
            return '.'.join([n]+rest)
    return None
PATH=re.compile(r'(?<![\w.-])(?P<pre>(?:\.\./)*(?:src/)?slipstream/|)(?P<p>(?:\w+/)*\w+\.(?:py|c|h))(?![\w/])')
def map_path(m):
    p=m['p']; pre=m['pre']
    if p in P and (pre or '/' in p): return pre+P[p]
    if not pre and p in P:
        if BAREMAP: return P[p]
        say('BARE',p,'->',P[p])
    return None
BAREMAP=False
class Edits:
    def __init__(self,text):
        self.text=text; self.lines=text.splitlines(keepends=True); self.starts=[0]
        self.b=[l.encode() for l in self.lines]
        for l in self.lines: self.starts.append(self.starts[-1]+len(l))
        self.edits=[]
    def pos(self,line,col): return self.starts[line-1]+len(self.b[line-1][:col].decode())
    def span(self,n): return self.pos(n.lineno,n.col_offset),self.pos(n.end_lineno,n.end_col_offset)
    def add(self,a,b,new): self.edits.append((a,b,new))
    def covered(self,a,b): return any(x<=a and b<=y for x,y,_ in self.edits)
    def apply(self,lo=0,hi=None):
        hi=len(self.text) if hi is None else hi
        out=[];i=lo
        for a,b,n in sorted(set(self.edits)):
            if a<lo or b>hi: continue
            assert a>=i,(self.text[a-40:b+40],n)
            out.append(self.text[i:a]); out.append(n); i=b
        out.append(self.text[i:hi]); return ''.join(out)
def imp(stmt_indent, items):
    return items
def scope_names(tree_):
    s=set()
    for n in ast.walk(tree_):
        if isinstance(n,ast.Name) and isinstance(n.ctx,(ast.Store,ast.Del)): s.add(n.id)
        elif isinstance(n,ast.arg): s.add(n.arg)
        elif isinstance(n,(ast.FunctionDef,ast.AsyncFunctionDef,ast.ClassDef)): s.add(n.name)
    return s
def import_names(tree_):
    c=collections.Counter()
    for n in ast.walk(tree_):
        if isinstance(n,(ast.Import,ast.ImportFrom)):
            for a in n.names: c[a.asname or a.name.split('.')[0]]+=1
    return c
class Rewriter:
    """edits of one file; self.top: [(kind, text)] of hoisted imports"""
    def __init__(self,path,text,own_old=None):
        self.path=path; self.e=Edits(text); self.tree=ast.parse(text); self.own=own_old
        self.me=newmod(own_old) if own_old else None
        self.local_renames={}   # local name -> new text
        self.modrenames={}      # local module name -> (old module, new local or None for same file)
        self.stores=scope_names(self.tree)
        self.imports=import_names(self.tree)
        self.import_stmts=[n for n in ast.walk(self.tree) if isinstance(n,(ast.Import,ast.ImportFrom))]
        self.out={}             # stmt -> list of new lines
        self.changed=False
    def run(self):
        for n in self.import_stmts: self.out[n]=self.one(n)
        self.names()
        self.texts()
    def one(self,n):
        res=[]
        if isinstance(n,ast.Import):
            for a in n.names:
                new=a.name
                if a.name in modules and newmod(a.name)!=a.name: new=newmod(a.name); self.changed=True
                if a.asname: 
                    if new!=a.name and '.' in new: par,leaf=new.rsplit('.',1); res.append(f'from {par} import {leaf}'+(f' as {a.asname}' if a.asname!=leaf else ''))
                    else: res.append(f'import {new} as {a.asname}')
                else: res.append(f'import {new}')
            return res
        A=n.module or ''
        if n.level: 
            say('RELATIVE',self.path); return [ast.unparse(n)]
        if not A.startswith('slipstream'): return [ast.unparse(n)]
        for a in n.names:
            full=A+'.'+a.name
            if full in modules and not (A in modules and self.defines(A,a.name)):
                new=newmod(full)
                if new!=full: self.changed=True
                if self.me and new==self.me:
                    self.modrenames[a.asname or a.name]=(full,None); self.changed=True; continue
                if '.' not in new: res.append(f'import {new}'); continue
                par,leaf=new.rsplit('.',1)
                if a.asname:
                    local=a.asname; res.append(f'from {par} import {leaf}'+(f' as {local}' if local!=leaf else ''))
                    self.modrenames[local]=(full,local)
                elif leaf==a.name:
                    res.append(f'from {par} import {leaf}'); self.modrenames[leaf]=(full,leaf)
                else:
                    if leaf in self.stores or leaf in self.imports or a.name in self.stores:
                        say('ALIAS',self.path,f'from {par} import {leaf} as {a.name}')
                        res.append(f'from {par} import {leaf} as {a.name}'); self.modrenames[a.name]=(full,a.name)
                    else:
                        res.append(f'from {par} import {leaf}'); self.modrenames[a.name]=(full,leaf)
                continue
            N=newmod(A); name=RENAMES.get((A,a.name),a.name)
            if N!=A or name!=a.name: self.changed=True
            local=a.asname or a.name
            if self.me and N==self.me and A!=self.own:
                self.changed=True
                if local!=name: self.local_renames[local]=name
                continue
            if a.asname: res.append(f'from {N} import {name}'+(f' as {a.asname}'))
            else:
                res.append(f'from {N} import {name}')
                if name!=a.name: self.local_renames[a.name]=name
        return res
    def defines(self,A,name):
        return name in defs(A)
    def names(self):
        # own renames
        own={k[1]:v for k,v in RENAMES.items() if k[0]==self.own} if self.own else {}
        for k,v in own.items():
            self.local_renames.setdefault(k,v)
        for n in ast.walk(self.tree):
            if isinstance(n,ast.Attribute) and isinstance(n.value,ast.Name) and n.value.id in self.modrenames and isinstance(n.value.ctx,ast.Load):
                full,new=self.modrenames[n.value.id]
                attr=RENAMES.get((full,n.attr),n.attr)
                a,b=self.e.span(n); va,vb=self.e.span(n.value)
                if new is None: self.e.add(a,b,attr)
                elif new!=n.value.id or attr!=n.attr: self.e.add(va,vb,new); self.e.add(b-len(n.attr),b,attr)
            elif isinstance(n,ast.Name):
                if n.id in self.local_renames:
                    a,b=self.e.span(n); self.e.add(a,b,self.local_renames[n.id])
                elif n.id in self.modrenames:
                    full,new=self.modrenames[n.id]
                    if new!=n.id:
                        par=getattr(n,'_par',None)
                        self.bare=True
                        self.pending=getattr(self,'pending',[]); self.pending.append(n)
            elif isinstance(n,(ast.FunctionDef,ast.AsyncFunctionDef,ast.ClassDef)) and n.name in own and n in self.tree.body:
                a,_=self.e.span(n); kw=re.compile(r'(async\s+def|def|class)\s+'); 
                m=kw.match(self.e.text,a); self.e.add(m.end(),m.end()+len(n.name),own[n.name])
            elif isinstance(n,ast.Global):
                for x in n.names:
                    if x in self.local_renames: say('GLOBAL',self.path,x)
        for n in getattr(self,'pending',[]):
            a,b=self.e.span(n)
            if not self.e.covered(a,b):
                full,new=self.modrenames[n.id]
                if new is None: say('BARE MODULE',self.path,n.id,n.lineno)
                else: self.e.add(a,b,new)
        if self.local_renames and self.own:
            pass
    def texts(self):
        spans=[self.e.span(n) for n in self.import_stmts]
        inimp=lambda a,b:any(x<=a and b<=y for x,y in spans)
        for m in DOT.finditer(self.e.text):
            if inimp(m.start(),m.end()): continue
            new=map_dotted(m[0])
            if new and new!=m[0]: self.e.add(m.start(),m.end(),new); self.changed=True
        for m in PATH.finditer(self.e.text):
            new=map_path(m)
            if new and new!=m[0]: self.e.add(m.start(),m.end(),new); self.changed=True
    def finish_inplace(self):
        for n,lines in self.out.items():
            old=[ast.unparse(n)]
            merged=merge_imports(lines)
            if merged_equal(n,lines): continue
            a,b=self.e.span(n)
            ind=' '*n.col_offset
            tail=self.e.text[b:self.e.text.index('\n',b)] if '\n' in self.e.text[b:] else ''
            if not merged:
                par=parent_of(self.tree,n)
                body=[x for f in ('body','orelse','finalbody') for x in getattr(par,f,[]) if f and n in getattr(par,f,[])]
                if len(body)==1: self.e.add(a,b,'pass'); say('PASS',self.path,n.lineno)
                else:
                    # remove whole line
                    ls=self.e.text.rindex('\n',0,a)+1 if '\n' in self.e.text[:a] else 0
                    le=self.e.text.index('\n',b)+1
                    self.e.add(ls,le,'')
            else: self.e.add(a,b,('\n'+ind).join(merged))
        return self.e.apply()
def parent_of(tree_,n):
    for p in ast.walk(tree_):
        for c in ast.iter_child_nodes(p):
            if c is n: return p
def merged_equal(n,lines):
    if isinstance(n,ast.Import): return merge_imports(lines)==merge_imports(['import '+a.name+(f' as {a.asname}' if a.asname else '') for a in n.names])
    if n.level: return True
    if not (n.module or '').startswith('slipstream'): return True
    return merge_imports(lines)==merge_imports([f'from {n.module} import {a.name}'+(f' as {a.asname}' if a.asname else '') for a in n.names])
def merge_imports(lines):
    d=collections.OrderedDict(); out=[]
    for l in lines:
        if l.startswith('from ') and l.split(' import ')[0].startswith('from slipstream'):
            k,v=l.split(' import ',1); d.setdefault(k,[])
            if v not in d[k]: d[k].append(v)
        elif l not in out: out.append(l)
    for k,v in d.items():
        line=k+' import '+', '.join(v)
        if len(line)>110: line=k+' import (\n    '+',\n    '.join(v)+',\n)'
        out.append(line)
    return out
_defs={}
def defs(m):
    if m not in _defs:
        t=ast.parse(read(f'{SRC}/{modules[m]}')); s=set()
        for n in t.body:
            s.update(bound(n))
            if isinstance(n,ast.ImportFrom) : s.update(a.asname or a.name for a in n.names if (n.module+'.'+a.name) not in modules)
        _defs[m]=s
    return _defs[m]
def origin(m,name,depth=0):
    """the module that defines what m re-exports"""
    if m not in modules or depth>5: return m
    for n in ast.parse(read(f'{SRC}/{modules[m]}')).body:
        if isinstance(n,ast.ImportFrom) and n.module and n.module.startswith('slipstream'):
            for a in n.names:
                if (a.asname or a.name)==name and a.name==name and f'{n.module}.{name}' not in modules: return origin(n.module,name,depth+1)
    return m
# ---------- parse the folds
class Old:
    def __init__(self,rel):
        self.rel=rel; self.mod=modname(rel); self.text=read(f'{SRC}/{rel}'); self.tree=ast.parse(self.text)
        self.doc=ast.get_docstring(self.tree,clean=True)
        self.top=collections.OrderedDict()
        for n in self.tree.body:
            for b in bound(n): self.top.setdefault(b,n)
folds=[]
for s,n,ps in chosen:
    if n.endswith('.py'): folds.append((n,[Old(p) for p in ps]))
# collisions -> renames
def imports_of(o):
    """local name -> target after mapping, module-level imports incl TYPE_CHECKING"""
    d={}
    for n in o.tree.body:
        for st in ([n] if isinstance(n,(ast.Import,ast.ImportFrom)) else n.body if is_tc(n) else []):
            for a in st.names:
                if isinstance(st,ast.Import): d[a.asname or a.name.split('.')[0]]=a.name if a.asname else a.name.split('.')[0]
                else:
                    full=f'{st.module}.{a.name}'
                    if full in modules and not(st.module in modules and a.name in defs(st.module)): d[a.asname or newmod(full).rsplit('.',1)[1]]=('mod',newmod(full))
                    else: d[a.asname or a.name]=(newmod(origin(st.module,a.name)),RENAMES.get((st.module,a.name),a.name), st.module)
    return d
problems=0
for n,olds in folds:
    if len(olds)<2: continue
    seen={}
    for o in olds:
        for name,node in o.top.items():
            if name=='__all__': continue
            name2=RENAMES.get((o.mod,name),name)
            if name2 in seen:
                o1,node1=seen[name2]
                if ast.unparse(node1)==ast.unparse(node) and isinstance(node,(ast.Assign,ast.AnnAssign)) : o.__dict__.setdefault('drop',set()).add(node); continue
                if ast.unparse(node1)==ast.unparse(node) and isinstance(node,ast.FunctionDef) and name.startswith('_'):
                    o.__dict__.setdefault('drop',set()).add(node); say('SAME FUNCTION dropped',n,name); continue
                stem=os.path.basename(o.rel)[:-3]
                if stem in('native','reference','triton','__init__'): stem=os.path.basename(os.path.dirname(o.rel))
                if name.startswith('_'):
                    new=f'_{stem.upper()}{name}' if name.isupper() else f'_{stem}{name}'
                    RENAMES[(o.mod,name)]=new; name2=new; say('RENAME',o.mod,name,new)
                else: say('COLLISION',n,name,o1.rel,o.rel); problems+=1
            seen.setdefault(name2,(o,node))
    alltop=set(seen)
    imps={}
    for o in olds:
        used={x.id for x in ast.walk(o.tree) if isinstance(x,ast.Name)}
        for b in used:
            if b in alltop and b not in o.top and hasattr(builtins,b) and b not in imports_of(o): say('BUILTIN CAPTURED',n,b,o.rel); problems+=1
        for local,target in imports_of(o).items():
            if isinstance(target,tuple) and target[0]!='mod' and target[0]==modname(n): continue
            if isinstance(target,tuple) and target==('mod',modname(n)): continue
            if local in alltop: say('IMPORT HIDES DEF',n,local,o.rel,'defined in',seen[local][0].rel); problems+=1
            t=target[:2] if isinstance(target,tuple) else target
            if local in imps and imps[local][0]!=t: say('IMPORT CLASH',n,local,o.rel,t,imps[local]); problems+=1
            imps.setdefault(local,(t,o.rel))
# ---------- build the folded files
def stmt_start(e,node,prev_end):
    """start of the text of a statement, with decorators and the comments above"""
    line=min([node.lineno]+[d.lineno for d in getattr(node,'decorator_list',[])])
    i=line-1
    while i-1>=prev_end and (e.lines[i-1].lstrip().startswith('#')) : i-=1
    return e.starts[i]
newtexts={}
for n,olds in folds:
    if not olds:
        newtexts[n]=None; continue
    rw={}
    for o in olds:
        r=Rewriter(f'{SRC}/{o.rel}',o.text,o.mod); r.run(); rw[o.mod]=r
    if len(olds)==1:
        o=olds[0]; newtexts[n]=rw[o.mod].finish_inplace(); continue
    # order
    def needs(o):
        """names used at module level (not in function bodies, not in annotations)"""
        got=set()
        def walk(x,top=True):
            if isinstance(x,(ast.FunctionDef,ast.AsyncFunctionDef,ast.Lambda)):
                for d in getattr(x,'decorator_list',[]): walk(d)
                for d in x.args.defaults+[k for k in x.args.kw_defaults if k]: walk(d)
                return
            if isinstance(x,ast.AnnAssign):
                if x.value: walk(x.value)
                return
            if isinstance(x,ast.Name): got.add(x.id)
            if isinstance(x,(ast.Import,ast.ImportFrom)) or is_tc(x): return
            for c in ast.iter_child_nodes(x): walk(c)
        for st in o.tree.body: walk(st)
        return got
    home={}
    for o in olds:
        for name in o.top: home.setdefault((o.mod,name),o)
    dep={o:set() for o in olds}
    for o in olds:
        need=needs(o)
        for st in o.tree.body:
            if isinstance(st,ast.ImportFrom) and st.module:
                for a in st.names:
                    if (a.asname or a.name) in need:
                        for q in olds:
                            if q is not o and (q.mod==st.module or q.mod==st.module+'.'+a.name): dep[o].add(q)
    order=[]; left=list(olds)
    while left:
        for o in left:
            if not (dep[o]-set(order)): order.append(o); left.remove(o); break
        else: say('ORDER CYCLE',n,[x.rel for x in left]); order+=left; left=[]
    if order[0] is not olds[0]: say('ORDER',n,[os.path.basename(x.rel) for x in order])
    future=any(isinstance(st,ast.ImportFrom) and st.module=='__future__' for o in olds for st in o.tree.body)
    nofut=[o.rel for o in olds if not any(isinstance(st,ast.ImportFrom) and st.module=='__future__' for st in o.tree.body)]
    if future and nofut and any(read(f'{SRC}/{x}').strip() for x in nofut): say('NO FUTURE IMPORT',n,nofut)
    imports=[]; tcimports=[]; bodies=[]; mains=[]; alls=set()
    for o in order:
        r=rw[o.mod]; e=r.e; drop=getattr(o,'drop',set())
        # function-level imports in place
        toplevel=set()
        for st in o.tree.body:
            pass
        tops=[]
        for st in r.tree.body:
            if isinstance(st,(ast.Import,ast.ImportFrom)): toplevel.add(st)
            elif is_tc(st): toplevel.update(st.body)
        for st,lines in r.out.items():
            if st in toplevel or merged_equal(st,lines): continue
            a,b=e.span(st); merged=merge_imports(lines); ind=' '*st.col_offset
            if not merged:
                par=parent_of(r.tree,st); body=[f for f in('body','orelse','finalbody','handlers') if st in getattr(par,f,[])]
                if len(getattr(par,body[0]))==1: e.add(a,b,'pass'); say('PASS',n,st.lineno)
                else:
                    ls=e.text.rindex('\n',0,a)+1; le=e.text.index('\n',b)+1; e.add(ls,le,'')
            else: e.add(a,b,('\n'+ind).join(merged))
        end=0; pieces=[]; body_started=False
        stmts=list(r.tree.body)
        dropsrc={ast.unparse(d) for d in drop}
        for i,st in enumerate(stmts):
            last=st.end_lineno
            if i==0 and isinstance(st,ast.Expr) and isinstance(st.value,ast.Constant) and isinstance(st.value.value,str): end=last; continue
            a=stmt_start(e,st,end)
            b=e.starts[last] if last<len(e.starts) else len(e.text)
            lead=e.text[a:e.starts[min([st.lineno]+[d.lineno for d in getattr(st,'decorator_list',[])])-1]]
            trail=e.text[e.span(st)[1]:b].strip()
            if st in toplevel:
                if isinstance(st,ast.ImportFrom) and st.module=='__future__': end=last; continue
                ls=r.out[st]
                if lead.strip() or trail: ls=[lead.rstrip('\n')+('\n' if lead.strip() else '')+merge_imports([x])[0]+('  '+trail if trail else '') for x in ls]; say('COMMENT ON IMPORT',n,lead.strip()[:60],trail)
                if body_started: say('HOISTED',n,ls)
                imports+=ls
            elif is_tc(st):
                for x in st.body: tcimports+=r.out[x]
            elif isinstance(st,ast.If) and isinstance(st.test,ast.Compare) and '__main__' in ast.unparse(st.test): mains.append(e.apply(a,b))
            elif any(ast.unparse(st)==d for d in dropsrc): pass
            elif isinstance(st,ast.Assign) and bound(st)==['__all__']: alls.update(ast.literal_eval(st.value))
            else:
                # keep the blank lines between statements
                gap=e.text[(e.starts[end] if end<len(e.starts) else a):a]
                loose=gap.strip('\n')
                text=e.apply(a,b)
                nl=gap.count('\n')
                pieces.append(('\n'*max(nl,0))+text if not loose.strip() else '\n'+loose+'\n\n'+text); body_started=True
            end=last
        rest=e.text[e.starts[end]:] if end<len(e.starts) else ''
        if rest.strip(): pieces.append(e.apply(e.starts[end],len(e.text)))
        bodies.append((o,''.join(pieces).strip('\n')))
    # imports: a runtime import wins over one for types
    seen_local={}; kept=[]
    for x in imports:
        mm=re.match(r'from (\S+) import (\w+)(?: as (\w+))?$',x)
        if mm:
            loc=mm[3] or mm[2]
            if loc in seen_local and seen_local[loc]!=x: say('SAME NAME TWICE',n,seen_local[loc],'|',x); continue
            seen_local[loc]=x
        kept.append(x)
    imports=kept
    run=merge_imports(imports)
    have={x.split(' as ')[-1].split(' import ')[-1].strip() for x in imports}
    flat=lambda ls:{(x.split(' import ')[0],v.strip()) for x in ls if ' import ' in x for v in x.split(' import ')[1].split(',')}
    rt=flat(imports)
    tc=[x for x in dict.fromkeys(tcimports) if (x not in imports if ' import ' not in x else not flat([x])<=rt)]
    doc=olds[0].doc or next((o.doc for o in olds if o.doc),None)
    docowner=olds[0] if olds[0].doc else next((o for o in olds if o.doc),None)
    out=''
    if doc:
        d0=docowner.tree.body[0]; r=rw[docowner.mod]; a,b=r.e.span(d0); out+=r.e.apply(a,b)+'\n\n'
    if future: out+='from __future__ import annotations\n\n'
    out+='\n'.join(run)+'\n'
    if tc: out+='\nif TYPE_CHECKING:\n'+textwrap.indent('\n'.join(merge_imports(tc)),'    ')+'\n'
    first=True
    for o,body in bodies:
        if not body.strip(): 
            if o.doc and o is not docowner: say('DOC OF EMPTY BODY',n,o.rel)
            continue
        out+='\n\n'
        if o is not docowner and o.doc:
            d0=o.tree.body[0]; r=rw[o.mod]; a,b=r.e.span(d0); t=r.e.apply(a,b)
            t=ast.literal_eval(t.strip()) if not t.startswith('r') else t.strip('r"')
            import inspect
            t=inspect.cleandoc(t)
            if any(len(l)>117 for l in t.split('\n')):
                t='\n\n'.join(textwrap.fill(par,118,break_long_words=False,break_on_hyphens=False) if not re.search(r'^\s|^[*-] ',par,re.M) else par for par in t.split('\n\n'))
            out+='\n'.join(('# '+l).rstrip() for l in t.split('\n'))+'\n\n'
        out+=body+'\n'
    if alls: out+='\n\n__all__ = ['+', '.join(f'"{x}"' for x in sorted(alls))+']\n'
    for m in mains: out+='\n\n'+m.strip('\n')+'\n'
    newtexts[n]=out
# ---------- the rest of the repository
MENTION=re.compile(r'slipstream(?:\.\w+)*')
touch=set(M)|{m.rsplit('.',1)[0] for m in M}
stems={os.path.basename(p) for p in P}
def relevant(t):
    ms=set(MENTION.findall(t))
    if ms&touch: 
        return True
    for m in ms:
        while '.' in m:
            m=m.rsplit('.',1)[0]
            if m in M: return True
    return any(m['p'] in P for m in PATH.finditer(t))
others={}
listed=subprocess.run(['git','ls-files'],capture_output=True,text=True,check=True).stdout.split('\n')
oldpaths={f'{SRC}/{p}' for p in P}
for f in listed:
    if not f or f in oldpaths or f.startswith('docs/images') or not os.path.isfile(f): continue
    if f.startswith('docs/log') or f=='CHANGELOG.md': pass
    if f.endswith('.py'):
        t=read(f)
        if not relevant(t): continue
        rel=f[len(SRC)+1:] if f.startswith(SRC+'/') else None
        r=Rewriter(f,t,modname(rel) if rel else None); r.run(); new=r.finish_inplace()
        if new!=t: others[f]=new
    elif f.endswith(('.md','.toml','.yml','.yaml','.sh','.c','.h','.js','.txt','.json','.cfg','.in')) or '.' not in os.path.basename(f) or f in('.importlinter','.gitignore'):
        try: t=read(f)
        except UnicodeDecodeError: continue
        if f=='.importlinter': continue
        new=DOT.sub(lambda m:map_dotted(m[0]) or m[0],t)
        BAREMAP=f.endswith('.md')
        new=PATH.sub(lambda m:map_path(m) or m[0],new)
        BAREMAP=False
        if new!=t: others[f]=new
# renamed private names that tests name in strings
for (m,a),b in RENAMES.items():
    if m not in M and m not in modules: continue
    for f in listed:
        if f.startswith(('tests/','benchmarks/')) and f.endswith('.py'):
            t=others.get(f) or read(f)
            if re.search(rf'["\']{re.escape(a)}["\']',t) and m.split('.')[-1] in t: say('STRING?',f,a,'of',m)
for x in dict.fromkeys(reports): print(x)
print(len(chosen),'new files;',len(P),'old;',len(others),'others changed; problems',problems, 'dead inits',dead_inits)
if DRY: sys.exit()
for p in P: os.remove(f'{SRC}/{p}')
ctext={}
for s,n,ps in chosen:
    if not n.endswith('.py'):
        assert len(ps)==1
        ctext[n]=subprocess.run(['git','show',f'HEAD:{SRC}/{ps[0]}'],capture_output=True,text=True,check=True).stdout
for n,t in list(newtexts.items())+list(ctext.items()):
    path=f'{SRC}/{n}'
    if t is None:
        if os.path.exists(path): continue
        t=''
    os.makedirs(os.path.dirname(path),exist_ok=True)
    with open(path,'w') as f: f.write(t)
for d in dead_inits: os.remove(f'{SRC}/{d}')
for f,t in others.items():
    with open(f,'w') as h: h.write(t)
for d,_,fs in sorted(os.walk(SRC),reverse=True):
    left=[x for x in os.listdir(d) if x!='__pycache__']
    if not left: subprocess.run(['rm','-rf',d])
