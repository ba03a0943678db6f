"""Turn the notebooks in nbs/ into Markdown: `pages` for the site, `readme` for README.md

Nothing is run: the outputs are those saved in the notebooks, and what is documented is looked up in the imported package."""
import argparse,ast,base64,inspect,json,os,re,shutil,sys
from functools import lru_cache
from html import escape
from importlib import import_module
from itertools import groupby
from pathlib import Path
from textwrap import dedent,indent

from latex2mathml.converter import convert as mathml

from fastcore.docments import docments,docstring
from fastcore.nbio import read_nb
from nbdev.config import get_config,nbpath2html
from nbdev.doclinks import NbdevLookup,nbglob
from nbdev.processors import FilterDefaults,add_links,exec_show_docs

cfg  = get_config(Path(__file__).resolve().parent)
base = cfg.doc_url.rstrip('/')+'/'
vocabularies = {'jmp','mpx','emily','fastai16'} # other libraries' names, many of them ours or plain words: they don't become links
blob = f'{cfg.git_url}/blob/{cfg.branch}/' # the repository's files
# The cell that makes a notebook work in Colab, under `#| hide` and `#| eval: false`. A page links to Colab if its notebook has it.
install = f'! [ -e /content ] && pip install -Uqq git+{cfg.git_url}'
# The sidebar: notebooks in nbs/, and files of the repository's root. What a beginner reads comes first, formulas and internals last.
sidebar = {
    'Home': 'index',
    'First steps': 'tutorials/get_started howto/which_precision howto/fast_on_a_gpu howto/works_with howto/migrate howto/applications '
                   'tutorials/measure',
    'How-to': 'howto/examples howto/troubleshooting howto/recorder_and_report howto/checkpoints howto/accumulation_and_clipping '
              'howto/less_memory howto/keep',
    'Advanced': 'tutorials/your_own_loop howto/other_trainers howto/from_other_libraries howto/several_gpus howto/callbacks howto/fp8',
    'Concepts': 'explanations/training_step tutorials/underflow howto/results explanations/quality explanations/tested_models explanations/guarantees '
                'explanations/comparison explanations/presets explanations/scale',
    'Reference': '13_learner 12_doctor 12a_checkup 11_recorder 10d_callback 03_half 02c_ways 04_functional 01_loss_scale 02_grads 06_nonfinite '
                 '07_report 08_plan 09_fp8 09a_fp8_report 00_dtypes 00a_devices 05_flat names.md',
    "Other libraries' names": '20_jmp 21_mpx 22_emily 23_fastai16',
    'Contributing': 'CONTRIBUTING.md explanations/architecture 10_inside 10a_explain 10b_step 10c_precision 02a_modules 02b_cast 30_demo CHANGELOG.md'}
generated = ['names.md'] # by this script
root_files = [o for part in sidebar.values() for o in part.split() if o.endswith('.md') and o not in generated]

# --- What the pages are made of, in three dialects of Markdown

class GitHub:
    "Markdown as GitHub reads it, for the page at `page`: links lead to the site"
    show_docs = False
    def __init__(self, page=Path('index')): self.page = page
    def link(self, url):
        p,sep,frag = url.partition('#')
        if not p.endswith('.ipynb') or '://' in p: return url
        return base+os.path.normpath(self.page.parent/nbpath2html(p)).replace(os.sep, '/')+sep+frag
    def callout(self, kind, body): return '\n'.join(f'> {o}'.rstrip() for o in [f'[!{kind.upper()}]', *body.splitlines()])
    def symbol(self, name, anchors, source): return f'### {name}' + (f' ([source]({source}))' if source else '')
    def code(self, s, summary=None): return f'```python\n{s}\n```'
    def text(self, s): return f'```text\n{s.rstrip()}\n```'
    def diff(self, s): return f'```diff\n{s}```'
    def html(self, s): return s
    def math(self, s): return f'${s}$'
    def image(self, path, alt): return f'![{alt}]({path})'

class Plain(GitHub):
    "The site's pages as plain Markdown, which the docstrings of the modules link to"
    show_docs = True

class Site(GitHub):
    "Markdown as Zensical reads it"
    show_docs = True
    def link(self, url):
        "Links inside the site become relative, so that the build checks them"
        p,sep,frag = super().link(url).partition('#')
        if p in [blob+o for o in root_files]: p = p.replace(blob, base)
        if not p.startswith(base): return p+sep+frag
        page = Path(p.removeprefix(base) or 'index.html').with_suffix('.md')
        return os.path.relpath(page, self.page.parent).replace(os.sep, '/')+sep+frag
    def callout(self, kind, body): return f'!!! {kind}\n\n'+indent(body, '    ')
    def symbol(self, name, anchors, source):
        ids = ''.join(f'<a id="{o}"></a>' for o in anchors[1:])
        return '\n\n'.join(o for o in (ids, f'### {name} {{ #{anchors[0]} }}', f'[source]({source}){{ .source }}' if source else '') if o)
    def code(self, s, summary=None):
        "With a `summary`, the code shows after a click on it"
        res = super().code(s)
        return f'??? example "{summary}"\n\n{indent(res, "    ")}' if summary else res
    def text(self, s):
        "Paragraphs with columns apart from those of sentences, which wrap"
        parts = groupby(s.rstrip().split('\n\n'), key=lambda o: '' if re.search(r'\S {2,}\S', o) else '.prose ')
        return '\n\n'.join('``` { .text .output .no-copy '+prose+'}\n'+'\n\n'.join(o)+'\n```' for prose,o in parts)
    def diff(self, s):
        "With what it leads to, to copy, after a click"
        new = '\n'.join(o[1:] for o in s.splitlines() if o[:1]!='-')
        return f'``` {{ .diff .no-copy }}\n{s}```\n\n{self.code(new, "The new code, to copy")}'
    def html(self, s): return f'<div class="output">{s}</div>'
    def math(self, s): return mathml(s)
    def image(self, path, alt): return f'<figure markdown="span">\n![{alt}]({path})\n</figure>'

_callout = re.compile(r'^::: *\{\.callout-(\w+)\} *\n(.*?)^::: *$', re.M|re.S)
_alert   = re.compile(r'^> \[!(\w+)\] *\n((?:^>.*\n?)+)', re.M)
_diff    = re.compile(r'^```diff\n(.*?)^```', re.M|re.S)
_link    = re.compile(r'(?P<code>^```.*?^```|`[^`\n]+`)|\]\((?P<url>[^)\s]+)', re.M|re.S)
_math    = re.compile(r'(?P<code>^```.*?^```|`[^`\n]+`)|(?<![\\\w$])\$(?P<inline>[^\s$](?:[^$\n]*[^\s$\\])?)\$(?!\d)', re.M|re.S)

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
    s = re.sub(r'\[([^][]*)\[(`[^`]*`)\]\([^)]*\)([^][]*)\]\(', r'[\1\2\3](', lookup.linkify(s) or '') # no link in a link
    s = _callout.sub(lambda m: d.callout(m[1], m[2].strip()), s)
    s = _alert.sub(lambda m: d.callout(m[1].lower(), re.sub('(?m)^> ?', '', m[2]).strip())+'\n', s)
    s = _link.sub(lambda m: m[0] if m['code'] else f']({d.link(m["url"])}', s)
    s = _math.sub(lambda m: m[0] if m['code'] else d.math(m['inline']), s)
    return _diff.sub(lambda m: d.diff(m[1]), s)

# --- Documentation of a symbol

def internal(name, ns):
    "Is the symbol `name` private, or an event of a callback?"
    cls,_,attr = name.rpartition('.')
    return attr.startswith('_') or bool(cls) and attr in getattr(eval(cls, ns), '_methods', ())

def namespace(mod):
    "What a notebook that exports to `mod` can document: the names in `mod`, or in every module if it exports nothing"
    mods = [mod] if mod else sorted(o.stem for o in cfg.lib_path.glob('[!_]*.py'))
    return {k: v for o in mods for k,v in vars(import_module(f'{cfg.lib_path.name}.{o}')).items()}

def brief(s): return re.sub(r'\b(?:[a-z_]\w*\.)+(?=[A-Z])', '', s) # without the modules that classes are from
def type_name(o): return '' if o in (None, inspect.Parameter.empty) else brief(inspect.formatannotation(o).strip("'"))
def default_name(o):
    if o is inspect.Parameter.empty: return ''
    return getattr(o, '__name__', None) or re.sub(r'<function (\w+) at \w+>', r'\1', repr(o))
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

def member_table(cls, name, shown, d):
    "A row for each public method and property that the class `cls` itself defines, without events; those in `shown` with a link"
    rows = []
    for k,v in vars(cls).items():
        func,doc = getattr(cls, k),inspect.getdoc(getattr(cls, k))
        if internal(f'C.{k}', dict(C=cls)) or not doc or not (isinstance(v, property) or inspect.isroutine(func)): continue
        args = [] if isinstance(v, property) else [o.name for o in parameters(func)]
        head = f'`{k}`' if isinstance(v, property) else f'`{k}({", ".join(args)})`'
        if f'{name}.{k}' in shown: head = f'[{head}](#{name.lower()}.{k.lower()})'
        text = to_dialect(doc.splitlines()[0].replace('|', r'\|'), d, args)
        rows.append(f'| {head} | {text} |')
    return '\n'.join(['| member | what it does |', '|---|---|', *rows]) if rows else ''

def subject(name, ns):
    "The function or class that the symbol `name` is or, as a property, calls; and the line where it begins"
    sym = eval(name, ns)
    func = sym.fget if isinstance(sym, property) else inspect.unwrap(sym, stop=lambda o: hasattr(o, '__signature__'))
    return func,inspect.getsourcelines(func)[1]

def symbol_md(name, ns, shown, d):
    "For the symbol `name`: heading, link to the source, signature, docstring, table of parameters, and of members of a class"
    (func,line),lookup = subject(name, ns),NbdevLookup()
    # Links to methods without a heading lead to their class
    anchors = [name, *(o for o in lookup.syms if o.startswith(f'{name}.') and '._' not in o and o not in shown)]
    file = f'{cfg.lib_path.name}/{Path(inspect.getsourcefile(func)).name}' # not the lookup's, where two modules may have the name
    source = f'{cfg.git_url}/blob/{cfg.branch}/{file}#L{line}' if isinstance(lookup[name], tuple) else None
    res = [d.symbol(name, [o.lower() for o in anchors], source)]
    if not callable(func): return '\n\n'.join([*res, to_dialect(docstring(func), d)])
    res += [f'```python\n{signature(func, name)}\n```', to_dialect(docstring(func), d, [o.name for o in parameters(func)]), param_table(func, d)]
    if inspect.isclass(func): res.append(member_table(func, name, shown, d))
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
    "One output of a cell, if it has something to show; `save` takes a picture's bytes"
    if o.output_type=='stream': return d.text(''.join(o.text)) if o.name=='stdout' else None
    data = {k: v if isinstance(v, str) else ''.join(v) for k,v in o.data.items()}
    if 'text/html' in data:
        h = re.sub(r'<style.*?</style>\s*', '', data['text/html'], flags=re.S)
        h = re.sub(r' (class="(dataframe|fastprogress)"|border="1"|style="text-align: right;")', '', h)
        return d.html(re.sub(r'\n\s*', '', h)) if re.sub('<[^>]*>', '', h).strip() else None
    if 'text/markdown' in data: return to_dialect(data['text/markdown'], d)
    if 'image/png' in data: return save(base64.b64decode(data['image/png']))
    return d.text(data['text/plain']) if 'text/plain' in data else None

def convert(fn, d, files):
    "Title, description and Markdown of the notebook at `fn`, in dialect `d`; its pictures go to the folder `files`"
    nb = read_nb(fn)
    mod = next((o.directives['default_exp'] for o in nb.cells if 'default_exp' in o.directives), None)
    ns = namespace(mod) if d.show_docs else {}
    Filter()(nb)
    symbols = {o.id: m[1] for o in nb.cells if (m := re.fullmatch(r'show_doc\((.*)\)', options(o)[1]))}
    left_out = [k for k,v in symbols.items() if not d.show_docs or internal(v, ns)]
    nb.cells = [o for o in nb.cells if o.id not in left_out]
    shown = {v for k,v in symbols.items() if k not in left_out}
    res,cells = [],[]
    for is_symbol,run in groupby(nb.cells, key=lambda c: c.id in symbols): # nbdev documents what a cell defines from the last to the first
        cells += sorted(run, key=lambda c: subject(symbols[c.id], ns)[1]) if is_symbol else run
    for c in cells:
        opts,src = options(c)
        if c.cell_type=='markdown' and not src.startswith('<!-- WARNING'): res.append(to_dialect(src, d))
        if c.cell_type!='code': continue
        if c.id in symbols: res.append(symbol_md(symbols[c.id], ns, shown, d))
        elif src and opts.get('echo')!='false': res.append(d.code(src, opts.get('code-summary')))
        for i,o in enumerate(c.get('outputs', [])):
            def save(data):
                files.mkdir(parents=True, exist_ok=True)
                (files/f'{c.id}-{i}.png').write_bytes(data)
                return d.image(f'{files.name}/{c.id}-{i}.png', opts.get('fig-alt', ''))
            if md := output(o, d, save): res.append(md)
    about = nb.frontmatter_
    return about.get('title', fn.stem),about.get('description', ''),'\n\n'.join(o for o in res if o)+'\n'

def convert_file(fn, d):
    "Title, description and Markdown of the Markdown file `fn` of the root; its links lead to pages of the site, others to the repository"
    title,desc,md = re.match(r'# ([^\n]*)\n+(?:> ([^\n]*)\n)?(.*)', fn.read_text(encoding='utf-8'), re.S).groups()
    def link(m):
        if m['code'] or re.match('https?:|#', m['url']): return m[0]
        return ']('+(m['url'].removeprefix('nbs/') if '.ipynb' in m['url'] else blob+m['url'])
    return title,desc or '',to_dialect(_link.sub(link, md), d)

def first_sentence(doc): return re.split(r'(?<=[.?!])\s|\n\n', ' '.join(doc.split(' ')), maxsplit=1)[0].replace('\n', ' ')

def name_index(d):
    "Title, description and Markdown of the page with all public names, module by module: those of users first, then internals"
    modidx = import_module(f'{cfg.lib_path.name}._modidx').d['syms']
    internals = {re.sub(r'^\d+[a-z]?_', '', o) for o in sidebar['Contributing'].split()}
    names = [o.split('.')[-1] for o in modidx]
    res = ['The names that a user needs. Those at the end hold the package together, and may change in any version.']
    for name in sorted({*names}-vocabularies, key=lambda o: (o in internals, names.index(o))):
        mod = f'{cfg.lib_path.name}.{name}'
        module = import_module(mod)
        values = {o: getattr(module, o) for o in getattr(module, '__all__', ())}
        docs = {k: first_sentence(inspect.getdoc(v)).replace('|', r'\|') for k,v in values.items()
                if getattr(v, '__module__', None)==mod and inspect.getdoc(v)}
        rows = [f'| `{k}` | {v} |' for k,v in docs.items()]
        head = f'## {name}'+' (internal)'*(name in internals)
        if rows: res.append('\n'.join([head, '', '| name | what it is |', '|---|---|', *(to_dialect(o, d) for o in rows)]))
    return 'All names','What the package defines, module by module','\n\n'.join(res)+'\n'

# --- The two commands

def page_path(name): return Path(name) if name.endswith('.md') else nbpath2html(Path(name+'.ipynb')).with_suffix('.md')

def navigation(found):
    "The sidebar, in which each page of `found` has its place"
    listed = [o for part in sidebar.values() for o in part.split()]
    if lost := sorted({*found}-{*listed}): sys.exit(f'{", ".join(lost)}: not in the sidebar. Add it to one of the parts of `sidebar` in docs/pages.py.')
    if gone := [o for o in listed if o not in found]: sys.exit(f'{", ".join(gone)}: in `sidebar` of docs/pages.py, but there is no such file.')
    parts = {k: [page_path(o).as_posix() for o in v.split()] for k,v in sidebar.items()}
    return [{k: v if len(v)>1 else v[0]} for k,v in parts.items()]

def notebook_links(fn):
    "Links to the notebook `fn` on GitHub and, if it installs this package there, in Colab"
    url = blob+fn.relative_to(cfg.config_path).as_posix()
    links = f'[Notebook]({url})'
    if install not in fn.read_text(encoding='utf-8'): return links
    return links+f' · [Open in Colab]({url.replace("github.com", "colab.research.google.com/github")})'

def site_page(title, desc, md, links=''):
    "A page for Zensical: its metadata, title, links, description and text"
    meta = dict(description=re.sub(r'[`*[]|\]\([^)]*\)', '', desc or f'{title} of {cfg.title}'))
    if title==cfg.title: meta['title'] = cfg.description # else the browser shows the site's name twice
    meta = ''.join(f'{k}: {json.dumps(v)}\n' for k,v in meta.items())
    parts = f'---\n{meta}---',f'# {title}',links and f'{links}\n{{ .links data-search-exclude=1 }}',desc and f'{desc}\n{{ .lead }}',md
    return '\n\n'.join(o for o in parts if o)

def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding='utf-8')

def pages(dest):
    "Write to the folder `dest` a page for each notebook, each page as plain Markdown, and mkdocs.yml"
    root,here = cfg.path('nbs_path'),Path(__file__).resolve().parent
    nbs = {o.relative_to(root).with_suffix('').as_posix(): o for o in sorted(nbglob(root, as_path=True))}
    nav = navigation([*nbs, *generated, *(o for o in root_files if (cfg.config_path/o).exists())])
    shutil.rmtree(dest, ignore_errors=True)
    for name,fn in nbs.items():
        page = page_path(name)
        html,plain = dest/'pages'/page,(dest/'md'/page).with_suffix('.html.md')
        write(html, site_page(*convert(fn, Site(page), html.with_suffix('')), notebook_links(fn)))
        title,desc,md = convert(fn, Plain(page), plain.with_name(page.stem))
        write(plain, f'# {title}\n\n> {desc}\n\n{md}')
    for name in root_files: write(dest/'pages'/name, site_page(*convert_file(cfg.config_path/name, Site(Path(name)))))
    write(dest/'pages/names.md', site_page(*name_index(Site(Path('names.md')))))
    shutil.copytree(here/'assets', dest/'pages', dirs_exist_ok=True)
    site = dict(INHERIT=os.path.relpath(here/'mkdocs.yml', dest), site_name=cfg.title, site_description=cfg.description, site_url=base,
                repo_url=cfg.git_url, repo_name=f'GitHub, version {cfg.version}', docs_dir='pages', site_dir='site', nav=nav,
                theme=dict(custom_dir=os.path.relpath(here/'theme', dest)))
    write(dest/'mkdocs.yml', json.dumps(site, indent=1))

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
