"""Turn the notebooks in nbs/ into Markdown: `pages` for the site, `readme` for README.md

Nothing is run: the outputs are those saved in the notebooks, and what is documented is looked up in the imported package."""
import argparse,ast,base64,inspect,json,os,re,shutil,sys
from functools import lru_cache
from html import escape
from importlib import import_module
from itertools import groupby
from pathlib import Path
from textwrap import dedent

from latex2mathml.converter import convert as mathml

from fastcore.docments import docments,docstring
from fastcore.nbio import read_nb
from nbdev.config import get_config,nbpath2html
from nbdev.doclinks import NbdevLookup,nbglob
from nbdev.processors import FilterDefaults,add_links,exec_show_docs

cfg  = get_config(Path(__file__).resolve().parent)
base = cfg.doc_url.rstrip('/')+'/'
vocabularies = {'jmp','mpx','emily','fastai16'} # other libraries' names, many of them ours or plain words: they don't become links
# Parts of the sidebar: a folder of nbs/, or the tens digit of a notebook's number, which is its layer
parts = {'0': 'Pieces, in plain PyTorch', '1': 'In fastai', '2': 'Vocabularies', '3': 'Programs',
         'tutorials': 'Tutorials', 'howto': 'How-to guides', 'explanations': 'Explanations'}

# --- What the pages are made of, in three dialects of Markdown

class GitHub:
    "Markdown as GitHub reads it, for the page at `page`: links lead to the site"
    show_docs = False
    def __init__(self, page=Path('index')): self.page = page
    def link(self, url):
        p,sep,frag = url.partition('#')
        if not p.endswith('.ipynb') or '://' in p: return url
        return base+os.path.normpath(self.page.parent/nbpath2html(p)).replace(os.sep, '/')+sep+frag
    def callout(self, kind, title, body, fold):
        return '\n'.join(f'> {o}'.rstrip() for o in [f'[!{kind.upper()}]', *([f'**{title}**', ''] if title else []), *body.splitlines()])
    def symbol(self, title, level, anchors, source): return f'{"#"*level} {title}' + (f' ([source]({source}))' if source else '')
    def code(self, code, opts): return f'```python\n{code}\n```'
    def text(self, s): return f'```text\n{s.rstrip()}\n```'
    def html(self, s): return s
    def math(self, s, block): return f'$$\n{s}\n$$' if block else f'${s}$'
    def image(self, path, cap, alt): return f'![{alt}]({path})'

class Plain(GitHub):
    "The site's pages as plain Markdown, which the docstrings of the modules link to"
    show_docs = True

class Site(GitHub):
    "Markdown as Zensical reads it, and MkDocs with Material too"
    show_docs = True
    def link(self, url):
        "Links inside the site become relative, so that the build checks them"
        p,sep,frag = super().link(url).partition('#')
        if not p.startswith(base): return p+sep+frag
        page = Path(p.removeprefix(base) or 'index.html').with_suffix('.md')
        return os.path.relpath(page, self.page.parent).replace(os.sep, '/')+sep+frag
    def callout(self, kind, title, body, fold):
        head = f'{"???" if fold else "!!!"} {kind}' + (f' "{title}"' if title else '')
        return head+'\n\n' + '\n'.join('    '+o if o else '' for o in body.splitlines())
    def symbol(self, title, level, anchors, source):
        ids = ''.join(f'<a id="{o}"></a>' for o in anchors[1:])
        head = f'{"#"*level} {title} {{ #{anchors[0]} }}'
        return '\n\n'.join(o for o in (ids, head, f'[source]({source}){{ .source }}' if source else '') if o)
    def code(self, code, opts):
        res,fold = super().code(code, opts),opts.get('code-fold')
        if fold in (None, 'false'): return res
        res = self.callout('quote', opts.get('code-summary') or 'Code', res, True)
        return res.replace('???', '???+', 1) if fold=='show' else res
    def text(self, s): return f'``` {{ .text .output .no-copy }}\n{s.rstrip()}\n```'
    def html(self, s): return f'<div class="output">{s}</div>'
    def math(self, s, block): return f'<div>{mathml(s, display="block")}</div>' if block else mathml(s)
    def image(self, path, cap, alt):
        return f'<figure markdown="span">\n![{alt}]({path})\n' + (f'<figcaption>{cap}</figcaption>\n' if cap else '') + '</figure>'

_callout = re.compile(r'^:{3,} *\{\.callout-(\w+)([^}]*)\} *\n(.*?)^:{3,} *$', re.M|re.S)
_alert   = re.compile(r'^> \[!(\w+)\] *\n((?:^>.*\n?)+)', re.M)
_link    = re.compile(r'(?P<code>^```.*?^```|`[^`\n]+`)|\]\((?P<url>[^)\s]+)', re.M|re.S)
_math    = re.compile(r'(?P<code>^```.*?^```|`[^`\n]+`)|\$\$(?P<block>.+?)\$\$|'
                      r'(?<![\\\w$])\$(?P<inline>[^\s$](?:[^$\n]*[^\s$\\])?)\$(?!\d)', re.M|re.S)

@lru_cache
def documented():
    "Where the names are documented that become links: ours, except private ones and the vocabularies'; fastai's and fastcore's, except plain words"
    res = {k: v for k,v in NbdevLookup().syms.items() if not re.fullmatch('[a-z]+', k) or str(v[0]).startswith(base)}
    for mod,syms in import_module(f'{cfg.lib_path.name}._modidx').d['syms'].items():
        for k,(page,file) in syms.items():
            name,old = k.removeprefix(f'{mod}.'),res.get(k.removeprefix(f'{mod}.'))
            if mod.split('.')[-1] not in vocabularies: res[name] = f'{base}{page}',file,old[2].replace(old[1], file)
    def wanted(k, v): return not re.search(r'(^|\.)_', k) and (not isinstance(v, tuple) or Path(v[1]).stem not in vocabularies)
    return {k: v for k,v in res.items() if wanted(k, v)}

def to_dialect(s, d, names=()):
    "Markdown `s` in dialect `d`: callouts, formulas, links; and a link where back-ticks have a documented name that is not in `names`"
    lookup = NbdevLookup()
    lookup.syms = {k: v for k,v in documented().items() if k not in names}
    s = lookup.linkify(s) or ''
    def callout(m):
        kind,attrs,body = m.groups()
        title,body = re.search(r'title="([^"]*)"', attrs),body.strip()
        if not title and (title := re.match(r'#+ (.*)\n', body)): body = body[title.end():].strip()
        return d.callout(kind, title and title[1], body, 'collapse="true"' in attrs)
    s = _callout.sub(callout, s)
    s = _alert.sub(lambda m: d.callout(m[1].lower(), None, re.sub('(?m)^> ?', '', m[2]).strip(), False)+'\n', s)
    s = _link.sub(lambda m: m[0] if m['code'] else f']({d.link(m["url"])}', s)
    return _math.sub(lambda m: m[0] if m['code'] else d.math((m['block'] or m['inline']).strip(), bool(m['block'])), s)

# --- Documentation of a symbol

def namespace(mod):
    "What a notebook that exports to `mod` can document: the names in `mod`, or in every module if it exports nothing"
    mods = [mod] if mod else sorted(o.stem for o in cfg.lib_path.glob('[!_]*.py'))
    return {k: v for o in mods for k,v in vars(import_module(f'{cfg.lib_path.name}.{o}')).items()}

def brief(s): return re.sub(r'\b(?:[a-z_]\w*\.)+(?=[A-Z])', '', s) # without the modules that classes are from
def type_name(o): return '' if o in (None, inspect.Parameter.empty) else brief(inspect.formatannotation(o).strip("'"))
def default_name(o): return '' if o is inspect.Parameter.empty else getattr(o, '__name__', None) or repr(o)
def returns(func): return '' if inspect.isclass(func) else type_name(inspect.signature(func).return_annotation)

def parameters(func):
    "What `func` is called with; for a fastai callback without the events, each of which could be passed as a function"
    return [o for o in inspect.signature(func).parameters.values() if o.name not in ('self', *getattr(func, '_methods', ()))]
def comments(func):
    "What the source says about each parameter of `func`, and as `return` about its result"
    if not hasattr(func, '_fields'): return docments(func, returns=not inspect.isclass(func))
    # docments do not reach the fields of a NamedTuple
    lines = dedent(inspect.getsource(func)).splitlines()
    fields = [o for o in ast.parse('\n'.join(lines)).body[0].body if isinstance(o, ast.AnnAssign)]
    return {o.target.id: lines[o.end_lineno-1].partition('# ')[2] for o in fields}

def signature(func, name):
    "How to call `func`: on one line, or if that is long with a line for each parameter"
    ps,args = parameters(func),[]
    for p,after in zip(ps, [*ps[1:], None]):
        if p.kind is p.KEYWORD_ONLY and not any(o.startswith('*') for o in args): args.append('*')
        anno,default = type_name(p.annotation),default_name(p.default)
        args.append({p.VAR_POSITIONAL: '*', p.VAR_KEYWORD: '**'}.get(p.kind, '') + p.name + (anno and f':{anno}') + (default and f'={default}'))
        if p.kind is p.POSITIONAL_ONLY and not (after and after.kind is p.kind): args.append('/')
    head,tail,line = ('class ' if inspect.isclass(func) else '')+name,f' -> {o}' if (o := returns(func)) else '',', '.join(args)
    if len(head+line+tail)>90: line = '\n    '+',\n    '.join(args)+'\n'
    return f'{head}({line}){tail}'

def param_table(func, d):
    "A row for each parameter of `func`, and one for its result, that has a comment"
    def code(s):
        if '|' in s: return f'<code>{escape(s).replace("|", "&#124;")}</code>' # in back-ticks, not every dialect reads \|
        return s and f'`{s}`'
    ps,texts = parameters(func),comments(func)
    names = [o.name for o in ps]
    def text(key): return to_dialect(' '.join((texts.get(key) or '').split()).replace('|', r'\|'), d, names)
    rows = [(f'`{o.name}`', code(type_name(o.annotation)), code(default_name(o.default)), text(o.name)) for o in ps]
    rows = [o for o in (*rows, ('*returns*', code(returns(func)), '', text('return'))) if o[-1]]
    cols = [o for o in zip(('parameter', 'type', 'default', 'meaning'), *rows) if any(o[1:])]
    lines = [f'| {" | ".join(o)} |' for o in zip(*cols)]
    return '\n'.join([lines[0], '|---'*len(cols)+'|', *lines[1:]]) if rows else ''

def subject(call, ns):
    "What a `show_doc` call is about, its name, and the line where it begins"
    name = ast.unparse(call.args[0])
    sym = eval(name, ns)
    func = sym.fget if isinstance(sym, property) else inspect.unwrap(sym)
    return func,name,inspect.getsourcelines(func)[1]

def symbol_md(call, ns, shown, d):
    "For a `show_doc` call: heading, link to the source, signature, docstring, table of parameters"
    (func,name,line),lookup = subject(call, ns),NbdevLookup()
    kw    = {o.arg: ast.literal_eval(o.value) for o in call.keywords}
    title = kw.get('name', name)
    # nbdev's index has links to every method of a class: they need somewhere to lead
    anchors = [name, *(o for o in lookup.syms if o.startswith(f'{name}.') and o not in shown)]
    source = f'{lookup[name][2]}#L{line}' if isinstance(lookup[name], tuple) else None
    res = [d.symbol(title, kw.get('title_level', 3), [o.lower() for o in anchors], source)]
    if not callable(func): return '\n\n'.join([*res, to_dialect(docstring(func), d)])
    res += [f'```python\n{signature(func, title)}\n```', to_dialect(docstring(func), d, [o.name for o in parameters(func)]), param_table(func, d)]
    return '\n\n'.join(filter(None, res))

# --- Notebooks

class Filter(FilterDefaults):
    "What nbdev makes of directives; but notebooks are not run for their `show_doc`s, and `to_dialect` makes the links"
    def base_procs(self): return [o for o in super().base_procs() if o not in (exec_show_docs, add_links)]

def options(cell):
    "Split a cell into its `#|` options and the rest"
    opts,lines = {},cell.source.splitlines()
    while lines and (m := re.match(r'#\|\s*([\w-]+)\s*:?\s*(.*)', lines[0])):
        opts[m[1]] = m[2].strip().strip('"\'')
        lines.pop(0)
    return opts,'\n'.join(lines).strip()

def output(o, d, save):
    "One output of a cell, if it has something to show; `save` takes a picture's bytes and its kind"
    if o.output_type=='stream': return d.text(''.join(o.text)) if o.name=='stdout' else None
    if o.output_type=='error':  return d.text('\n'.join(o.traceback))
    data = {k: v if isinstance(v, str) else ''.join(v) for k,v in o.data.items()}
    if 'text/html' in data:
        h = re.sub(r'<style.*?</style>\s*', '', data['text/html'], flags=re.S)
        h = re.sub(r' (class="(dataframe|fastprogress)"|border="1"|style="text-align: right;")', '', h)
        return d.html(re.sub(r'\n\s*', '', h)) if re.sub('<[^>]*>', '', h).strip() else None
    if 'text/markdown' in data: return to_dialect(data['text/markdown'], d)
    if 'image/svg+xml' in data: return save(data['image/svg+xml'].encode(), 'svg')
    if 'image/png'     in data: return save(base64.b64decode(data['image/png']), 'png')
    return d.text(data['text/plain']) if 'text/plain' in data else None

def convert(fn, d, files):
    "Title, description and Markdown of the notebook at `fn`, in dialect `d`; its pictures go to the folder `files`"
    nb = read_nb(fn)
    mod = next((o.directives['default_exp'] for o in nb.cells if 'default_exp' in o.directives), None)
    ns = namespace(mod) if d.show_docs else {}
    Filter()(nb)
    calls = {o.id: options(o)[1] for o in nb.cells if o.cell_type=='code'}
    calls = {k: ast.parse(v).body[0].value for k,v in calls.items() if v.startswith('show_doc(')}
    shown = {ast.unparse(o.args[0]) for o in calls.values()}
    res,cells = [],[]
    for is_call,run in groupby(nb.cells, key=lambda c: c.id in calls): # nbdev documents what a cell defines from the last to the first
        cells += sorted(run, key=lambda c: subject(calls[c.id], ns)[-1]) if is_call and d.show_docs else run
    for c in cells:
        opts,src = options(c)
        if c.cell_type=='markdown' and not src.startswith('<!-- WARNING'): res.append(to_dialect(src, d))
        if c.cell_type!='code': continue
        if c.id in calls:
            if d.show_docs: res.append(symbol_md(calls[c.id], ns, shown, d))
            continue
        if opts.get('include')=='false': continue
        if src and opts.get('echo')!='false': res.append(d.code(src, opts))
        if opts.get('output')=='false': continue
        for i,o in enumerate(c.get('outputs', [])):
            def save(data, kind):
                files.mkdir(parents=True, exist_ok=True)
                (files/f'{c.id}-{i}.{kind}').write_bytes(data)
                cap = opts.get('fig-cap', '')
                return d.image(f'{files.name}/{c.id}-{i}.{kind}', cap, opts.get('fig-alt', cap))
            if md := output(o, d, save): res.append(md)
    about = nb.frontmatter_
    return about.get('title', fn.stem),about.get('description', ''),'\n\n'.join(o for o in res if o)+'\n'

# --- The two commands

def navigation(nbs):
    "The sidebar for notebooks `nbs`: the index, then `parts` in their order"
    def part(o): return o.parts[0] if len(o.parts)>1 else o.name[0]
    def page(o): return nbpath2html(o).with_suffix('.md').as_posix()
    other = [o for o in nbs if o.name!=cfg.readme_nb]
    if lost := [str(o) for o in other if part(o) not in parts]:
        sys.exit(f'{", ".join(lost)}: not in a part of the sidebar. Number it, move it to one of the folders, or add one in docs/pages.py.')
    nav = [{title: [page(o) for o in other if part(o)==k]} for k,title in parts.items()]
    return [page(Path(cfg.readme_nb)), *(o for o in nav if all(o.values()))]

def pages(dest):
    "Write to the folder `dest` a page for each notebook, each page as plain Markdown, and mkdocs.yml"
    shutil.rmtree(dest, ignore_errors=True)
    root,here = cfg.path('nbs_path'),Path(__file__).resolve().parent
    nbs = sorted(o.relative_to(root) for o in nbglob(root, as_path=True))
    for nb in nbs:
        page = nbpath2html(nb).with_suffix('.md')
        for folder,d in (('pages', Site(page)), ('md', Plain(page))):
            out = (dest/folder/page).with_suffix('.md' if folder=='pages' else '.html.md')
            out.parent.mkdir(parents=True, exist_ok=True)
            title,desc,md = convert(root/nb, d, out.with_name(page.stem))
            path = f'{cfg.user}/{cfg.repo}/blob/{cfg.branch}/{root.name}/{nb.as_posix()}'
            links = f'[Notebook](https://github.com/{path}) · [Colab](https://colab.research.google.com/github/{path})'
            head = f'> {desc}' if folder=='md' else f'{links}\n{{ .links }}\n\n{desc}\n{{ .lead }}'
            out.write_text(f'# {title}\n\n{head}\n\n{md}', encoding='utf-8')
    shutil.copytree(here/'assets', dest/'pages', dirs_exist_ok=True)
    # A link in the footer instead of `repo_url`, for which each reader's browser would ask GitHub for the number of stars
    social = dict(icon='fontawesome/brands/github', link=cfg.git_url, name='Source')
    site = dict(INHERIT=os.path.relpath(here/'mkdocs.yml', dest), site_name=cfg.title, site_description=cfg.description, site_url=base,
                docs_dir='pages', site_dir='site', nav=navigation(nbs), extra=dict(social=[social]))
    (dest/'mkdocs.yml').write_text(json.dumps(site, indent=1), encoding='utf-8')

def readme(folder):
    "README.md as the index notebook has it; its pictures go to README_files in `folder`"
    nb = cfg.path('nbs_path')/cfg.readme_nb
    title,desc,md = convert(nb, GitHub(), folder/'README_files')
    note = f'<!-- Made from {nb.relative_to(cfg.config_path).as_posix()} by docs/pages.py: edit the notebook, then make check -->'
    return f'# {title}\n\n{note}\n\n> {desc}\n\n{md}'

def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument('what', choices=['pages', 'readme'], help='pages: to _proc/, for `make docs`. readme: to README.md')
    os.chdir(cfg.config_path) # nbdev's link lookup reads the configuration from here
    if p.parse_args().what=='pages': pages(cfg.config_path/'_proc')
    else: (cfg.config_path/'README.md').write_text(readme(cfg.config_path), encoding='utf-8')

if __name__=='__main__': main()
